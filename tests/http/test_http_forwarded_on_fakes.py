"""Whose address a request has: that of its connection, or what proxies report that the operator named."""

import logging
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.hosting import keys
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.forwarded import ForwardedAddress, parse_proxy
from tinker_local.backend.hosting.request_logs import Logs
from tinker_local.backend.hosting.server import LoopbackServer

from tests.http.conftest import Api


def watch_wrong_keys(monkeypatch: pytest.MonkeyPatch, counted: list[str]) -> None:
    """Add the address of each to `counted`; none waits."""

    def delay(self: keys.WrongKeys, address: str) -> float:
        counted.append(address)
        return 0.0

    monkeypatch.setattr(keys.WrongKeys, "delay", delay)


async def no_app(*_: Any) -> None:
    raise AssertionError


def behind(*proxies: str) -> ForwardedAddress:
    return ForwardedAddress(no_app, [parse_proxy(each) for each in proxies])


@pytest.mark.parametrize(
    ("peer", "lines", "address"),
    [
        pytest.param("127.0.0.1", ["198.51.100.7"], "198.51.100.7", id="one-proxy"),
        pytest.param("127.0.0.1", ["6.6.6.6, 198.51.100.7"], "198.51.100.7", id="the-client-sent-another"),
        pytest.param("127.0.0.1", ["6.6.6.6", "198.51.100.7"], "198.51.100.7", id="in-another-line"),
        pytest.param("127.0.0.1", ["6.6.6.6,198.51.100.7, 10.1.2.3,10.9.9.9 "], "198.51.100.7", id="three-proxies"),
        pytest.param("127.0.0.1", ["127.0.0.1, 198.51.100.7"], "198.51.100.7", id="the-client-says-it-is-a-proxy"),
        pytest.param("127.0.0.1", ["10.1.2.3, 10.1.2.4"], "10.1.2.3", id="a-proxy-is-the-client"),
        pytest.param("198.51.100.7", ["6.6.6.6"], "198.51.100.7", id="not-a-proxy"),
        pytest.param("198.51.100.7", ["6.6.6.6, 127.0.0.1"], "198.51.100.7", id="not-a-proxy-that-names-one"),
        pytest.param("127.0.0.1", ["198.51.100.7:5123"], "198.51.100.7", id="with-a-port"),
        pytest.param("127.0.0.1", ["2001:DB8:0::7"], "2001:db8::7", id="IPv6"),
        pytest.param("127.0.0.1", ["6.6.6.6, [2001:db8::7]:443"], "2001:db8::7", id="IPv6-with-a-port"),
        pytest.param("127.0.0.1", ["[2001:db8::7]"], "2001:db8::7", id="IPv6-in-brackets"),
        pytest.param("::ffff:127.0.0.1", ["::ffff:198.51.100.7"], "198.51.100.7", id="IPv4-in-IPv6"),
        pytest.param("fd00::5", ["6.6.6.6, 2001:db8::7, fd00::6"], "2001:db8::7", id="proxies-of-IPv6"),
        pytest.param("127.0.0.1", ["fe80::1%eth0\tforged"], "fe80::1", id="an-interface"),
        pytest.param("127.0.0.1", ["6.6.6.6, unknown"], "127.0.0.1", id="unknown"),
        pytest.param("127.0.0.1", ["6.6.6.6, unknown, 10.1.2.3"], "10.1.2.3", id="unknown-before-a-proxy"),
        pytest.param("127.0.0.1", ["6.6.6.6, "], "127.0.0.1", id="an-empty-end"),
        pytest.param("127.0.0.1", [""], "127.0.0.1", id="empty"),
        pytest.param("127.0.0.1", ["1.2.3.4.5"], "127.0.0.1", id="too-many-parts"),
        pytest.param("127.0.0.1", ["198.51.100.7:http"], "127.0.0.1", id="a-port-that-is-none"),
        pytest.param("127.0.0.1", ["[2001:db8::7]x"], "127.0.0.1", id="text-after-brackets"),
        pytest.param("a socket", ["198.51.100.7"], "a socket", id="not-an-address"),
    ],
)
def test_the_address_is_the_last_that_is_no_proxys_on_fakes(peer: str, lines: list[str], address: str) -> None:
    assert behind("127.0.0.1", "10.0.0.0/8", "fd00::/8").client(peer, lines) == address


def test_without_named_proxies_the_header_means_nothing_and_is_warned_of_once_on_fakes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = behind()
    with caplog.at_level(logging.WARNING):
        for peer in ("127.0.0.1", "127.0.0.1", "10.1.2.3", "::1"):
            assert alone.client(peer, ["198.51.100.7"]) == peer
    assert len(caplog.records) == 1
    assert "--trusted-proxy" in caplog.text


def test_a_proxy_is_an_address_or_a_network_and_not_all_there_are_on_fakes() -> None:
    assert str(parse_proxy("::ffff:10.0.0.0/104")) == "10.0.0.0/8"
    for wrong in ("proxy.example", "10.0.0.1/8", "0.0.0.0/0", "::/0", "*", "127.0.0.1:80"):
        with pytest.raises(ValueError, match=wrong.replace("*", r"\*")):
            parse_proxy(wrong)
        outcome = CliRunner().invoke(main, ["serve", "--fake", "--model", "a/b", "--trusted-proxy", wrong])
        assert outcome.exit_code == 2
        assert "--trusted-proxy" in outcome.output


async def test_logs_and_the_limit_of_wrong_keys_have_the_address_of_the_client_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = []
    counted: list[str] = []
    watch_wrong_keys(monkeypatch, counted)
    key = "tml-correct-horse-battery"
    app = create_app(
        api.backend, api_keys=[key], logs=Logs([lines.append], [lines.append]), proxies=[parse_proxy("10.0.0.1")]
    )
    for peer, address in (("10.0.0.1", "198.51.100.7"), ("10.0.0.2", "10.0.0.2")):
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for given, status in (("tml-wrong-wrong", 401), (key, 200)):
                headers = {"X-API-Key": given, "X-Forwarded-For": "6.6.6.6, 198.51.100.7"}
                answer = await http.post("/api/v1/create_session", json={}, headers=headers)
                assert answer.status_code == status
        assert {line["address"] for line in lines} == {address}
        assert counted == [address]
        assert len(lines) == 3  # two requests, and a session that was created
        lines.clear()
        counted.clear()


def test_a_program_of_this_machine_is_not_believed_to_be_a_proxy_on_fakes(
    loopback_server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    watch_wrong_keys(monkeypatch, counted)
    headers = {"X-API-Key": "tml-wrong-wrong", "X-Forwarded-For": "198.51.100.7"}
    assert httpx.get(f"{loopback_server.url}/api/v1/sessions", headers=headers, trust_env=False).status_code == 401
    assert counted == ["127.0.0.1"]
