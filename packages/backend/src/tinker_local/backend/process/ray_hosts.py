"""Ray starts the ranks of a trainer on other hosts, and does nothing else: for each an actor, which runs a `Relay`.

Only the stand-in of the first of these ranks imports Ray. It places the actors, and tells the other stand-ins where
their relays are. Actors and placement group end with it, and it ends with the server.
"""

import ipaddress
import json
import logging
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_local.backend.options import parse_host_and_port
from tinker_local.backend.process.relay import Address, Links, Relay, connect

log = logging.getLogger(__name__)

TOKEN_FILE = Path(".ray") / "auth_token"
"""Where Ray looks for the token below the home folder."""

_NODE_ID = "ray.io/node-id"
_CONNECT_SECONDS = 5.0
_SAY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RayHosts:
    """`hosts` other hosts that the Ray cluster at `address` ("HOST:PORT") has, with `ranks` processes on each. Each
    process has a GPU if `gpus`, otherwise a CPU of those that Ray counts."""

    address: str
    hosts: int
    ranks: int
    gpus: bool

    def check(self) -> None:
        """ValueError, in one line, if Ray or its token is missing here, or if other hosts cannot reach this one."""
        if find_spec("ray") is None:
            raise ValueError("--ray-address: Ray is not installed; install tinker-local[ray] here and on every host")
        if not _has_token():
            raise ValueError(
                f"--ray-address {self.address}: Ray without a token lets everybody on the network run programs; make "
                f"one with `ray get-auth-token --generate`, copy ~/{TOKEN_FILE} to every host, and start Ray with "
                "RAY_AUTH_MODE=token"
            )
        self.own_address()

    def own_address(self) -> str:
        """This host's address in the network of the cluster's."""
        try:
            host, port = self._host_and_port()
            if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback:
                raise ValueError("other hosts cannot reach this; name an address in the network that they share")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))  # sends nothing
                return str(probe.getsockname()[0])
        except (OSError, ValueError) as error:
            raise ValueError(f"--ray-address {self.address}: {error}") from None

    def _host_and_port(self) -> tuple[str, int]:
        host, _, port = parse_host_and_port(self.address).rpartition(":")
        return host, int(port)

    def meeting(self) -> str:
        """Where the ranks meet: a free port of this host."""
        with socket.create_server((self.own_address(), 0)) as free:
            host, port = free.getsockname()[:2]
        return f"tcp://{host}:{port}"

    def place(self, others: Sequence[int]) -> Links:
        """Place the actors, and connect to the first one's relay. `others`: files to which the address of each other
        one is written."""
        secret = secrets.token_bytes(32)
        try:
            socket.create_connection(self._host_and_port(), _CONNECT_SECONDS).close()  # Ray tries for minutes
            first, *rest = _place(self, secret)
        except (ValueError, OSError):
            raise
        except Exception as error:  # the server cannot read Ray's own errors
            raise RuntimeError(f"--ray-address {self.address}: {type(error).__name__}: {error}") from None
        for file, address in zip(others, rest, strict=True):
            with os.fdopen(file, "w") as pipe:
                json.dump([secret.hex(), *address], pipe)
        return connect(first, secret)


def placed(file: int) -> Links:
    """The connections to the relay whose address arrives in `file`."""
    with os.fdopen(file) as pipe:
        text = pipe.read()
    if not text:
        raise ConnectionError("the ranks on other hosts were not placed; the first of them has the reason")
    secret, *address = json.loads(text)
    return connect(Address(*address), bytes.fromhex(secret))


class RankActor:
    """Starts a rank's process on its host, when the stand-in connects."""

    def __init__(self, secret: bytes) -> None:
        import ray

        self._relay = Relay(ray.util.get_node_ip_address(), secret)
        threading.Thread(target=self._relay.run, daemon=True, name="relay").start()

    def address(self) -> tuple[Address, str, bool]:
        """Where the relay listens, what is installed here, and whether Ray on this host demands its token."""
        return self._relay.address, _versions(), os.environ.get("RAY_AUTH_MODE") == "token"


def _place(hosts: RayHosts, secret: bytes) -> list[Address]:
    """Where the relay of each rank listens. Waits until there are enough hosts."""
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    try:
        ray.init(hosts.address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError:
        raise ConnectionError(
            f"--ray-address {hosts.address}: Ray is there and does not let this host in; its token must be the same"
        ) from None
    resource = "GPU" if hosts.gpus else "CPU"
    elsewhere = {_NODE_ID: f"!{ray.get_runtime_context().get_node_id()}"}
    # Ray has each bundle on one node (PACK), and each on another one.
    bundles = [{resource: float(hosts.ranks)}] * hosts.hosts
    group = placement_group(bundles, "STRICT_SPREAD", bundle_label_selector=[elsewhere] * hosts.hosts)
    began = time.monotonic()
    while not group.wait(_SAY_SECONDS):
        log.warning(
            "the trainer has waited %.0f s for %d other hosts with %d free %ss each (--train-hosts); Ray has %s",
            time.monotonic() - began,
            hosts.hosts,
            hosts.ranks,
            resource,
            _nodes(ray.nodes(), resource),
        )
    # If an actor ends, all ranks do, and the server starts them all again.
    needs = {"num_cpus": 0, "num_gpus": 1} if hosts.gpus else {"num_cpus": 1}
    actor = ray.remote(max_restarts=0, **needs)(RankActor)
    for bundle in range(hosts.hosts):
        there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        _actors.extend(actor.options(scheduling_strategy=there).remote(secret) for _ in range(hosts.ranks))
    found = ray.get([each.address.remote() for each in _actors])
    for address, versions, demands_token in found:
        if not demands_token:
            raise ValueError(f"Ray on {address.host} demands no token; start it with RAY_AUTH_MODE=token on every host")
        if versions != _versions():
            raise ValueError(f"the host {address.host} has {versions}, and this one {_versions()}: they must be equal")
    return [address for address, _, _ in found]


_actors: list[Any] = []
"""Of this process. An actor ends with the last reference to it."""


def _nodes(nodes: Sequence[Mapping[str, Any]], resource: str) -> str:
    alive = [node for node in nodes if node["Alive"]]
    return ", ".join(f"{node['NodeManagerAddress']}: {node['Resources'].get(resource, 0):.0f}" for node in alive)


def _versions() -> str:
    return f"Python {platform.python_version()} with tinker-local {version('tinker-local')}"


def _has_token() -> bool:
    """Whether Ray will find a token here."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or (Path(path) if path else Path.home() / TOKEN_FILE).is_file()
