"""Which matrices of a layer are one, here and in vLLM: those that read the same input, one below the other.

vLLM has the same rows in the same order, which `tests/families/test_joined_names.py` compares with its modules.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Joined:
    """`parts`: transformers' modules, from the top. `vllm`: the module of vLLM that has all of them."""

    parts: tuple[str, ...]
    vllm: str

    def modules(self, parent: Any) -> list[Any]:
        """The parts of transformers' module `parent`."""
        return [getattr(parent, name) for name in self.parts]


QKV = Joined(("q_proj", "k_proj", "v_proj"), "qkv_proj")
GATE_UP = Joined(("gate_proj", "up_proj"), "gate_up_proj")
QKVZ = Joined(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz")
BA = Joined(("in_proj_b", "in_proj_a"), "in_proj_ba")
JOINED = (QKV, GATE_UP, QKVZ, BA)

PROJECTIONS = {
    *(name for joined in (QKV, GATE_UP, QKVZ) for name in (*joined.parts, joined.vllm)),
    *("o_proj", "down_proj", "out_proj"),
}
_PROJECTION = re.compile(r"(?:^|\.)layers\.\d+\.(?:self_attn|attn|linear_attn|mlp|mlp\.shared_experts?)\.(\w+)$")


def is_projection(path: str) -> bool:
    """Whether the module at `path`, of transformers, of vLLM or of files, is a projection of attention, linear or not,
    or of an MLP or a shared expert in a layer, which alone are in fewer bits, beside routed experts
    (`packed_stack.py`). The layer may be one of a tower."""
    found = _PROJECTION.search(path)
    return found is not None and found[1] in PROJECTIONS


DRAFT = "mtp."
"""What begins the names of layers that predict several tokens at once. transformers' models lack them."""

EXPERTS_GATE_UP, EXPERTS_DOWN = "gate_up_proj", "down_proj"
"""transformers' parameters of all experts of a layer, [E, 2 I, H] and [E, H, I] (or transposed, see `Experts`)."""

OF_VLLM: Mapping[str, str] = {EXPERTS_GATE_UP: "w13_weight", EXPERTS_DOWN: "w2_weight"}
"""vLLM's names of these, [E, 2 I, H] and [E, H, I]."""
