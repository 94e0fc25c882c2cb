"""Which HTTP answer an error becomes: one table, in `tinker_local.types.errors`.

Answers carry a Content-Length: the SDK takes a 400 without one for a broken connection and sends again.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from tinker_local.types import ApiError, ContextOverflowError, InternalError, InvalidRequestError, TooManyRequestsError
from tinker_local.types.base_urls import end_of_openai
from tinker_local.types.errors import Category

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 4000
"""Characters. Messages quote what was sent, which may be a megabyte."""


def message(error: Exception) -> str:
    """What a client reads of `error`: short enough to be read, and always valid Unicode."""
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}… ({len(text)} characters)"


Api = Literal["tinker", "openai", "anthropic"]


RECORDED = "/session/"
"""Below it, and the name of a recorded session, are OpenAI's and Anthropic's APIs."""


def api_of(path: str) -> Api:
    """The API whose errors a path answers with."""
    if path.startswith(RECORDED):
        path = "/" + path.removeprefix(RECORDED).partition("/")[2]
    if path.startswith(("/v1/messages", "/anthropic/")):
        return "anthropic"
    return "openai" if path.startswith(("/v1/", "/oai/", "/tokenize", "/detokenize")) else "tinker"


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]-]*): ")


def error_body(text: str, status: int, api: Api, category: Category | None = None) -> dict[str, Any]:
    """An error as `api` has it."""
    if api == "openai":
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        field = _FIELD.match(text)
        param = field[1] if field and status in (400, 404) else None
        return {"error": {"message": text, "type": kind, "param": param, "code": _OPENAI_CODES.get(status)}}
    if api == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": text}}
    return {"detail": text} if category is None else {"detail": text, "error": text, "category": category}


def body_of(error: ApiError, api: Api) -> dict[str, Any]:
    """`error` as `api` has it. A context that is too short is said in the words by which clients recognise it."""
    text = message(error)
    if not isinstance(error, ContextOverflowError) or api == "tinker":
        return error_body(text, error.status, api, error.category)
    tokens, sampled, limit = error.prompt_tokens, error.max_tokens, error.limit
    if api == "anthropic":
        if sampled:
            text = f"input length and `max_tokens` exceed context limit: {tokens} + {sampled} > {limit}"
        else:
            text = f"prompt is too long: {tokens} tokens > {limit - 1} maximum"  # and one to be sampled
        return error_body(text, error.status, api)
    body = error_body(text, error.status, api)
    code = "context_length_exceeded"  # in the message as well: newer clients raise errors that show nothing else
    told = {"message": f"This model's maximum context length is {limit} tokens. {text} ({code})", "code": code}
    return {"error": body["error"] | told}


def plain(text: str, status: int, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error that is none of `tinker_local.types.errors`."""
    return JSONResponse(error_body(text, status, api_of(path)), status, headers)


def answer(error: ApiError, path: str = "") -> JSONResponse:
    """The answer to a request that could not be taken, at `path`."""
    headers = None
    if isinstance(error, TooManyRequestsError) and error.retry_after is not None:
        # Whole seconds are the standard; the SDK prefers its own header of milliseconds.
        milliseconds = math.ceil(error.retry_after * 1000)
        headers = {"Retry-After": str(math.ceil(milliseconds / 1000)), "Retry-After-Ms": str(milliseconds)}
    return JSONResponse(body_of(error, api_of(path)), error.status, headers)


def _reason(item: Mapping[str, Any]) -> str:
    """What is wrong with one parameter: its name and what was given for it."""
    field, reason = item["loc"][-1], item["msg"]
    return f"{field}: {reason}" if item["type"] == "missing" else f"{field}: {reason}, not {item['input']!r}"


OF_OPENAI_BELOW_V1 = ("/chat/completions", "/completions", "/models", "/responses")
"""What OpenAI's clients ask for without `/v1` in their base_url."""


def install(app: FastAPI) -> None:
    """Let every error of `app` become JSON with a `detail`."""

    @app.exception_handler(ApiError)
    async def _api_error(request: Request, error: ApiError) -> Response:
        return answer(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == 404 and detail == "Not Found":
            path = request.url.path
            detail = f"there is no {request.method} {path} on this server"
            if end := end_of_openai(path.rpartition("/api/v1/")[0]):
                detail += f"; leave out {end} of the base_url"
            elif path.startswith("/v1/v1/"):
                detail += "; leave out one /v1 of the base_url"
            elif path in OF_OPENAI_BELOW_V1:
                detail += f", but /v1{path}: clients of OpenAI take a base_url that ends with /v1"
            elif path.endswith("/v1/responses"):
                detail += f", but {path.removesuffix('responses')}chat/completions"
        return plain(detail, error.status_code, request.url.path, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _bad_parameter(request: Request, error: RequestValidationError) -> Response:
        return answer(InvalidRequestError("; ".join(_reason(item) for item in error.errors())), request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def _client_has_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)

    @app.exception_handler(Exception)
    async def _our_fault(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        text, api = str(InternalError(f"{type(error).__name__}: {error}")), api_of(request.url.path)
        if api != "tinker":
            return JSONResponse(error_body(text, 500, api), 500)
        return JSONResponse({"detail": text, "category": "server"}, 500)
