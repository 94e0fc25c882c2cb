"""Whose address a request has: that of the connection, or behind proxies that an option names, what they report."""

import ipaddress
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HEADER = "x-forwarded-for"


def parse_proxy(text: str) -> Network:
    """The address of a proxy, or the network of several; ValueError if it is neither, or is every address there is."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an address nor a network, such as 127.0.0.1 or 10.0.0.0/8") from None
    if not network.prefixlen:
        raise ValueError(f"{text!r} is every address: each client could then choose its own")
    begin = network.network_address
    if isinstance(begin, ipaddress.IPv6Address) and begin.ipv4_mapped is not None and network.prefixlen >= 96:
        return ipaddress.ip_network((begin.ipv4_mapped, network.prefixlen - 96))
    return network


class ForwardedAddress:
    """Gives each request the address of its client, which may be behind `proxies`.

    Each proxy appends the address of who connected to it to `X-Forwarded-For`, so the last entries are what proxies
    wrote, and the first ones what the client sent. From the right, the first address that belongs to
    none of `proxies` is the client's. Without `proxies`, and from any other address, the header means nothing.
    """

    def __init__(self, app: ASGIApp, proxies: Sequence[Network] = ()) -> None:
        self._app = app
        self._proxies = proxies
        self._told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (client := scope.get("client")) is not None:
            given = Headers(scope=scope).getlist(HEADER)
            if given and (found := self.client(client[0], given)) != client[0]:
                scope["client"] = (found, 0)
        await self._app(scope, receive, send)

    def client(self, peer: str, given: Sequence[str]) -> str:
        """The address of the client, by the connection's and the lines of the header."""
        address = peer
        for entry in reversed(",".join(given).split(",")):
            if not self._is_proxy(address):
                break
            if (found := _address(entry)) is None:
                break  # what stands there is no address: the proxy that wrote it is all that is known
            address = found
        if address == peer and not self._told and not self._is_proxy(peer):
            self._told = True
            log.warning(
                "a request from %s has X-Forwarded-For, which is ignored: name your proxy with --trusted-proxy, so "
                "that logs and the limit of wrong keys have the addresses of its clients (this is said once)",
                peer,
            )
        return address

    def _is_proxy(self, text: str) -> bool:
        if not self._proxies or (text := _address(text) or "") == "":
            return False
        address = ipaddress.ip_address(text)
        return any(address in network for network in self._proxies)


def _address(entry: str) -> str | None:
    """`ADDRESS`, `ADDRESS:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`, as an address; None if it is none of these."""
    text = entry.strip()
    if text.startswith("["):
        text, _, port = text[1:].partition("]")
        if port and not (port[0] == ":" and port[1:].isdecimal()):
            return None
    elif text.count(":") == 1:
        text, _, port = text.partition(":")
        if not port.isdecimal():
            return None
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or ipaddress.IPv6Address(parsed.packed)  # without an interface (`%eth0`)
    return str(parsed)
