"""Which fused attention computes what, and what FlashAttention 4 is called with. Its package is a fake here; on a GPU,
test_flash_attention_on_gpu.py has the real one."""

import importlib
import importlib.metadata
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tinker_local.backend.training.kernels import flash_attention
from tinker_local.backend.training.kernels.flash_attention import (
    FASTER,
    PACKAGE,
    RIGHT,
    TRIED,
    TWO,
    Faster,
    FlashAttention4,
    FlashKernel,
    in_words,
    is_faster,
    kernel_for,
)
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.model.vision_attention import packed_attention

from tests.training import attention_reference, fake_flash_attention

CPU = torch.device("cpu")
HOPPER, AMPERE, ADA, BLACKWELL, RTX = (9, 0), (8, 0), (8, 9), (10, 0), (12, 0)
SINKS = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64)
RULES = {
    "plain": AttentionRule(0.4),
    "window 4": AttentionRule(0.4, window=4),
    "window 1": AttentionRule(0.4, window=1),
    "a window that hides nothing": AttentionRule(0.4, window=100),
    "softcap": AttentionRule(0.4, softcap=2.0),
    "softcap and window": AttentionRule(0.4, window=3, softcap=2.0),
    "sinks": AttentionRule(0.4, sinks=SINKS),
    "sinks and window": AttentionRule(0.4, window=6, sinks=SINKS),
}
FOREST = Segments((7, 3, 5, 3, 1, 9), CPU, parents=(NO_PARENT, 0, 1, 0, NO_PARENT, NO_PARENT))


def fake() -> FlashAttention4:
    return FlashAttention4(fake_flash_attention.interface(), fake_flash_attention.utils())


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this machine's GPU one of a compute capability, with a version of the package or without it."""

    def choose(capability: tuple[int, int], version: str | None) -> None:
        def installed(name: str) -> str:
            if name == PACKAGE and version is not None:
                return version
            raise importlib.metadata.PackageNotFoundError(name)

        modules = {"interface": fake_flash_attention.interface(), "utils": fake_flash_attention.utils()}
        monkeypatch.setattr(importlib.metadata, "version", installed)
        monkeypatch.setattr(importlib, "import_module", lambda name: modules[name.removeprefix("flash_attn.cute.")])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(flash_attention, "keep_flash_attention", lambda: None)  # the environment is all tests'
        flash_attention.flash_attention_4.cache_clear()

    yield choose
    flash_attention.flash_attention_4.cache_clear()


class Row(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.shape[0])


def query(size: int = 128, tokens: int = 4096, dtype: Any = torch.bfloat16, requires_grad: bool = False) -> Any:
    """A fake of a tensor on a GPU."""
    device = torch.device("cuda")
    shape = torch.Size((tokens, 32, size))
    return Row(is_cuda=True, device=device, dtype=dtype, shape=shape, requires_grad=requires_grad)


def bounds(length: int = 4096) -> Any:
    return Segments((length,), CPU).bounds


