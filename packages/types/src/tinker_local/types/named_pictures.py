"""What both the server and the client allow of pictures that are named: files below folders, public hosts by name.

Otherwise a prompt or a row of somebody else's data could read any file of this machine and reach what only this machine
reaches (its network, the metadata service of a cloud).
"""

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_IPV4_AT_THE_END = [ipaddress.IPv6Network(text) for text in ("::/96", "::ffff:0:0/96", "64:ff9b::/96")]

_LOCAL = [ipaddress.IPv6Network(text) for text in ("64:ff9b:1::/48", "fec0::/10")]
"""Of one network (RFC 8215, RFC 3879), and `is_global` for Python 3.11."""

_HOST = re.compile(r"[^\s/\\@?#*:\[\]]+(:\d{1,5})?")


Addresses = Callable[[str, int], Iterable[str]]
"""Finds the IP addresses of a host for a port, as `addresses_of` does."""


class NotBelowError(ValueError):
    """A name does not lead to a file below one of the folders."""


class TooManyBytesError(ValueError):
    """A file has `size` bytes, more than may be read."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def read_below(name: str, folders: Sequence[Path], most_bytes: int) -> bytes:
    """The bytes of the file `name`, a path that is absolute or relative to one of `folders` (resolved ones), which are
    tried in order. Links are followed, and the file that they lead to must be below one of the folders.

    Raises NotBelowError if none of the folders has the file, and TooManyBytesError if it is larger than `most_bytes`.
    """
    for folder in folders:
        if (path := _file_at(folder / name, folders)) is not None:
            return _read(path, folders, most_bytes)
    raise NotBelowError(name)


def _file_at(named: Path, folders: Sequence[Path]) -> Path | None:
    try:
        path = named.resolve(strict=True)
        return path if _is_below(path, folders) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links that lead to each other, before Python 3.13
        return None


def _read(path: Path, folders: Sequence[Path], most_bytes: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise NotBelowError(str(path)) from None
    try:
        # Once more of what was opened, as names may change meanwhile.
        status = os.fstat(descriptor)
        if not _is_below(_opened(descriptor, path), folders) or not stat.S_ISREG(status.st_mode):
            raise NotBelowError(str(path))
        if status.st_size > most_bytes:
            raise TooManyBytesError(status.st_size)
        return os.pread(descriptor, most_bytes, 0)
    finally:
        os.close(descriptor)


def _opened(descriptor: int, path: Path) -> Path:
    """The real path of an open file; where the system has no /proc, what `path` leads to now."""
    found = Path(f"/proc/self/fd/{descriptor}")
    return found.readlink() if found.is_symlink() else path.resolve()


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def addresses_of(host: str, port: int) -> list[str]:
    """The IP addresses of a host by the system's resolver; OSError if it has none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def check_image_host(text: str) -> str:
    """Return `text`; ValueError unless it is `HOST`, `HOST:PORT` or an IPv6 address without brackets."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        if not _HOST.fullmatch(text):
            raise ValueError(f"an image host is HOST or HOST:PORT, not {text!r}") from None
    return text


def is_named_host(host: str, port: int, own_port: int | None, hosts: frozenset[str]) -> bool:
    """Whether `hosts` (in small letters, `name` or `name:port`) allow a host at a port. A name alone allows the ports
    of http and https: `own_port` is that of the URL's scheme."""
    return f"{host}:{port}" in hosts or (port == own_port and host in hosts)


def is_public(text: str) -> bool:
    """Whether an address is one host's in the public network; of one that stands for an IPv4 address, that one."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if any(address in network for network in _LOCAL):
            return False
        if any(address in network for network in _IPV4_AT_THE_END):
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.sixtofour is not None:
            address = address.sixtofour
    return address.is_global and not address.is_multicast
