"""While nothing is sampled, each rank of a sampler gives back memory that others need."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.sampling.process_sampler import SamplerSeat
from tinker_local.backend.vllm_engine import rank_follower, vllm_sampler
from tinker_local.backend.vllm_engine.rank_follower import Follower
from tinker_local.backend.vllm_engine.rank_leader import Leader, Told
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler


@pytest.mark.parametrize("asleep", [False, True])
def test_a_sampler_at_rest_tells_its_ranks(asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is asleep has given its memory back, and touching it would end the process."""
    given: list[tuple[str, int]] = []
    for module in (vllm_sampler, rank_follower):
        monkeypatch.setattr(module, "give_back_at_rest", lambda spare, of=module.__name__: given.append((of, spare)))
    ours, theirs = socket.socketpair()
    leader = Leader(SamplerSeat(0, 2, "", (ours.detach(),), "ranks"))
    sampler: Any = SimpleNamespace(asleep=asleep, _leader=leader, _spare_bytes=7)
    VLLMSampler._rest(sampler)
    if asleep:
        assert given == []
        return
    told = Channel(theirs, os.getppid()).receive()
    assert isinstance(told, Told)
    follower = Follower.__new__(Follower)
    follower._spare_bytes = 5
    for call in told.calls:
        follower._do(call)
    assert given == [(vllm_sampler.__name__, 7), (rank_follower.__name__, 5)]
