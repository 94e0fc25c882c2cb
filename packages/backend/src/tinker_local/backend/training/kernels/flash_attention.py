"""Attention on packed rows by fused kernels, which never have the scores in memory (arXiv 2205.14135).

FlashAttention 2 is part of torch. FlashAttention 4 (arXiv 2603.05451) is `flash-attn-4`, a pre-release: the extra `fa4`
installs the version that was tried, and no other one is used. Which of the two computes is a table of measurements.

torch can put FlashAttention 4 behind its own operators (`torch.nn.attention.activate_flash_attention_impl`), but torch
2.13 fails with this version, whose forward returns more tensors. The operators have no soft caps and no sinks, and the
switch holds for all of a process, also where FlashAttention 2 is faster. So this module calls the package.

Legend: T positions, N query heads, M key-value heads (N is a multiple of M), D head size. Queries are [T, N, D], keys
and values [keys, M, D], rows may be strided; bfloat16 or float16, on CUDA."""

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tinker_local.backend.kernel_caches import keep_flash_attention
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Bounds

DTYPES = (torch.bfloat16, torch.float16)

PACKAGE, TRIED = "flash-attn-4", "4.0.0b36"
"""The only version of FlashAttention 4 that computes, as the extra `fa4` pins it."""

RIGHT = frozenset({64, 96, 128, 192, 256})
"""Head sizes whose output and gradients were compared with float32 on an H200. With 72 and 80 gradients are wrong (they
differ by more than they are), and so they may be with other sizes that are not a multiple of 32."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FlashKernel(Protocol):
    """A fused attention, forward and backward. Each segment of queries attends to its keys (`Bounds`)."""

    def computes(self, size: int, rule: AttentionRule) -> bool:
        """Whether it computes `rule` with heads of this size."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [T, N, D] and the logsumexp of the scores and sinks, float32 [N, T]. `causal`: the last position
        of a segment sees all of its keys, the one before it all but the last, and so on."""

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> Gradients:
        """The gradients of query, key and value of `forward`, from that of its output, [T, N, D]. Output and
        logsumexp include the sinks, so weights and gradients made from them are right without the sinks."""


class FlashAttention2:
    """Implements `FlashKernel` by torch's operators. Calls them directly, because `torch.nn.attention.varlen` of 2.11
    refuses fewer key-value than query heads."""

    def computes(self, size: int, rule: AttentionRule) -> bool:
        return size % 8 == 0 and size <= 256 and rule.softcap is None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, logsumexp, _, _, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_arguments(bounds), 0.0, causal, False, scale=rule.scaling, **_window(rule.window)
        )
        return (output, logsumexp) if rule.sinks is None else with_sinks(output, logsumexp, rule.sinks)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> Gradients:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, output, logsumexp, *_arguments(bounds), 0.0, causal,
            no_dropout, torch.empty(0, device=query.device), scale=rule.scaling, **_window(rule.window),
        )  # fmt: skip
        return grad_query, grad_key, grad_value


@dataclass(frozen=True, slots=True)
class FlashAttention4:
    """Implements `FlashKernel` by the modules `interface` and `utils` of `flash_attn.cute`. A kernel is compiled when a
    rule or head size first needs it, and kept for later processes (`kernel_caches.py`)."""

    interface: Any
    utils: Any

    def computes(self, size: int, rule: AttentionRule) -> bool:
        return size in RIGHT

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cap = {} if rule.softcap is None else {"score_mod": _soft_cap(self.utils, rule.softcap)[0]}
        found = self.interface._flash_attn_fwd(
            query, key, value, **_packed(bounds, rule), causal=causal, learnable_sink=rule.sinks, return_lse=True, **cap
        )
        return found[0], found[1]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        logsumexp: torch.Tensor,
        bounds: Bounds,
        rule: AttentionRule,
        *,
        causal: bool = True,
    ) -> Gradients:
        cap = {}
        if rule.softcap is not None:
            cap = dict(zip(("score_mod", "score_mod_bwd"), _soft_cap(self.utils, rule.softcap), strict=True))
        exact = torch.are_deterministic_algorithms_enabled()
        grad_query, grad_key, grad_value = self.interface._flash_attn_bwd(
            query,
            key,
            value,
            output,
            grad,
            logsumexp,
            **_packed(bounds, rule),
            causal=causal,
            deterministic=exact,
            **cap,
        )
        return grad_query, grad_key, grad_value


def _arguments(bounds: Bounds) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_keys


def _window(window: int | None) -> dict[str, int]:
    """The kernels' arguments for `window`: the number of positions before and after a position."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def with_sinks(output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `sinks` [N] to the softmax behind `output` [T, N, D] and `logsumexp` [N, T]."""
    with_sink = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    share = torch.exp(logsumexp - with_sink).T[..., None]
    return output * share.to(output.dtype), with_sink


LONG = 512
"""FlashAttention 4 compiles other kernels where the longest segment fits one block of a kernel. The length only has to
be a bound, so that it always gets one that does not fit: fewer kernels, and none compiled in the middle of training."""


def _packed(bounds: Bounds, rule: AttentionRule) -> dict[str, Any]:
    """FlashAttention 4's arguments for both directions. A window that hides nothing would only slow it down."""
    queries, keys, longest_query, longest_keys = _arguments(bounds)
    window = None if rule.window is None or rule.window >= longest_keys else rule.window
    return {
        "softmax_scale": rule.scaling,
        "cu_seqlens_q": queries,
        "cu_seqlens_k": keys,
        "max_seqlen_q": max(longest_query, LONG),
        "max_seqlen_k": max(longest_keys, LONG),
        **_window(window),
    }


