"""Where a client connects and with which key: local defaults, no proxy in between, and a quick word if nobody answers.

Knows URLs, environment variables and one health request. Knows nothing of sessions and models.
"""

import ipaddress
import logging
import os
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import tinker
from tinker_local.types import InvalidRequestError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_API_KEY = "tml-local"

CONNECT_ATTEMPTS = 3
"""A refused connection is tried this often, for a server that is just about to listen."""
RETRY_DELAY_S = 0.25
HEALTH_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL without trailing slash, and the API key that goes with it (kept out of the representation)."""

    base_url: str
    api_key: str = field(repr=False)


def resolve_endpoint(base_url: str | None, api_key: str | None) -> Endpoint:
    """The arguments, else $TINKER_BASE_URL and $TINKER_API_KEY, else the local defaults; empty counts as unset.

    Raises InvalidRequestError for a base URL that is not http or https with a host.
    """
    url = (base_url or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"base_url: must look like {DEFAULT_BASE_URL}, not {url!r}")
    return Endpoint(url, api_key or os.environ.get("TINKER_API_KEY") or DEFAULT_API_KEY)


def connect(base_url: str | None, api_key: str | None, *, check_server: bool) -> Endpoint:
    """`resolve_endpoint`; a loopback URL is also taken off the proxies and, if `check_server`, asked for its health.

    Raises tinker.APIConnectionError within about a second if a loopback URL has no server.
    """
    endpoint = resolve_endpoint(base_url, api_key)
    host = urlsplit(endpoint.base_url).hostname or ""
    if is_loopback(host):
        bypass_proxies(host)
        # Over https the SDK's own trust settings decide, which one plain request here would not reproduce.
        if check_server and endpoint.base_url.startswith("http://"):
            require_server(endpoint.base_url)
    return endpoint


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine: localhost, 127.0.0.0/8 or ::1. Nothing is looked up."""
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
    """Raise tinker.APIConnectionError unless something at `base_url` talks HTTP.

    Left alone, the SDK would try for five minutes before it says so. Whoever listens is enough: a server that loads
    (503), is busy (no answer in time) or has no health route is left to the SDK's own patience.
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
            message = f"what listens at {base_url} is no HTTP server ({error})"
            raise tinker.APIConnectionError(httpx.Request("GET", url), message) from error
        if status == 503:
            logger.warning("the server at %s is still loading; requests wait for it", base_url)
        return
    message = f"no tinker-local server answers at {base_url}; start one with: tinker-local serve --model NAME"
    raise tinker.APIConnectionError(httpx.Request("GET", url), message)
