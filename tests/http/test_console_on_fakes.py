"""The console as files: who gets them, with which headers, and what their text may not contain."""

import re
from pathlib import Path

import pytest
from tinker_local import client
from tinker_local.backend.hosting import console_routes
from tinker_local.backend.hosting.console_routes import console_files

from tests.conftest import Server
from tests.http.conftest import StartApi

KEY = "tml-correct-horse-battery"
PATHS = ["/", *(f"/console/{name}" for name in console_files() if name != "index.html")]


def directives(policy: str) -> dict[str, list[str]]:
    return {name: values for name, *values in (part.split() for part in policy.split(";"))}


@pytest.mark.parametrize("path", PATHS)
async def test_the_page_needs_no_key_and_its_data_do_on_fakes(start_api: StartApi, path: str) -> None:
    api = await start_api(api_keys=[KEY])
    answer = await api.http.get(path)
    assert answer.status_code == 200
    assert len(answer.content) > 100
    for data in ("api/v1/status", "api/v1/training_runs", "api/v1/checkpoints", "v1/models", "console", "docs"):
        assert (await api.http.get(f"/{data}")).status_code == 401
        assert (await api.http.get(f"/console/../{data}")).status_code in (401, 404)
    assert (await api.http.get("/api/v1/status", headers={"X-API-Key": KEY})).status_code == 200


async def test_files_have_exact_types_a_strict_policy_and_a_tag_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    kinds = {"": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
    for path in PATHS:
        answer = await api.http.get(path)
        suffix = Path(path).suffix.removeprefix(".")
        assert answer.headers["content-type"] == kinds.get(suffix, "image/svg+xml")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        assert directives(answer.headers["content-security-policy"]) == {
            "default-src": ["'none'"],
            "script-src": ["'self'"],
            "style-src": ["'self'"],
            "img-src": ["'self'", "data:", "blob:"],
            "connect-src": ["'self'"],
            "base-uri": ["'none'"],
            "form-action": ["'none'"],
            "frame-ancestors": ["'none'"],
        }
        tag = answer.headers["etag"]
        for given, status in ((tag, 304), (f'"other", W/{tag}', 304), ('"other"', 200)):
            again = await api.http.get(path, headers={"If-None-Match": given})
            assert again.status_code == status
            assert len(again.content) == (0 if status == 304 else len(answer.content))
    assert (await api.http.head("/")).status_code == 200
    for missing in ("nothing.js", "index.html", "..%2Fkeys.py", "%2e%2e/hosting/keys.py"):
        assert (await api.http.get(f"/console/{missing}")).status_code == 404


async def test_the_page_is_there_while_models_load_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api()
    monkeypatch.setattr(api.backend, "ready", False)
    assert (await api.http.get("/")).status_code == 200
    assert (await api.http.get("/console/main.js")).status_code == 200
    assert (await api.get("status")).status_code == 503


async def test_without_keys_other_hosts_get_no_page_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    assert (await api.http.get("/", headers={"Host": "rebound.example"})).status_code == 403


async def test_there_are_no_pages_that_load_scripts_of_other_hosts_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert (await api.http.get(path)).status_code == 404


def test_console_urls_of_a_client_lead_to_its_server_and_session_on_fakes(fake_server: Server) -> None:
    service = client.ServiceClient(base_url=fake_server.url)
    assert service.get_console_url() == f"{fake_server.url}/"
    session = service.holder.get_session_id()
    assert service.get_console_url() == f"{fake_server.url}/#session={session}"
    run = service.create_lora_training_client("fake/bigram", rank=2).result()
    assert service.get_console_url(run) == f"{fake_server.url}/#run={str(run.model_id).replace(':', '%3A')}"


def sources() -> dict[str, str]:
    return {name: file.content.decode() for name, file in console_files().items()}


def test_every_file_that_the_page_and_its_modules_name_is_there_and_is_used_on_fakes() -> None:
    found = set()
    for name, text in sources().items():
        if name.endswith(".js"):
            found |= set(re.findall(r'^(?:import|export) .*from "\./([^"]+)";$', text, re.MULTILINE))
    page = sources()["index.html"]
    named = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert all(one.startswith("console/") for one in named)
    found |= {one.removeprefix("console/") for one in named}
    assert found == set(console_files()) - {"index.html"}
    assert {path.name for path in console_routes.FOLDER.iterdir()} == set(console_files())


DANGEROUS = (
    r"\.(inner|outer)HTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b"
    r"|\bFunction\(|set(Timeout|Interval)\(\s*[\"'`]|\bimport\(|\bsrcdoc\b|\bsetHTML|javascript:"
)
HANDLER = r"<[^>]*\s(on\w+|style)\s*="


def test_texts_of_the_server_cannot_become_markup_or_code_on_fakes() -> None:
    for name, text in sources().items():
        assert not re.search(DANGEROUS, text), name
        assert not re.search(r'setAttribute\(\s*["\'](on|style)', text), name
        for address in re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"]*", text):
            assert address == "http://www.w3.org/2000/svg", (name, address)
    page = sources()["index.html"]
    assert not re.search(HANDLER, page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert "<style" not in page
