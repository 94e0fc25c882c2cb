"""The API keys of a server: who has which, in a list or in a file that names their owners."""

import hashlib
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.control.callers import Caller
from tinker_local.backend.scheduling.quotas import Owners
from tinker_local.backend.storage.records import ADMIN, LOCAL_OWNER

log = logging.getLogger(__name__)

REREAD_SECONDS = 0.2
"""How often a key file is read."""

GRACE_SECONDS = 1.0
"""For which keys go on when their file is missing or cannot be read: an editor may delete a file and write it anew."""

TOLD_LINES = 3
"""Wrong lines of a key file that are logged; the others are counted."""

_KEY = re.compile(r"tml-[!-~]{8,}")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_NAME = re.compile(r"(?!tml-)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def fingerprint(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyFile:
    """The API keys of a file, which is read again and again; ValueError if it has none at first, or is wrong.

    Each line is `NAME KEY`, or `KEY` for the owner of all that has no other. A `KEY` is the key itself, or `sha256:`
    and the digest of it in hexadecimal. The keys of `admin` see everything. Lines that begin with `#` are comments.

    Later, what the file has is what counts: a line that is wrong is left out, and an empty file means that no key is
    right. A file that is empty or has such lines may be half written, so it counts if it is the same in two readings.
    While the file is missing or cannot be read, there are no keys after `GRACE_SECONDS`. Contents are compared, and not
    times, which are as coarse as two seconds on some disks.
    """

    _callers: Mapping[bytes, Caller]
    _owners: Owners

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._watched = False
        self._read = self._seen = path.read_bytes()
        try:
            self._read.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        found = parse_keys(self._read, path)
        if found.wrong:
            raise ValueError(found.wrong[0])
        if not found.callers:
            raise ValueError(f"{path} contains no key")
        self._use(found)
        self._looked = self._readable_at = clock()
        self._unreadable: str | None = None

    def watch(self) -> None:
        """Read the file again every `REREAD_SECONDS` from now on, in a thread that ends with this object. Without it,
        each look at the keys reads the file."""
        self._watched = True
        if not self._path.is_file():
            log.warning("the keys stay as they are, because %s is not a file that can be read again", self._path)
            return
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="key file").start()

    @property
    def problem(self) -> str | None:
        """Why no key is right now, if that is not what the file says."""
        if self._unreadable is None or self._clock() - self._readable_at < GRACE_SECONDS:
            return None
        return f"the key file cannot be read, so no key is taken until it can be: {self._unreadable}"

    def owners(self) -> Owners:
        """Who has a key."""
        self._look_unwatched()
        return self._owners

    def callers(self) -> Mapping[bytes, Caller]:
        """Who has which key, by `fingerprint`."""
        self._look_unwatched()
        return self._callers if self.problem is None else {}

    def _look_unwatched(self) -> None:
        if not self._watched and self._clock() - self._looked >= REREAD_SECONDS:
            self.look()

    def look(self) -> None:
        """Read the file, and use what it has."""
        self._looked = self._clock()
        try:
            content = self._path.read_bytes()
        except OSError as error:
            why = error.strerror or type(error).__name__
            if self._unreadable is None:
                log.error(
                    "the key file %s cannot be read: %s; from %.0f s on, no key is taken until it can be read",
                    self._path,
                    why,
                    GRACE_SECONDS,
                )
            self._unreadable = why
            return
        self._readable_at = self._clock()
        if self._unreadable is not None:
            self._unreadable = None
            log.warning("the key file %s can be read again", self._path)
        settled, self._seen = content == self._seen, content
        if content == self._read:
            return
        found = parse_keys(content, self._path)
        if not settled and (found.wrong or not found.callers):
            return
        self._read = content
        for why in found.wrong[:TOLD_LINES]:
            log.error("a line of the key file is left out: %s", why)
        if len(found.wrong) > TOLD_LINES:
            log.error("%d more lines of the key file are left out", len(found.wrong) - TOLD_LINES)
        self._use(found)
        let_in = "" if found.callers else ", so no request is let in"
        log.warning("the key file %s was read again: %d keys%s", self._path, len(found.callers), let_in)

    def _use(self, found: "Parsed") -> None:
        if found.clear and os.name == "posix":
            try:
                readable = self._path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
            except OSError:
                readable = 0
            if readable:
                log.warning(
                    "other users of this machine can read the keys in %s: chmod 600 it, or hash them", self._path
                )
        names = {caller.owner for caller in found.callers.values()}
        if found.wrong or not names:  # whose work goes on: what they may have does not change by a mistake
            names |= self._owners.names
        self._owners = Owners(names)
        self._callers = found.callers


def _watch(file: "weakref.ref[KeyFile]") -> None:
    while (watched := file()) is not None:
        try:
            watched.look()
        except Exception:
            log.exception("the key file could not be looked at")
        del watched
        time.sleep(REREAD_SECONDS)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a key file has: callers by the fingerprints of their keys, and what is wrong with other lines, which quotes
    no key. `clear`: some keys are not hashed."""

    callers: Mapping[bytes, Caller]
    wrong: Sequence[str]
    clear: bool


def parse_keys(content: bytes, path: Path) -> Parsed:
    """The keys of a file."""
    callers: dict[bytes, Caller] = {}
    wrong: list[str] = []
    clear = False
    given = (line.split() for line in _lines(content) if line.strip() and not line.startswith("#"))
    for number, (*names, key) in enumerate(given, 1):
        owner = names[0] if names else LOCAL_OWNER
        if len(names) > 1 or not _NAME.fullmatch(owner) or not (_KEY.fullmatch(key) or _HASH.fullmatch(key)):
            wrong.append(
                f"key {number} of {path} must begin with 'tml-' and have at least 12 characters, all visible ASCII, or "
                "be 'sha256:' and 64 hexadecimal digits; a name before it has up to 64 letters, digits, '.', '_', '@' "
                "or '-', and does not begin with 'tml-' (put comments on separate lines)"
            )
            continue
        clear |= not key.startswith("sha256:")
        digest = bytes.fromhex(key.removeprefix("sha256:")) if key.startswith("sha256:") else fingerprint(key)
        caller = Caller(owner, admin=owner == ADMIN)
        if callers.setdefault(digest, caller) != caller:
            wrong.append(f"key {number} of {path} is also one of the owner {callers[digest].owner!r}")
    return Parsed(callers, wrong, clear)


def _lines(content: bytes) -> list[str]:
    """Of a text with or without a byte order mark. What is not UTF-8 makes the key wrong in which it is."""
    return content.decode("utf-8-sig", "replace").splitlines()
