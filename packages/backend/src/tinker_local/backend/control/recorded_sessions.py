"""Recorded sessions: conversations of any program, as the tokens that the model read and sampled.

A session is a folder of its owner that only the server's user may read: `session.json`, `turns.jsonl` with a line for
each turn, and `pictures/` by the SHA-256 of their bytes. A turn is one reply: its parent is the turn that it continues
token by token, so that turns form trees.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from tinker_local.backend.threads import DISK
from tinker_local.backend.training.losses.recorded import RecordedSequence
from tinker_local.types import InvalidRequestError, NotFoundError, StorageFullError, UnsupportedError

LIFETIME_HOURS = 24.0
"""Of a session whose owner gives no other."""

LONGEST_LIFETIME_HOURS = 24.0 * 30

SESSION_BYTES = 2**30
"""Of a session whose owner gives no other limit."""

MAX_SESSION_BYTES = 2**36

MOST_SESSIONS = 1000
"""Of one owner, at a time."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PICTURE = re.compile("[0-9a-f]{64}")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What an owner decides about a session. `keep_thoughts`: a prompt continues what was sampled even where the
    template would drop earlier thoughts."""

    name: str
    owner: str
    created: float
    expires: float
    max_bytes: int
    keep_thoughts: bool = False


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """What finds a turn again. `keys`: of its messages; `reply`: of its reply; `head`: see `head_of`; `offset`, `size`:
    of its line."""

    turn: int
    parent: int | None
    head: str
    keys: tuple[str, ...]
    reply: str
    offset: int
    size: int


@dataclass(slots=True, eq=False)
class RecordedSession:
    """One session that is open, with what is in memory of it."""

    folder: Path
    settings: SessionSettings
    turns: dict[int, KnownTurn] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    rewards: dict[int, float] = field(default_factory=dict)
    bytes: int = 0
    next_turn: int = 0
    ended: dict[tuple[str, tuple[str, ...], str], int] = field(default_factory=dict)
    """The newest turn by its conversation, reply included."""
    replies: dict[str, int] = field(default_factory=dict)
    """The newest turn by its reply alone."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def lines(self) -> Path:
        """The file of turns."""
        return self.folder / "turns.jsonl"

    def found(self, head: str, keys: Sequence[str]) -> KnownTurn | None:
        """The newest turn whose conversation, with its reply, is these messages."""
        turn = self.ended.get((head, tuple(keys[:-1]), keys[-1]))
        return None if turn is None else self.turns[turn]

    def parents(self) -> set[int]:
        """Turns that others continue."""
        return {known.parent for known in self.turns.values() if known.parent is not None}

    def take(self, line: Json, offset: int, size: int) -> None:
        """Remember a line that was written."""
        self.bytes += size
        if "abandoned" in line:
            self.abandoned.add(line["abandoned"])
        elif "rewards" in line:
            self.rewards |= {int(turn): reward for turn, reward in line["rewards"].items()}
        else:
            keys, reply = tuple(line["keys"]), line["reply_key"]
            known = KnownTurn(line["turn"], line["parent"], line["head"], keys, reply, offset, size)
            self.turns[known.turn] = known
            self.next_turn = max(self.next_turn, known.turn + 1)
            if line["stop_reason"] == "abandoned":
                self.abandoned.add(known.turn)
            else:
                self.ended[known.head, keys, reply] = self.replies[reply] = known.turn

    def read(self, known: KnownTurn) -> Json:
        """The line of a turn, from its file."""
        with self.lines.open("rb") as file:
            file.seek(known.offset)
            found: Json = json.loads(file.read(known.size))
        return found

    def check_room(self) -> None:
        """StorageFullError if no more may be recorded."""
        if self.bytes >= self.settings.max_bytes:
            raise StorageFullError(
                f"session: {self.settings.name!r} is full, {self.bytes} bytes of {self.settings.max_bytes}; "
                "read and delete it, or make one with more max_bytes"
            )


