"""Exports: what is saved, whose URLs fetch it, and until when."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from itsdangerous import URLSafeSerializer
from safetensors.numpy import load
from tinker_local.backend.control.sessions import now
from tinker_local.backend.options import OwnerQuota

from tests.http.conftest import Api, StartApi

FILES = {"adapter_config.json", "adapter_model.safetensors"}


async def export(api: Api, model: str, seq_id: int, name: str, **fields: Any) -> dict[str, Any]:
    body = {"model_id": model, "seq_id": seq_id, "path": name, "type": "save_weights_external", **fields}
    found: dict[str, Any] = await api.result(await api.submit("save_weights_external", body))
    return found


async def signed(api: Api, model: str, name: str, **headers: str) -> dict[str, str]:
    path = f"/api/v1/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"
    answer = await api.http.get(path, headers=headers)
    assert answer.status_code == 200, answer.text
    urls: dict[str, str] = answer.json()["urls"]
    return urls


async def fetch(api: Api, url: httpx.URL, send: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """GET `url`, with `send` for each part of the answer at the moment that it is sent."""
    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.4"},
        "method": "GET",
        "path": url.path,
        "query_string": url.query,
        "headers": [(b"host", b"localhost"), *headers],
        "scheme": "http",
        "server": ("localhost", 80),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    transport: Any = api.http._transport
    await transport.app(scope, receive, send)


async def test_export_is_fetched_without_a_key_and_equals_what_was_saved_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=["tml-secret"])
    api.http.headers["x-api-key"] = "tml-secret"
    model = await api.model()
    await api.gradient(model, 1)
    await api.result(await api.step(model, 2))
    saved = await export(api, model, 3, "a")
    assert saved["path"] == f"tinker://{model}/external_weights/a"
    await api.save(model, 4, "a")
    urls = await signed(api, model, "a")
    assert urls.keys() == FILES
    async with httpx.AsyncClient(transport=api.http._transport) as stranger:
        assert (await stranger.get("http://localhost/api/v1/training_runs")).status_code == 401
        answers = {file: await stranger.get(url) for file, url in urls.items()}
        assert {answer.status_code for answer in answers.values()} == {200}
        part = await stranger.get(urls["adapter_model.safetensors"], headers={"Range": "bytes=8-15"})
        head = await stranger.head(urls["adapter_model.safetensors"])
    weights = answers["adapter_model.safetensors"].content
    assert int(answers["adapter_model.safetensors"].headers["content-length"]) == len(weights)
    assert saved["size_bytes"] == sum(len(answer.content) for answer in answers.values())
    assert (part.status_code, part.content) == (206, weights[8:16])
    assert (head.status_code, int(head.headers["content-length"]), head.content) == (200, len(weights), b"")
    assert answers["adapter_config.json"].json()["r"] == 4
    trained = api.trainer.capture(model, optimizer=False).tensors
    found = load(weights)
    assert found.keys() == trained.keys()
    assert all((found[name] == trained[name]).all() for name in trained)


async def test_file_is_streamed_and_never_whole_in_memory_on_fakes(api: Api) -> None:
    model = await api.model()
    await export(api, model, 1, "a")
    url = httpx.URL((await signed(api, model, "a"))["adapter_model.safetensors"])
    (weights,) = (api.backend.options.data_dir / "checkpoints").rglob("adapter_model.safetensors")
    size = 64 * 2**20
    with weights.open("r+b") as file:
        file.truncate(size)
    parts = []

    async def send(message: dict[str, Any]) -> None:
        parts.append(len(message.get("body", b"")))

    await fetch(api, url, send)
    assert sum(parts) == size
    assert max(parts) <= 2**20


async def test_export_that_is_deleted_while_a_download_begins_is_404_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    await export(api, model, 1, "a")
    url = (await signed(api, model, "a"))["adapter_model.safetensors"]
    looked_up, loop = api.backend.store.get_checkpoint, asyncio.get_running_loop()

    def deleted_at_once(*name: Any) -> Any:
        """The record; it and its folder are deleted before the caller can use it."""
        record = looked_up(*name)
        assert record is not None
        monkeypatch.setattr(api.backend.store, "get_checkpoint", looked_up)
        deletion = api.backend.checkpoints.delete(record.tinker_path)
        asyncio.run_coroutine_threadsafe(deletion, loop).result(10)
        return record

    monkeypatch.setattr(api.backend.store, "get_checkpoint", deleted_at_once)
    answer = await api.http.get(url)
    assert answer.status_code == 404
    assert "tinker_path: there is no checkpoint" in answer.json()["detail"]
    assert api.backend.store.get_checkpoint == looked_up


@pytest.mark.parametrize("headers", [[], [(b"range", b"bytes=8-")]])
async def test_download_goes_on_to_its_end_if_the_export_is_deleted_on_fakes(
    api: Api, headers: list[tuple[bytes, bytes]]
) -> None:
    model = await api.model()
    await export(api, model, 1, "a")
    url = httpx.URL((await signed(api, model, "a"))["adapter_model.safetensors"])
    folder = api.backend.options.data_dir / "checkpoints"
    (weights,) = folder.rglob("adapter_model.safetensors")
    whole = weights.read_bytes()
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        if not sent:  # the file is not open yet
            path = f"training_runs/{model}/checkpoints/external_weights/a"
            assert (await api.delete(path)).status_code == 204
            assert (await api.http.get(url)).status_code == 404
        sent.append(message)

    await fetch(api, url, send, headers)
    received = b"".join(message.get("body", b"") for message in sent)
    assert received == (whole[8:] if headers else whole)
    await api.until(lambda: not list(folder.rglob("adapter_model.safetensors")))


async def test_a_deleted_export_counts_for_its_owner_while_a_download_of_it_is_not_read_on_fakes(api: Api) -> None:
    model = await api.model()
    before = await stored(api)
    await export(api, model, 1, "a")
    size = await stored(api) - before
    url = httpx.URL((await signed(api, model, "a"))["adapter_model.safetensors"])
    begun, read = asyncio.Event(), asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        begun.set()
        await read.wait()

    download = asyncio.create_task(fetch(api, url, send))
    await begun.wait()
    api.backend.quotas._given = (OwnerQuota("local", (("storage_bytes", before + size + size // 2),)),)
    assert (await api.delete(f"training_runs/{model}/checkpoints/external_weights/a")).status_code == 204
    assert await stored(api) == before + size > before
    body = {"model_id": model, "seq_id": 2, "path": "b", "type": "save_weights_external"}
    failure = await api.failure(await api.submit("save_weights_external", body))
    assert failure.startswith("user: storage: the checkpoints of the owner 'local' take ")
    assert "MiB are of deleted ones that are still being downloaded or read" in failure
    read.set()
    await download
    await api.until(lambda: api.backend.store.quota.used().get("local", 0) == before)
    await export(api, model, 3, "b")


async def stored(api: Api) -> float:
    (found,) = (await api.get("usage")).json()["owners"]
    return float(found["used"]["storage_bytes"])


async def test_exports_are_listed_and_deleted_and_live_as_long_as_they_were_given_on_fakes(api: Api) -> None:
    model = await api.model()
    await export(api, model, 1, "a", ttl_seconds=3600)
    for listing in (f"training_runs/{model}/checkpoints", "checkpoints"):
        (found,) = (await api.get(listing)).json()["checkpoints"]
        assert (found["checkpoint_id"], found["checkpoint_type"]) == ("external_weights/a", "external")
        assert found["tinker_path"] == f"tinker://{model}/external_weights/a"
        assert found["size_bytes"] > 0
        assert found["expires_at"]
    answer = await api.get(f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls")
    assert answer.json()["expires"] <= found["expires_at"]  # no URL that outlives what it is of
    urls = answer.json()["urls"]
    assert (await api.delete(f"training_runs/{model}/checkpoints/external_weights/a")).status_code == 204
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert not list((api.backend.options.data_dir / "checkpoints").rglob("*.safetensors"))
    for url in urls.values():
        assert (await api.http.get(url)).status_code == 404
    await export(api, model, 2, "a")
    for url in urls.values():  # of the one that was deleted
        assert (await api.http.get(url)).status_code == 404
    for url in (await signed(api, model, "a")).values():
        assert (await api.http.get(url)).status_code == 200


def later(token: str) -> str:
    """The token with another time of expiry and the old signature."""
    tokens = URLSafeSerializer("not the server's")
    payload, _, signature = token.rpartition(".")
    expires, *what = tokens.load_payload(payload.encode())
    return f"{tokens.dump_payload([expires + 1, *what]).decode()}.{signature}"


async def test_forged_or_expired_url_is_403_on_fakes(start_api: StartApi) -> None:
    late = timedelta()
    api = await start_api(clock=lambda: now() + late)
    model = await api.model()
    await export(api, model, 1, "a")
    await export(api, model, 2, "b")
    url = (await signed(api, model, "a"))["adapter_config.json"]
    query = dict(httpx.URL(url).params)
    forged = [
        str(httpx.URL(url).copy_merge_params({**query, name: value}))
        for name, value in (
            ("token", "0" * 64),
            ("token", ""),
            ("token", "ä"),
            ("token", query["token"][:-1]),
            ("token", later(query["token"])),
            ("token", query["token"].partition(".")[0]),
            ("version", "0"),
        )
    ]
    forged += [
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "checkpoint.json"),
        url.replace("/a/", "/b/"),
        url.replace("adapter_config.json", "..%2F..%2F..%2Fsigning.key"),
        url.replace("/a/", "/%2E%2E/"),
        url.replace("/a/", "/..%2Fb/"),
    ]
    for bad in forged:
        answer = await api.http.get(bad)
        assert answer.status_code in (403, 404), bad
        assert answer.status_code == 403 or "%2F" in bad or "%2E" in bad, bad  # those match no route
        assert answer.json()["detail"]
    assert (await api.http.get(url.partition("?")[0])).status_code == 400
    assert (await api.http.get(url)).status_code == 200
    late = timedelta(seconds=3601)
    answer = await api.http.get(url)
    assert answer.status_code == 403
    assert "expired" in answer.json()["detail"]


async def test_urls_name_the_server_as_the_client_reached_it_on_fakes(start_api: StartApi) -> None:
    api = await start_api(api_keys=["tml-secret"])
    api.http.headers["x-api-key"] = "tml-secret"
    model = await api.model()
    await export(api, model, 1, "a")
    proxied = {
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "ai.example:8443, inner",
        "X-Forwarded-Prefix": "/a/b/",
    }
    for headers, root in (
        ({}, "http://localhost/"),
        ({"Host": "192.168.1.7:8000"}, "http://192.168.1.7:8000/"),
        ({"Host": "[::1]:8000"}, "http://[::1]:8000/"),
        (proxied, "https://ai.example:8443/a/b/"),
    ):
        for url in (await signed(api, model, "a", **headers)).values():
            assert url.startswith(f"{root}api/v1/external_weights/")
            parts = urlsplit(url)
            assert (await api.http.get(f"/api/{parts.path.partition('/api/')[2]}?{parts.query}")).status_code == 200
    path = f"/api/v1/training_runs/{model}/checkpoints/external_weights/a/external_weights_urls"
    for name, value in (("X-Forwarded-Host", "a b/c"), ("X-Forwarded-Proto", "file"), ("X-Forwarded-Prefix", "//x?y")):
        answer = await api.http.get(path, headers={name: value})
        assert answer.status_code == 400
        assert name.rpartition("-")[2] in answer.json()["detail"]


async def test_urls_outlive_a_restart_and_their_secret_is_the_owners_alone_on_fakes(
    start_api: StartApi, tmp_path: Path
) -> None:
    api = await start_api()
    model = await api.model()
    await export(api, model, 1, "a")
    urls = await signed(api, model, "a")
    await api.backend.close()
    again = await start_api()
    for url in urls.values():
        assert (await again.http.get(url)).status_code == 200
    secret = again.backend.options.data_dir / "signing.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) == 32
    other = await start_api(data_dir=tmp_path / "other")
    for url in urls.values():
        assert (await other.http.get(url)).status_code == 403


async def test_what_cannot_be_exported_says_what_to_do_on_fakes(api: Api) -> None:
    model = await api.model()

    async def failure(seq_id: int, **fields: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": "a", **fields}
        return str(await api.failure(await api.submit("save_weights_external", body)))

    encrypted = await failure(1, age_encryption_recipients=["age1qqqq"])
    assert encrypted.startswith("user: age_encryption_recipients[0]: 'age1qqqq' is neither")
    assert "ttl_seconds: 3599" in await failure(2, ttl_seconds=3599)
    assert "path: '../a'" in await failure(3, path="../a")
    path = (await export(api, model, 4, "a"))["path"]
    repeated = await failure(5)
    assert "'a' exists already" in repeated
    assert repeated.endswith(
        f"choose another name, or delete it first: RestClient.delete_checkpoint_from_tinker_path({path!r})"
    )
    # What it is not: training state, a sampler, an export of another kind.
    session = await api.session()
    load_body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    answer = await api.post("load_weights", load_body)
    assert answer.status_code == 400
    assert "saved for download" in answer.json()["detail"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    answer = await api.post("create_sampling_session", sampler)
    assert answer.status_code == 400
    assert "save_weights_for_sampler" in answer.json()["detail"]
    await api.named(model, 6, "s")
    for name, status in (("external_weights/none", 404), ("sampler_weights/s", 400), ("weights/a", 400)):
        answer = await api.get(f"training_runs/{model}/checkpoints/{name}/external_weights_urls")
        assert answer.status_code == status
        assert answer.json()["detail"].startswith("tinker_path: ")
