"""Replicas of a sampler on other hosts. A process here, the placer, imports Ray for all of them; each has an actor."""

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tinker_local.backend.process.calls import Calls
from tinker_local.backend.process.child import LOAD, serve_calls
from tinker_local.backend.process.process_group import ProcessGroup
from tinker_local.backend.process.ray_hosts import (
    SAY_SECONDS,
    RayHosts,
    accepted,
    join_cluster,
    reserve,
    start_actor,
    waits_for,
)
from tinker_local.backend.process.relay import Address

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_PLACER_SECONDS = 120.0
_WAIT_SECONDS = 0.1


class RayReplicas:
    """Finds a place for each replica on `hosts`, each time that its processes start: `hosts.ranks` on each host, of
    `size` processes. `ended` is called once for each of them, and the placer ends with the last.

    If the placer ends, so do all its actors and replicas, and the next start makes another one.
    """

    def __init__(self, hosts: RayHosts, size: int) -> None:
        self.size = size
        self._hosts = hosts
        self._lock = threading.Lock()  # for moments, since starts and ends of replicas take it
        self._placing = threading.Lock()  # from before the placer is loaded until it has begun to place a replica
        self._calls: Calls | None = None
        self._starts = [0] * (hosts.hosts * hosts.ranks)
        self._in_use = len(self._starts)

    def find(self, replica: int) -> list[int]:
        """Files in which `ray_hosts.placed` finds the relay of each process of `replica`; the caller closes them."""
        pipes = [os.pipe() for _ in range(self.size)]
        with self._lock:
            self._starts[replica] += 1
            start = self._starts[replica]
        work = partial(self._tell, replica, start, [write for _, write in pipes])
        threading.Thread(target=work, daemon=True, name="place-replica").start()
        return [read for read, _ in pipes]

    def ended(self) -> None:
        """One of the replicas will not start again."""
        with self._lock:
            self._in_use -= 1
            calls = None if self._in_use else self._calls
        if calls is not None:
            calls.close()

    def _tell(self, replica: int, start: int, files: Sequence[int]) -> None:
        """Write into each of `files` where the relay is, or why there is none."""
        try:
            found: Sequence[Any] = self._found(replica, start)
        except Exception as error:
            found = [str(error)] * len(files)
        for file, each in zip(files, found, strict=True):
            with suppress(BrokenPipeError), os.fdopen(file, "w") as pipe:
                json.dump(each, pipe)

    def _found(self, replica: int, start: int) -> Sequence[Any]:
        with self._placing:
            calls = self._placer()
            if self._starts[replica] == start:  # otherwise it would end the actor of the start after it
                calls.call(_PLACER_SECONDS, "place", replica)
        while self._starts[replica] == start and self._in_use:
            found: Sequence[Any] | None = calls.call(_PLACER_SECONDS, "placed", replica)
            if found is not None:
                return found
            time.sleep(_LOOK_SECONDS)
        raise ConnectionError("this replica was started again, or closed")

    def _placer(self) -> Calls:
        with self._lock:
            if not self._in_use:
                raise ConnectionError("all replicas were closed")
            if self._calls is not None and not self._calls.group.ended:
                return self._calls
            program = partial(serve_calls, make=partial(self._make_placer, self._hosts, self.size), describe=bool)
            calls = self._calls = Calls(ProcessGroup("replica placer", [program]))
        try:
            calls.call(_PLACER_SECONDS, LOAD)
        except BaseException:
            calls.close()
            raise
        return calls

    @staticmethod
    def _make_placer(hosts: RayHosts, size: int) -> Any:
        return Placer(hosts, size)


class Placer:
    """Has an actor for each replica that was started; in the placer's process. Errors are not Ray's own, which the
    server cannot read."""

    def __init__(self, hosts: RayHosts, size: int) -> None:
        self._hosts = hosts
        self._size = size
        self._secret = secrets.token_bytes(32)
        self._actors: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self._began: float | None = None
        self._said = 0.0
        hosts.reach()
        try:
            join_cluster(hosts)
            self._group = reserve(hosts, hosts.ranks * size)
        except OSError:
            raise
        except Exception as error:
            raise self._readable(error) from None

    def place(self, replica: int) -> None:
        """Start an actor for `replica`, as soon as there is a host for it, in place of the last one."""
        import ray

        try:
            if (last := self._actors.pop(replica, None)) is not None:
                ray.kill(last)
            host = replica // self._hosts.ranks
            self._actors[replica] = start_actor(self._hosts, self._group, host, self._secret, self._size)
            self._answers[replica] = self._actors[replica].addresses.remote()
        except Exception as error:
            raise self._readable(error) from None

    def placed(self, replica: int) -> list[tuple[str, str, int]] | None:
        """The secret and the address of each process's relay; None while there is no host for the replica.

        For up to half a minute Ray does not notice that a host is gone. An actor that it places there ends before it
        answers, and another one is started."""
        import ray

        try:
            ready, _ = ray.wait([self._answers[replica]], timeout=_WAIT_SECONDS)
            if not ready:
                self._say()
                return None
            addresses: Sequence[Address] = accepted(*ray.get(ready[0]))
            self._began = None
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                raise self._readable(error) from None
            self.place(replica)
            return None
        except ValueError:
            raise
        except Exception as error:
            raise self._readable(error) from None
        return [(self._secret.hex(), *address) for address in addresses]

    def close(self) -> None:
        """Its actors end with its process."""

    def _say(self) -> None:
        """Say from time to time what replicas wait for."""
        now = time.monotonic()
        self._began = self._began or now
        if now - max(self._began, self._said) >= SAY_SECONDS:
            self._said = now
            each = self._hosts.ranks * self._size
            log.warning("%s", waits_for("a replica", now - self._began, self._hosts, each, "--sample-hosts"))

    def _readable(self, error: Exception) -> RuntimeError:
        return RuntimeError(f"--ray-address {self._hosts.address}: {type(error).__name__}: {error}")
