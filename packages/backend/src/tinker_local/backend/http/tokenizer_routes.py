"""Tokenizers and processors of the served models, for clients that do not share a disk with the server."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse
from tinker_local.backend.http.access import Backend
from tinker_local.backend.models.tokenizer_files import tokenizer_files
from tinker_local.backend.threads import DISK
from tinker_local.types import NotFoundError

router = APIRouter(tags=["client"])


@router.get("/tokenizers")
async def tokenizers(backend: Backend) -> dict[str, Any]:
    """Of every base model: `tokenizer_id`, under which the SDK looks for its tokenizer, and the files with their sizes.
    Not part of the Tinker API."""
    found = []
    for model in backend.models.distinct():
        files = await DISK.run(_sizes, model.path)
        found += [{"base_model": name, "tokenizer_id": model.tokenizer_id, "files": files} for name in model.names]
    return {"tokenizers": found}


@router.get("/tokenizers/{file}")
async def tokenizer_file(file: str, base_model: str, backend: Backend) -> FileResponse:
    """One of the files. Not part of the Tinker API."""
    model = backend.models.get(base_model)
    path = (await DISK.run(tokenizer_files, model.path)).get(file)
    if path is None:
        raise NotFoundError(f"{file[:100]!r} is not a file of the tokenizer or the processors of {base_model}")
    return FileResponse(path, media_type="application/octet-stream")


def _sizes(path: str) -> dict[str, int]:
    return {name: file.stat().st_size for name, file in tokenizer_files(path).items()}
