"""What the client requires of a backend in the same process: to serve its HTTP app on a loopback port.

The SDK has no transport without a socket. An in-process backend is therefore reached through the same app that a remote
client uses. The backend package implements these protocols; the client never imports it.
"""

from typing import Protocol


class LoopbackServer(Protocol):
    """A server in a daemon thread of this process, which runs until it is closed."""

    @property
    def url(self) -> str:
        """Base URL with the bound port, e.g. http://127.0.0.1:43121."""
        ...

    @property
    def api_key(self) -> str:
        """The only key that this server accepts; it begins with `tml-`."""
        ...

    def close(self) -> None:
        """Stop serving and wait for the thread; also close the backend if it was started for this server."""
        ...


class LoopbackBackend(Protocol):
    """A backend that can serve its HTTP app from a thread."""

    def serve_in_thread(self, host: str = "127.0.0.1", port: int = 0) -> LoopbackServer:
        """Serve in a daemon thread with a random key; return when requests are answered. Port 0 picks a free port."""
        ...
