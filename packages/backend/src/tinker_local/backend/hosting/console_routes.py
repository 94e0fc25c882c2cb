"""The console: a page at `/` in plain JavaScript, whose data come from the other routes. It needs no key, as it holds
nothing; what it asks for does."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from tinker_local.types import NotFoundError

router = APIRouter(tags=["console"], include_in_schema=False)

FOLDER = Path(__file__).parent / "console"
PAGE = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Names, metrics and samples are text, and could do nothing if they were not: no inline script runs, and no request
leaves for another host."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file of the page, and the headers it is sent with."""

    content: bytes
    headers: Mapping[str, str]


@cache
def console_files() -> Mapping[str, ConsoleFile]:
    """The files of the page by name, read once."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def _read(path: Path) -> ConsoleFile:
    content = path.read_bytes()
    headers = {
        "Content-Type": MEDIA_TYPES[path.suffix],
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    return ConsoleFile(content, headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _answer(request, console_files()[PAGE])


@router.api_route("/console/{file}", methods=["GET", "HEAD"])
async def console_file(file: str, request: Request) -> Response:
    found = console_files().get(file)
    if found is None or file == PAGE:
        raise NotFoundError(f"file: the console has no {file!r}")
    return _answer(request, found)


def _answer(request: Request, file: ConsoleFile) -> Response:
    """304 if the browser has it already. `If-None-Match` may list several tags, weak ones too."""
    tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.headers["ETag"] in tags:
        return Response(status_code=304, headers={**file.headers})
    return Response(file.content, headers={**file.headers})
