"""Relays without Ray, as if on other hosts. Stand-ins import this file, so it contains no tests."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.fakes import FakeFollower, FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.process import ray_hosts
from tinker_local.backend.process.ray_hosts import RayHosts
from tinker_local.backend.process.ray_replicas import RayReplicas
from tinker_local.backend.process.relay import Address, Links
from tinker_local.backend.sampling.process_sampler import SamplerSeat
from tinker_local.backend.training.trainer import Seat

RELAYS = """
import sys
from tinker_local.backend.process.relay import Relays

relays = Relays(sys.argv[2], bytes.fromhex(sys.argv[1]), int(sys.argv[3]))
print(*[address.port for address in relays.addresses], flush=True)
for thread in relays.threads:
    thread.join()
"""


ELSEWHERE = "TESTS_ELSEWHERE"
"""In the environment of processes of relays."""


def start_relays(
    secret: bytes, host: str = "127.0.0.1", size: int = 1
) -> "tuple[subprocess.Popen[str], list[Address]]":
    """Relays in a process and in a session that nothing else here ends."""
    command = [sys.executable, "-c", RELAYS, secret.hex(), host, str(size)]
    environment = {**os.environ, ELSEWHERE: "1"}
    relays = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert relays.stdout is not None
    return relays, [Address(host, int(port)) for port in relays.stdout.readline().split()]


def start_relay(secret: bytes, host: str = "127.0.0.1") -> "tuple[subprocess.Popen[str], Address]":
    """One relay."""
    relay, (address,) = start_relays(secret, host)
    return relay, address


@dataclass(frozen=True, slots=True)
class RelayHosts(RayHosts):
    """Has the ids of its relays' processes in `folder`, as names of files."""

    folder: Path = Path()

    def check(self) -> None:
        pass

    def meeting(self) -> str:
        return "nowhere"

    def place(self, others: Sequence[int]) -> Links:
        ray_hosts._place = self._relays
        return RayHosts.place(self, others)

    def _relays(self, hosts: RayHosts, secret: bytes) -> list[Address]:
        found = [start_relay(secret) for _ in range(hosts.hosts * hosts.ranks)]
        for relay, _ in found:
            (self.folder / str(relay.pid)).touch()
        return [address for _, address in found]

    def _host_and_port(self) -> tuple[str, int]:
        host, port = self.address.split(":")
        return host, int(port)


class EchoingTrainer(FakeTrainer):
    """Returns an array as it came, with the rank that has it."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(FakeModel("fake/bigram"))
        self._seat = seat

    def echo(self, array: npt.NDArray[np.uint8]) -> tuple[Seat, npt.NDArray[np.uint8]]:
        return self._seat, array


def echoing(seat: Seat) -> FakeTrainer:
    return EchoingTrainer(seat)


class RelayReplicas(RayReplicas):
    """The same for replicas: the names of files are `REPLICA-ID`."""

    @staticmethod
    def _make_placer(hosts: RayHosts, size: int) -> Any:
        assert isinstance(hosts, RelayHosts)
        return RelayPlacer(hosts, size)


class RelayPlacer:
    """Has no place for the replica that the file `full` names, until it is gone; one in `refused` is an error. Is not
    there while the file `slow` is. Notes in `places` which replicas it was told to place."""

    def __init__(self, hosts: RelayHosts, size: int) -> None:
        self._folder, self._size = hosts.folder, size
        while self._named("slow", 0):
            time.sleep(0.05)
        self._addresses: dict[int, list[Address]] = {}

    def place(self, replica: int) -> None:
        if self._named("refused", replica):
            raise RuntimeError("Ray says no")
        with (self._folder / "places").open("a") as places:
            places.write(f"{replica}\n")
        self._addresses.pop(replica, None)

    def placed(self, replica: int) -> list[tuple[str, str, int]] | None:
        if self._named("full", replica):
            return None
        relays, addresses = start_relays(b"secret", size=self._size)
        (self._folder / f"{replica}-{relays.pid}").touch()
        return [(b"secret".hex(), *address) for address in addresses]

    def _named(self, file: str, replica: int) -> bool:
        path = self._folder / file
        return path.exists() and path.read_text() == str(replica)

    def close(self) -> None:
        pass


class SamplerElsewhere(FakeSampler):
    """A sampler whose host has no folder of the server, if that is another one."""

    def _read(self, version: AdapterVersion) -> Any:
        assert ELSEWHERE not in os.environ or version.unwritten() is not None, f"{version.name} did not come"
        return super()._read(version)


def sampler_elsewhere(model: FakeModel) -> Any:
    return SamplerElsewhere(model)


def rank_elsewhere(model: FakeModel, seat: SamplerSeat) -> Any:
    return FakeFollower(seat.links[0]) if seat.rank else SamplerElsewhere(model)
