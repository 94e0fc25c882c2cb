"""Errors that an operation can end with, and what a client sees of each.

    ApiError                    base; `category` is what a failed future carries
    ├─ InvalidRequestError      user    HTTP 400   a value is wrong: names the field and the numbers
    │  ├─ UnsupportedError      user    HTTP 400   this server lacks the feature: says what to use instead
    │  └─ ContextOverflowError  user    HTTP 400   prompt and max_tokens are longer than the context
    ├─ AuthenticationError      user    HTTP 401   a missing or wrong key
    ├─ PermissionDeniedError    user    HTTP 403   a signed URL is forged or expired
    ├─ NotFoundError            user    HTTP 404   no such model, session, checkpoint, route
    ├─ GoneError                user    HTTP 410   the session has ended; a sampling promise has expired
    ├─ TooManyRequestsError     user    HTTP 429   back-pressure: send the same again after a while
    ├─ StorageFullError         server  HTTP 400   the disk is full: says how to free it
    └─ InternalError            server  HTTP 500   our fault; on a future it is still HTTP 200
       └─ NotEnoughMemoryError  server  HTTP 500   a training request does not fit in the trainer's memory

How the SDK 0.38.0 reacts: it raises 400, 401, 403 and 404 at once. It retries 409 for five minutes, so this server
never sends it. It retries 5xx for five minutes on a submit and for ever on a poll, so permanent failures of queued work
are HTTP 200 `{"error", "category"}` on their future. It retries 429 for ever when sampling, and for at most five
minutes when training, where it honours Retry-After.
"""

import re
from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


def brief(value: object) -> str:
    """`repr(value)` for a message, cut after 80 characters: names that a client chose may be a megabyte long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-fA-F]+")


class ApiError(Exception):
    """Base of every error that a client may see; `str(error)` is the message it sees.

    A message may quote an exception of a library. Addresses of memory (`<_io.BytesIO object at 0x7f...>`) are left out.
    """

    category: ClassVar[Category] = "server"
    status: ClassVar[int] = 500

    def __str__(self) -> str:
        return _ADDRESS.sub("", super().__str__())


class InvalidRequestError(ApiError):
    """A value of the request is wrong; the message names the field and the numbers."""

    category = "user"
    status = 400


class UnsupportedError(InvalidRequestError):
    """This server does not have what the request asks for; the message says what to use instead."""


class ContextOverflowError(InvalidRequestError):
    """A prompt, with the tokens that are to be sampled, is longer than the model's context. Programs shorten their
    history if they recognise this.

    `prompt_tokens`: of the prompt, at least. `max_tokens`: that were to be sampled; 0: the prompt alone is too long.
    `limit`: of both together.
    """

    def __init__(self, message: str, prompt_tokens: int = 0, max_tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class AuthenticationError(ApiError):
    """The API key is missing or wrong."""

    category = "user"
    status = 401


class PermissionDeniedError(ApiError):
    """The URL's signature is wrong or has expired, an access token is not a key of this server, or a server without
    keys received a request from another machine."""

    category = "user"
    status = 403


class NotFoundError(ApiError):
    """The named model, session, checkpoint or route does not exist."""

    category = "user"
    status = 404


class GoneError(ApiError):
    """The session has ended, the promise has expired, or what the request made has been deleted."""

    category = "user"
    status = 410


class TooManyRequestsError(ApiError):
    """The server's queue is full; the client sends the request again after `retry_after` seconds."""

    category = "user"
    status = 429

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageFullError(ApiError):
    """The disk of the data folder is full. Not a 5xx, which the SDK would repeat for minutes without a word."""

    status = InvalidRequestError.status


class InternalError(ApiError):
    """A failure of the server that the client did not cause."""


class NotEnoughMemoryError(InternalError):
    """The request does not fit in the available memory; with more it could succeed."""
