"""Ray starts processes on other hosts, and does nothing else: for each rank of a trainer an actor, which runs a relay.

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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinker_local.backend.options import parse_host_and_port
from tinker_local.backend.process.relay import Address, Links, Relays, connect

log = logging.getLogger(__name__)

TOKEN_FILE = Path(".ray") / "auth_token"
"""Where Ray looks for the token below the home folder."""

_NODE_ID = "ray.io/node-id"
_CONNECT_SECONDS = 5.0
SAY_SECONDS = 30.0


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

    @property
    def resource(self) -> str:
        """What each process takes of those that Ray counts."""
        return "GPU" if self.gpus else "CPU"

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

    def reach(self) -> None:
        """OSError if nothing listens at the address, at once; Ray tries for minutes."""
        socket.create_connection(self._host_and_port(), _CONNECT_SECONDS).close()

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
            self.reach()
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
    """The connections to the relay whose secret and address arrive in `file`; ConnectionError if a reason does."""
    with os.fdopen(file) as pipe:
        text = pipe.read()
    if not text:
        raise ConnectionError("the ranks on other hosts were not placed; the first of them has the reason")
    found = json.loads(text)
    if isinstance(found, str):
        raise ConnectionError(found)
    secret, *address = found
    return connect(Address(*address), bytes.fromhex(secret))


class RankActor:
    """Starts the process of a rank, or the `size` processes of a sampler, on its host, when their stand-ins connect."""

    def __init__(self, secret: bytes, size: int) -> None:
        import ray

        self._relays = Relays(ray.util.get_node_ip_address(), secret, size)

    def addresses(self) -> tuple[list[Address], str, bool]:
        """Where the relays listen, what is installed here, and whether Ray on this host demands its token."""
        return self._relays.addresses, _versions(), os.environ.get("RAY_AUTH_MODE") == "token"


def _place(hosts: RayHosts, secret: bytes) -> list[Address]:
    """Where the relay of each rank listens. Waits until there are enough hosts."""
    join_cluster(hosts)
    import ray

    group = reserve(hosts, hosts.ranks)
    began = time.monotonic()
    while not group.wait(SAY_SECONDS):
        log.warning("%s", waits_for("the trainer", time.monotonic() - began, hosts, hosts.ranks, "--train-hosts"))
    # If an actor ends, all ranks do, and the server starts them all again.
    places = [host for host in range(hosts.hosts) for _ in range(hosts.ranks)]
    _actors.extend(start_actor(hosts, group, host, secret, 1) for host in places)
    found = ray.get([each.addresses.remote() for each in _actors])
    return [address for each in found for address in accepted(*each)]


def join_cluster(hosts: RayHosts) -> None:
    """Connect this process to Ray; ConnectionError if another token is needed there."""
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    try:
        ray.init(hosts.address, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError:
        raise ConnectionError(
            f"--ray-address {hosts.address}: Ray is there and does not let this host in; its token must be the same"
        ) from None


def reserve(hosts: RayHosts, each: int) -> Any:
    """Ray's placement group with room for `each` processes on each of `hosts`, which are others than this one."""
    import ray
    from ray.util.placement_group import placement_group

    elsewhere = {_NODE_ID: f"!{ray.get_runtime_context().get_node_id()}"}
    # Ray has each bundle on one node (PACK), and each on another one.
    bundles = [{hosts.resource: float(each)}] * hosts.hosts
    return placement_group(bundles, "STRICT_SPREAD", bundle_label_selector=[elsewhere] * hosts.hosts)


def start_actor(hosts: RayHosts, group: Any, host: int, secret: bytes, size: int) -> Any:
    """A `RankActor` on a host of `group`. It ends with the last reference to it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"num_cpus": 0, "num_gpus": size} if hosts.gpus else {"num_cpus": size}
    actor = ray.remote(max_restarts=0, **needs)(RankActor)
    there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host)
    return actor.options(scheduling_strategy=there).remote(secret, size)


def accepted(addresses: Sequence[Address], versions: str, demands_token: bool) -> Sequence[Address]:
    """The addresses of an actor; ValueError in one line if its host is not as it should be."""
    host = addresses[0].host
    if not demands_token:
        raise ValueError(f"Ray on {host} demands no token; start it with RAY_AUTH_MODE=token on every host")
    if versions != _versions():
        raise ValueError(f"the host {host} has {versions}, and this one {_versions()}: they must be equal")
    return addresses


def waits_for(who: str, seconds: float, hosts: RayHosts, each: int, option: str) -> str:
    """That there are too few hosts, and what Ray has."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = (f"{node['NodeManagerAddress']}: {node['Resources'].get(hosts.resource, 0):.0f}" for node in alive)
    return (
        f"{who} has waited {seconds:.0f} s for {hosts.hosts} other hosts with {each} free {hosts.resource}s each "
        f"({option}); Ray has {', '.join(nodes)}"
    )


_actors: list[Any] = []
"""Of the trainer in this process."""


def _versions() -> str:
    return f"Python {platform.python_version()} with tinker-local {version('tinker-local')}"


def _has_token() -> bool:
    """Whether Ray will find a token here."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or (Path(path) if path else Path.home() / TOKEN_FILE).is_file()
