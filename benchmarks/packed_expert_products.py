"""A layer of experts of 8 or 4 bits against the same in 16, in the shape of Qwen3-30B-A3B.

    python benchmarks/packed_expert_products.py [--out benchmarks/results] [--tiny]

Milliseconds (median of repeats in turn, each behind a buffer larger than the caches). Sampler: vLLM's experts on some
tokens that go to random experts, without adapters; `16 bits`: vLLM's own, `codes`: those of this project, which read
the codes, `made first`: all numbers of both stacks, then vLLM's own. Trainer: forward and backward products with both
stacks, whose numbers are made anew for each. Needs a GPU; `--tiny` runs the trainer's on a CPU.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import machine
from packed_products import Ways, milliseconds
from rich.console import Console
from rich.table import Table
from tinker_local.backend.training.kernels.grouped_products import RowGroups
from tinker_local.backend.weights.dense import DenseStack
from tinker_local.backend.weights.packed_stack import PackedMatrices
from tinker_local.backend.weights.precision import BITS

TOKENS = {"sampler": (1, 4, 16, 64, 256, 1024, 8192), "trainer": (512, 2048, 8192)}
NAMES = ("16 bits", "codes", "made first")


@dataclass(frozen=True, slots=True)
class Sizes:
    """`chosen`: experts of a token, of `count`."""

    count: int = 128
    chosen: int = 8
    hidden: int = 2048
    width: int = 768


class Stacks:
    """Gate and up, and down, dense and packed, on `device`."""

    def __init__(self, sizes: Sizes, bits: str, device: str, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, torch.device(device), dtype
        shapes = (2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
        made = [torch.randn(sizes.count, *shape, device=device, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
        self.packed = [PackedMatrices.rounded(each, BITS[bits], None) for each in made]
        self.dense = [each.stack().numbers() for each in self.packed]

    def trainer(self, tokens: int) -> Ways:
        """Four products, forward and backward, for rows that are divided evenly over the experts."""
        sizes = self.sizes
        rows = tokens * sizes.chosen
        ends = torch.arange(1, sizes.count + 1, device=self.device) * rows // sizes.count
        groups = RowGroups(ends.int())
        x, wide, mid = (
            torch.randn(rows, width, device=self.device, dtype=self.dtype)
            for width in (sizes.hidden, 2 * sizes.width, sizes.width)
        )

        def run(gate_up: Any, down: Any) -> None:
            gate_up.times(x, groups)
            down.times(mid, groups)
            down.back(x, groups)
            gate_up.back(wide, groups)

        return {
            "16 bits": lambda: run(*map(DenseStack, self.dense)),
            "made first": lambda: run(*(each.stack() for each in self.packed)),
        }

    def sampler(self, tokens: int) -> Ways:
        """vLLM's experts, as its runner calls them."""
        from tinker_local.backend.vllm_engine.packed_experts_method import experts_in_triton
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

        sizes, silu = self.sizes, MoEActivation.SILU
        settings = (
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "activation_situ_beta",
            "activation_situ_linear_beta",
        )
        config: Any = SimpleNamespace(activation=silu, **dict.fromkeys(settings))
        plain, packed = (kind(config, FusedMoEQuantConfig.make()) for kind in (TritonExperts, experts_in_triton()))
        packed.process_weights_after_loading(
            SimpleNamespace(
                w13_scales=self.packed[0].scales, w2_scales=self.packed[1].scales, curved=self.packed[0].curved
            )
        )
        x = torch.randn(tokens, sizes.hidden, device=self.device, dtype=self.dtype)
        chosen = torch.rand(tokens, sizes.count, device=self.device).topk(sizes.chosen)
        scores, experts = chosen.values.softmax(-1), chosen.indices.int()
        of = (sizes.count, sizes.count, None, silu)
        shapes = plain.workspace_shapes(tokens, 2 * sizes.width, sizes.hidden, sizes.chosen, *of)
        spaces = [torch.empty(shape, device=self.device, dtype=self.dtype) for shape in shapes]

        def run(kind: Any, gate_up: torch.Tensor, down: torch.Tensor) -> None:
            kind.apply(
                output=spaces[2],
                hidden_states=x,
                w1=gate_up,
                w2=down,
                topk_weights=scores,
                topk_ids=experts,
                activation=silu,
                global_num_experts=sizes.count,
                expert_map=None,
                a1q_scale=None,
                a2_scale=None,
                workspace13=spaces[0],
                workspace2=spaces[1],
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )

        return {
            "16 bits": lambda: run(plain, *self.dense),
            "codes": lambda: run(packed, *(each.qweight for each in self.packed)),
            "made first": lambda: run(plain, *(each.stack().numbers() for each in self.packed)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    sizes = Sizes(4, 2, 64, 32) if options.tiny else Sizes()
    table = Table(
        "engine", "bits", "tokens", *NAMES, title=f"a layer's experts, ms, {dtype}, {machine.gpu() or device}"
    )
    lines = ["| engine | bits | tokens | " + " | ".join(NAMES) + " |", "| --- " * (len(NAMES) + 3) + "|"]
    for bits in BITS:
        stacks = Stacks(sizes, bits, device, dtype)
        for engine in ("trainer",) if options.tiny else TOKENS:
            for tokens in (8,) if options.tiny else TOKENS[engine]:
                ways = getattr(stacks, engine)(tokens)
                took = milliseconds(ways, 3 if options.tiny else options.repeats, device)
                cells = [f"{took[name]:.3f}" if name in took else "" for name in NAMES]
                table.add_row(engine, bits, str(tokens), *cells)
                lines.append(f"| {engine} | {bits} | {tokens} | " + " | ".join(cells) + " |")
    Console(width=110).print(table)
    if options.out:
        (options.out / "packed_expert_products.md").write_text(f"# {table.title}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