@functools.cache
def _soft_cap(utils: Any, cap: float) -> tuple[Any, Any]:
    """What `flash_attn.cute` does with scores and with their gradients for a soft cap. Given `softcap=` it makes both
    anew in each call, and hashes their source to find the kernel."""
    return utils.create_softcap_scoremod(cap), utils.create_softcap_scoremod_bwd(cap)


@dataclass(frozen=True, slots=True)
class Faster:
    """FlashAttention 4 is faster, forward and backward together: on GPUs of this compute `capability`, with heads of
    these `sizes`, for rules with no extensions but these (of "window", "sinks" and "full", which is not causal), in
    rows whose segments have at least so many `keys` on average, and at least so many `scores`: tokens times keys."""

    capability: tuple[int, int]
    sizes: frozenset[int]
    extensions: frozenset[str]
    scores: int
    keys: int


FASTER: tuple[Faster, ...] = (
    # An H200 with torch 2.13 (benchmarks/results/fused_attention-20261130-h200.txt and
    # attention_kernels-20261130-h200-cut-short.txt). Rows of 8,192 with 32 heads of 128 and segments of 64, 128, 256,
    # 512, 2,048: 0.80, 1.02, 1.24, 1.48, 1.81 times as fast; one segment of 1,024, 2,048, 8,192, 32,768: 0.87, 1.85,
    # 2.15, 1.89. Segments of 256 with 64 heads of 64: 1.23, with 24 of 256: 1.20. A window of 128 with 64 heads of 64:
    # 1.47 to 1.56, and sinks cost nothing; of 1,024 with 16 heads of 256: 1.41. Rows of 2,048 in segments of 256: 0.65
    # to 0.85, since the host is slower than the GPU.
    Faster((9, 0), frozenset({64, 128, 256}), frozenset({"window", "sinks"}), scores=2**21, keys=256),
    # All samples of a group against their prompt, beside each sample against a copy of it by FlashAttention 2: 16 of
    # 512 after 2,048 take 3.2 instead of 5.7 ms, 64 of 64 after 1,000 1.4 instead of 4.2.
    Faster((9, 0), frozenset({128}), frozenset({"full"}), scores=2**21, keys=1000),
)
"""What was measured. All else is left to FlashAttention 2 if it can, and so are all cards without a line."""

GAIN = "is 1.2 to 1.9 times as fast"
"""Beside FlashAttention 2, on a card of `FASTER`, where it is faster."""

TWO = FlashAttention2()


def kernel_for(
    query: torch.Tensor, key: torch.Tensor, bounds: Bounds, rule: AttentionRule, *, causal: bool = True
) -> FlashKernel | None:
    """The fastest kernel for `rule` and tensors like these, the same forward and backward; None if there is none:
    another dtype or device, other head sizes, or gradients are required, because kernels bypass autograd."""
    if not query.is_cuda or query.dtype not in DTYPES or query.requires_grad:
        return None
    (tokens, _, size), capability = query.shape, torch.cuda.get_device_capability(query.device)
    two, keys = TWO if TWO.computes(size, rule) else None, len(key) / (len(bounds.keys) - 1)
    if is_faster(capability, size, tokens, keys, extensions(bounds, rule, causal=causal)) or (
        two is None and is_measured(capability)  # a soft cap: anything is faster than scores in memory
    ):
        four, _ = flash_attention_4()
        if four is not None and four.computes(size, rule):
            return four
    return two


def extensions(bounds: Bounds, rule: AttentionRule, *, causal: bool) -> frozenset[str]:
    """What `rule` has beyond causal softmax attention for these segments, in the words of `Faster`."""
    found = {
        "window": rule.window is not None and rule.window < bounds.longest_keys,
        "sinks": rule.sinks is not None,
        "full": not causal,
    }
    return frozenset(name for name, has in found.items() if has)


def is_faster(capability: tuple[int, int], size: int, tokens: int, keys: float, has: frozenset[str]) -> bool:
    """Whether a line of `FASTER` says so of rows of `tokens` with heads of `size`, so many `keys` of a segment on
    average, and these extensions."""
    return any(
        capability == line.capability
        and size in line.sizes
        and tokens * keys >= line.scores
        and keys >= line.keys
        and has <= line.extensions
        for line in FASTER
    )


def is_measured(capability: tuple[int, int]) -> bool:
    """Whether `FASTER` has a line for such cards."""
    return any(line.capability == capability for line in FASTER)


@functools.cache
def flash_attention_4() -> tuple[FlashAttention4 | None, str]:
    """The kernels of `flash-attn-4`, or None, and in words why. Imports it, which only works where there is a GPU."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None, f"FlashAttention 4 {GAIN} on this GPU (pip install '{PACKAGE}=={TRIED}')"
    if version != TRIED:
        return None, f"{PACKAGE} {version} is not used, because {TRIED} alone has been tried here"
    keep_flash_attention()
    try:
        modules = [importlib.import_module(f"flash_attn.cute.{name}") for name in ("interface", "utils")]
    except Exception as error:  # a pre-release on top of compilers: whatever it raises, training goes on without it
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None, f"{PACKAGE} {version} is not used, because it cannot be imported: {first}"
    words = f"{PACKAGE} {version} where it is faster; the first steps compile its kernels, unless its cache has them"
    return FlashAttention4(*modules), words


def in_words(device: torch.device, dtype: torch.dtype) -> str:
    """What computes attention, for the start; empty where that is not a question."""
    if device.type != "cuda" or dtype not in DTYPES:
        return ""
    if not is_measured(torch.cuda.get_device_capability(device)):
        return ""
    four, words = flash_attention_4()
    return f"attention is computed by {words}" if four else f"attention is computed by FlashAttention 2; {words}"