def chosen(rule: str = "plain", *lengths: int, **other: Any) -> FlashKernel | None:
    """For a row with segments of these lengths."""
    row = query(tokens=sum(lengths or (4096,)), **other)
    return kernel_for(row, row, Segments(lengths or (4096,), CPU).bounds, RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("segments", [Segments((3, 9, 1, 14, 30), CPU), FOREST], ids=["alone", "forks"])
def test_what_tests_on_a_gpu_compare_with_equals_attention(
    segments: Segments, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, in float64; rounded to bfloat16 it differs, but little."""
    monkeypatch.setattr(attention_reference, "BLOCK", 4)
    torch.manual_seed(0)
    total = sum(segments.lengths)
    query, key, value, grad = (torch.randn(total, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    output, logsumexp = attend(query, key, value, segments, RULES[rule])
    wanted = [output, *attend_backward(grad, query, key, value, output, logsumexp, segments, RULES[rule])]
    found = attention_reference.reference(query, key, value, grad, segments, RULES[rule])
    near = attention_reference.reference(query, key, value, grad, segments, RULES[rule], torch.bfloat16)
    for ours, expected, rounded in zip(found, wanted, near, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        if rule != "window 1":  # whose queries and keys have no gradients, and whose weights are ones
            assert 1e-4 < (rounded - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("segments", [Segments((3, 9, 1, 14, 30), CPU), FOREST], ids=["alone", "forks"])
def test_a_fake_of_flash_attention_4_is_given_what_makes_it_equal_plain_torch(
    segments: Segments, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, forward and backward, through `attend`: windows, soft caps, sinks, bounds of queries and of keys."""
    torch.manual_seed(0)
    total = sum(segments.lengths)
    given = [torch.randn(total, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    grad = torch.randn(total, 4, 8, dtype=torch.float64)
    seen = []
    for kernel in (None, fake()):
        monkeypatch.setattr(flash_attention, "kernel_for", lambda *_, kernel=kernel, **__: kernel)
        output, logsumexp = attend(given[0], given[1], given[2], segments, RULES[rule])
        assert (logsumexp is None) == (kernel is None)
        grads = attend_backward(grad, given[0], given[1], given[2], output, logsumexp, segments, RULES[rule])
        seen.append([output, *grads])
    for ours, expected in zip(*seen, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_a_fake_of_flash_attention_4_is_given_what_makes_all_patches_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3)]
    how = {"attention_mask": None, "scaling": 0.3, "cu_seq_lens_q": torch.tensor([0, 5, 12]), "max_length_q": 7}
    seen = []
    for kernel in (None, fake()):
        module = "tinker_local.backend.training.model.vision_attention.kernel_for"
        monkeypatch.setattr(module, lambda *_, kernel=kernel, **__: kernel)
        seen.append(packed_attention(torch.nn.Identity(), *rows, **how)[0])
    torch.testing.assert_close(*seen, rtol=0, atol=1e-12)


def test_lengths_that_fit_one_block_of_a_kernel_compile_no_other_kernel_on_a_fake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bounds of lengths are those of a longer row, and so is what the package compiles by."""
    seen: list[dict[str, Any]] = []
    kernel = fake()

    def compiled(*_: Any, **given: Any) -> tuple[None, None]:
        seen.append(given)
        return None, None

    monkeypatch.setattr(kernel.interface, "_flash_attn_fwd", compiled)
    for lengths in ((1,), (3, 60), (400, 2)):
        kernel.forward(None, None, None, Segments(lengths, CPU).bounds, RULES["plain"])
    assert {(given["max_seqlen_q"], given["max_seqlen_k"]) for given in seen} == {(flash_attention.LONG,) * 2}


def test_the_functions_for_a_soft_cap_are_made_once() -> None:
    """The fake makes new ones in each call, as the package does; it compiles a kernel for each that it has not seen."""
    utils = fake_flash_attention.utils()
    first = flash_attention._soft_cap(utils, 50.0)
    assert flash_attention._soft_cap(utils, 50.0) is first
    assert flash_attention._soft_cap(utils, 30.0) is not first


def test_a_step_that_must_be_exact_says_so_to_a_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kernel = fake()

    def compiled(*_: Any, **given: Any) -> tuple[None, None, None]:
        seen.append(given["deterministic"])
        return None, None, None

    monkeypatch.setattr(kernel.interface, "_flash_attn_bwd", compiled)
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact)
        try:
            kernel.backward(*(None,) * 6, bounds(), RULES["plain"])
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_flash_attention_4_computes_where_it_was_measured_and_found_faster_on_a_fake(on: Any) -> None:
    on(HOPPER, TRIED)
    for line in FASTER:
        assert line.capability == HOPPER, "the only card that has been measured"
        assert line.sizes <= RIGHT
        for size in line.sizes:
            segments = [line.keys] * -(-line.scores // line.keys**2)
            assert isinstance(chosen("plain", *segments, size=size), FlashAttention4), (size, line)
    assert chosen("plain", *[64] * 128) is TWO, "segments that are too short"
    assert isinstance(chosen("plain", *[256] * 32), FlashAttention4)
    assert chosen("plain", 1000) is TWO, "a row that is too short"
    assert chosen("plain", *[256] * 8) is TWO, "a row with too few scores"
    assert chosen(size=136) is TWO, "a size without a line"
    assert chosen(size=12) is None
    row = query(size=64)
    assert kernel_for(row, row, bounds(), RULES["plain"], causal=False) is TWO, "vision towers have no line"


def test_many_short_samples_attend_to_a_long_prompt_as_one_segment_on_a_fake(on: Any) -> None:
    on(HOPPER, TRIED)
    segments = Segments((1000, *[64] * 64), CPU, parents=(NO_PARENT, *[0] * 64))
    (call,) = segments.levels
    found = kernel_for(query(tokens=64 * 64), query(tokens=1000), call.bounds, RULES["plain"], causal=False)
    assert isinstance(found, FlashAttention4)
    assert kernel_for(query(tokens=5096), query(tokens=5096), segments.bounds, RULES["plain"]) is TWO


def test_soft_caps_have_no_scores_in_memory_where_flash_attention_4_is_on_a_fake(on: Any) -> None:
    """In rows of any length: FlashAttention 2 has none."""
    on(HOPPER, TRIED)
    assert isinstance(chosen("softcap", 3, 4, size=256), FlashAttention4)
    assert isinstance(chosen("softcap and window", 3, 4, size=128), FlashAttention4)
    assert chosen("softcap", 3, 4, size=40) is None


@pytest.mark.parametrize("size", [72, 80, 112, 224])
def test_sizes_whose_gradients_are_wrong_or_unknown_are_left_to_others_on_a_fake(size: int, on: Any) -> None:
    on(HOPPER, TRIED)
    assert not fake().computes(size, RULES["plain"])
    assert chosen(size=size) is TWO
    assert chosen("softcap", size=size) is None


@pytest.mark.parametrize("card", [AMPERE, (8, 6), ADA, BLACKWELL, RTX])
def test_all_cards_without_a_measurement_have_flash_attention_2_on_a_fake(card: tuple[int, int], on: Any) -> None:
    on(card, TRIED)
    assert chosen() is TWO
    assert chosen("softcap") is None
    assert in_words(torch.device("cuda"), torch.bfloat16) == ""


def test_without_the_package_all_is_as_it_was_on_a_fake(on: Any) -> None:
    on(HOPPER, None)
    for name, rule in RULES.items():
        assert chosen(name) is (None if rule.softcap else TWO)
    assert in_words(torch.device("cuda"), torch.bfloat16) == (
        f"attention is computed by FlashAttention 2; FlashAttention 4 {flash_attention.GAIN} on this GPU "
        f"(pip install '{PACKAGE}=={TRIED}')"
    )


@pytest.mark.parametrize("package", [TRIED, None])
def test_tensors_that_fused_kernels_do_not_take_have_none_on_a_fake(package: str | None, on: Any) -> None:
    on(HOPPER, package)
    assert chosen(dtype=torch.float32) is None
    assert chosen(requires_grad=True) is None
    row = torch.zeros(4096, 32, 128, dtype=torch.bfloat16)
    assert kernel_for(row, row, bounds(), RULES["plain"]) is None


def test_a_line_holds_for_its_card_its_sizes_its_lengths_and_no_other_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Faster(HOPPER, frozenset({64}), frozenset({"window"}), scores=1000, keys=10)
    monkeypatch.setattr(flash_attention, "FASTER", (line,))
    assert is_faster(HOPPER, 64, 100, 10, frozenset())
    assert is_faster(HOPPER, 64, 100, 10, frozenset({"window"}))
    nothing = frozenset[str]()
    assert not is_faster(AMPERE, 64, 100, 10, nothing)
    assert not is_faster(HOPPER, 72, 100, 10, nothing)
    assert not is_faster(HOPPER, 64, 99, 10, nothing)
    assert not is_faster(HOPPER, 64, 1000, 9.9, nothing)
    assert is_faster(HOPPER, 64, 20, 50, nothing)
    assert not is_faster(HOPPER, 64, 100, 10, frozenset({"window", "sinks"}))


def test_a_rule_has_the_extensions_that_change_something() -> None:
    def of(rule: str, length: int, *, causal: bool = True) -> set[str]:
        return set(flash_attention.extensions(bounds(length), RULES[rule], causal=causal))

    assert of("plain", 9) == set()
    assert of("window 4", 4) == set()
    assert of("window 4", 5) == {"window"}
    assert of("sinks and window", 9) == {"window", "sinks"}
    assert of("softcap", 9, causal=False) == {"full"}


def test_another_version_is_said_not_to_compute_on_a_fake(on: Any) -> None:
    on(HOPPER, "4.0.0b99")
    assert chosen() is TWO
    words = in_words(torch.device("cuda"), torch.bfloat16)
    assert words.endswith(f"{PACKAGE} 4.0.0b99 is not used, because {TRIED} alone has been tried here")


def test_a_package_that_cannot_be_imported_is_said_in_one_line_on_a_fake(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(HOPPER, TRIED)

    def broken(name: str) -> ModuleType:
        raise AttributeError("module 'cutlass' has no attribute 'cute'\nand more")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert chosen() is TWO
    words = in_words(torch.device("cuda"), torch.bfloat16)
    assert words.endswith("it cannot be imported: AttributeError: module 'cutlass' has no attribute 'cute'")


def test_the_start_says_what_computes_attention_on_a_fake(on: Any) -> None:
    on(HOPPER, TRIED)
    words = in_words(torch.device("cuda"), torch.bfloat16)
    assert words == (
        f"attention is computed by {PACKAGE} {TRIED} where it is faster; "
        "the first steps compile its kernels, unless its cache has them"
    )
    assert in_words(torch.device("cuda"), torch.float32) == ""
    assert in_words(CPU, torch.bfloat16) == ""


def test_nothing_is_imported_where_the_package_would_not_compute(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> ModuleType:
        raise AssertionError(f"imported {name}")

    for card, version in ((AMPERE, TRIED), (HOPPER, None), (HOPPER, "4.0.0b99")):
        on(card, version)
        monkeypatch.setattr(importlib, "import_module", refused)
        in_words(torch.device("cuda"), torch.bfloat16)
        assert chosen() is TWO
    on(HOPPER, TRIED)
    monkeypatch.setattr(importlib, "import_module", refused)
    in_words(CPU, torch.bfloat16)
    row = torch.zeros(4096, 32, 128)
    kernel_for(row, row, bounds(), RULES["plain"])


def test_the_extra_installs_the_version_that_was_tried() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "packages/backend/pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["fa4"] == [f"{PACKAGE}=={TRIED}"]
    locked = {each["name"]: each.get("version") for each in tomllib.loads((root / "uv.lock").read_text())["package"]}
    assert locked[PACKAGE] == TRIED
