"""Images that a prompt names by path or URL: read below one folder, fetched from named hosts, and from nowhere else.

Otherwise any client that may sample could read the server's files and reach what only the server reaches (its network,
the metadata service of a cloud). So a path is followed to its real place before it is opened; a host is one that the
operator named, its addresses are public ones, and the connection goes to the address that was looked at.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from pydantic import ValidationError
from tinker_local.backend.daemon_thread import in_daemon_thread
from tinker_local.backend.rendering.turns_at_places import TurnsAtPlaces
from tinker_local.backend.threads import DISK, IMAGE_FOLDER, RENDERING_IMAGES
from tinker_local.types import (
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)
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

MAX_BYTES = 32 * 2**20
MAX_PROMPT_BYTES = 128 * 2**20
"""Of all images that one prompt names: as much as the body of a request may hold."""

SECONDS = 20.0
MAX_REDIRECTS = 3
MAX_PROMPTS = 8
"""Prompts that read from one host, or from the folder, at once; each may hold `MAX_PROMPT_BYTES`."""

MAX_LOOK_UPS = 8
"""Of one host's name, at once. The system's resolver can be given up, but not stopped, and holds a thread until it
returns; further look-ups wait for a place until the time is up."""

FOLDER = ""
"""The place of files, beside the names of hosts; also of what is refused before anything is read."""


class ImageAssets:
    """`folder`: of the files that may be named, by a path relative to it, an absolute one, or a `file:` URL. `hosts`:
    `name` (at the ports of http and https) or `name:port` of the hosts that may be asked by http(s). Images have at
    most `max_bytes`, those of one prompt `max_prompt_bytes`, and they all are there within `seconds`. Belongs to one
    event loop, on which only the network is waited for: files, and the bytes of images, are looked at in threads."""

    def __init__(
        self,
        folder: Path | None = None,
        hosts: Sequence[str] = (),
        *,
        max_bytes: int = MAX_BYTES,
        max_prompt_bytes: int = MAX_PROMPT_BYTES,
        seconds: float = SECONDS,
        addresses: Addresses = addresses_of,
    ) -> None:
        self._folder = None if folder is None else folder.resolve(strict=True)
        for host in hosts:
            check_image_host(host)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._max_prompt_bytes = max_prompt_bytes
        self._seconds = seconds
        self._addresses = addresses
        # More than one colon is an IPv6 address, which has no port here.
        names = {host.partition(":")[0] if host.count(":") == 1 else host for host in self._hosts}
        self._look_ups = {name: asyncio.Semaphore(MAX_LOOK_UPS) for name in names}
        self._turns = TurnsAtPlaces(MAX_PROMPTS)
        self._looking_up: set[asyncio.Task[list[str]]] = set()
        self._tls: ssl.SSLContext | None = None

    def turn(self, model_input: ModelInput) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until at most `MAX_PROMPTS` prompts, this one included, read from any place that it names."""
        named = [chunk.location for chunk in model_input.chunks if isinstance(chunk, ImageAssetPointerChunk)]
        return self._turns.at(frozenset(map(self._place_of, named)))

    def _place_of(self, location: str) -> str:
        try:
            host = urlsplit(location).hostname or FOLDER
        except ValueError:
            return FOLDER
        return host if host in self._look_ups else FOLDER

    async def resolved(self, model_input: ModelInput, where: str) -> ModelInput:
        """`model_input` with the bytes of every image that it names. Raises UnsupportedError if nothing may be named,
        InvalidRequestError for what may not or cannot be had."""
        end, size = time.monotonic() + self._seconds, 0
        chunks = list(model_input.chunks)
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, ImageAssetPointerChunk):
                chunks[index] = image = await self._image(chunk, f"{where}.chunks[{index}]", end)
                size += len(image.data)
                if size > self._max_prompt_bytes:
                    raise InvalidRequestError(
                        f"{where}.chunks[{index}].location: the images up to this one have {size} bytes, "
                        f"the limit for those that a prompt names is {self._max_prompt_bytes}"
                    )
        return ModelInput(chunks=tuple(chunks))

    async def _image(self, chunk: ImageAssetPointerChunk, where: str, end: float) -> ImageChunk:
        field = f"{where}.location"
        if self._folder is None and not self._hosts:
            raise UnsupportedError(
                f"{field}: this server reads no images by name; send the image's bytes, or start it with "
                "--image-folder or --image-host"
            )
        try:
            data = await self._data(chunk.location, field, end)
        except ValueError as error:  # of the parsers of URLs and addresses
            raise InvalidRequestError(f"{field}: {chunk.location}: {error}") from None
        return await RENDERING_IMAGES.run(_as_sent, chunk, data, where)

    async def _data(self, location: str, field: str, end: float) -> bytes:
        scheme = urlsplit(location).scheme.lower()
        if scheme in ("http", "https"):
            return await self._fetched(location, field, end)
        if scheme in ("", "file"):
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    # The folder may be of another machine that is gone: threads that all share must not wait for it.
                    return await IMAGE_FOLDER.run(self._read, location, field)
            except TimeoutError:
                raise self._too_slow(field, location) from None
        raise InvalidRequestError(f"{field}: the scheme {scheme!r} is not one of http, https, file")

    # Files ----------------------------------------------------------------------------------------------------------

    def _read(self, location: str, field: str) -> bytes:
        if self._folder is None:
            raise InvalidRequestError(
                f"{field}: this server reads no files, only from {', '.join(sorted(self._hosts))}"
            )
        parts = urlsplit(location)
        name = unquote(parts.path) if parts.scheme else location
        if parts.scheme and parts.netloc not in ("", "localhost"):
            raise InvalidRequestError(f"{field}: a file: URL names no host, but this one says {parts.netloc!r}")
        try:
            return read_below(name, [self._folder], self._max_bytes)
        except NotBelowError:
            raise InvalidRequestError(f"{field}: {location} is not a file below the folder of images") from None
        except TooManyBytesError as error:
            raise self._too_large(field, location, error.size) from None

    # Hosts ----------------------------------------------------------------------------------------------------------

    async def _fetched(self, location: str, field: str, end: float) -> bytes:
        asked = location
        for _ in range(1 + MAX_REDIRECTS):
            url, address = await self._checked(asked, location, field, end)
            try:
                answer = await self._get(url, address, location, field, end)
            except TimeoutError:
                raise self._too_slow(field, location) from None
            except httpx.HTTPError as error:
                raise InvalidRequestError(f"{field}: {location}: {type(error).__name__}: {error}") from error
            if isinstance(answer, bytes):
                return answer
            asked = urljoin(asked, answer)
            if urlsplit(asked).netloc.lower() != urlsplit(location).netloc.lower():
                raise InvalidRequestError(f"{field}: {location} redirects to another host, which is not followed")
        raise InvalidRequestError(f"{field}: {location} redirects more than {MAX_REDIRECTS} times")

    async def _checked(self, asked: str, location: str, field: str, end: float) -> tuple[httpx.URL, str]:
        """The URL, and an address of its host that may be asked."""
        try:
            url = httpx.URL(asked)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{field}: {location}: {error}") from None
        own = {"http": 80, "https": 443}.get(url.scheme)
        port, host = url.port or own or 0, url.host.lower()
        if own is None or not is_named_host(host, port, own, self._hosts):
            allowed = ", ".join(sorted(self._hosts)) or "none"
            raise InvalidRequestError(f"{field}: the host of {location} is not one that this server asks ({allowed})")
        if url.userinfo:
            raise InvalidRequestError(f"{field}: a URL with a name or password is not asked")
        try:
            found = await self._looked_up(url.host, port, end)
        except TimeoutError:
            raise self._too_slow(field, location, f", as the name {url.host} was still being looked up") from None
        except OSError as error:
            raise InvalidRequestError(f"{field}: {location}: {error}") from None
        public = [address for address in found if is_public(address)]
        if len(public) != len(found) or not public:
            raise InvalidRequestError(f"{field}: {location} leads to a private address, which is not asked")
        return url, public[0]

    async def _looked_up(self, host: str, port: int, end: float) -> list[str]:
        """The addresses of a host; TimeoutError at `end`, OSError if it has none."""

        def look_up() -> list[str]:
            return list(self._addresses(host, port))

        look_ups = self._look_ups[host.lower()]
        async with asyncio.timeout(end - time.monotonic()):
            await look_ups.acquire()
            task = asyncio.create_task(in_daemon_thread(look_up))
            self._looking_up.add(task)
            task.add_done_callback(partial(self._look_up_ended, look_ups))
            return await asyncio.shield(task)  # after a cancellation its thread continues and keeps its place

    def _look_up_ended(self, look_ups: asyncio.Semaphore, task: asyncio.Task[list[str]]) -> None:
        self._looking_up.discard(task)
        look_ups.release()
        if not task.cancelled():
            task.exception()  # waiting callers get it; otherwise it does not matter

    async def _get(self, url: httpx.URL, address: str, location: str, field: str, end: float) -> bytes | str:
        """The body, or where the answer redirects to. It is `address` that is asked, under the name of the host.

        TimeoutError at `end`, whatever the host does: a limit for each read would let it send byte after byte.
        """
        head = {
            "Host": url.netloc.decode(),
            "Accept": "image/png, image/jpeg, image/webp, image/gif",
            "Accept-Encoding": "identity",
        }
        if self._tls is None:
            self._tls = await DISK.run(httpx.create_ssl_context, trust_env=False)
        async with (
            asyncio.timeout(end - time.monotonic()),
            httpx.AsyncClient(trust_env=False, timeout=None, verify=self._tls) as client,
            client.stream(
                "GET", url.copy_with(host=address), headers=head, extensions={"sni_hostname": url.host}
            ) as answer,
        ):
            if answer.has_redirect_location:
                return answer.headers["location"]
            if answer.status_code != 200:
                raise InvalidRequestError(f"{field}: {location} answers {answer.status_code}")
            data = bytearray()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > self._max_bytes:
                    raise self._too_large(field, location, len(data))
            return bytes(data)

    def _too_slow(self, field: str, location: str, why: str = "") -> InvalidRequestError:
        return InvalidRequestError(f"{field}: {location} was not there within {self._seconds:g} seconds{why}")

    def _too_large(self, field: str, location: str, size: int) -> InvalidRequestError:
        return InvalidRequestError(f"{field}: {location} has {size} bytes or more, the limit is {self._max_bytes}")


def _as_sent(chunk: ImageAssetPointerChunk, data: bytes, where: str) -> ImageChunk:
    """The chunk that would have been sent with `data`, whose bytes say what they are: suffixes may not."""
    try:
        return ImageChunk.of(data, chunk.expected_tokens)
    except ValidationError as error:
        raise InvalidRequestError(f"{where}: {chunk.location}: {error.errors()[0]['msg']}") from None
