"""The gated delta rule inside the segments of one packed row, forward and backward (Gated DeltaNet, arXiv 2412.06464).

Each value head keeps a state S [K, V], zero where a sequence begins. With k and q of length 1,

    S <- exp(g) S,    S <- S + k beta (v - k^T S)^T,    o = S^T q / sqrt(K)

Around it, as Qwen3.5 has it: a causal convolution with SiLU before, and a norm with a gate after. CUDA in 16 bits uses
the kernels of `fla-core` where they are right; all else uses `_chunked`, in plain torch. Legend: T positions, N key
heads, M value heads (a multiple of N), K and V the sizes of their heads, C = 2 N K + M V, W taps of the convolution,
S segments, c positions of a chunk.

Where sequences share their beginning (`model/segments.py`), each segment starts from the last state of its parent,
whose gradient is the sum of those of all its children, and its convolution sees the end of its path.

If several ranks share the row, T are the positions of this one, and the rule runs on all positions of its heads."""

import functools
import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tinker_local.backend.training.kernels.delta_segments import CHUNK, Beginnings, Chunks, FlaBounds, Levels
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.parallel.shared_rows import SharedRow

FLA_CORE = "0.6"
"""The oldest version of `fla-core` whose kernels take the bounds of chunks."""

_LENGTH_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """The frozen parameters of one layer, besides its projections. `taps` [C, W]; `rate` [M] = exp(A_log) and
    `rate_bias` [M]: g = -rate softplus(a + rate_bias); `norm` [V] and its `epsilon`."""

    taps: torch.Tensor
    rate: torch.Tensor
    rate_bias: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, module: Any) -> "DeltaRule":
        """The parameters of transformers' module of the layer."""
        return cls(
            taps=module.conv1d.weight.detach().squeeze(1),
            rate=module.A_log.detach().float().exp(),
            rate_bias=module.dt_bias.detach(),
            norm=module.norm.weight.detach(),
            epsilon=module.norm.variance_epsilon,
            key_heads=module.num_k_heads,
            value_heads=module.num_v_heads,
            key_size=module.head_k_dim,
            value_size=module.head_v_dim,
        )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of queries, keys and values in C."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    def of_heads(self, shared: SharedRow) -> "DeltaRule":
        """The rule for this rank's heads."""
        size, rank = shared.ranks.size, shared.ranks.rank
        return replace(
            self,
            taps=torch.cat([taps.chunk(size)[rank] for taps in self.taps.split(self.widths)]),
            rate=self.rate.chunk(size)[rank],
            rate_bias=self.rate_bias.chunk(size)[rank],
            key_heads=shared.share_of(self.key_heads),
            value_heads=shared.share_of(self.value_heads),
        )


class MixInputs(NamedTuple):
    """What a layer's projections make of T positions, rows may be strided: `qkv` [T, C], `z` [T, M V], `b` and `a`
    [T, M]."""

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


def in_parts(qkvz: torch.Tensor, ba: torch.Tensor, rule: DeltaRule) -> MixInputs:
    """The inputs from two projections whose columns lie key head by key head, as Qwen3-Next has them: `qkvz`
    [..., N (2 K + 2 M / N V)] and `ba` [..., 2 M]; query, key, values and gates of a head, then of the next.
    Differentiable."""
    each = rule.value_heads // rule.key_heads
    values = each * rule.value_size
    by_head = qkvz.unflatten(-1, (rule.key_heads, -1)).split([rule.key_size, rule.key_size, values, values], dim=-1)
    *qkv, z = (part.flatten(-2) for part in by_head)
    b, a = (part.flatten(-2) for part in ba.unflatten(-1, (rule.key_heads, -1)).split([each, each], dim=-1))
    return MixInputs(torch.cat(qkv, dim=-1), z, b, a)


