"""What commands that talk to a running server share: its address, its key, and errors in one line."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0

F = TypeVar("F", bound=Callable[..., Any])


def server_options(command: F) -> F:
    """Add `--url`, which has the examples' name too, and `--api-key`."""
    key = click.option("--api-key", envvar="TINKER_API_KEY", default="tml-local", help="Its key, or TINKER_API_KEY.")
    url = click.option(
        "--url",
        "--base-url",
        "url",
        envvar="TINKER_BASE_URL",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="The server, or the environment's TINKER_BASE_URL.",
    )
    return url(key(command))


def open_client(url: str, headers: dict[str, str], *, read_seconds: float | None = None) -> "httpx.Client":
    """A client of the server at `url`; click.BadParameter if that is not a URL. `read_seconds` None: any time."""
    import httpx
    from tinker_local.types.base_urls import end_of_openai

    timeout = httpx.Timeout(read_seconds, connect=CONNECT_SECONDS)
    try:
        if httpx.URL(url).scheme not in ("http", "https"):
            raise ValueError("it must begin with http:// or https://")
        if end := end_of_openai(url.rstrip("/")):
            raise ValueError(f"leave out {end}")
        return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        raise click.BadParameter(f"{url}: {error}", param_hint="--url") from None


def unreachable(http: "httpx.Client", error: Exception) -> str:
    return f"no server answers at {str(http.base_url).rstrip('/')} ({error}); start one with tinker-local serve"


def refusal(answer: "httpx.Response") -> str:
    """What an answer with an error says."""
    try:
        found = answer.json()
        return str(found["detail"] if "detail" in found else found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.request.url} answers {answer.status_code}; is it a tinker-local server?"
