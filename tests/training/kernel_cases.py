"""Compare the Triton kernels with plain torch, on a GPU or with Triton's interpreter on a CPU.

An environment variable selects the interpreter before Triton is imported, for the whole process. Run as a program, this
file checks all cases on the CPU.
"""

from collections.abc import Callable

import torch
from tinker_local.backend.training.kernels import Kernels, TorchKernels

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
    from tinker_local.backend.training.triton_kernels import TritonKernels

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
        grad_gate_up, value = kernels.swiglu_backward(cast(grad), cast(gate_up))
        assert logsumexp[off].isnan()
        routed = kernels.routed_swiglu_backward(cast(grad), cast(gate_up), cast(shares))
        seen.append(
            {
                "rms_norm": kernels.rms_norm(cast(x), cast(weight), 1e-6),
                "rms_norm_backward": kernels.rms_norm_backward(cast(grad), cast(x), cast(weight), 1e-6, cast(residual)),
                "norm_rope": kernels.norm_rope(inner, optional, 1e-6, cast(cos), cast(sin)),
                "norm_rope_backward": out,
                "swiglu": kernels.swiglu(cast(gate_up)),
                "grad_gate_up": grad_gate_up,
                "swiglu again": value,
                **dict(zip(("routed grad_gate_up", "routed value", "grad_shares"), routed, strict=True)),
                "weighted sum": kernels.weighted_sum(cast(x), places, cast(scores)),
                "sum": kernels.weighted_sum(cast(x), places, None),
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
    from tinker_local.backend.training.triton_kernels import TritonKernels

    logits = torch.zeros(3, width, device=device).to(torch.bfloat16)
    at = width - 4 if row.endswith("later") else 0
    logits[1, at : at + 4] = torch.tensor(ROWS[row])
    ours, expected = (kernels.logsumexp(logits.clone()) for kernels in (TritonKernels(), TorchKernels()))
    torch.testing.assert_close(ours[::2], expected[::2])
    if expected[1].isfinite():
        torch.testing.assert_close(ours[1], expected[1])
    else:
        assert not ours[1].isfinite()


def interpret_as_a_gpu() -> None:
    """The maximum of a number and NaN is the number on a GPU, but NaN in the interpreter: make it the number."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)


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
