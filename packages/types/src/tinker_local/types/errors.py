"""Errors that an operation may end with, and what a client sees of each.

    ApiError                    base; `category` is what a failed future carries
    ├─ InvalidRequestError      user    HTTP 400   a value is wrong: names the field and the numbers
    │  └─ UnsupportedError      user    HTTP 400   a feature that this server does not have; says what to use
    ├─ AuthenticationError      user    HTTP 401   no key, or a wrong one
    ├─ PermissionDeniedError    user    HTTP 403   a signed URL is forged or expired
    ├─ NotFoundError            user    HTTP 404   no such model, session, checkpoint, route
    ├─ GoneError                user    HTTP 410   the session has ended; a sampling promise has expired
    ├─ TooManyRequestsError     user    HTTP 429   back-pressure: send the same again after a while
    └─ InternalError            server  HTTP 500   our fault; on a future it is still HTTP 200
       └─ NotEnoughMemoryError  server  HTTP 500   a training request does not fit in the trainer's memory

How the SDK 0.38.0 reacts: 400, 401, 403, 404 are raised at once; 409 is never sent, because the SDK takes it for
"try again" for five minutes; 5xx on a submit is retried for five minutes, on a poll for ever, so permanent failures
of queued work travel as HTTP 200 `{"error", "category"}` on their future. A 429 is sent again: for ever by sampling,
for at most five minutes by training, which heeds Retry-After.
"""

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class ApiError(Exception):
    """Base of every error that a client may see; `str(error)` is the message it sees."""

    category: ClassVar[Category] = "server"
    status: ClassVar[int] = 500


class InvalidRequestError(ApiError):
    """A value of the request is wrong; the message names the field and the numbers."""

    category = "user"
    status = 400


class UnsupportedError(InvalidRequestError):
    """The request asks for something that this server does not have; the message says what to use instead."""


class AuthenticationError(ApiError):
    """The API key is missing or wrong."""

    category = "user"
    status = 401


class PermissionDeniedError(ApiError):
    """The URL's signature is wrong or has expired, an access token is no key of this server, or a server without keys
    was asked from outside its machine."""

    category = "user"
    status = 403


class NotFoundError(ApiError):
    """The named model, session, checkpoint or route does not exist."""

    category = "user"
    status = 404


class GoneError(ApiError):
    """The session has ended, the promise has expired, or what was made for the request is deleted since."""

    category = "user"
    status = 410


class TooManyRequestsError(ApiError):
    """The server has as much queued as it takes; the client waits and sends again, after `retry_after` seconds."""

    category = "user"
    status = 429

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InternalError(ApiError):
    """A failure of the server that the client did not cause."""


class NotEnoughMemoryError(InternalError):
    """The request does not fit in the memory that there is; with more it could succeed."""
