"""A web site on this machine that stands for one in the public network."""

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

PUBLIC = "93.184.216.34"
"""The address that its names are to have."""


class Site:
    """A web site on this machine that is asked as if it had a public address. `hosts`: the names it was asked by."""

    def __init__(self) -> None:
        self.pages: dict[str, Callable[[Any], None]] = {}
        self.hosts: list[str] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.hosts.append(self.headers["Host"])
                site.pages[self.path](self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def page(self, path: str, body: bytes = b"", status: int = 200, **headers: str) -> None:
        def answer(handler: Any) -> None:
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)

        self.pages[path] = answer


def public_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site, and httpx that asks it instead of `PUBLIC`; another address fails."""
    site = Site()

    class Redirected(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            assert request.url.host == PUBLIC, "another address was asked than was looked at"
            request.url = request.url.copy_with(host="127.0.0.1")
            return await super().handle_async_request(request)

    class Client(httpx.AsyncClient):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(transport=Redirected(), **kwargs)

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    yield site
    site.server.shutdown()
