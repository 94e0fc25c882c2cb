"""Images that a prompt names by path or URL: read below one folder, fetched from named hosts, and from nowhere else.

Whoever may sample could otherwise read the server's files and reach what only the server can reach (its own network,
the metadata service of a cloud). So a path is followed to its real place before it is opened; a host is one that the
operator named, its addresses are public ones, and the connection goes to the address that was looked at.
"""

import ipaddress
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx
from pydantic import ValidationError
from tinker_local.types import (
    ImageAssetPointerChunk,
    ImageChunk,
    InvalidRequestError,
    ModelInput,
    UnsupportedError,
)

MAX_BYTES = 32 * 2**20
SECONDS = 20.0
MAX_REDIRECTS = 3

Addresses = Callable[[str, int], Iterable[str]]


def addresses_of(host: str, port: int) -> list[str]:
    """The IP addresses of a host by the system's resolver; OSError if it has none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class ImageAssets:
    """`folder`: of the files that may be named, by a path relative to it, an absolute one, or a `file:` URL. `hosts`:
    `name` or `name:port` of the hosts that may be asked by http(s). Images have at most `max_bytes`, and are there
    within `seconds`. Blocks; any thread may call it."""

    def __init__(
        self,
        folder: Path | None = None,
        hosts: Sequence[str] = (),
        *,
        max_bytes: int = MAX_BYTES,
        seconds: float = SECONDS,
        addresses: Addresses = addresses_of,
    ) -> None:
        self._folder = None if folder is None else folder.resolve(strict=True)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._addresses = addresses

    def resolved(self, model_input: ModelInput, where: str) -> ModelInput:
        """`model_input` with the bytes of every image that it names. Raises UnsupportedError if nothing may be named,
        InvalidRequestError for what may not or cannot be had."""
        return ModelInput(
            chunks=tuple(
                self._image(chunk, f"{where}.chunks[{index}]") if isinstance(chunk, ImageAssetPointerChunk) else chunk
                for index, chunk in enumerate(model_input.chunks)
            )
        )

    def _image(self, chunk: ImageAssetPointerChunk, where: str) -> ImageChunk:
        field = f"{where}.location"
        if self._folder is None and not self._hosts:
            raise UnsupportedError(
                f"{field}: this server reads no images by name; send the image's bytes, or start it with "
                "--image-folder or --image-host"
            )
        scheme = urlsplit(chunk.location).scheme.lower()
        if scheme in ("http", "https"):
            data = self._fetched(chunk.location, field)
        elif scheme in ("", "file"):
            data = self._read(chunk.location, field)
        else:
            raise InvalidRequestError(f"{field}: the scheme {scheme!r} is not one of http, https, file")
        try:
            return ImageChunk(data=data, format=chunk.format, expected_tokens=chunk.expected_tokens)
        except ValidationError as error:
            raise InvalidRequestError(f"{where}: {chunk.location}: {error.errors()[0]['msg']}") from None

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
        outside = InvalidRequestError(f"{field}: {location} is no file below the folder of images")
        try:
            path = (self._folder / name).resolve(strict=True)
            if not path.is_relative_to(self._folder) or not path.is_file():
                raise outside
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise outside from None
        try:
            # Once more of what was opened, as names may change meanwhile.
            real, status = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor)
            if not real.is_relative_to(self._folder) or not stat.S_ISREG(status.st_mode):
                raise outside
            if status.st_size > self._max_bytes:
                raise self._too_large(field, location, status.st_size)
            return os.pread(descriptor, self._max_bytes, 0)
        finally:
            os.close(descriptor)

    # Hosts ----------------------------------------------------------------------------------------------------------

    def _fetched(self, location: str, field: str) -> bytes:
        end = time.monotonic() + self._seconds
        asked = location
        for _ in range(1 + MAX_REDIRECTS):
            url, address = self._checked(asked, location, field)
            try:
                answer = self._get(url, address, location, field, end)
            except httpx.HTTPError as error:
                raise InvalidRequestError(f"{field}: {location}: {type(error).__name__}: {error}") from error
            if isinstance(answer, bytes):
                return answer
            asked = urljoin(asked, answer)
            if urlsplit(asked).netloc.lower() != urlsplit(location).netloc.lower():
                raise InvalidRequestError(f"{field}: {location} redirects to another host, which is not followed")
        raise InvalidRequestError(f"{field}: {location} redirects more than {MAX_REDIRECTS} times")

    def _checked(self, asked: str, location: str, field: str) -> tuple[httpx.URL, str]:
        """The URL, and an address of its host that may be asked."""
        try:
            url = httpx.URL(asked)
        except httpx.InvalidURL as error:
            raise InvalidRequestError(f"{field}: {location}: {error}") from None
        port = url.port or (443 if url.scheme == "https" else 80)
        if url.scheme not in ("http", "https") or not {url.host.lower(), f"{url.host.lower()}:{port}"} & self._hosts:
            allowed = ", ".join(sorted(self._hosts)) or "none"
            raise InvalidRequestError(f"{field}: the host of {location} is not one that this server asks ({allowed})")
        if url.userinfo:
            raise InvalidRequestError(f"{field}: a URL with a name or password is not asked")
        try:
            found = list(self._addresses(url.host, port))
        except OSError as error:
            raise InvalidRequestError(f"{field}: {location}: {error}") from None
        public = [address for address in found if ipaddress.ip_address(address).is_global]
        if len(public) != len(found) or not public:
            raise InvalidRequestError(f"{field}: {location} leads to a private address, which is not asked")
        return url, public[0]

    def _get(self, url: httpx.URL, address: str, location: str, field: str, end: float) -> bytes | str:
        """The body, or where the answer redirects to. It is `address` that is asked, under the name of the host."""
        head = {"Host": url.netloc.decode(), "Accept": "image/png, image/jpeg", "Accept-Encoding": "identity"}
        left = max(0.1, end - time.monotonic())
        with (
            httpx.Client(trust_env=False, timeout=left) as client,
            client.stream(
                "GET", url.copy_with(host=address), headers=head, extensions={"sni_hostname": url.host}
            ) as answer,
        ):
            if answer.is_redirect:
                return answer.headers["location"]
            if answer.status_code != 200:
                raise InvalidRequestError(f"{field}: {location} answers {answer.status_code}")
            data = bytearray()
            for part in answer.iter_raw():
                data += part
                if len(data) > self._max_bytes:
                    raise self._too_large(field, location, len(data))
                if time.monotonic() > end:
                    raise InvalidRequestError(f"{field}: {location} was not there within {self._seconds:g} seconds")
            return bytes(data)

    def _too_large(self, field: str, location: str, size: int) -> InvalidRequestError:
        return InvalidRequestError(f"{field}: {location} has {size} bytes or more, the limit is {self._max_bytes}")


def names_images(model_input: ModelInput) -> bool:
    """Whether any image of it is named and not sent."""
    return any(isinstance(chunk, ImageAssetPointerChunk) for chunk in model_input.chunks)
