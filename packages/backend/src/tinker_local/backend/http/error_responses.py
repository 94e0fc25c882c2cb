"""Which HTTP answer an error becomes: one table, in `tinker_local.types.errors`.

Answers carry a Content-Length: the SDK takes a 400 without one for a broken connection and sends again.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from tinker_local.types import ApiError, InvalidRequestError, TooManyRequestsError

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 4000
"""Characters. Messages quote what was sent, which may be a megabyte."""


def message(error: Exception) -> str:
    """What a client reads of `error`: short enough to be read, and always valid Unicode."""
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}… ({len(text)} characters)"


def answer(error: ApiError) -> JSONResponse:
    """The answer to a request that could not be taken."""
    text = message(error)
    headers = None
    if isinstance(error, TooManyRequestsError) and error.retry_after is not None:
        # Whole seconds are the standard; the SDK prefers its own header of milliseconds.
        milliseconds = math.ceil(error.retry_after * 1000)
        headers = {"Retry-After": str(math.ceil(milliseconds / 1000)), "Retry-After-Ms": str(milliseconds)}
    return JSONResponse({"detail": text, "error": text, "category": error.category}, error.status, headers)


def _reason(item: Mapping[str, Any]) -> str:
    """What is wrong with one parameter: its name and what was given for it."""
    field, reason = item["loc"][-1], item["msg"]
    return f"{field}: {reason}" if item["type"] == "missing" else f"{field}: {reason}, not {item['input']!r}"


def install(app: FastAPI) -> None:
    """Let every error of `app` become JSON with a `detail`."""

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == 404 and detail == "Not Found":
            detail = f"there is no {request.method} {request.url.path} on this server"
        return JSONResponse({"detail": detail}, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def _bad_parameter(request: Request, error: RequestValidationError) -> Response:
        return answer(InvalidRequestError("; ".join(_reason(item) for item in error.errors())))

    @app.exception_handler(ClientDisconnect)
    async def _client_has_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    @app.exception_handler(Exception)
    async def _our_fault(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse({"detail": f"{type(error).__name__}: {error}", "category": "server"}, 500)
