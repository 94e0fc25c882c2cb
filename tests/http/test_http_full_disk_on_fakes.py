"""A disk without a free byte: what was acknowledged stays, errors say what to do, and deleting makes room."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinker_local.types import StorageFullError

from tests.http.conftest import Api

PROGRAM = Path(__file__).parent / "program_on_a_full_disk.py"
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def may_mount() -> bool:
    """Whether this user can mount a file system for one process."""
    try:
        done = subprocess.run([*MOUNTED, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not may_mount(), reason="mounting a small file system needs user namespaces")
def test_a_full_disk_is_freed_through_the_api_on_fakes(tmp_path: Path) -> None:
    command = 'mount -t tmpfs -o size=40m tmpfs "$1" && exec "$2" "$3" "$1"'
    arguments = ["sh", str(tmp_path), sys.executable, str(PROGRAM)]
    done = subprocess.run([*MOUNTED, command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["free"], said["free_again"]) == (0, 0)
    full = f"StorageFullError: the disk of {tmp_path}/data is full (0.0 MiB are free): delete checkpoints"
    for failed in ("save", "overwrite", "create_session"):
        assert said[failed].startswith(full)
    assert said["junk_left"] == []
    problem = "the disk of the data folder is full: nothing can be saved, so delete checkpoints or free space there"
    assert said["problems"] == [problem]
    assert said["health"] == {"status": "ok", "detail": problem}
    for works in ("step", "new_owner", "finish", "delete", "load"):
        assert said[works] == "worked", said[works]
    assert said["live"] == [said["first"]]
    assert "is gone: its session has ended (success)" in said["step_of_finished"]
    assert said["why_ended"] == "success"
    assert said["left"] == [said["path"]]
    assert said["expire"] == "worked"
    assert said["expires"]


async def test_a_session_whose_end_cannot_be_recorded_leaves_no_live_model_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageFullError("the disk of /data is full")

    session = await api.session()
    model = await api.model(session)
    with monkeypatch.context() as patched:
        patched.setattr(api.backend.store, "end_session", full)
        answer = await api.post(f"sessions/{session}/finish", {})
    assert (answer.status_code, answer.json()["detail"]) == (400, "the disk of /data is full")
    assert api.backend.runs.live(model) is None
    assert model not in api.trainer.adapters
    # Sent again, it is recorded.
    assert (await api.post(f"sessions/{session}/finish", {})).status_code == 204
    assert (await api.backend.sessions.record(session)).end_reason == "success"
