"""The gated delta rule on rows where sequences share their beginning, against each sequence alone, in float64."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tinker_local.backend.training.kernels import delta_rule
from tinker_local.backend.training.kernels.delta_rule import (
    DeltaRule,
    FlaKernels,
    MixInputs,
    mix,
    mix_backward,
    transient_bytes,
)
from tinker_local.backend.training.kernels.delta_segments import Beginnings, Chunks, Levels
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.parallel.shared_rows import RowRanks, SharedRow, share
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.test_attention_of_forks import path_of, rows_of
from tests.training.test_delta_rule import CPU, VALUE_HEADS, VALUE_SIZE, made
from tests.training.test_live_memory import Live
from tests.training.test_shared_rows import ThreadRanks

FORESTS = {
    "a group": ((70, 30, 130, 5), (NO_PARENT, 0, 0, 0)),
    "one token each": ((9, 1, 1, 1), (NO_PARENT, 0, 0, 0)),
    "a prompt shorter than the taps reach": ((2, 3, 1), (NO_PARENT, 0, 0)),
    "a prompt of one token": ((1, 70, 2), (NO_PARENT, 0, 0)),
    "a prompt of one chunk": ((64, 3, 65), (NO_PARENT, 0, 0)),
    "a prompt of one chunk and a token": ((65, 64, 1), (NO_PARENT, 0, 0)),
    "forks of forks": ((5, 2, 140, 4, 1, 66), (NO_PARENT, 0, 1, 1, 0, 4)),
    "children far from their parents": ((64, 3, 20, 129, 2, 7), (NO_PARENT, NO_PARENT, 1, 0, 0, 2)),
    "groups and some alone": ((4, 30, 3, 200, 66, 2, 2, 150), (NO_PARENT, 0, 0, NO_PARENT, NO_PARENT, 4, 4, NO_PARENT)),
    "a chain": ((1, 1, 1, 2, 1, 64, 1, 1, 3), (NO_PARENT, 0, 1, 2, 3, 4, 5, 6, 7)),
    "a long chain with children": ((1,) * 40, (NO_PARENT, *range(19), *range(20))),
}
RowGradients = tuple[torch.Tensor, list[torch.Tensor]]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def alone(inputs: MixInputs, rule: DeltaRule, segments: Segments, grad: torch.Tensor) -> RowGradients:
    """What `mix` and `mix_backward` give each sequence alone, put together. What is shared has its gradient once: in
    the sequence that ends with it."""
    output, grads = torch.empty_like(grad), [torch.zeros_like(each) for each in inputs]
    for segment, length in enumerate(segments.lengths):
        rows = rows_of(segments, segment)
        given, itself = MixInputs(*(each[rows] for each in inputs)), Segments((len(rows),), segments.device)
        output[rows[-length:]] = mix(given, itself, rule)[-length:]
        own = torch.zeros(len(rows), grad.shape[1], dtype=grad.dtype)
        own[-length:] = grad[rows[-length:]]
        for total, part in zip(grads, mix_backward(own, given, itself, rule), strict=True):
            total.index_add_(0, rows, part)
    return output, grads


def assert_same(found: RowGradients, wanted: RowGradients) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-12)
    for name, ours, theirs in zip(MixInputs._fields, found[1], wanted[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * max(1.0, float(theirs.abs().max())), msg=name)


@pytest.mark.parametrize("forest", FORESTS)
def test_sequences_that_share_their_beginning_are_as_if_each_were_alone(forest: str) -> None:
    lengths, parents = FORESTS[forest]
    segments = Segments(lengths, CPU, parents=parents)
    inputs, rule = made(lengths)
    grad = noise(sum(lengths), VALUE_HEADS * VALUE_SIZE)
    found = mix(inputs, segments, rule), [*mix_backward(grad, inputs, segments, rule)]
    assert_same(found, alone(inputs, rule, segments, grad))


class FakeOfFla(FlaKernels):
    """The kernels in plain torch, with the arguments of `fla`. `calls` of the rule: how many segments there were, and
    whether with initial states, and final ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, bool]] = []
        self._convolution, self._rule, self._gated_norm = self.fake_convolution, self.fake_rule, None

    def fake_convolution(self, x: torch.Tensor, taps: torch.Tensor, *, cu_seqlens: torch.Tensor, **_: Any) -> Any:
        segments = Segments(tuple(cu_seqlens.diff().tolist()), CPU)
        return delta_rule._convolved(x[0], taps, segments)[None], None

    def fake_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        chunk_indices: torch.Tensor,
        use_qk_l2norm_in_kernel: bool,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Position by position."""
        bounds = cu_seqlens.tolist()
        assert use_qk_l2norm_in_kernel
        assert len(chunk_indices) == sum(-(-(stop - start) // 64) for start, stop in itertools.pairwise(bounds))
        assert all(each.is_contiguous() for each in (q, k, v, g, beta))
        self.calls.append((len(bounds) - 1, initial_state is not None, output_final_state))
        times = v.shape[2] // q.shape[2]
        q, k = (delta_rule._unit(x[0]).repeat_interleave(times, 1) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        outputs, states = [], []
        for segment, (start, stop) in enumerate(itertools.pairwise(bounds)):
            state = q.new_zeros(q.shape[1], q.shape[2], v.shape[3]) if initial_state is None else initial_state[segment]
            for t in range(start, stop):
                state = state * g[0, t].exp()[:, None, None]
                new = beta[0, t, :, None] * (v[0, t] - torch.einsum("mk,mkv->mv", k[t], state))
                state = state + torch.einsum("mk,mv->mkv", k[t], new)
                outputs.append(torch.einsum("mk,mkv->mv", q[t], state))
            states.append(state)
        return torch.stack(outputs)[None], torch.stack(states) if output_final_state else None

    def gated_norm(self, o: torch.Tensor, z: torch.Tensor, rule: DeltaRule) -> torch.Tensor:
        return delta_rule._gated_norm(o, z, rule)


@pytest.mark.parametrize("forest", FORESTS)
def test_kernels_get_the_states_of_one_level_for_the_next_on_fakes(
    forest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, parents = FORESTS[forest]
    segments = Segments(lengths, CPU, parents=parents)
    inputs, rule = made(lengths)
    grad = noise(sum(lengths), VALUE_HEADS * VALUE_SIZE)
    wanted = alone(inputs, rule, segments, grad)
    fake = FakeOfFla()
    monkeypatch.setattr(delta_rule, "_kernels", lambda _: fake)
    output = mix(inputs, segments, rule)
    depths = [len(path_of(segments, segment)) for segment in range(len(lengths))]
    levels = max(depths)
    assert fake.calls == [(depths.count(1 + at), at > 0, at < levels - 1) for at in range(levels)]
    assert_same((output, [*mix_backward(grad, inputs, segments, rule)]), wanted)


def test_without_parents_kernels_get_the_row_in_one_call_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, rule = made((9, 70))
    wanted = mix(inputs, Segments((9, 70), CPU), rule)
    fake = FakeOfFla()
    monkeypatch.setattr(delta_rule, "_kernels", lambda _: fake)
    torch.testing.assert_close(mix(inputs, Segments((9, 70), CPU), rule), wanted, rtol=0, atol=1e-12)
    assert fake.calls == [(2, False, False)]


class Sums(TorchDispatchMode):
    """In which dtypes gradients of the same row were added up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.index_add.default, torch.ops.aten.index_add_.default):
            into, _, index = args[:3]
            if len(index.unique()) < len(index):
                self.dtypes.add(into.dtype)
        return func(*args, **(kwargs or {}))


