"""What each module of a model gives for one prompt, to name the first one that two engines compute differently."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.weights.joined_names import JOINED

ModuleOutputs = dict[str, npt.NDArray[np.float32]]
"""[N, F] for N positions, by the module's name, in the order in which modules ended."""


@contextmanager
def watching(model: Any, length: int) -> Iterator[ModuleOutputs]:
    """What the modules of torch's `model` that have weights give in the next forward of `length` positions. Nothing of
    those that a compiler or a CUDA graph runs."""
    found: ModuleOutputs = {}

    def keep(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        if not hasattr(first, "detach") or not first.is_floating_point() or name in found:
            return
        rows = first.detach()[0] if first.ndim > 2 and len(first) == 1 else first.detach()
        if rows.ndim > 1 and len(rows) == length:
            # A copy, since vLLM's kernels write into what modules gave.
            found[name] = rows.clone().reshape(length, -1).float().cpu().numpy()

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters())  # vLLM's activations multiply, too
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(ours: ModuleOutputs, theirs: ModuleOutputs, limit: float) -> str:
    """Which module of a trainer gives something else in the sampler first, by more than `limit` of its norm, in words;
    empty if that is not known. Layers are not compared as a whole: vLLM's leave it to the next one to add the
    residual."""
    others = _by_place(ours, theirs)
    compared = [
        name
        for name in ours
        if (other := others.get(name)) is not None
        and other.shape == ours[name].shape
        and not name.endswith("embed_tokens")  # Gemma's is scaled within it here, and behind it in vLLM
    ]
    for name in compared:
        norm = max(float(np.linalg.norm(ours[name])), float(np.finfo(np.float32).tiny))
        difference = float(np.linalg.norm(ours[name] - others[name])) / norm
        if not difference <= limit:
            return f"the first module to differ on a text is {name}, by {difference:.2g} of its output"
    last = {*[*ours][-2:]}  # the decoder's norm, and the decoder
    return "on a text its modules agree up to the LM head" if last & {*compared} else ""


def _by_place(ours: ModuleOutputs, theirs: ModuleOutputs) -> ModuleOutputs:
    """`theirs` by the names of `ours`: the decoder may be at another path, and projections may be one module."""
    found = {_place(name): output for name, output in theirs.items()}
    widths = {_place(name): output.shape[1] for name, output in ours.items()}
    for joined in JOINED:
        for name in [name for name in found if name.endswith(f".{joined.vllm}")]:
            parts = [name.removesuffix(joined.vllm) + part for part in joined.parts]
            ends = list(itertools.accumulate(widths.get(part, 0) for part in parts))
            if ends[-1] == found[name].shape[1]:
                found |= zip(parts, np.split(found[name], ends[:-1], axis=1), strict=True)
    return {name: found[place] for name in ours if (place := _place(name)) in found and not place[-1:].isdigit()}


def _place(name: str) -> str:
    """The name of a module below its decoder."""
    return name[name.index("layers.") :] if "layers." in name else name.rpartition(".")[2]
