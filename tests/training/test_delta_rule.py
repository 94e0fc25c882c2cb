"""The gated delta rule in chunks, on packed rows, is what its formula gives each segment alone."""

import importlib
import importlib.util
from dataclasses import replace
from importlib import metadata, resources
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinker_local.backend.training.kernels import delta_rule
from tinker_local.backend.training.kernels.delta_rule import DeltaRule, MixInputs, mix, mix_backward
from tinker_local.backend.training.kernels.delta_segments import Chunks, FlaBounds
from tinker_local.backend.training.model.segments import NO_PARENT, Segments

KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, TAPS = 2, 6, 5, 7, 4
CPU = torch.device("cpu")

ROWS = {
    "one": (150,),
    "equal": (64, 64, 64),
    "mixed": (3, 130, 1, 64, 2, 65, 20),
    "short": (1, 1, 2),
}


def made(
    lengths: tuple[int, ...], dtype: torch.dtype = torch.float64, key_size: int = KEY_SIZE, value_size: int = VALUE_SIZE
) -> tuple[MixInputs, DeltaRule]:
    """qkv, z, b and a of a row, and random parameters."""
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    channels, rows = 2 * KEY_HEADS * key_size + VALUE_HEADS * value_size, sum(lengths)
    rule = DeltaRule(
        taps=normal(channels, TAPS),
        rate=normal(VALUE_HEADS).exp(),
        rate_bias=normal(VALUE_HEADS),
        norm=1 + normal(value_size) / 10,
        epsilon=1e-6,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_size=key_size,
        value_size=value_size,
    )
    widths = (channels, VALUE_HEADS * value_size, VALUE_HEADS, VALUE_HEADS)
    return MixInputs(*(normal(rows, width) for width in widths)), rule


def by_the_formula(inputs: MixInputs, rule: DeltaRule) -> torch.Tensor:
    """One sequence, position by position."""
    qkv, z, b, a = inputs
    length = len(qkv)
    padded = torch.cat([qkv.new_zeros(TAPS - 1, qkv.shape[1]), qkv])
    windows = torch.stack([padded[at : at + length] for at in range(TAPS)], -1)
    convolved = torch.nn.functional.silu((windows * rule.taps).sum(-1))
    keys = KEY_HEADS * KEY_SIZE
    q, k, v = convolved.split([keys, keys, VALUE_HEADS * VALUE_SIZE], -1)
    q, k = (x.view(length, KEY_HEADS, 1, KEY_SIZE) for x in (q, k))
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.expand(-1, -1, VALUE_HEADS // KEY_HEADS, -1).flatten(1, 2) for x in (q, k))
    v = v.view(length, VALUE_HEADS, VALUE_SIZE)
    decay = (-rule.rate * torch.nn.functional.softplus(a + rule.rate_bias)).exp()
    beta = b.sigmoid()
    state = qkv.new_zeros(VALUE_HEADS, KEY_SIZE, VALUE_SIZE)
    outputs = []
    for t in range(length):
        state = state * decay[t, :, None, None]
        new = beta[t, :, None] * (v[t] - torch.einsum("mk,mkv->mv", k[t], state))
        state = state + torch.einsum("mk,mv->mkv", k[t], new)
        outputs.append(torch.einsum("mk,mkv->mv", q[t], state) / KEY_SIZE**0.5)
    o = torch.stack(outputs)
    o = rule.norm * o / (o.pow(2).mean(-1, keepdim=True) + rule.epsilon).sqrt()
    return o.flatten(1) * torch.nn.functional.silu(z)


@pytest.mark.mutation(
    "delta-rule-state-of-other-segments", "_chunked", "state = state[: len(new)]", "state = state.flip(0)[: len(new)]"
)
@pytest.mark.mutation("convolution-leaks-between-segments", "_convolved", " * (places >= back)[:, None]", "")
@pytest.mark.parametrize("row", ROWS)
def test_packed_segments_are_what_the_formula_gives_each_alone_and_so_are_gradients(row: str) -> None:
    """In float64, to rounding."""
    lengths = ROWS[row]
    inputs, rule = made(lengths)
    segments = Segments(lengths, CPU)
    grad = torch.randn(sum(lengths), VALUE_HEADS * VALUE_SIZE, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in leaves), strict=True)
    wanted = torch.cat([by_the_formula(MixInputs(*part), rule) for part in parts])
    torch.testing.assert_close(mix(inputs, segments, rule), wanted, atol=1e-11, rtol=1e-9)
    found = mix_backward(grad, inputs, segments, rule)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


