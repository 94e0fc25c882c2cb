"""FlashAttention 2 and 4 on a GPU, against attention by its formulas in float32. The bound is what the same formulas
lose by rounding to 16 bits what a fused kernel rounds. Each kernel is called directly, wherever it is not the faster
one too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tinker_local.backend.training.kernels import flash_attention
from tinker_local.backend.training.kernels.flash_attention import FASTER, FlashAttention4, FlashKernel
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import NO_PARENT, Segments

from tests.training.attention_reference import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


RAGGED = (1, 2, 7, 64, 65, 127, 128, 129, 300, 511, 1, 1030)
WINDOW, CAP = 100, 3.0
KINDS = ("plain", "window", "softcap", "sinks", "softcap and window", "sinks and window")
SHAPES = {
    "qwen3-8b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "gpt-oss": (64, 8, 64),
    "gemma-3-12b": (16, 8, 256),
    "qwen3.5-27b": (24, 4, 256),
    "one kv head": (6, 1, 64),
    "72": (4, 2, 72),
    "80": (8, 8, 80),
    "96": (8, 2, 96),
    "192": (8, 2, 192),
}
"""Query heads, key-value heads and head size."""
FEW = {
    "72": ("plain",),
    "80": ("plain", "window"),
    "96": ("plain", "window"),
    "192": ("plain",),
    "qwen2.5-7b": ("plain", "window"),
}
"""The kinds of rules for shapes that have not all: each compiles kernels for seconds."""
OUTPUTS = ("output", "grad_query", "grad_key", "grad_value")


def kernel(name: str) -> FlashKernel:
    if name == "FlashAttention 2":
        return flash_attention.TWO
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("FlashAttention 4 is for Hopper and Blackwell")
    four, words = flash_attention.flash_attention_4()
    if four is None:
        pytest.skip(words)
    return four


def rule_of(kind: str, heads: int, size: int) -> AttentionRule:
    return AttentionRule(
        size**-0.5,
        window=WINDOW if "window" in kind else None,
        softcap=CAP if "softcap" in kind else None,
        sinks=torch.linspace(-2, 4, heads, device="cuda") if "sinks" in kind else None,
    )


def row(heads: int, kv_heads: int, size: int, total: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value, and the gradient of the output. As blocks have them: the value is a part of a wider row."""
    generator = torch.Generator("cuda").manual_seed(size)
    joined = torch.randn(total, 2 * heads + 2 * kv_heads, size, generator=generator, device="cuda").to(dtype)
    query, key, value, grad = joined.split([heads, kv_heads, kv_heads, heads], dim=1)
    assert total == 1 or not value.is_contiguous()
    return [query.contiguous(), key.contiguous(), value, grad.contiguous()]


def check(given: list[torch.Tensor], found: Any, segments: Segments, rule: AttentionRule) -> None:
    """The whole is at most twice as wrong as rounding makes it, and each segment at most four times. A position that
    sees itself alone has exact gradients of zero, hence the noise."""
    query, key, value, grad = given
    exact = reference(query, key, value, grad, segments, rule)
    rounded = reference(query, key, value, grad, segments, rule, query.dtype)
    for name, ours, wanted, near in zip(OUTPUTS, found, exact, rounded, strict=True):
        assert ours.shape == wanted.shape
        assert ours.dtype == given[0].dtype
        error, bound = (float((x.float() - wanted).norm()) for x in (ours, near))
        size, noise = float(wanted.norm()), 1e-5 * wanted.numel() ** 0.5
        print(f"{name}: {error:.3g} of {bound:.3g}, in {size:.3g};", end=" ")
        assert error <= 2 * bound + noise, (name, error, bound, size)
        for start, length in zip(segments.starts, segments.lengths, strict=True):
            part = slice(start, start + length)
            error, bound = (float((x[part].float() - wanted[part]).norm()) for x in (ours, near))
            assert error <= 4 * bound + 1e-4 * wanted[part].numel() ** 0.5, (name, start, length, error, bound)


def through(which: FlashKernel, given: list[torch.Tensor], segments: Segments, rule: AttentionRule) -> Any:
    """What `attend` and `attend_backward` do with a kernel."""
    query, key, value, grad = given
    with mock.patch.object(flash_attention, "kernel_for", return_value=which):
        output, logsumexp = attend(query, key, value, segments, rule)
        grads = attend_backward(grad, query, key, value, output, logsumexp, segments, rule)
    assert logsumexp is not None
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    assert logsumexp.dtype == torch.float32
    return output, *grads


@pytest.mark.parametrize("name", ["FlashAttention 2", "FlashAttention 4"])
@pytest.mark.parametrize(("shape", "kind"), [(shape, kind) for shape in SHAPES for kind in FEW.get(shape, KINDS)])
def test_fused_attention_of_packed_rows_equals_float32(shape: str, kind: str, name: str) -> None:
    which, rule = kernel(name), rule_of(kind, SHAPES[shape][0], SHAPES[shape][2])
    if not which.computes(SHAPES[shape][2], rule):
        pytest.skip(f"{name} does not compute this")
    segments = Segments(RAGGED, CUDA)
    given = row(*SHAPES[shape], sum(RAGGED), torch.bfloat16)
    check(given, through(which, given, segments, rule), segments, rule)


@pytest.mark.parametrize("name", ["FlashAttention 2", "FlashAttention 4"])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks and window"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_sequences_that_share_their_beginning_attend_to_it_in_fused_kernels(size: int, kind: str, name: str) -> None:
    """A group, a fork of a fork, and one alone: fewer queries than keys, also in the middle of blocks of a kernel."""
    which, rule = kernel(name), rule_of(kind, 8, size)
    if not which.computes(size, rule):
        pytest.skip(f"{name} does not compute this")
    parents = (NO_PARENT, 0, 0, 0, 3, 3, NO_PARENT)
    segments = Segments((300, 64, 1, 130, 70, 257, 90), CUDA, parents=parents)
    given = row(8, 2, size, sum(segments.lengths), torch.bfloat16)
    check(given, through(which, given, segments, rule), segments, rule)


