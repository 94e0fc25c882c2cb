"""Ranks read each other's memory, or none does. The memory is shared memory of the host, the ranks are threads."""

import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.parallel import peer_memory
from tinker_local.backend.training.parallel.peer_memory import HostMemory, Peers, connect

UNITS = 3


class ThreadGroup:
    """Ranks in threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()
        self._barrier = threading.Barrier(size, timeout=60)
        self._said: dict[int, Any] = {}

    def all(self, mine: Any, _: Any) -> list[Any]:
        self._barrier.wait()
        self._said[self.here.rank] = mine
        self._barrier.wait()
        return [self._said[rank] for rank in range(self.size)]


def connected(monkeypatch: pytest.MonkeyPatch, parts: list[list[torch.Tensor]]) -> list[Peers | str]:
    """What `connect` returns on each rank."""
    group, found = ThreadGroup(len(parts)), dict[int, Peers | str]()
    monkeypatch.setattr(peer_memory, "_all", group.all)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _: group.here.rank)

    def run(rank: int) -> None:
        group.here.rank = rank
        found[rank] = connect(parts[rank], group)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(parts))]


@pytest.fixture
def parts() -> list[list[torch.Tensor]]:
    """Of three ranks; two units lie in one storage."""
    rng = np.random.default_rng(0)
    sizes = [32, 48, 4096]
    made = []
    for _ in range(3):
        joined = torch.from_numpy(rng.integers(0, 256, sum(sizes[:2]), np.uint8))
        made.append([*joined.split(sizes[:2]), torch.from_numpy(rng.integers(0, 256, sizes[2], np.uint8))])
    return made


def test_fake_ranks_read_whole_units(monkeypatch: pytest.MonkeyPatch, parts: Any) -> None:
    for peers in connected(monkeypatch, parts):
        assert isinstance(peers, Peers)
        for number in range(UNITS):
            whole = torch.cat([of_rank[number] for of_rank in parts])
            into = torch.zeros_like(whole)
            version = into._version
            peers.read(number, into)
            torch.testing.assert_close(into, whole, rtol=0, atol=0)
            assert into._version == version  # else autograd would refuse weights that it has saved


def spoiled(open_: Callable[..., Any]) -> Callable[..., Any]:
    def call(memory: Any, handle: Any, nbytes: int) -> Any:
        found = open_(memory, handle, nbytes).copy()
        if nbytes == 48:
            found[7] ^= 1
        return found

    return call


def test_fake_ranks_that_read_other_bytes_read_none(monkeypatch: pytest.MonkeyPatch, parts: Any) -> None:
    monkeypatch.setattr(HostMemory, "open", spoiled(HostMemory.open))
    for fault in connected(monkeypatch, parts):
        assert fault == "rank 0 reads other bytes from rank 1 than are there"


@pytest.mark.mutation(
    "rank-gathers-alone",
    "peer_memory.connect",
    'fault = next((said for said in _all(fault, group) if said), "")',
    "_all(fault, group)",
)
@pytest.mark.parametrize("kind", [OSError, RuntimeError])  # of the driver, and of torch
@pytest.mark.parametrize("place", ["share", "open"])
def test_if_a_fake_rank_cannot_read_none_does(
    monkeypatch: pytest.MonkeyPatch, parts: Any, place: str, kind: type[Exception]
) -> None:
    original = getattr(HostMemory, place)

    def refused(memory: Any, *arguments: Any) -> Any:
        if threading.current_thread().name == "rank 2":
            raise kind(f"{place}: CUDA error 217 (peer access is not supported)")
        return original(memory, *arguments)

    monkeypatch.setattr(HostMemory, place, refused)
    found = connected(monkeypatch, parts)
    assert found == [f"{place}: CUDA error 217 (peer access is not supported)"] * 3


def test_fake_ranks_obey_nccls_variable(monkeypatch: pytest.MonkeyPatch, parts: Any) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert connected(monkeypatch, parts) == ["NCCL_P2P_DISABLE is set"] * 3


def test_shared_memory_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="/dev/shm has 100 bytes free, and this needs 64"):
        HostMemory().share(torch.zeros(64, dtype=torch.uint8))
