"""Listening sockets. Imports nothing but `socket`, for `tinker-local check`."""

import socket


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address is taken. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off; else every answer would wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


def url_of(listening: socket.socket) -> str:
    """The base URL behind a listening socket, for a client of this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # not an address that a client can connect to
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
