"""Decides where a client connects and with which key: local defaults, no proxy, and a quick error if no server answers.

This module knows URLs, environment variables and how a request is sent, but no sessions and models.
"""

import functools
import ipaddress
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import tinker
from tinker_local.types import InvalidRequestError
from tinker_local.types.base_urls import end_of_openai

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_API_KEY = "tml-local"

CONNECT_ATTEMPTS = 3
"""Attempts if the connection is refused, in case the server is about to listen."""
RETRY_DELAY_S = 0.25
HEALTH_TIMEOUT_S = 2.0
LOADING_S = 300.0
"""For how long the SDK, too, repeats what a server refuses with 503."""
LOADING_DELAY_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL without trailing slash, and its API key (which `repr` does not show)."""

    base_url: str
    api_key: str = field(repr=False)


def resolve_endpoint(base_url: str | None, api_key: str | None) -> Endpoint:
    """The arguments, else $TINKER_BASE_URL and $TINKER_API_KEY, else the local defaults. Empty values count as unset.

    Raises InvalidRequestError for a base URL that is not http or https with a host, or that ends as OpenAI's do.
    """
    url = (base_url or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"base_url: must look like {DEFAULT_BASE_URL}, not {url!r}")
    if end := end_of_openai(parts.path):
        raise InvalidRequestError(f"base_url: leave out {end} of {url!r}; it is for OpenAI's clients")
    return Endpoint(url, api_key or os.environ.get("TINKER_API_KEY") or DEFAULT_API_KEY)


def connect(base_url: str | None, api_key: str | None, *, check_server: bool) -> Endpoint:
    """`resolve_endpoint`. A loopback URL also bypasses proxies and, with `check_server`, has its health checked.

    Raises tinker.APIConnectionError within about a second if no server listens at a loopback URL.
    """
    endpoint = resolve_endpoint(base_url, api_key)
    host = urlsplit(endpoint.base_url).hostname or ""
    if is_loopback(host):
        bypass_proxies(host)
        # Not over https: this request would not reproduce the SDK's own trust settings.
        if check_server and endpoint.base_url.startswith("http://"):
            require_server(endpoint.base_url)
    return endpoint


def send(
    endpoint: Endpoint, method: str, path: str, request: Callable[..., httpx.Response] = httpx.request, **given: Any
) -> httpx.Response:
    """What the server answers at `path` below its API. `given` goes to `request`, which is httpx's. A server that loads
    its models (503) is asked again for `LOADING_S`, as by the SDK.

    Raises tinker.APIConnectionError if no server answers, tinker.APIStatusError if it refuses.
    """
    url = f"{endpoint.base_url}/api/v1/{path}"
    ask = functools.partial(request, method, url, headers={"X-API-Key": endpoint.api_key}, **given)
    deadline = time.monotonic() + LOADING_S
    try:
        answer = ask()
        while answer.status_code == 503 and time.monotonic() < deadline:
            time.sleep(LOADING_DELAY_S)
            answer = ask()
    except httpx.TransportError as error:
        raise tinker.APIConnectionError(httpx.Request(method, url), f"{endpoint.base_url}: {error}") from error
    if answer.is_error:
        raise tinker.APIStatusError(_why(answer), response=answer, body=None)
    return answer


def _why(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost, in 127.0.0.0/8 or ::1. Does not resolve names."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, not an address
        return False


def bypass_proxies(host: str) -> None:
    """Add `host`, 127.0.0.1 and localhost to NO_PROXY and no_proxy of this process.

    The SDK sends even loopback requests through HTTP_PROXY unless NO_PROXY covers them. Its two transports prefer
    different spellings of the variable, so both get the union.
    """
    listed = [
        entry.strip()
        for name in ("NO_PROXY", "no_proxy")
        for entry in os.environ.get(name, "").split(",")
        if entry.strip()
    ]
    hosts = ",".join(dict.fromkeys([*listed, "127.0.0.1", "localhost", host]))
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = hosts


def require_server(base_url: str) -> None:
    """Raise tinker.APIConnectionError unless an HTTP server listens at `base_url`.

    The SDK itself would only report this after five minutes. Any HTTP server is enough: if it is still loading (503),
    busy (no answer in time) or has no health route, the SDK's own retries take over.
    """
    url = f"{base_url}/api/v1/healthz"
    for attempt in range(CONNECT_ATTEMPTS):
        if attempt:
            time.sleep(RETRY_DELAY_S)
        try:
            status = httpx.get(url, trust_env=False, timeout=HEALTH_TIMEOUT_S).status_code
        except httpx.ConnectError:
            continue
        except httpx.TimeoutException:
            return
        except httpx.TransportError as error:
            message = f"the server at {base_url} does not speak HTTP ({error})"
            raise tinker.APIConnectionError(httpx.Request("GET", url), message) from error
        if status == 503:
            logger.warning("the server at %s is still loading; requests wait for it", base_url)
        return
    message = f"no tinker-local server answers at {base_url}; start one with: tinker-local serve --model NAME"
    raise tinker.APIConnectionError(httpx.Request("GET", url), message)
