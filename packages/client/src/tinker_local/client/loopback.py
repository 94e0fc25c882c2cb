"""What the client asks of a backend in the same process: to serve its HTTP app on a loopback port.

The SDK has no transport without a socket, so an in-process backend is reached through the very app that a remote
client would use. The backend's own package fulfils these protocols; the client never imports it.
"""

from typing import Protocol


class LoopbackServer(Protocol):
    """A server that runs in a daemon thread of this process until it is closed."""

    @property
    def url(self) -> str:
        """Base URL with the port that was bound, e.g. http://127.0.0.1:43121."""
        ...

    @property
    def api_key(self) -> str:
        """The one key that this server accepts; begins with `tml-`."""
        ...

    def close(self) -> None:
        """Stop serving and wait for the thread to end; a backend that was started for this server is closed too."""
        ...


class LoopbackBackend(Protocol):
    """A backend that can serve its HTTP app from a thread."""

    def serve_in_thread(self, host: str = "127.0.0.1", port: int = 0) -> LoopbackServer:
        """Serve in a daemon thread, with a random key; returns when requests are answered. Port 0: any free one."""
        ...