def test_gradients_of_what_several_share_are_not_added_in_16_bits() -> None:
    """Where CUDA rounds after each of them; a CPU does not."""
    lengths, parents = FORESTS["a group"]
    inputs, rule = made(lengths, torch.bfloat16)
    grad = noise(sum(lengths), VALUE_HEADS * VALUE_SIZE).bfloat16()
    with Sums() as sums:
        mix_backward(grad, inputs, Segments(lengths, CPU, parents=parents), rule)
    assert sums.dtypes == {torch.float32}


def test_index_tensors_of_a_row_are_made_once() -> None:
    lengths, parents = FORESTS["forks of forks"]
    for first, again in (
        (Chunks.of(lengths, parents, CPU), Chunks.of(lengths, parents, CPU)),
        (Levels.of(lengths, parents, CPU), Levels.of(lengths, parents, CPU)),
        (Beginnings.of(lengths, parents, 4, CPU), Beginnings.of(lengths, parents, 4, CPU)),
    ):
        assert first is again
    assert Levels.of(lengths, parents, CPU) is not Levels.of(lengths, (NO_PARENT,) * 6, CPU)


def test_steps_follow_the_chunks_of_each_path() -> None:
    chunks = Chunks.of((65, 3, 130, 64), (NO_PARENT, 0, 0, NO_PARENT), CPU)
    assert (chunks.alive, chunks.size) == ([2, 1, 2, 1, 1], 64)
    # The last chunk of the root is alone in its step; both children follow on it, the longer one first.
    assert [None if each is None else each.tolist() for each in chunks.before] == [None, None, [0, 0], None, None]
    assert chunks.places[[0, 64, 65, 68, 65 + 3 + 64, 65 + 3 + 128, 65 + 3 + 130]].tolist() == [
        *(0, 2 * 64, 4 * 64, 3 * 64),
        *(5 * 64, 6 * 64, 64),
    ]


def test_a_group_takes_no_more_memory_than_as_many_lone_positions() -> None:
    """So the plan of the memory, which knows positions alone, holds as without a group."""
    lengths, parents = (512,) + (96,) * 16, (NO_PARENT,) + (0,) * 16
    inputs, rule = made(lengths, torch.float32, 64, 64)
    grad = noise(sum(lengths), VALUE_HEADS * 64).float()

    def peak(segments: Segments) -> int:
        mix_backward(grad, inputs, segments, rule)  # which makes index tensors that stay
        with Live([grad, *inputs]) as live:
            mix_backward(grad, inputs, segments, rule)
        return live.peak

    group, lone = (peak(Segments(lengths, CPU, parents=each)) for each in (parents, ()))
    assert group < 1.1 * lone
    assert group < 1.25 * transient_bytes(sum(lengths), rule)


@pytest.mark.parametrize("size", [2])
def test_forks_of_ranks_that_share_a_row_are_those_of_one(size: int) -> None:
    lengths, parents = FORESTS["forks of forks"]
    inputs, rule = made(lengths)
    grad = noise(sum(lengths), VALUE_HEADS * VALUE_SIZE)

    def mixed(shared: SharedRow) -> list[torch.Tensor]:
        segments = Segments(lengths, CPU, shared=shared.or_none, parents=parents)
        own = MixInputs(*(each[shared.own] for each in inputs))
        return [mix(own, segments, rule), *mix_backward(grad[shared.own], own, segments, rule)]

    posts: list[Sequence[torch.Tensor]] = [()] * size
    barrier = threading.Barrier(size)
    rows = [share(sum(lengths), ThreadRanks(rank, posts, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        parts = [*threads.map(mixed, rows)]
    for wanted, *found in zip(mixed(share(sum(lengths), RowRanks())), *parts, strict=True):
        torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-12)