def by_key_head(inputs: MixInputs, rule: DeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of `in_parts`."""
    qkvz, ba = (
        torch.cat([part.unflatten(-1, (rule.key_heads, -1)) for part in parts], dim=-1).flatten(-2)
        for parts in ((*inputs.qkv.split(rule.widths, dim=-1), inputs.z), (inputs.b, inputs.a))
    )
    return qkvz, ba


def mix(inputs: MixInputs, segments: Segments, rule: DeltaRule) -> torch.Tensor:
    """The layer between its projections, [T, M V]. Differentiable, unless ranks share the row."""
    if (shared := segments.shared) is not None:
        of_heads = _joined(shared.to_heads(*_columns(inputs, rule)))
        mixed = mix(of_heads, segments.gathered, rule.of_heads(shared))
        return shared.to_rows(mixed[..., None])[0].squeeze(-1)
    qkv, z, b, a = inputs
    if qkv.is_meta:  # it has no values
        return z.new_empty(z.shape)
    fast = _kernels(qkv)
    convolve = _convolved if fast is None else fast.convolved
    if segments.forks:
        beginnings = Beginnings.of(segments.lengths, segments.parents, rule.taps.shape[1], qkv.device)
        convolved = beginnings.convolved(qkv, rule.taps, convolve)
    else:
        convolved = convolve(qkv, rule.taps, segments)
    heads = (rule.key_heads, rule.key_heads, rule.value_heads)
    parts = zip(convolved.split(rule.widths, dim=-1), heads, strict=True)
    q, k, v = (part.unflatten(-1, (count, -1)) for part, count in parts)
    wide = _wide(qkv)
    beta = b.to(wide).sigmoid()
    g = -rule.rate.to(wide) * torch.nn.functional.softplus(a.to(wide) + rule.rate_bias.to(wide))
    z = z.unflatten(-1, (rule.value_heads, -1))
    if fast is None:
        return _gated_norm(_chunked(q, k, v, g, beta, segments), z, rule).flatten(1)
    return fast.gated_norm(fast.delta_rule(q, k, v, g, beta, segments), z, rule).flatten(1)


def mix_backward(grad: torch.Tensor, inputs: MixInputs, segments: Segments, rule: DeltaRule) -> MixInputs:
    """The gradients of `inputs` from that of the output of `mix`. Runs it again: all that lies between takes several
    times their memory."""
    if (shared := segments.shared) is not None:
        own = rule.of_heads(shared)
        grad_heads, *heads = shared.to_heads(grad[..., None], *_columns(inputs, rule))
        found = mix_backward(grad_heads.squeeze(-1), _joined(heads), segments.gathered, own)
        return _joined(shared.to_rows(*_columns(found, own)))
    with torch.enable_grad():
        leaves = MixInputs(*(tensor.detach().requires_grad_() for tensor in inputs))
        output = mix(leaves, segments, rule)
    if output.is_meta:
        return inputs
    return MixInputs(*torch.autograd.grad(output, leaves, grad))


def _columns(inputs: MixInputs, rule: DeltaRule) -> list[torch.Tensor]:
    """Query, key, value, z, b and a, whose columns lie head by head, [T, columns, 1] each."""
    return [tensor[..., None] for tensor in (*inputs.qkv.split(rule.widths, dim=-1), *inputs[1:])]


def _joined(columns: Sequence[torch.Tensor]) -> MixInputs:
    """The inverse of `_columns`."""
    query, key, value, z, b, a = (tensor.squeeze(-1) for tensor in columns)
    return MixInputs(torch.cat([query, key, value], dim=-1), z, b, a)


def transient_bytes(tokens: int, rule: DeltaRule) -> int:
    """About what `mix_backward` allocates besides its results. In torch: for each position, in float32, 10 times the
    channels (the convolution, q, k, v and gradients in chunks), and for each head 6 rows of a chunk's matrices and 3 of
    its states."""
    channels = 2 * rule.key_heads * rule.key_size + rule.value_heads * rule.value_size
    states = rule.value_heads * rule.key_size * rule.value_size // CHUNK
    return tokens * 4 * (10 * channels + rule.value_heads * 6 * CHUNK + 3 * states)


def _convolved(x: torch.Tensor, taps: torch.Tensor, segments: Segments) -> torch.Tensor:
    """silu(sum over w of taps[:, W - 1 - w] x[t - w]), without what lies before the segment, which has no parent.
    [T, C]."""
    places = segments.places
    width = taps.shape[1]
    y = x * taps[:, width - 1]
    for back in range(1, min(width, segments.longest)):
        before = torch.nn.functional.pad(x[:-back], (0, 0, back, 0))
        y = y + before * taps[:, width - 1 - back] * (places >= back)[:, None]
    return torch.nn.functional.silu(y)


def _gated_norm(o: torch.Tensor, z: torch.Tensor, rule: DeltaRule) -> torch.Tensor:
    """norm(o) silu(z), rounded as transformers does. [T, M, V]."""
    wide = o.to(_wide(o))
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rule.epsilon)
    gate = torch.nn.functional.silu(z.to(wide.dtype))
    return (rule.norm * normalized.to(z.dtype) * gate).to(z.dtype)


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """The rule in chunks (arXiv 2406.06484), in float32 (float64 stays). `q`, `k` [T, N, K]; `v` [T, M, V]; `g`, `beta`
    [T, M] -> [T, M, V] in the dtype of `v`.

    Each segment is padded to whole chunks, so that none has positions of two. What happens within chunks is computed
    for all at once. Then one step takes the state from chunk to chunk, for all segments that are long enough, and from
    the last chunk of a segment to the first of each of its children.
    """
    chunks = Chunks.of(segments.lengths, segments.parents, q.device)
    groups = q.shape[1]
    # [chunks, N, M / N, c, ...]
    q, k = (chunks.spread(_unit(x.to(_wide(x))))[:, :, None] for x in (q, k))
    values, g, beta = (chunks.spread(x.to(_wide(x))).unflatten(1, (groups, -1)) for x in (v, g, beta))
    q = q * q.shape[-1] ** -0.5
    decay = g.cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    beta, since_start = beta[..., None], decay.exp()[..., None]
    # Row i: its own value, minus what the keys before it in the chunk already wrote, and minus what the state holds.
    system = (k @ k.transpose(-1, -2)) * between * beta
    solved = torch.linalg.solve_triangular(
        system, torch.cat([values * beta, k * (beta * since_start)], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([values.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    to_end = (k * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    whole = decay[..., -1].exp()[..., None, None]
    steps = (x.split(chunks.alive) for x in (written, read, within, q * since_start, to_end, whole))
    state, outputs = None, list[torch.Tensor]()
    for before, new, of_state, inside, query, key, kept in zip(chunks.before, *steps, strict=True):
        if state is None:
            outputs.append(inside @ new)
            state = key @ new
            continue
        state = state[: len(new)] if before is None else state.index_select(0, before)
        new = new - of_state @ state
        outputs.append(inside @ new + query @ state)
        state = state * kept + key @ new
    return chunks.gathered(torch.cat(outputs).flatten(1, 2)).to(v.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPSILON)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class FlaKernels:
    """The same three operations by Triton kernels of `fla-core`; 16 bits, on CUDA."""

    def __init__(self) -> None:
        from tinker_local.backend.autotuning import compile_choices_at_once

        compile_choices_at_once()
        self._convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        self._rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        self._gated_norm = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated

    def convolved(self, x: torch.Tensor, taps: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `_convolved`."""
        bounds, chunks = FlaBounds.of(segments.lengths, x.device)
        found, _ = self._convolution(x[None], taps, activation="silu", cu_seqlens=bounds, chunk_indices=chunks)
        convolved: torch.Tensor = found[0]
        return convolved

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        segments: Segments,
    ) -> torch.Tensor:
        """See `_chunked`."""
        if segments.forks:
            return self._by_levels((q, k, v, g, beta), Levels.of(segments.lengths, segments.parents, q.device))
        bounds, chunks = FlaBounds.of(segments.lengths, q.device)
        rows = [x.contiguous()[None] for x in (q, k, v, g, beta)]
        found, _ = self._rule(*rows, cu_seqlens=bounds, chunk_indices=chunks, use_qk_l2norm_in_kernel=True)
        output: torch.Tensor = found[0]
        return output

    def _by_levels(self, rows: Sequence[torch.Tensor], levels: Levels) -> torch.Tensor:
        """The rule with one call for each level, which gives its last states, in float32, to the next one."""
        outputs: list[torch.Tensor] = []
        states: Any = None
        for level, *parts in zip(levels.levels, *map(levels.split, rows), strict=True):
            found, states = self._rule(
                *(part[None] for part in parts),
                initial_state=None if level.parents is None else states.index_select(0, level.parents),
                output_final_state=level is not levels.levels[-1],
                cu_seqlens=level.bounds.segments,
                chunk_indices=level.bounds.chunks,
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(found[0])
        return levels.joined(outputs)

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor, rule: DeltaRule) -> torch.Tensor:
        """See `_gated_norm`; rounded once, at the end."""
        found: torch.Tensor = self._gated_norm(o, z, rule.norm, None, eps=rule.epsilon)
        return found


