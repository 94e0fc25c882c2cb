"""Who calls: the owner of a key, and the file that names them.

A session belongs to the owner who created it, and its training runs, samplers and checkpoints with it.
"""

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.scheduling.quotas import Owners
from tinker_local.backend.storage.records import ADMIN, LOCAL_OWNER

log = logging.getLogger(__name__)

REREAD_SECONDS = 1.0
"""How often a key file is looked at."""

_KEY = re.compile(r"tml-[!-~]{8,}")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_NAME = re.compile(r"(?!tml-)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of what a request creates; it sees only what belongs to `owner`, or with `admin` everything."""

    owner: str
    admin: bool = False


LOCAL = Caller(LOCAL_OWNER, admin=True)
"""A program in this process, or any caller of a server without a key file."""


def owner_urn(owner: str) -> str:
    """An owner on the wire."""
    return f"tml:organization_user:{owner}"


def fingerprint(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyFile:
    """The API keys of a file, which is read again when it changes; ValueError if it is not one.

    Each line is `NAME KEY`, or `KEY` for the owner of all that has no other. A `KEY` is the key itself, or `sha256:`
    and the digest of it in hexadecimal. The keys of `admin` see everything. Lines that begin with `#` are comments.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = self._stat()
        self._use(parse_keys(path))
        self._looked = time.monotonic()

    def owners(self) -> Owners:
        """Who has a key."""
        self.callers()
        return self._owners

    def callers(self) -> Mapping[bytes, Caller]:
        """Who has which key, by `fingerprint`. A file that cannot be read leaves the keys as they were."""
        now = time.monotonic()
        if now - self._looked >= REREAD_SECONDS:
            self._looked = now
            if (state := self._stat()) != self._state:
                self._state = state
                self._read_again()
        return self._callers

    def _read_again(self) -> None:
        try:
            self._use(parse_keys(self._path))
        except (OSError, ValueError) as error:
            log.error("the keys stay as they were, because the key file cannot be read: %s", error)
        else:
            log.warning("the key file %s was read again: %d keys", self._path, len(self._callers))

    def _use(self, callers: dict[bytes, Caller]) -> None:
        self._callers = callers
        self._owners = Owners(caller.owner for caller in callers.values())

    def _stat(self) -> tuple[int, int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def parse_keys(path: Path) -> dict[bytes, Caller]:
    """The callers of a key file, by the fingerprints of their keys; ValueError, which quotes no key.

    Warns if other users of the machine can read keys that are not hashed.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    callers: dict[bytes, Caller] = {}
    clear = False
    given = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    for number, (*names, key) in enumerate(given, 1):
        owner = names[0] if names else LOCAL_OWNER
        clear |= not key.startswith("sha256:")
        if len(names) > 1 or not _NAME.fullmatch(owner) or not (_KEY.fullmatch(key) or _HASH.fullmatch(key)):
            raise ValueError(
                f"key {number} of {path} must begin with 'tml-' and have at least 12 characters, all visible ASCII, or "
                "be 'sha256:' and 64 hexadecimal digits; a name before it has up to 64 letters, digits, '.', '_', '@' "
                "or '-', and does not begin with 'tml-' (put comments on separate lines)"
            )
        digest = bytes.fromhex(key.removeprefix("sha256:")) if key.startswith("sha256:") else fingerprint(key)
        caller = Caller(owner, admin=owner == ADMIN)
        if callers.setdefault(digest, caller) != caller:
            raise ValueError(f"key {number} of {path} is also one of the owner {callers[digest].owner!r}")
    if not callers:
        raise ValueError(f"{path} contains no key")
    if clear and os.name == "posix" and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users of this machine can read the keys in %s: chmod 600 it, or hash them", path)
    return callers
