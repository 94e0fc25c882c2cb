"""Which ephemeral sampler versions are kept: within a limit of bytes, those that were used last."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tinker_local.backend.control.sampler_versions import SamplerVersions
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.scheduling.quotas import Quotas
from tinker_local.backend.threads import Ledger

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EphemeralVersion:
    """The version `name`, of `size` bytes, of the sampling session `sampler_id`. `samples`: those of it that have not
    ended. `dropped`: why it does not exist any more; empty while it does. `pinned`: it is not dropped for others, as
    the sampler may run on it."""

    name: str
    size: int
    session_id: str
    sampler_id: str
    owner: str
    base: ServedModel
    samples: int = 0
    dropped: str = ""
    pinned: bool = False


class EphemeralVersions:
    """Keeps those that are sampled from, and drops others beyond the limits of a session, of an owner, and of all: of
    these the least recently used one, of the owner that has most. Used on the event loop."""

    def __init__(self, quotas: Quotas, versions: SamplerVersions) -> None:
        self._quotas = quotas
        self._versions = versions
        self._kept: dict[EphemeralVersion, None] = {}  # the least recently used first
        self._by_session: Ledger[str] = Ledger()  # bytes
        self._by_owner: Ledger[str] = Ledger()
        self._dropping: set[asyncio.Task[None]] = set()

    def add(self, version: EphemeralVersion) -> None:
        """Keep a new version, and drop others for it."""
        self._kept[version] = None
        self._by_session[version.session_id] += version.size
        self._by_owner[version.owner] += version.size
        version.base.counts.ephemeral_bytes += version.size
        self._drop(version, newest=version)

    def sampled(self, version: EphemeralVersion) -> None:
        """A sample begins, so that the version is kept until `sample_ended`."""
        version.samples += 1
        self._kept[version] = self._kept.pop(version)

    def sample_ended(self, version: EphemeralVersion) -> None:
        """A sample has ended; the version may be dropped now."""
        version.samples -= 1
        if version in self._kept and not version.samples:
            self._drop(version)

    def forget(self, version: EphemeralVersion) -> None:
        """Count it no more. Nothing happens if it was dropped."""
        if version not in self._kept:
            return
        del self._kept[version]
        self._by_session[version.session_id] -= version.size
        self._by_owner[version.owner] -= version.size
        version.base.counts.ephemeral_bytes -= version.size

    async def remove(self, version: EphemeralVersion) -> None:
        """Delete it, unless it was dropped."""
        if version in self._kept:
            self.forget(version)
            await self._delete(version)

    def of(self, owner: str) -> int:
        """Bytes of those of `owner`."""
        return self._by_owner[owner]

    def of_runs(self) -> dict[str, list[EphemeralVersion]]:
        """Those of each training run, the most recently used first."""
        found: dict[str, list[EphemeralVersion]] = {}
        for version in reversed(self._kept):
            found.setdefault(version.name.partition("/")[0], []).append(version)
        return found

    def owners(self) -> Collection[str]:
        """Owners that have any."""
        return self._by_owner.keys()

    def _drop(self, changed: EphemeralVersion, newest: EphemeralVersion | None = None) -> None:
        """Drop what is beyond the limits of the session and the owner of `changed`, and of all, but not `newest`."""
        session_id, owner, quotas = changed.session_id, changed.owner, self._quotas
        most = quotas.session.ephemeral_bytes
        while self._by_session[session_id] > most:
            why = _why("its session", most, "--max-ephemeral-versions-per-session")
            if not self._drop_one(why, newest, lambda version: version.session_id == session_id):
                break
        most = quotas.of(owner).ephemeral_bytes
        while self._by_owner[owner] > most:
            why = _why(f"the owner {owner!r}", most, "--quota ephemeral-versions=GIB")
            if not self._drop_one(why, newest, lambda version: version.owner == owner):
                break
        most = quotas.all.ephemeral_bytes
        while self._by_owner.total() > most:
            if not self._drop_one(_why("all sessions", most, "--max-ephemeral-versions"), newest, lambda _: True):
                break

    def _drop_one(self, why: str, newest: EphemeralVersion | None, may_go: Callable[[EphemeralVersion], bool]) -> bool:
        """Drop the one that was used least recently, of the owner that has most; whether there is one."""
        droppable = (each for each in self._kept if not each.pinned)
        free = [each for each in droppable if not each.samples and each is not newest and may_go(each)]
        if not free:
            return False
        version = max(free, key=lambda each: self._by_owner[each.owner])  # the first one of several
        version.dropped = why
        self.forget(version)
        version.base.counts.versions_dropped += 1
        task = asyncio.create_task(self._delete(version))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
        return True

    async def _delete(self, version: EphemeralVersion) -> None:
        try:
            await self._versions.remove_ephemeral(version.base, version.name)
        except Exception:
            log.exception("the sampler version %s was not removed completely", version.name)


def _why(whose: str, most: float, option: str) -> str:
    return (
        f"the ephemeral versions of {whose} have more than {most / 2**30:g} GiB, and others were used since; sample "
        f"from a newer one, save with save_weights_for_sampler(name), or start the server with a larger {option}"
    )
