"""API keys at the door: whose request it is, how long answers to wrong keys wait, and how many requests of an owner may
be open."""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker_local.backend.control.callers import LOCAL, Caller
from tinker_local.backend.hosting.key_file import KeyFile, fingerprint
from tinker_local.backend.http import error_responses
from tinker_local.backend.http.access import ACCESS_TOKEN, CALLER, address_in, open_to_all
from tinker_local.backend.http.connections import most_connections
from tinker_local.backend.http.error_responses import api_of
from tinker_local.backend.scheduling.quotas import ONE_OWNER, Owners
from tinker_local.backend.threads import Ledger, acting_for
from tinker_local.types import (
    ApiError,
    AuthenticationError,
    CopyWeightsRequest,
    LoadWeightsRequest,
    PermissionDeniedError,
    TooManyRequestsError,
)

R = TypeVar("R", CopyWeightsRequest, LoadWeightsRequest)


class Keys:
    """Who has which API key. A list of keys, or None for any key, is one owner's. Access tokens for checkpoints of
    another owner are such keys, too."""

    def __init__(self, keys: Sequence[str] | KeyFile | None) -> None:
        self._file = keys if isinstance(keys, KeyFile) else None
        self._list = None if keys is None or isinstance(keys, KeyFile) else {fingerprint(key): LOCAL for key in keys}

    def caller(self, given: str) -> Caller | None:
        """Whose key this is; None if it is not one of this server."""
        if self._file is None and self._list is None:
            return LOCAL
        callers = self._list if self._file is None else self._file.callers()
        # Found by its digest, so that the time taken reveals nothing of a key.
        return (callers or {}).get(fingerprint(given))

    @property
    def problem(self) -> str | None:
        """Why no key is right now, if that is a fault of the server."""
        return None if self._file is None else self._file.problem

    def owners(self) -> Owners:
        """Who has a key."""
        return ONE_OWNER if self._file is None else self._file.owners()

    def knows(self, token: str | None) -> bool:
        """Whether an access token is a key of this server, or was not given.

        As on the hosted service, it is an API key of the checkpoint's owner.
        """
        return token is None or self.caller(token) is not None

    def opened(self, request: R) -> R:
        """`request` without its token; PermissionDeniedError if that is not a key of this server."""
        if not self.knows(request.weights_access_token):
            raise _unknown_token("weights_access_token")
        return request.model_copy(update={"weights_access_token": None})


def _unknown_token(field: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{field}: it is not a key of this server; give a key of the checkpoint's owner, or leave it out: "
        "every key reads the checkpoints of its owner and public ones"
    )


FREE_WRONG_KEYS, FORGIVEN_SECONDS = 10, 6.0
"""How many wrong keys of an address are answered at once, and how long it takes until one more is again."""

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Seconds that the answer to the next one waits, doubled with each; and at most."""

MOST_ADDRESSES, MOST_DELAYED = 4096, 512
"""Addresses that are remembered, and answers that wait; those beyond close their connection at once."""


MOST_COUNTED = 2 * FREE_WRONG_KEYS
"""Of one address, so that it is forgiven in minutes, however many it sent."""


class WrongKeys:
    """How long the answer to a wrong key or access token waits, by its address. A right one never waits, so that many
    users may share one address, behind a proxy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many, and when the last came
        self._delayed = 0

    def delay(self, address: str) -> float:
        """Count a wrong key; how many seconds its answer waits."""
        now, network = self._clock(), network_of(address)
        count, last = self._seen.pop(network, (0.0, now))
        count = max(0.0, count - (now - last) / FORGIVEN_SECONDS) + 1
        self._seen[network] = min(count, MOST_COUNTED), now
        if len(self._seen) > MOST_ADDRESSES:
            self._seen.popitem(last=False)
        beyond = count - FREE_WRONG_KEYS
        return 0.0 if beyond <= 0 else min(LONGEST_DELAY, FIRST_DELAY * 2 ** (beyond - 1))

    async def wait(self, address: str) -> bool:
        """Count a wrong key and wait; false if too many wait already."""
        seconds = self.delay(address)
        if not seconds:
            return True
        if self._delayed >= MOST_DELAYED:
            return False
        self._delayed += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._delayed -= 1
        return True


def network_of(address: str) -> str:
    """An IPv4 address, or the network of 64 bits of an IPv6 one, which one person has whole."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


class RequireKey:
    """Answer 401 to a request without a known key in `X-API-Key`, or outside the Tinker API in `Authorization: Bearer`,
    and 403 to one with an unknown access token; `caller_of` tells whose it is.

    With several owners, each may have half of all connections in use: beyond that, its requests are answered with 429.
    Connections without a request are closed for others, but long polls, slow bodies and slow readers are not.
    """

    def __init__(self, app: ASGIApp, keys: Keys, wrong: WrongKeys) -> None:
        self._app = app
        self._keys = keys
        self._wrong = wrong
        self._open: Ledger[str] = Ledger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not open_to_all(scope["path"]):
            headers = Headers(scope=scope)
            caller = self._keys.caller(_key_in(headers, scope["path"]))
            if caller is None and (problem := self._keys.problem) is not None:  # nothing was compared or can be guessed
                await error_responses.answer(AuthenticationError(problem), scope["path"])(scope, receive, send)
                return
            if caller is None:
                error = AuthenticationError(_WRONG_KEY.get(api_of(scope["path"]), _NO_KEY))
                await self._refuse(error, scope, receive, send)
                return
            if not self._keys.knows(headers.get(ACCESS_TOKEN)):
                await self._refuse(_unknown_token(ACCESS_TOKEN), scope, receive, send)
                return
            scope[CALLER] = caller
            if (most := self._most(caller)) is not None and self._open[caller.owner] >= most:
                answer = error_responses.answer(
                    TooManyRequestsError(f"{most} requests of the owner {caller.owner!r} are open, the most", 1.0),
                    scope["path"],
                )
                answer.headers["Connection"] = "close"
                await answer(scope, receive, send)
                return
            self._open[caller.owner] += 1
            try:
                with acting_for(caller.owner):
                    await self._app(scope, receive, send)
            finally:
                self._open[caller.owner] -= 1
            return
        await self._app(scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a wrong key or token, when it has waited."""
        answer = error_responses.answer(error, scope["path"])
        if not await self._wrong.wait(address_in(scope)):
            answer.headers["Connection"] = "close"
        await answer(scope, receive, send)

    def _most(self, caller: Caller) -> int | None:
        """How many requests of `caller` may be open; None: any number."""
        return max(1, most_connections() // 2) if self._keys.owners().shares(caller.owner) else None


def _key_in(headers: Headers, path: str) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    takes_bearer = scheme.lower() == "bearer" and api_of(path) != "tinker"
    return headers.get("x-api-key") or (bearer.strip() if takes_bearer else "")


_NO_KEY = "X-API-Key: missing or unknown; set TINKER_API_KEY to a key of this server"
_WRONG_KEY = {
    "openai": "Authorization: the Bearer key is missing or unknown; api_key must be a key of this server",
    "anthropic": "x-api-key: missing or unknown; api_key must be a key of this server",
}
