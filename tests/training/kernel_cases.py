"""Compare the Triton kernels with plain torch, on a GPU or with Triton's interpreter on a CPU.

An environment variable selects the interpreter before Triton is imported, for the whole process. Run as a program, this
file checks all cases on the CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from tinker_local.backend.adapters.adapter import Factor
from tinker_local.backend.training.kernels.kernels import ACTIVATIONS, Kernels, TorchKernels
from tinker_local.backend.training.lora.lora import Adapter, AdapterSlice, Target, groups_of, layout
from tinker_local.backend.training.lora.lora_batch import LoraBatch, Owners
from tinker_local.backend.training.model.experts import (
    ExpertsKept,
    ExpertWeights,
    Routing,
    down,
    experts_backward,
    gate_and_up,
)
from tinker_local.backend.weights.dense import DenseStack
from tinker_local.types import LoraConfig

SHAPES = [
    (5, 48, 3, 16),
    (7, 1000, 28, 64),
    (1, 72, 1, 72),  # one row, one head, a head size that is not a power of two
    (3, 2, 5, 2),
    (2, 1, 1, 8),
    (4, 4097, 6, 40),  # one number beyond a span
]
"""Rows, width, heads and head size."""

ROWS = {
    "finite": [1.0, -2.0, 3.0, 0.5],
    "minus infinity": [float("-inf"), 1.0, float("-inf"), 2.0],
    "NaN first": [float("nan"), 1.0, 2.0, 3.0],
    "NaN later": [1.0, 2.0, float("nan"), 3.0],
    "infinity": [1.0, float("inf"), 2.0, 3.0],
    "both infinities": [float("-inf"), float("inf"), 1.0, 2.0],
    "only minus infinity": [float("-inf")] * 4,
    "only NaN": [float("nan")] * 4,
}


def check_kernels(
    device: str,
    rows: int,
    width: int,
    heads: int,
    size: int,
    *,
    has_norm: bool,
    rotary: int | None = None,
    relative: float = 5e-3,
) -> None:
    """Compare bfloat16 with float32 on the same numbers: equal within one or two roundings of the output. `rotary`:
    numbers of a head that rotate, if not all; heads then lie apart."""
    from tinker_local.backend.training.kernels.triton_kernels import TritonKernels

    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    x, grad, residual, weight = draw(rows, width), draw(rows, width), draw(rows, width), draw(width)
    apart = 1 if rotary is None else 2
    heads_x, heads_grad = draw(rows, apart * heads * size + 8), draw(rows, heads, size)
    norm = draw(size) if has_norm else None
    cos, sin, gate_up = draw(rows, rotary or size), draw(rows, rotary or size), draw(rows, 2 * width)
    logits, scale = draw(rows, width) * 5, torch.randn(rows, generator=generator, device=device)
    shares, scores = draw(rows), draw(2, 4)
    places = torch.randint(rows, (2, 4), generator=generator, device=device)
    wide, all_places = draw(2, 2 * width), torch.randperm(8, generator=generator, device=device).view(2, 4)
    off = rows - 1
    scale[off] = 0
    logits[off, 0] = float("nan")
    seen = []
    ways: list[tuple[Kernels, Callable[[torch.Tensor], torch.Tensor]]] = [
        (TritonKernels(), torch.Tensor.clone),
        (TorchKernels(), torch.Tensor.float),
    ]
    for kernels, cast in ways:
        inner = cast(heads_x)[:, : apart * heads * size].unflatten(1, (-1, size))[:, ::apart]
        out = torch.zeros(rows, apart * heads + 1, size, device=device, dtype=inner.dtype)
        optional = None if norm is None else cast(norm)
        kernels.norm_rope_backward(
            cast(heads_grad), inner, optional, 1e-6, cast(cos), cast(sin), out[:, : apart * heads : apart]
        )
        logsumexp = kernels.logsumexp(cast(logits))
        gated: dict[str, torch.Tensor] = {}
        for activation in ACTIVATIONS:
            grad_gate_up, value = kernels.glu_backward(cast(grad), cast(gate_up), activation)
            gated |= {
                activation: kernels.glu(cast(gate_up), activation),
                f"{activation}: grad_gate_up": grad_gate_up,
                f"{activation} again": value,
            }
        untouched = cast(grad)
        without_residual = kernels.rms_norm_backward(untouched, cast(x), cast(weight), 1e-6, None)
        assert torch.equal(untouched, cast(grad))
        assert logsumexp[off].isnan()
        routed = kernels.routed_swiglu_backward(cast(grad), cast(gate_up), cast(shares))
        seen.append(
            {
                "rms_norm": kernels.rms_norm(cast(x), cast(weight), 1e-6),
                "rms_norm_backward": kernels.rms_norm_backward(cast(grad), cast(x), cast(weight), 1e-6, cast(residual)),
                "norm_rope": kernels.norm_rope(inner, optional, 1e-6, cast(cos), cast(sin)),
                "norm_rope_backward": out,
                "rms_norm_backward without a residual": without_residual,
                **gated,
                **dict(zip(("routed grad_gate_up", "routed value", "grad_shares"), routed, strict=True)),
                "weighted sum": kernels.weighted_sum(cast(x), places, cast(scores)),
                "sum": kernels.weighted_sum(cast(x), places, None),
                "spread": kernels.spread(cast(wide)[:, :width], all_places),
                "logsumexp": logsumexp[:off],
                "scaled_softmax": kernels.scaled_softmax(cast(logits), logsumexp, scale),
            }
        )
    assert not seen[0]["scaled_softmax"][off].any()
    outside = torch.ones(apart * heads + 1, dtype=torch.bool)
    outside[: apart * heads : apart] = False
    assert not seen[0]["norm_rope_backward"][:, outside].any(), "wrote outside its rows"
    for name, ours in seen[0].items():
        torch.testing.assert_close(ours.float(), seen[1][name], atol=2e-2, rtol=2e-2, msg=lambda m, n=name: f"{n}: {m}")
        assert float((ours.float() - seen[1][name]).norm()) <= relative * float(seen[1][name].norm()), name


def check_logsumexp(device: str, row: str, width: int) -> None:
    """A non-finite row must give a non-finite sum, wherever the culprit is: no logprob may come from the remaining
    numbers."""
    from tinker_local.backend.training.kernels.triton_kernels import TritonKernels

    logits = torch.zeros(3, width, device=device).to(torch.bfloat16)
    at = width - 4 if row.endswith("later") else 0
    logits[1, at : at + 4] = torch.tensor(ROWS[row])
    ours, expected = (kernels.logsumexp(logits.clone()) for kernels in (TritonKernels(), TorchKernels()))
    torch.testing.assert_close(ours[::2], expected[::2])
    if expected[1].isfinite():
        torch.testing.assert_close(ours[1], expected[1])
    else:
        assert not ours[1].isfinite()


EXPERTS = {
    "one adapter": (7, 24, ((16, 33),)),
    "a rank that fills no columns": (4, 40, ((3, 20),)),
    "three ranks": (5, 48, ((4, 9), (13, 70), (1, 1))),
    "the base model too": (3, 72, ((8, 12), (None, 5), (20, 6))),
    "rows of several tiles": (3, 24, ((8, 150),)),
}
"""Experts, their width, and the rank (None: the base model) and tokens of each adapter."""

SMALLER_BLOCKS = 3, 72, ((80, 20),)
"""The same, with a rank for which a card with little shared memory takes other blocks."""

SORTS = [
    (1, 1, 3, 1),
    (5, 3, 40, 1),  # more experts than pairs
    (300, 2, 5, 1),
    (200, 4, 9, 3),
    (40, 2, 600, 2),  # more groups than a program takes at once
    (65_600, 2, 3, 1),  # more blocks of pairs than that
]
"""Tokens, experts of each, experts, and owners of tokens."""


def check_experts(
    device: str,
    experts: int,
    width: int,
    slices: Sequence[tuple[int | None, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    relative: float = 1e-2,
) -> None:
    """Forward and backward of a layer of experts in `dtype` with fused kernels, beside float32 in plain torch."""
    from tinker_local.backend.training.kernels.triton_kernels import TritonKernels

    hidden = 32
    kinds: tuple[tuple[str, str, int, int, Factor], ...] = (
        ("w1", "gate_up", hidden, width, "A"),
        ("w3", "gate_up", hidden, width, "A"),
        ("w2", "down", width, hidden, "B"),
    )
    targets = [
        Target(name, f"experts.{group}", name, 0, inputs, outputs, "mlp", experts, shared)
        for name, group, inputs, outputs, shared in kinds
    ]
    generator = torch.Generator().manual_seed(experts)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(device, torch.bfloat16)

    found, start = list[AdapterSlice](), 0
    for rank, tokens in slices:
        adapter = None
        if rank is not None:
            config = LoraConfig(rank=rank)
            specs = layout(targets, config)
            weights = draw(specs[-1].stop, scale=rank / 32 * 0.2).float()
            adapter = Adapter(config, specs, weights)
        found.append(AdapterSlice(adapter, start, start + tokens))
        start += tokens
    matrices = draw(experts, 2 * width, hidden, scale=0.2), draw(experts, hidden, width, scale=0.2)
    # The last expert has no rows.
    chosen = torch.stack([torch.randperm(experts - 1, generator=generator)[:2] for _ in range(start)]).to(device)
    x, grad, scores = draw(start, hidden), draw(start, hidden), draw(start, 2)
    seen = []
    ways: list[tuple[Kernels, torch.dtype, torch.dtype]] = [
        (TritonKernels(), dtype, dtype),
        (TorchKernels(), torch.float32, torch.float32),
        (TritonKernels(), dtype, torch.float32),  # as routers of some families give scores
        (TorchKernels(), dtype, torch.float32),
    ]
    for kernels, kind, of_scores in ways:
        batch = LoraBatch(groups_of(targets), found, kind, torch.float32, gradient=True)
        low = batch.group("experts.gate_up"), batch.group("experts.down")
        assert low[0] is not None
        of_layer = ExpertWeights(*(DenseStack(matrix.to(kind)) for matrix in matrices))
        routing = Routing.of(chosen, experts, low[0].owners, kernels)
        h, gate_up = gate_and_up(x.to(kind), routing, of_layer, low[0], kernels)
        mid, output = down(gate_up, h, scores.to(of_scores), routing, of_layer, *low, kernels)
        kept = ExpertsKept(gate_up, h, mid)
        grad_x, grad_scores = experts_backward(
            grad.to(kind), x.to(kind), scores.to(of_scores), routing, of_layer, kept, *low, kernels
        )
        gradients: dict[str, torch.Tensor] = {}
        for place, adapter in enumerate(batch.adapters):
            flat = torch.zeros_like(adapter.weights)
            batch.add_gradients(adapter, flat, batch.trained())
            gradients |= {f"{place} {spec.name}": spec.view(flat) for spec in adapter.specs}
        seen.append({"output": output, "grad_x": grad_x, "grad_scores": grad_scores, **gradients})
    for name, wanted in seen[1].items():
        assert float(wanted.norm()) > 0, name
        differences = [float((found_here[name].float() - wanted).norm() / wanted.norm()) for found_here in seen]
        # What an adapter of few rows loses by rounding depends on the numbers drawn, and plain torch loses it as well.
        assert max(differences) <= max(relative, 2 * differences[3]), f"{name}: {differences}"
        assert differences[3] <= 0.05, f"{name}: {differences}"


def check_sort(device: str, tokens: int, chosen: int, experts: int, owners: int) -> None:
    """The kernels sort pairs exactly as torch does, and give each group the tiles that it needs."""
    from tinker_local.backend.training.kernels.triton_experts import _ROWS
    from tinker_local.backend.training.kernels.triton_kernels import TritonKernels

    generator = torch.Generator().manual_seed(tokens)
    # Most tokens choose the first experts; the last one has none.
    scores = torch.rand(tokens, experts - 1, generator=generator) - torch.linspace(0, 1, experts - 1)
    of_tokens = scores.topk(chosen).indices.to(device)
    whose = None
    if owners > 1:
        drawn = torch.randint(owners, (tokens,), generator=generator).to(device)
        columns = torch.zeros(owners, 2, dtype=torch.int32, device=device)
        whose = Owners(columns, 8, drawn, torch.zeros(tokens, 8, dtype=torch.bool, device=device))
    wanted = Routing.of(of_tokens, experts, whose, TorchKernels())
    found = Routing.of(of_tokens, experts, whose, TritonKernels())
    for name in ("order", "places", "bounds", "tokens", "experts", "owners"):
        assert torch.equal(*(torch.as_tensor(getattr(each, name)) for each in (found, wanted))), name
    assert found.owned is not None
    needed = (wanted.bounds.diff() + _ROWS - 1) // _ROWS
    assert torch.equal(found.owned.tile_ends, needed.cumsum(0, dtype=torch.int32))
    groups = torch.arange(len(needed), dtype=torch.int32, device=device).repeat_interleave(needed)
    rest = torch.full((len(found.owned.tile_groups) - len(groups),), len(needed), dtype=torch.int32, device=device)
    assert len(rest) >= 0
    assert torch.equal(found.owned.tile_groups, torch.cat([groups, rest]))


def interpret_as_a_gpu() -> None:
    """The maximum of a number and NaN is the number on a GPU, but NaN in the interpreter: make it the number. And the
    interpreter multiplies matrices of bfloat16 as the integers that have their bits: make them numbers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def number(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, number(a), number(b), *rest)


if __name__ == "__main__":
    interpret_as_a_gpu()
    for shape in SHAPES:
        for with_norm in (True, False):
            # The interpreter truncates to 16 bits instead of rounding.
            check_kernels("cpu", *shape, has_norm=with_norm, relative=1.2e-2)
            check_kernels("cpu", 3, 8, 3, 40, has_norm=with_norm, rotary=12, relative=1.2e-2)
    for name in ROWS:
        for row_width in (4, 5000):
            check_logsumexp("cpu", name, row_width)
    for sort in SORTS:
        check_sort("cpu", *sort)
    for case in EXPERTS.values():
        check_experts("cpu", *case, dtype=torch.float32, relative=1e-5)
    check_experts("cpu", *EXPERTS["three ranks"], relative=3e-2)
    with mock.patch("tinker_local.backend.training.kernels.triton_experts.shared_memory", return_value=99 * 1024):
        check_experts("cpu", *SMALLER_BLOCKS, dtype=torch.float32, relative=1e-5)
