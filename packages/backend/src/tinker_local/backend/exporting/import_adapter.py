"""`import_adapter`: an adapter that PEFT or an export wrote, as checkpoints of a running server."""

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, WEIGHTS
from tinker_local.types import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    TooManyRequestsError,
)

URL = "http://127.0.0.1:8000"
PART = 2**20
CONNECT_SECONDS = 10.0

_ERRORS: dict[int, type[ApiError]] = {
    each.status: each
    for each in (InvalidRequestError, AuthenticationError, PermissionDeniedError, NotFoundError, TooManyRequestsError)
}


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """`path`: `tinker://…/weights/NAME`, to train on. `sampler_path`: `tinker://…/sampler_weights/NAME`, to sample.
    `notes`: what of the adapter was changed into the form that it has here."""

    path: str
    sampler_path: str
    notes: tuple[str, ...]


def import_adapter(
    folder: str | Path,
    *,
    model: str,
    name: str = "imported",
    other_base: bool = False,
    url: str | None = None,
    api_key: str | None = None,
) -> ImportedAdapter:
    """Send the adapter in `folder` (`adapter_config.json` and `adapter_model.safetensors`) to the server at `url`.

    `model`: the base model, as the server names it. `name`: of both checkpoints. `other_base`: import it although it
    names another base model than the one served as `model`. `url`, `api_key`: default to TINKER_BASE_URL and
    TINKER_API_KEY, then to a server without keys on this machine.

    Raises InvalidRequestError, which names what of the adapter the server cannot take, or another ApiError; OSError if
    a file cannot be read; httpx.TransportError if no server answers.
    """
    import httpx

    folder = Path(folder)
    url = url or os.environ.get("TINKER_BASE_URL") or URL
    headers = {"X-API-Key": api_key or os.environ.get("TINKER_API_KEY") or "tml-local"}
    files = [folder / file for file in (CONFIG, WEIGHTS)]
    for file in files:
        if not file.is_file():
            encrypted = file.with_name(f"{file.name}{AGE}").exists()
            why = "it is encrypted: decrypt it with `age -d`" if encrypted else "PEFT's save_pretrained writes it"
            raise InvalidRequestError(f"{folder} has no {file.name}; {why}")
    heads = [_head(file) for file in files]
    headers["Content-Length"] = str(sum(len(head) + _padded(size) for head, size in heads) + len(_END))
    params = {"base_model": model, "name": name, "other_base": str(other_base).lower()}
    with httpx.Client(
        base_url=url.rstrip("/"), headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), trust_env=False
    ) as http:
        body = _archive(files, heads)
        answer = http.post("/api/v1/import_adapter", params=params, content=body)
    try:
        told = answer.json()
        if answer.status_code == 200:
            return ImportedAdapter(told["path"], told["sampler_path"], tuple(told["notes"]))
        detail = str(told["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"{answer.request.url} answers {answer.status_code}; is it a tinker-local server?"
    raise _ERRORS.get(answer.status_code, InternalError)(detail)


_END = bytes(2 * tarfile.BLOCKSIZE)
"""Ends an archive."""


def _head(file: Path) -> tuple[bytes, int]:
    """The archive's header of `file`, and the file's size."""
    info = tarfile.TarInfo(file.name)
    info.size = file.stat().st_size
    return info.tobuf(tarfile.GNU_FORMAT), info.size


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE


def _archive(files: list[Path], heads: list[tuple[bytes, int]]) -> Iterator[bytes]:
    """A tar archive of `files`; at most `PART` bytes are in memory."""
    for file, (head, size) in zip(files, heads, strict=True):
        yield head
        with file.open("rb") as opened:
            while part := opened.read(PART):
                yield part
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield _END
