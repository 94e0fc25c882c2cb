"""A fake of the package `flash-attn-4` in plain torch, for any device and dtype: what its two functions promise, with
the names of their arguments in 4.0.0b36."""

import functools
import itertools
from types import ModuleType
from typing import Any

import torch


def interface() -> ModuleType:
    """A fake of `flash_attn.cute.interface`."""
    found: Any = ModuleType("flash_attn.cute.interface")
    found._flash_attn_fwd, found._flash_attn_bwd = forward, backward
    return found


def utils() -> ModuleType:
    """A fake of `flash_attn.cute.utils`."""
    found: Any = ModuleType("flash_attn.cute.utils")
    found.create_softcap_scoremod = lambda cap: lambda scores: cap * torch.tanh(scores / cap)
    found.create_softcap_scoremod_bwd = lambda cap: lambda grad, scores: grad * (1 - torch.tanh(scores / cap) ** 2)
    return found


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,
    score_mod: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One segment: output, logsumexp, and the weights and scores [N, q, k]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) * softmax_scale
    changed = scores if score_mod is None else score_mod(scores)
    # The last query is beside the last key.
    ahead = torch.arange(len(key))[None] - torch.arange(len(query))[:, None] - (len(key) - len(query))
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window_size_left is not None:
        hidden |= -ahead > window_size_left
    if window_size_right is not None:
        hidden |= ahead > window_size_right
    changed = changed.masked_fill(hidden, -torch.inf)
    logsumexp = changed.logsumexp(-1)
    if learnable_sink is not None:
        logsumexp = torch.logaddexp(logsumexp, learnable_sink[:, None].to(logsumexp.dtype))
    weights = torch.exp(changed - logsumexp[..., None])
    return torch.einsum("nqk,knd->qnd", weights, value), logsumexp, weights, scores


def pieces(bounds: torch.Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds.tolist())]


def check_lengths(of_queries: list[slice], of_keys: list[slice], longest: tuple[int, int]) -> None:
    for each, most in zip((of_queries, of_keys), longest, strict=True):
        assert all(piece.stop - piece.start <= most for piece in each)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_lse: bool,
    **how: Any,
) -> tuple[Any, ...]:
    """A fake of `_flash_attn_fwd`."""
    assert return_lse
    of_queries, of_keys = pieces(cu_seqlens_q), pieces(cu_seqlens_k)
    check_lengths(of_queries, of_keys, (max_seqlen_q, max_seqlen_k))
    found = [attended(q[a], k[b], v[b], **how)[:2] for a, b in zip(of_queries, of_keys, strict=True)]
    return torch.cat([output for output, _ in found]), torch.cat([each for _, each in found], 1), None, None, None


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    deterministic: bool = False,
    score_mod_bwd: Any = None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A fake of `_flash_attn_bwd`: weights come from `lse`, and what all share of a gradient from `out`."""
    of_queries, of_keys = pieces(cu_seqlens_q), pieces(cu_seqlens_k)
    check_lengths(of_queries, of_keys, (max_seqlen_q, max_seqlen_k))
    grads = tuple(map(torch.zeros_like, (q, k, v)))
    for a, b in zip(of_queries, of_keys, strict=True):
        repeats = q.shape[1] // k.shape[1]
        _, alone, weights, scores = attended(q[a], k[b], v[b], **how)
        weights = weights * torch.exp(alone - lse[:, a])[..., None]
        wide_key, wide_value = (x[b].repeat_interleave(repeats, 1) for x in (k, v))
        shared = (dout[a] * out[a]).sum(-1).T[..., None]
        grad_scores = weights * (torch.einsum("qnd,knd->nqk", dout[a], wide_value) - shared)
        if score_mod_bwd is not None:
            grad_scores = score_mod_bwd(grad_scores, scores)
        grad_scores = grad_scores * how["softmax_scale"]
        grads[0][a] = torch.einsum("nqk,knd->qnd", grad_scores, wide_key)
        to_heads = functools.partial(torch.Tensor.unflatten, dim=1, sizes=(-1, repeats))
        grads[1][b] = to_heads(torch.einsum("nqk,qnd->knd", grad_scores, q[a])).sum(2)
        grads[2][b] = to_heads(torch.einsum("nqk,qnd->knd", weights, dout[a])).sum(2)
    return grads
