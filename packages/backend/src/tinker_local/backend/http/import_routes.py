"""Adapters to import: the body is a tar archive of their two files, which goes to the disk as it comes."""

import tarfile
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query, Request
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS
from tinker_local.backend.http.access import Backend, caller_of
from tinker_local.backend.threads import DISK
from tinker_local.types import InvalidRequestError

router = APIRouter(tags=["training runs and checkpoints"])

FILES = (CONFIG, WEIGHTS)

BLOCK = 512
"""Bytes that a tar archive counts in."""

PART = 2**20
"""Bytes that are written at once."""


@router.post("/import_adapter")
async def import_adapter(
    request: Request,
    backend: Backend,
    base_model: str,
    name: Annotated[str, Query()] = "imported",
    other_base: bool = False,
) -> dict[str, Any]:
    """Checkpoints of an adapter that PEFT or an export wrote. Not part of the Tinker API."""
    caller, most = caller_of(request), await DISK.run(backend.imports.most_bytes, base_model)
    async with backend.imports.place(caller.owner) as folder:
        await _receive(request, backend, folder, most)
        imported = await backend.imports.add(folder, base_model, name, other_base=other_base, caller=caller)
    return {"path": imported.path, "sampler_path": imported.sampler_path, "notes": imported.notes}


async def _receive(request: Request, backend: Backend, folder: Path, most: int) -> None:
    """Write the files of the body into `folder`; InvalidRequestError if it has more than `most` bytes."""
    given = request.headers.get("content-length", "")
    declared, received = int(given) if given.isdecimal() else 0, 0
    archive, waiting = Archive(folder), bytearray()
    try:
        with backend.store.full_disk_explained():
            async for part in request.stream():
                received += len(part)
                if (size := max(declared, received)) > most:
                    raise InvalidRequestError(
                        f"body: {size} bytes are more than {most}, which an adapter of the largest rank of this server "
                        "has at most"
                    )
                waiting += part
                if len(waiting) >= PART:
                    await DISK.run(archive.feed, bytes(waiting))
                    waiting.clear()
            await DISK.run(archive.feed, bytes(waiting))
            archive.end()
    finally:
        archive.close()


class Archive:
    """A tar archive that comes in parts, of which the files of an adapter go into `folder`. Nothing in it chooses a
    path, and no more than a part is held: tarfile would hold whatever an extended header claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._head = bytearray()
        self._file: BinaryIO | None = None
        self._left = self._padding = 0
        self._found: set[str] = set()

    def feed(self, data: bytes) -> None:
        """The next part; blocks. InvalidRequestError for anything but the plain files of an adapter."""
        view = memoryview(data)
        while view:
            if self._file is not None:
                part, view = view[: self._left], view[self._left :]
                self._file.write(part)
                self._left -= len(part)
                if not self._left:
                    self.close()
            elif self._padding:
                part, view = view[: self._padding], view[self._padding :]
                self._padding -= len(part)
            else:
                missing = BLOCK - len(self._head)
                self._head += view[:missing]
                view = view[missing:]
                if len(self._head) == BLOCK:
                    block = bytes(self._head)
                    self._head.clear()
                    if any(block):  # blocks of zeros end an archive
                        self._begin(block)

    def _begin(self, block: bytes) -> None:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise InvalidRequestError(f"body: is not a tar archive: {error}") from None
        name = info.name.removeprefix("./")
        if (
            info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE)
            or name not in FILES
            or name in self._found
            or info.size < 0
        ):
            raise InvalidRequestError(
                f"body: {name[:100]!r} of the tar archive (type {info.type!r}) is not {' or '.join(FILES)}, once each, "
                "as a plain file"
            )
        self._found.add(name)
        self._file, self._left, self._padding = (self._folder / name).open("xb"), info.size, -info.size % BLOCK
        if not self._left:
            self.close()

    def end(self) -> None:
        """InvalidRequestError unless all files are whole."""
        if self._file is not None or self._head:
            raise InvalidRequestError(f"body: the tar archive ends {self._left or BLOCK - len(self._head)} bytes early")
        if missing := [name for name in FILES if name not in self._found]:
            raise InvalidRequestError(f"body: the tar archive lacks {' and '.join(missing)}")

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None