@pytest.mark.parametrize("name", ["FlashAttention 2", "FlashAttention 4"])
@pytest.mark.parametrize(
    ("lengths", "size", "kind"),
    [
        ((32768,), 128, "plain"),
        ((32768,), 64, "sinks and window"),
        ((20000, 1, 12767), 256, "window"),
        ((3, 1, 5) * 200, 128, "plain"),  # with more than 256 segments FlashAttention 4 finds them in another way
        ((1,), 128, "plain"),
        ((1,), 64, "sinks"),
    ],
    ids=lambda value: f"{len(value)} of {max(value)}" if isinstance(value, tuple) else str(value),
)
def test_fused_attention_equals_float32_at_any_length(
    lengths: tuple[int, ...], size: int, kind: str, name: str
) -> None:
    which, segments, rule = kernel(name), Segments(lengths, CUDA), rule_of(kind, 4, size)
    given = row(4, 2, size, sum(lengths), torch.bfloat16)
    check(given, through(which, given, segments, rule), segments, rule)


@pytest.mark.parametrize("name", ["FlashAttention 2", "FlashAttention 4"])
def test_fused_attention_takes_float16(name: str) -> None:
    segments, rule = Segments(RAGGED, CUDA), rule_of("window", 8, 128)
    given = row(8, 2, 128, sum(RAGGED), torch.float16)
    check(given, through(kernel(name), given, segments, rule), segments, rule)


def test_the_table_chooses_and_what_it_chooses_equals_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    four, words = flash_attention.flash_attention_4()
    mine = torch.cuda.get_device_capability()
    lines = [line for line in FASTER if line.capability == mine and "full" not in line.extensions]
    if four is None or not lines:
        pytest.skip(words)
    seen = []
    forward = FlashAttention4.forward

    def watched(*given: Any, **how: Any) -> Any:
        seen.append(given)
        return forward(*given, **how)

    monkeypatch.setattr(FlashAttention4, "forward", watched)
    for line in lines:
        lengths = (line.scores // line.keys, 5)
        for size in sorted(line.sizes):
            segments, rule = Segments(lengths, CUDA), rule_of("plain", 4, size)
            query, key, value, grad = given = row(4, 2, size, sum(lengths), torch.bfloat16)
            output, logsumexp = attend(query, key, value, segments, rule)
            grads = attend_backward(grad, query, key, value, output, logsumexp, segments, rule)
            check(given, (output, *grads), segments, rule)
    assert len(seen) == sum(len(line.sizes) for line in lines)


def test_flash_attention_4_never_waits_for_the_device() -> None:
    """After a first call, which compiles. Bounds go to the device once for all layers."""
    which = kernel("FlashAttention 4")
    for kind in ("plain", "sinks and window", "softcap"):
        segments, rule = Segments(RAGGED, CUDA), rule_of(kind, 8, 64)
        given = row(8, 2, 64, sum(RAGGED), torch.bfloat16)
        assert segments.bounds.longest_keys == max(RAGGED)
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                through(which, given, segments, rule)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_deterministic_step_has_the_same_bits_each_time(size: int) -> None:
    which, segments, rule = kernel("FlashAttention 4"), Segments(RAGGED, CUDA), rule_of("window", 8, size)
    given = row(8, 2, size, sum(RAGGED), torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (through(which, given, segments, rule) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_lengths_of_rows_compile_no_kernels_again() -> None:
    """Rows of one, of short and of long segments, with and without a window that hides nothing, share their kernels."""
    which = kernel("FlashAttention 4")
    assert isinstance(which, FlashAttention4)
    caches = [getattr(which.interface, name).compile_cache for name in ("_flash_attn_fwd", "_flash_attn_bwd")]
    sizes = []
    for lengths in ((700, 1300), (1,), (3, 60), (5, 5, 5, 90)):
        for window in (None, 5000):
            segments, rule = Segments(lengths, CUDA), AttentionRule(0.1, window=window)
            through(which, row(8, 2, 128, sum(lengths), torch.bfloat16), segments, rule)
            sizes.append([len(cache.cache) for cache in caches])
    assert sizes == [sizes[0]] * len(sizes)


def test_a_later_process_compiles_nothing_again_and_has_the_same_bits(tmp_path: Path) -> None:
    kernel("FlashAttention 4")
    program = """
import torch
from tests.training.test_flash_attention_on_gpu import CUDA, RAGGED, kernel, row, rule_of, through
from tinker_local.backend.training.model.segments import Segments

which, compiled = kernel("FlashAttention 4"), []
cute = which.interface.cute
original = cute.compile
cute.compile = lambda *given, **how: compiled.append(1) or original(*given, **how)
torch.use_deterministic_algorithms(True)
sums = []
for kind, size in (("plain", 128), ("sinks and window", 64), ("softcap", 256)):
    given = row(8, 2, size, sum(RAGGED), torch.bfloat16)
    found = through(which, given, Segments(RAGGED, CUDA), rule_of(kind, 8, size))
    sums += [int(each.view(torch.int16).long().sum()) for each in found]
print(len(compiled), sums)
"""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.splitlines()[-1].split(maxsplit=1))
    assert int(seen[0][0]) > 0
    assert int(seen[1][0]) == 0
    assert seen[0][1] == seen[1][1]