def test_in_float32_packed_is_alone_to_1e_4() -> None:
    lengths = ROWS["mixed"]
    inputs, rule = made(lengths, torch.float32)
    packed = mix(inputs, Segments(lengths, CPU), rule)
    found = mix_backward(torch.ones_like(packed), inputs, Segments(lengths, CPU), rule)
    start = 0
    for length in lengths:
        part = MixInputs(*(x[start : start + length] for x in inputs))
        alone = mix(part, Segments((length,), CPU), rule)
        torch.testing.assert_close(packed[start : start + length], alone, atol=1e-4, rtol=0)
        grads = mix_backward(torch.ones_like(alone), part, Segments((length,), CPU), rule)
        for ours, theirs in zip(found, grads, strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(ours[start : start + length], theirs, atol=1e-4 * scale, rtol=0)
        start += length


def test_a_long_gap_in_time_makes_neither_infinity_nor_nan() -> None:
    """Decays of a chunk multiply to far below the smallest float32; differences of their logarithms stay exact."""
    inputs, rule = made((100,), torch.float32)
    inputs.a.fill_(200.0)
    output = mix(inputs, Segments((100,), CPU), rule)
    found = mix_backward(torch.ones_like(output), inputs, Segments((100,), CPU), rule)
    assert all(x.isfinite().all() for x in (output, *found))


def test_the_backward_needs_the_inputs_alone() -> None:
    inputs, rule = made((9,), torch.float32)
    assert not mix(inputs, Segments((9,), CPU), rule).requires_grad
    found = mix_backward(torch.ones(9, VALUE_HEADS * VALUE_SIZE), inputs, Segments((9,), CPU), rule)
    assert [x.shape for x in found] == [x.shape for x in inputs]


def test_chunks_of_a_row_begin_with_the_first_of_each_segment_by_falling_length() -> None:
    chunks = Chunks.of((3, 130, 64), (), CPU)
    assert (chunks.alive, chunks.size) == ([3, 1, 1], 64)
    starts = [3 * 0, 3, 3 + 64, 3 + 128, 3 + 130]
    np.testing.assert_array_equal(chunks.places[starts], [128, 0, 192, 256, 64])


def test_fla_knows_where_chunks_begin() -> None:
    lengths = ROWS["mixed"]
    bounds, chunks = FlaBounds.of(lengths, CPU)
    assert bounds.tolist() == [0, 3, 133, 134, 198, 200, 265, 285]
    assert chunks.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [3, 0], [4, 0], [5, 0], [5, 1], [6, 0]]
    again, _ = FlaBounds.of(lengths, CPU)
    assert again is bounds


def test_an_older_fla_core_is_said_not_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of the package, which has no kernels."""
    versions = {"fla": SimpleNamespace(__version__="0.5.1"), "triton": SimpleNamespace(__version__="3.7.1")}
    monkeypatch.setattr(importlib, "import_module", versions.__getitem__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    found = delta_rule._on_cuda.__wrapped__(9)
    assert found == (None, "plain torch, since fla-core 0.5.1 is older than 0.6")


def locked() -> dict[str, str]:
    """The versions that the extra `gpu` installs, by the names of their packages."""
    lines = resources.files("tinker_local.backend.cli").joinpath("requirements-gpu.txt").read_text().splitlines()
    pins = (line.partition(" ;")[0].split("==") for line in lines if "==" in line)
    return dict(pins)


def test_what_the_extra_for_gpus_installs_computes_by_fla_on_hopper_too() -> None:
    pins = locked()
    assert delta_rule._numbers(pins["fla-core"]) >= delta_rule._numbers(delta_rule.FLA_CORE)
    assert delta_rule.gradients_are_right(9, pins["triton"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parents", [(), (NO_PARENT, 0, 0, NO_PARENT, 3, 1, 1)], ids=["lone sequences", "forks"])
def test_fla_computes_what_plain_torch_does_and_never_waits(parents: tuple[int, ...]) -> None:
    """In bfloat16, against float64 on the CPU: the norm of the difference over the norm. The first call compiles
    kernels, and waits. With the locked torch, the locked `fla-core` must be what computes."""
    cuda = torch.device("cuda")
    kernels, words = delta_rule.kernels_for(cuda, torch.bfloat16)
    pins = locked()
    as_locked = all(metadata.version(name) == pins[name] for name in ("torch", "triton"))
    if kernels is None and not as_locked:
        pytest.skip(words)
    assert kernels is not None, words
    assert not as_locked or metadata.version("fla-core") == pins["fla-core"]
    lengths = ROWS["mixed"]
    exact, rule = made(lengths, torch.bfloat16, 128, 128)
    grad = torch.randn(sum(lengths), VALUE_HEADS * 128).bfloat16()
    wide = replace(rule, **{name: getattr(rule, name).double() for name in ("taps", "rate", "rate_bias", "norm")})
    doubles = MixInputs(*(x.double() for x in exact))
    on_cpu = Segments(lengths, CPU, parents=parents)
    wanted = mix(doubles, on_cpu, wide), *mix_backward(grad.double(), doubles, on_cpu, wide)
    on_gpu = replace(rule, **{name: getattr(rule, name).cuda() for name in ("taps", "rate", "rate_bias", "norm")})
    inputs, segments, grad = (
        MixInputs(*(x.cuda() for x in exact)),
        Segments(lengths, cuda, parents=parents),
        grad.cuda(),
    )
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            found = (mix(inputs, segments, on_gpu), *mix_backward(grad, inputs, segments, on_gpu))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, ours, theirs in zip(("output", *MixInputs._fields), found, wanted, strict=True):
        difference = float((ours.cpu().double() - theirs).norm() / theirs.norm())
        print(f"{name}: {difference:.4f}")
        assert difference < 0.02, name


def test_fla_does_not_compute_where_its_gradients_are_wrong() -> None:
    wrong = [(9, "3.4.0"), (9, "3.6.0"), (9, "3.7.0")]
    right = [(9, "3.3.1"), (9, "3.7.1"), (9, "3.8.0+git1"), (8, "3.6.0"), (10, "3.6.0")]
    assert [delta_rule.gradients_are_right(*each) for each in wrong] == [False] * 3
    assert [delta_rule.gradients_are_right(*each) for each in right] == [True] * 5
