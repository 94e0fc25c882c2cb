"""A key file that changes, is emptied, broken, deleted, or replaced, under a server that goes on."""

import logging
import os
import time
from pathlib import Path

import httpx
import pytest
from tinker_local.backend.hosting import key_file
from tinker_local.backend.hosting.key_file import GRACE_SECONDS, KeyFile
from tinker_local.backend.hosting.keys import Keys

from tests.http.conftest import StartApi

ALICE, BOB = "tml-alice-horse-battery", "tml-bob-horse-battery"


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class File:
    """A key file, its reader, and the time; `look` as the thread does, after `seconds`."""

    def __init__(self, folder: Path, text: str = f"alice {ALICE}\nbob {BOB}\n") -> None:
        self.path = folder / "keys"
        self.path.write_text(text)
        self.time = Time()
        self.reader = KeyFile(self.path, self.time)
        self.reader._watched = True  # by this

    def look(self, seconds: float = key_file.REREAD_SECONDS) -> None:
        self.time.now += seconds
        self.reader.look()

    def right(self) -> set[str]:
        keys = Keys(self.reader)
        return {name for name, key in (("alice", ALICE), ("bob", BOB)) if keys.caller(key) is not None}


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "# alice left\n"])
def test_an_empty_key_file_lets_in_no_key_on_fakes(file: File, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file.path.write_text(text)
    file.look()
    assert file.right() == {"alice", "bob"}  # it may be about to be written
    with caplog.at_level(logging.WARNING):
        file.look()
    assert file.right() == set()
    assert "0 keys, so no request is let in" in caplog.text
    assert file.reader.problem is None  # it says so
    file.path.write_text(f"bob {BOB}\n")
    file.look()
    assert file.right() == {"bob"}


def test_a_wrong_line_is_left_out_and_the_others_count_on_fakes(file: File, caplog: pytest.LogCaptureFixture) -> None:
    shared = file.reader.owners()
    assert shared.shares("bob")
    for wrong in (b"carol no-key\n", b"\xff\xfe\n", b"carol tml-carol-horse extra words\n", f"alice {BOB}\n".encode()):
        file.path.write_bytes(f"bob {BOB}\n".encode() + wrong)
        for _ in range(2):
            file.look()
        assert file.right() == {"bob"}
        assert "is left out: key 2" in caplog.text
        assert BOB not in caplog.text
        assert "carol-horse" not in caplog.text
        assert file.reader.owners().shares("bob")  # a mistake in a line gives no owner more
        caplog.clear()
        file.path.write_text(f"alice {ALICE}\nbob {BOB}\n")
        file.look()
        assert file.right() == {"alice", "bob"}


def test_many_wrong_lines_are_told_in_few_on_fakes(file: File, caplog: pytest.LogCaptureFixture) -> None:
    file.path.write_text("wrong\n" * 1000)
    for _ in range(5):
        file.look()
    assert file.right() == set()
    assert sum("left out" in record.message for record in caplog.records) == key_file.TOLD_LINES + 1
    assert "997 more lines" in caplog.text


def test_a_file_that_is_being_written_locks_no_one_out_on_fakes(file: File) -> None:
    whole = f"alice {ALICE}\nbob {BOB}\n"
    for part in ("", whole[:10], f"alice {ALICE}\nbo", whole):
        file.path.write_text(part)
        file.look()
        assert file.right() == {"alice", "bob"}


def test_a_missing_key_file_lets_in_no_key_after_a_second_and_says_so_on_fakes(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.look()
    kept = file.path.rename(file.path.with_name("elsewhere"))
    file.look(0.5 * GRACE_SECONDS)
    assert file.right() == {"alice", "bob"}
    assert "cannot be read: No such file or directory; from 1 s on" in caplog.text
    file.time.now += 0.5 * GRACE_SECONDS
    assert file.right() == set()
    assert "No such file or directory" in str(file.reader.problem)
    assert str(file.path) not in str(file.reader.problem)  # which strangers may read
    for _ in range(100):
        file.look()
    assert sum("cannot be read" in record.message for record in caplog.records) == 1
    kept.rename(file.path)
    file.look()
    assert file.right() == {"alice", "bob"}
    assert file.reader.problem is None
    assert "can be read again" in caplog.text
    # A folder in its place, as a volume that is gone leaves it, and a key file that has lost a key meanwhile.
    file.path.unlink()
    file.path.mkdir()
    file.look(GRACE_SECONDS)
    assert file.right() == set()
    file.path.rmdir()
    file.path.write_text(f"bob {BOB}\n")
    file.look()
    assert file.right() == {"bob"}


def test_editors_that_replace_the_file_and_links_of_secrets_that_swap_lock_no_one_out_on_fakes(tmp_path: Path) -> None:
    """vim renames the file and writes it anew; Kubernetes has keys -> ..data/keys, and ..data -> another folder."""
    file = File(tmp_path)
    file.path.rename(tmp_path / "keys~")
    file.look()
    assert file.right() == {"alice", "bob"}
    file.path.write_text(f"bob {BOB}\n")
    file.look()
    assert file.right() == {"bob"}
    for name, text in (("..1", f"alice {ALICE}\n"), ("..2", f"alice {ALICE}\n"), ("..3", f"bob {BOB}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "link").symlink_to("..data/keys")
    linked = KeyFile(tmp_path / "link", file.time)
    file.reader, file.reader._watched, linked._watched = linked, True, True
    for name, right in (("..2", {"alice"}), ("..3", {"bob"}), ("..1", {"alice"})):
        (tmp_path / "..tmp").symlink_to(name)
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        file.look()
        assert file.right() == right


def test_a_change_counts_that_leaves_size_and_times_as_they_were_on_fakes(tmp_path: Path) -> None:
    file = File(tmp_path, f"alice {ALICE}\n")
    before = file.path.stat()
    file.path.write_text(f"alice {ALICE[:-1]}X\n")
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    file.look()
    assert file.right() == set()


async def test_while_the_key_file_is_missing_requests_are_401_with_the_reason_and_the_server_is_not_ready_on_fakes(
    start_api: StartApi, file: File
) -> None:
    api = await start_api(api_keys=file.reader)

    async def status(key: str = ALICE) -> httpx.Response:
        return await api.http.get("/api/v1/sessions", headers={"X-API-Key": key})

    assert (await status()).status_code == 200
    assert (await api.get("healthz")).status_code == 200
    content = file.path.read_text()
    file.path.unlink()
    file.look(GRACE_SECONDS)
    for _ in range(30):  # of clients that try again: these are not wrong keys, and none waits
        answer = await status()
    assert answer.status_code == 401
    assert "the key file cannot be read" in answer.json()["detail"]
    health = await api.get("healthz")
    assert health.status_code == 503
    assert "the key file cannot be read" in health.json()["detail"]
    assert (await api.get("livez")).status_code == 200
    file.path.write_text(content)
    file.look()
    assert (await status()).status_code == 200
    assert (await api.get("healthz")).status_code == 200


def eventually_right(reader: KeyFile, key: str, *, right: bool) -> None:
    for _ in range(6000):
        if (Keys(reader).caller(key) is not None) == right:
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


def test_a_watched_file_is_read_again_without_a_request_and_no_longer_than_it_is_used_on_fakes(tmp_path: Path) -> None:
    file = File(tmp_path)
    reader = KeyFile(file.path)
    reader.watch()
    file.path.write_text("")
    eventually_right(reader, ALICE, right=False)
    file.path.write_text(f"alice {ALICE}\n")
    eventually_right(reader, ALICE, right=True)
    file.path.unlink()
    eventually_right(reader, ALICE, right=False)
    assert reader.problem is not None


def test_what_is_not_a_file_is_read_once_on_fakes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    os.write(write, f"alice {ALICE}\n".encode())
    os.close(write)
    reader = KeyFile(Path(f"/dev/fd/{read}"), clock := Time())
    reader.watch()
    assert "the keys stay as they are" in caplog.text
    clock.now += 100
    assert Keys(reader).caller(ALICE) is not None
    os.close(read)
