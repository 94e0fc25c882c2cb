"""Pictures that rows name: from folders, and from hosts that were allowed.

A data set is somebody else's text. So a path is followed to its real place before it is opened, a host is one that was
named, its addresses are public ones, and the connection goes to the address that was looked at: the rules of a server
for prompts (`tinker_local.types.named_pictures`).
"""

import asyncio
import base64
import hashlib
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import httpx
import PIL.Image
import tinker
from tinker_local.client.encode_images import chunk_of
from tinker_local.types import InvalidRequestError, image_format, open_picture
from tinker_local.types.errors import brief
from tinker_local.types.named_pictures import (
    Addresses,
    NotBelowError,
    TooManyBytesError,
    addresses_of,
    check_image_host,
    is_named_host,
    is_public,
    read_below,
)
from tinker_local.types.pictures import MAX_PIXELS

PICTURE_BYTES = 32 * 2**20
"""Of the file of one picture, as a server takes it."""

_CONVERTED = -1
"""In place of the positions of a picture that is not sent as its file is."""

SECONDS = 20.0
REDIRECTS = 3

_Result = TypeVar("_Result")

_UNREADABLE = (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError)  # what PIL's readers raise


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Where pictures of rows may come from. `folders`: beside the folder of the data file, whose files may be named.
    `hosts`: `name` or `name:port` that may be asked by http(s); empty: URLs are refused.

    Raises InvalidRequestError for a folder that does not exist, or a host that is not written so.
    """

    folders: Sequence[Path] = ()
    hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        for folder in self.folders:
            if not Path(folder).is_dir():
                raise InvalidRequestError(f"media folders: {folder} is not a folder")
        for host in self.hosts:
            try:
                check_image_host(host)
            except ValueError as error:
                raise InvalidRequestError(f"media hosts: {error}") from None


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture with its number of positions, and a digest of its file."""

    chunk: tinker.types.ImageChunk
    digest: bytes


