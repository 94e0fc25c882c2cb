"""Where the clients connect, with which key, and how quickly they report that no server answers."""

import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import tinker
import tinker_local.client as local
from tinker_local.client import endpoint
from tinker_local.client.endpoint import resolve_endpoint
from tinker_local.types import InvalidRequestError

MAKERS = [local.ServiceClient, local.RestClient, local.AdminClient]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_url_and_key_come_from_the_argument_then_the_environment_then_local_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = resolve_endpoint(None, None)
    assert (default.base_url, default.api_key) == ("http://127.0.0.1:8000", "tml-local")
    monkeypatch.setenv("TINKER_BASE_URL", "http://10.0.0.5:9000/prefix/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    from_environment = resolve_endpoint(None, None)
    assert (from_environment.base_url, from_environment.api_key) == ("http://10.0.0.5:9000/prefix", "tml-env")
    given = resolve_endpoint("http://127.0.0.1:1/", "tml-arg")
    assert (given.base_url, given.api_key) == ("http://127.0.0.1:1", "tml-arg")
    monkeypatch.setenv("TINKER_BASE_URL", "")
    assert resolve_endpoint("", "").base_url == "http://127.0.0.1:8000"


def test_the_key_is_not_in_the_representation() -> None:
    assert "tml-secret" not in repr(resolve_endpoint(None, "tml-secret"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "ftp://127.0.0.1", "http://", "8000"])
def test_a_base_url_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="base_url") as error:
        local.ServiceClient(base_url=url)
    assert url.rstrip("/") in str(error.value)


@pytest.mark.parametrize("path", ["/v1", "/api/v1", "/v1/", "/oai/api/v1"])
def test_a_base_url_of_openai_s_clients_is_refused_with_what_to_leave_out(path: str) -> None:
    for before in ("", "/team"):
        with pytest.raises(InvalidRequestError, match=f"base_url: leave out {path.rstrip('/')} of"):
            local.ServiceClient(base_url=f"http://127.0.0.1:8000{before}{path}")


@pytest.mark.parametrize("make", MAKERS)
def test_a_missing_server_is_reported_without_trying_again(make: type) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    began = time.monotonic()
    with pytest.raises(tinker.APIConnectionError, match="tinker-local serve --model") as error:
        make(base_url=url)
    assert time.monotonic() - began < 30  # the SDK would try for minutes
    assert url in str(error.value)


def test_a_listener_that_does_not_talk_http_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_nonsense() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer_nonsense, daemon=True).start()
        with pytest.raises(tinker.APIConnectionError, match="does not speak HTTP"):
            local.ServiceClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_the_check_can_be_switched_off() -> None:
    local.ServiceClient(base_url=f"http://127.0.0.1:{unused_port()}", check_server=False)


def test_a_server_elsewhere_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(httpx, "get", lambda *args, **kwargs: asked.append(args))
    local.ServiceClient(base_url="http://192.0.2.1:8000")
    assert asked == []
    assert "NO_PROXY" not in os.environ


def test_a_fake_server_that_still_loads_is_waited_for(fake_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_server.health = 503
    local.ServiceClient(base_url=fake_server.url)
    assert fake_server.paths() == ["healthz"]
    assert "still loading" in caplog.text


def test_what_the_sdk_does_not_send_waits_for_a_server_that_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_served_names` and `log_metrics`."""
    monkeypatch.setattr(endpoint, "LOADING_DELAY_S", 0.0)
    loading = httpx.Response(503, json={"detail": "the server is loading its models"})
    answers = [loading, loading, httpx.Response(200, json={})]
    at = endpoint.Endpoint("http://127.0.0.1:1", "tml-local")
    assert endpoint.send(at, "GET", "tokenizers", lambda *_, **__: answers.pop(0)).status_code == 200
    assert answers == []
    monkeypatch.setattr(endpoint, "LOADING_S", 0.0)
    loading.request = httpx.Request("GET", at.base_url)
    with pytest.raises(tinker.APIStatusError, match="the server is loading its models"):
        endpoint.send(at, "GET", "tokenizers", lambda *_, **__: loading)


def test_a_fake_server_that_comes_up_late_is_found(fake_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real_get, attempts = httpx.get, []

    def refused_once(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        if len(attempts) == 1:
            raise httpx.ConnectError("refused")
        return real_get(*args, **kwargs)

    monkeypatch.setattr(httpx, "get", refused_once)
    local.ServiceClient(base_url=fake_server.url)
    assert len(attempts) == 2


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request that goes through the proxy fails."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port()}")


@pytest.mark.usefixtures("dead_proxy")
def test_no_request_to_a_fake_server_on_loopback_goes_through_a_proxy(fake_server: Any) -> None:
    with local.ServiceClient(base_url=fake_server.url) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        sampled = sampler.sample(local.ModelInput.from_ints([1]), 1, local.SamplingParams(max_tokens=2)).result()
    assert sampled.sequences[0].tokens == [7, 8]


@pytest.mark.parametrize(("upper", "lower"), [("", ""), ("a.example,b", ""), ("", "c.example"), ("a, b", "b ,c")])
def test_no_proxy_keeps_what_it_held_and_gains_loopback(
    upper: str, lower: str, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", upper)
    monkeypatch.setenv("no_proxy", lower)
    for _ in range(2):
        local.ServiceClient(base_url=fake_server.url.replace("127.0.0.1", "127.0.0.2"), check_server=False)
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    held = {entry.strip() for entry in f"{upper},{lower}".split(",") if entry.strip()}
    entries = os.environ["NO_PROXY"].split(",")
    assert set(entries) == held | {"127.0.0.1", "localhost", "127.0.0.2"}
    assert len(entries) == len(set(entries))


def test_backend_of_a_fake_is_served_on_loopback_with_its_own_key(
    fake_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-hosted-service")
    monkeypatch.setenv("TINKER_BASE_URL", "http://192.0.2.1")
    with local.ServiceClient(backend=fake_backend) as service:
        service.create_sampling_client(base_model="tiny")
        assert fake_backend.bound_to == ("127.0.0.1", 0)
        assert not fake_backend.server.closed
    server = fake_backend.server
    assert {headers["x-api-key"] for headers in server.headers} == {server.api_key}
    assert server.paths()[-1] == "sessions/s1/finish"  # answered before the server stopped
    assert server.closed == 1


async def test_closing_a_client_of_a_fake_backend_can_be_awaited_and_repeated(fake_backend: Any) -> None:
    service = local.ServiceClient(backend=fake_backend)
    await service.close("success")
    await service.close("errored")
    assert fake_backend.server.closed == 1


def test_the_server_of_a_fake_backend_stops_even_if_finishing_fails(
    fake_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = local.ServiceClient(backend=fake_backend)
    failed = tinker.lib.public_interfaces.api_future.AwaitableConcurrentFuture(_failed_future())
    monkeypatch.setattr(tinker.ServiceClient, "close", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match="finish failed"):
        service.close("success").result(timeout=60)
    assert fake_backend.server.closed == 1


def _failed_future() -> Any:
    future: Future[None] = Future()
    future.set_exception(RuntimeError("finish failed"))
    return future


@pytest.mark.parametrize("name", ["base_url", "api_key"])
def test_backend_excludes_url_and_key_by_name(name: str, fake_backend: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        local.ServiceClient(backend=fake_backend, **{name: "http://127.0.0.1:1"})
    assert fake_backend.bound_to is None