class RecordedSessions:
    """All recorded sessions of a data folder. `enabled`: whether the server records at all."""

    def __init__(self, data_dir: Path, enabled: bool, clock: Callable[[], datetime]) -> None:
        self._root = data_dir / "recorded"
        self._enabled = enabled
        self._clock = clock
        self._open: dict[tuple[str, str], RecordedSession] = {}
        self._opening = asyncio.Lock()

    def check_enabled(self) -> None:
        """UnsupportedError without `--record-sessions`."""
        if not self._enabled:
            raise UnsupportedError("session: this server records no sessions; start it with --record-sessions")

    async def create(
        self, owner: str, name: str, lifetime_hours: float, max_bytes: int, keep_thoughts: bool
    ) -> RecordedSession:
        """A session `name` of `owner`; InvalidRequestError if there is one, or there are too many."""
        self.check_enabled()
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError("name: 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit")
        now = self._clock()
        async with self._opening:
            there = await DISK.run(self._names, owner)
            if name in there:
                raise InvalidRequestError(
                    f"name: there is a recorded session {name!r} already; delete it, or take another"
                )
            if len(there) >= MOST_SESSIONS:
                raise InvalidRequestError(f"name: {len(there)} recorded sessions are the most; delete some")
            expires = now + timedelta(hours=lifetime_hours)
            settings = SessionSettings(name, owner, now.timestamp(), expires.timestamp(), max_bytes, keep_thoughts)
            session = await DISK.run(_make, self._folder(owner, name), settings)
            self._open[owner, name] = session
            return session

    async def get(self, owner: str, name: str) -> RecordedSession:
        """NotFoundError, in the same words for one that is another owner's, expired or unknown."""
        self.check_enabled()
        async with self._opening:
            session = self._open.get((owner, name))
            if session is None and _NAME.fullmatch(name) is not None:
                session = await DISK.run(_load, self._folder(owner, name))
                if session is not None:
                    self._open[owner, name] = session
        if session is None or session.settings.expires <= self._clock().timestamp():
            raise NotFoundError(f"session: there is no recorded session {name!r}")
        return session

    async def all_of(self, owner: str) -> list[RecordedSession]:
        """The sessions of an owner that have not expired, by name."""
        self.check_enabled()
        found = []
        for name in sorted(await DISK.run(self._names, owner)):
            try:
                found.append(await self.get(owner, name))
            except NotFoundError:  # expired, or deleted meanwhile
                continue
        return found

    async def delete(self, owner: str, name: str) -> None:
        """Remove a session with its pictures."""
        session = await self.get(owner, name)
        await self._remove(session)

    async def sweep(self) -> None:
        """Remove what has expired."""
        now = self._clock().timestamp()
        for folder in await DISK.run(_folders, self._root):
            settings = await DISK.run(_settings, folder)
            if settings is not None and settings.expires <= now:
                session = self._open.get((settings.owner, settings.name)) or RecordedSession(folder, settings)
                await self._remove(session)

    async def _remove(self, session: RecordedSession) -> None:
        async with session.writing:
            self._open.pop((session.settings.owner, session.settings.name), None)
            await DISK.run(shutil.rmtree, session.folder, ignore_errors=True)

    async def write(self, session: RecordedSession, lines: Sequence[Json], pictures: Mapping[str, bytes]) -> None:
        """Append lines, and files of pictures. What was deleted meanwhile stays deleted."""
        async with session.writing:
            if self._open.get((session.settings.owner, session.settings.name)) is not session:
                return
            added, places = await DISK.run(_append, session, lines, pictures)
            session.bytes += added
            for line, (offset, size) in zip(lines, places, strict=True):
                session.take(line, offset, size)

    def sequence(self, owner: str, sequence_id: str) -> RecordedSequence | None:
        """What a gradient needs of the turn that `sequence_id` names, `recorded:SESSION:TURN`; None if it names none of
        this owner. Reads a file."""
        kind, _, rest = sequence_id.partition(":")
        name, _, turn = rest.rpartition(":")
        if not self._enabled or kind != "recorded" or _NAME.fullmatch(name) is None or not turn.isdecimal():
            return None
        session = self._open.get((owner, name)) or _load(self._folder(owner, name))
        if session is None or session.settings.expires <= self._clock().timestamp():
            return None
        known = session.turns.get(int(turn))
        if known is None:
            return None
        line = session.read(known)
        length = sum(
            len(chunk["tokens"]) if "tokens" in chunk else chunk["expected_tokens"] for chunk in line["prompt"]
        )
        return RecordedSequence(
            np.array(line["tokens"], np.int32), np.array(line["logprobs"], np.float32), length, line["version"]
        )

    async def picture(self, session: RecordedSession, name: str) -> bytes:
        """The bytes of a picture; NotFoundError."""
        if _PICTURE.fullmatch(name) is None:
            raise NotFoundError(f"picture: {session.settings.name!r} has no picture {name!r}")
        try:
            return await DISK.run((session.folder / "pictures" / name).read_bytes)
        except FileNotFoundError:
            raise NotFoundError(f"picture: {session.settings.name!r} has no picture {name!r}") from None

    async def reward(self, session: RecordedSession, rewards: Mapping[int, float]) -> None:
        """Keep a reward for each of these turns; InvalidRequestError for one that is not there."""
        if unknown := [turn for turn in rewards if turn not in session.turns]:
            raise InvalidRequestError(f"rewards: {session.settings.name!r} has no turn {unknown[0]}")
        session.check_room()
        await self.write(session, [{"rewards": {str(turn): value for turn, value in rewards.items()}}], {})

    def _folder(self, owner: str, name: str) -> Path:
        return self._root / hashlib.sha256(owner.encode()).hexdigest()[:32] / name

    def _names(self, owner: str) -> set[str]:
        folder = self._folder(owner, "x").parent
        return {each.name for each in folder.iterdir()} if folder.is_dir() else set()


