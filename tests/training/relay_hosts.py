"""Relays without Ray, as if on other hosts. Stand-ins import this file, so it contains no tests."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tinker_local.backend.fakes import FakeModel, FakeTrainer
from tinker_local.backend.process import ray_hosts
from tinker_local.backend.process.ray_hosts import RayHosts
from tinker_local.backend.process.relay import Address, Links
from tinker_local.backend.training.trainer import Seat

RELAY = """
import sys
from tinker_local.backend.process.relay import Relay

relay = Relay(sys.argv[2], bytes.fromhex(sys.argv[1]))
print(relay.address.port, flush=True)
relay.run()
"""


def start_relay(secret: bytes, host: str = "127.0.0.1") -> "tuple[subprocess.Popen[str], Address]":
    """A relay in a process and in a session that nothing else here ends."""
    command = [sys.executable, "-c", RELAY, secret.hex(), host]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert relay.stdout is not None
    return relay, Address(host, int(relay.stdout.readline()))


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