class Media:
    """Reads pictures of rows, for one image processor. `folder`: that of the data file, to which relative paths belong;
    then `rules.folders` are tried. What was fetched stays in a temporary folder while this is used, so a host is asked
    once for a picture.

    A picture is decoded once, to check it and to count its positions. Then its digest is remembered, about 150 bytes a
    picture, and its file is sent as it is. One that must be converted is decoded each time: to keep what it becomes
    would take as much memory as the data set, or as much of a disk.
    """

    def __init__(
        self, rules: MediaRules, folder: Path, *, addresses: Addresses = addresses_of, seconds: float = SECONDS
    ) -> None:
        self._folders = [each.resolve(strict=True) for each in (folder, *map(Path, rules.folders))]
        self._hosts = frozenset(host.lower() for host in rules.hosts)
        self._addresses = addresses
        self._seconds = seconds
        self._fetched = tempfile.TemporaryDirectory(prefix="tinker-local-media-") if self._hosts else None
        self._lock = threading.Lock()
        self._positions: dict[bytes, int] = {}  # by the digests of files that were decoded; or _CONVERTED
        self._complete = False

    def complete(self) -> None:
        """From now on, only files that were read before are taken: another one has changed."""
        self._complete = True

    def picture(
        self, value: str | bytes, image_processor: Any, field: str, positions: int | None = None
    ) -> ReadPicture:
        """A picture: a path, a `file:`, `data:` or `http(s):` URL, or the bytes of a file. `positions`: of every
        picture; None: `image_processor` counts them. Raises InvalidRequestError, which begins with `field`."""
        if image_processor is None:
            raise InvalidRequestError(f"{field}: is a picture, and this model has no image processor: it reads text")
        data = value if isinstance(value, bytes) else self._read(value, field)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        known = self._positions.get(digest)
        if known is None and self._complete:
            raise InvalidRequestError(f"{field}: this picture has changed since the rows were checked; start again")
        found = image_format(data)
        if known is not None and known != _CONVERTED and found in ("png", "jpeg"):
            chunk = tinker.types.ImageChunk(data=data, format=found, expected_tokens=known)
            return ReadPicture(chunk, digest)
        chunk = self._decoded(data, image_processor, field, positions)
        counted = chunk.expected_tokens
        self._positions[digest] = _CONVERTED if counted is None or bytes(chunk.data) != data else counted
        return ReadPicture(chunk, digest)

    def _decoded(self, data: bytes, image_processor: Any, field: str, positions: int | None) -> tinker.types.ImageChunk:
        try:
            opened = open_picture(data)
        except _UNREADABLE as error:
            start = f"{len(data)} bytes, beginning with {data[:8].hex(' ')}" if data else "0 bytes"
            raise InvalidRequestError(f"{field}: no picture that can be read ({start}): {error}") from None
        if opened.format == "EPS":  # Pillow hands PostScript, which is a program, to Ghostscript
            raise InvalidRequestError(f"{field}: is PostScript, a program that draws; save the picture as PNG or JPEG")
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise InvalidRequestError(
                f"{field}: {width} x {height} pixels are {width * height}, the limit is {MAX_PIXELS}; make it smaller"
            )
        if positions is None:
            return chunk_of(data, image_processor, "png", field)
        sent = chunk_of(data, None, "png", field)
        return tinker.types.ImageChunk(data=sent.data, format=sent.format, expected_tokens=positions)

    def _read(self, name: str, field: str) -> bytes:
        try:
            parts = urlsplit(name)
            scheme = parts.scheme.lower()
            if scheme == "data":
                return _inside(name, field)
            if scheme in ("http", "https"):
                return self._kept(name, field)
        except ValueError as error:  # of the parsers of URLs and addresses
            raise InvalidRequestError(f"{field}: {_shown(name)}: {error}") from None
        if scheme == "file" and parts.netloc not in ("", "localhost"):
            raise InvalidRequestError(f"{field}: a file: URL names no host, but this one says {brief(parts.netloc)}")
        return self._file(unquote(parts.path) if scheme == "file" else name, field)

    def _file(self, name: str, field: str) -> bytes:
        try:
            return read_below(name, self._folders, PICTURE_BYTES)
        except NotBelowError:
            allowed = ", ".join(map(str, self._folders))
            raise InvalidRequestError(
                f"{field}: {brief(name)} is not a file below {allowed}; a folder of pictures elsewhere must be named"
            ) from None
        except TooManyBytesError as error:
            raise InvalidRequestError(
                f"{field}: {brief(name)} has {error.size} bytes, the limit is {PICTURE_BYTES}"
            ) from None

    # Hosts -----------------------------------------------------------------------------------------------------------

    def _kept(self, url: str, field: str) -> bytes:
        if self._fetched is None:
            raise InvalidRequestError(
                f"{field}: {_shown(url)} is a URL, and URLs are off; name the hosts that may be asked, or download the "
                "pictures"
            )
        file = Path(self._fetched.name) / hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
        with self._lock:
            if not file.exists():
                file.write_bytes(self._fetch(url, field))
        return file.read_bytes()

    def _fetch(self, given: str, field: str) -> bytes:
        end, asked = time.monotonic() + self._seconds, given
        late = InvalidRequestError(f"{field}: {_shown(given)} was not there within {self._seconds:g} seconds")
        for _ in range(1 + REDIRECTS):
            url, address = self._checked(asked, given, field)
            try:
                answer = _run(_get(url, address, f"{field}: {_shown(given)}", end))
            except TimeoutError:
                raise late from None
            except httpx.HTTPError as error:
                raise InvalidRequestError(f"{field}: {_shown(given)}: {type(error).__name__}") from None
            if isinstance(answer, bytes):
                return answer
            asked = urljoin(asked, answer)
            if urlsplit(asked).netloc.lower() != urlsplit(given).netloc.lower():
                raise InvalidRequestError(f"{field}: {_shown(given)} redirects to another host; it is not followed")
        raise InvalidRequestError(f"{field}: {_shown(given)} redirects more than {REDIRECTS} times")

    def _checked(self, asked: str, given: str, field: str) -> tuple[httpx.URL, str]:
        """The URL, and an address of its host that may be asked."""
        try:
            url = httpx.URL(asked)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{field}: {_shown(given)}: {error}") from None
        own = {"http": 80, "https": 443}.get(url.scheme)
        port, host = url.port or own or 0, url.host.lower()
        if own is None or not is_named_host(host, port, own, self._hosts):
            allowed = ", ".join(sorted(self._hosts))
            raise InvalidRequestError(f"{field}: the host of {_shown(given)} is not one that was named ({allowed})")
        if url.userinfo:
            raise InvalidRequestError(f"{field}: a URL with a name or password; it is not asked")
        try:
            found = list(self._addresses(url.host, port))
        except OSError as error:
            raise InvalidRequestError(f"{field}: {_shown(given)}: {error}") from None
        if not found or not all(map(is_public, found)):
            raise InvalidRequestError(f"{field}: {_shown(given)} resolves to a private address; it is not asked")
        return url, found[0]


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, in an event loop of a thread that ends with it: the caller may have a loop that runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _get(url: httpx.URL, address: str, named: str, end: float) -> bytes | str:
    """The body, or where the answer redirects to. It is `address` that is asked, under the name of the host.

    TimeoutError at `end`, whatever the host does: a limit for each read would let it send byte after byte.
    """
    head = {
        "Host": url.netloc.decode(),
        "Accept": "image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding": "identity",
    }
    async with (
        asyncio.timeout(end - time.monotonic()),
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
        client.stream(
            "GET", url.copy_with(host=address), headers=head, extensions={"sni_hostname": url.host}
        ) as answer,
    ):
        if answer.has_redirect_location:
            return str(answer.headers["location"])
        if answer.status_code != 200:
            raise InvalidRequestError(f"{named} answers {answer.status_code}")
        data = bytearray()
        async for part in answer.aiter_raw():
            data += part
            if len(data) > PICTURE_BYTES:
                raise InvalidRequestError(f"{named} has {len(data)} bytes or more, the limit is {PICTURE_BYTES}")
        return bytes(data)


def _inside(url: str, field: str) -> bytes:
    """The bytes of a data URL."""
    head, _, data = url[5:].partition(",")
    if "base64" not in head.split(";")[1:]:
        raise InvalidRequestError(f"{field}: a data URL must be data:image/png;base64,... (or image/jpeg, image/webp)")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: a data URL, but not base64: {error}") from None


def _shown(url: str) -> str:
    """A URL for a message: without its query and its password, which may be keys."""
    try:
        parts = urlsplit(url)
    except ValueError:  # as for http://[::1, of which no part is known to be safe to show
        return "a URL"
    return brief(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