def exported(session: RecordedSession, known: KnownTurn) -> bytes:
    """A turn as its owner gets it: a line of JSON."""
    line = session.read(known)
    for internal in ("keys", "reply_key", "head"):
        del line[internal]
    line["abandoned"] = known.turn in session.abandoned
    line["reward"] = session.rewards.get(known.turn)
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _make(folder: Path, settings: SessionSettings) -> RecordedSession:
    for each in (folder.parent.parent, folder.parent, folder, folder / "pictures"):
        each.mkdir(0o700, exist_ok=True)
    _write_new(folder / "turns.jsonl", b"")
    _write_new(folder / "session.json", json.dumps(asdict(settings)).encode())
    return RecordedSession(folder, settings)


def _write_new(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _folders(root: Path) -> list[Path]:
    return [folder for owner in root.iterdir() for folder in owner.iterdir()] if root.is_dir() else []


def _settings(folder: Path) -> SessionSettings | None:
    try:
        return SessionSettings(**json.loads((folder / "session.json").read_bytes()))
    except FileNotFoundError:
        return None


def _load(folder: Path) -> RecordedSession | None:
    """A session of an earlier server. A line that a crash cut off is left out and removed."""
    settings = _settings(folder)
    if settings is None:
        return None
    session = RecordedSession(folder, settings)
    offset = 0
    for line in _whole_lines(session.lines):
        session.take(json.loads(line), offset, len(line))
        offset += len(line)
    os.truncate(session.lines, offset)
    session.bytes += sum(path.stat().st_size for path in (folder / "pictures").iterdir())
    return session


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _append(
    session: RecordedSession, lines: Sequence[Json], pictures: Mapping[str, bytes]
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of new pictures, and where each line is."""
    added, places = 0, []
    for name, content in pictures.items():
        path = session.folder / "pictures" / name
        if not path.exists():
            _write_new(path, content)
            added += len(content)
    with session.lines.open("ab") as file:
        for line in lines:
            written = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            places.append((file.tell(), len(written)))
            file.write(written)
    return added, places