def kernels_for(device: torch.device, dtype: torch.dtype) -> tuple[FlaKernels | None, str]:
    """The kernels for activations of `dtype` on `device`, or None for plain torch, and in words what computes."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None, "plain torch"
    return _on_cuda(torch.cuda.get_device_capability(device)[0])


@functools.cache
def _on_cuda(major: int) -> tuple[FlaKernels | None, str]:
    """For GPUs of this compute capability. `fla` is imported on CUDA alone: without a GPU its import fails."""
    if importlib.util.find_spec("fla") is None:
        return None, f"plain torch, which is slower than fla-core (pip install 'fla-core>={FLA_CORE}')"
    fla, triton = (str(importlib.import_module(name).__version__) for name in ("fla", "triton"))
    if _numbers(fla) < _numbers(FLA_CORE):
        return None, f"plain torch, since fla-core {fla} is older than {FLA_CORE}"
    if not gradients_are_right(major, triton):
        return None, (
            f"plain torch, since gradients of fla-core are wrong on this GPU with Triton {triton} (3.7.1 is right)"
        )
    return FlaKernels(), "fla-core, whose kernels the first steps compile, unless Triton's cache has them"


def gradients_are_right(major: int, triton: str) -> bool:
    """Whether `fla` computes right gradients on GPUs of this compute capability: not on Hopper with Triton from 3.4 to
    before 3.7.1, which miscompiles `chunk_bwd_dqkwg` (fla-org/flash-linear-attention#640). New ones of `fla` refuse,
    old ones do not."""
    return major != 9 or not (3, 4) <= _numbers(triton) < (3, 7, 1)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _kernels(x: torch.Tensor) -> FlaKernels | None:
    """The kernels for activations like `x`; None for plain torch."""
    return kernels_for(x.device, x.dtype)[0]
