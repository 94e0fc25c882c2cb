"""Keeps large results that clients may still read in memory, up to a bound, and the others in files."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tinker_local.backend.heap import give_memory_back
from tinker_local.backend.storage.result_files import ResultFiles
from tinker_local.backend.threads import DISK

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class HeldResult:
    """A result of `size` bytes. `encoded` gives what is written; `put_into` frees its memory."""

    size: int
    encoded: Callable[[], Awaitable[bytes]]
    put_into: Callable[[Path], None]


@dataclass(slots=True, eq=False)
class KeptResults:
    """What one session of `owner` has of results, `size` bytes in all: request ids and bytes, the oldest first."""

    owner: str
    unread: OrderedDict[str, int] = field(default_factory=OrderedDict)
    read: OrderedDict[str, int] = field(default_factory=OrderedDict)
    size: int = 0

    def oldest(self) -> str:
        """The next to be dropped: the one that was read first, or that ended first if none was read."""
        return next(iter(self.read or self.unread))


class ResultMemory:
    """Beyond `most` bytes, the oldest results are put into `files`, one after the other, so that no more than one of
    the threads is busy with it. They stay in memory if the disk has no room. Belongs to one event loop.

    `bytes`: of the results in memory.
    """

    def __init__(self, most: float, files: ResultFiles) -> None:
        self._most = most
        self._files = files
        self._filing: asyncio.Task[None] | None = None
        self._held: OrderedDict[str, HeldResult] = OrderedDict()  # the oldest first
        self._filed: dict[str, Path] = {}
        self.bytes = 0

    def add(self, request_id: str, result: HeldResult) -> None:
        """Hold the result of a request that has ended."""
        self._held[request_id] = result
        self.bytes += result.size
        if self.bytes > self._most and (self._filing is None or self._filing.done()):
            self._filing = asyncio.create_task(self._file_the_oldest(), name="results into files")

    def remove(self, request_id: str) -> None:
        """Forget a result; ignores what was not added."""
        self._leave(request_id)
        if (file := self._filed.pop(request_id, None)) is not None:
            DISK.run(self._files.delete, file)

    def _leave(self, request_id: str) -> HeldResult | None:
        result = self._held.pop(request_id, None)
        self.bytes -= 0 if result is None else result.size
        return result

    async def _file_the_oldest(self) -> None:
        while self.bytes > self._most and await self._file_one():
            if self.bytes <= self._most:
                await DISK.run(give_memory_back)  # meanwhile more may come

    async def _file_one(self) -> bool:
        """Move the oldest of the results from memory to a file; False if it has to stay, for want of room."""
        request_id, result = next(iter(self._held.items()))
        try:
            file = await DISK.run(self._files.write, await result.encoded())
        except OSError as error:
            log.warning("results stay in memory: %s", error)
            return False
        except Exception as error:  # a client that reads this result gets the same error
            log.warning("the result of %s stays in memory: %s", request_id, error)
            self._leave(request_id)
            return True
        if file is None:
            return False
        if self._held.get(request_id) is result:
            self._leave(request_id)
            self._filed[request_id] = file
            result.put_into(file)
        else:  # it was removed meanwhile
            await DISK.run(self._files.delete, file)
        return True

    async def close(self) -> None:
        """Delete the files."""
        if self._filing is not None:
            self._filing.cancel()
            await asyncio.gather(self._filing, return_exceptions=True)
        await DISK.run(self._files.close)
