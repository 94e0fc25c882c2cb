"""Promise 16: folders of nameless sampler versions: immutable, the newest in shared memory, gone with the process."""

import asyncio
import fcntl
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_files import adapter_bytes, read_adapter, write_adapter
from tinker_local.backend.storage import VersionFolders
from tinker_local.backend.storage.versions import UNWRITTEN
from tinker_local.types import NotFoundError

from tests.storage.store_states import make_state, same_tensors

SIZE = adapter_bytes(make_state(0, optimizer=False))


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def holds(path: Path, seed: int) -> bool:
    state = make_state(seed, optimizer=False)
    return same_tensors(read_adapter(path, state.base_model, state.lora_config, optimizer=False), state)


async def add(versions: VersionFolders, name: str, state: AdapterState) -> Path:
    """Publish, and wait until the folder is there."""
    path = await versions.publish(name, state)
    versions.write(name)
    versions.flush()
    return path


def found(folder: Path, pattern: str) -> list[Path]:
    """What is in `folder`; a pattern that ends with a slash finds folders alone."""
    return [path for path in folder.glob(pattern) if path.is_dir() or not pattern.endswith("/")]


def in_memory(path: Path, memory: Path) -> bool:
    return path.resolve().is_relative_to(memory.resolve())


async def test_versions_are_on_disk_where_the_memory_cannot_be_written_to(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose /dev/shm is read-only, which stops root as well; a mode of this folder would not."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == memory and mode == os.W_OK))
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    path = await add(versions, "m:train:0/1", make_state(1, optimizer=False))
    assert holds(path, 1)
    assert not in_memory(path, memory)
    assert not found(memory, "*")
    versions.close()


async def test_versions_are_written_in_memory_and_removed(tmp_path: Path, memory: Path) -> None:
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    path = await add(versions, "m:train:0/1", make_state(1, optimizer=False))
    assert holds(path, 1)
    assert in_memory(path, memory)
    assert {file.name for file in path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    with pytest.raises(ValueError, match="exists"):
        await versions.publish("m:train:0/1", make_state(2))
    folder = path.resolve()
    versions.remove("m:train:0/1")
    versions.remove("m:train:0/1")
    assert not folder.exists()
    assert not path.is_symlink()
    with pytest.raises(NotFoundError, match="m:train:0/1"):
        versions.path("m:train:0/1")
    again = await add(versions, "m:train:0/1", make_state(2, optimizer=False))
    assert again != path, "a path must never be used twice"
    versions.close()


async def test_a_version_is_in_memory_until_its_folder_can_be_read(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def slow(folder: Path, state: AdapterState) -> None:
        assert may_write.wait(10)
        write_adapter(folder, state)

    monkeypatch.setattr("tinker_local.backend.storage.versions.write_adapter", slow)
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    state = make_state(1, optimizer=False)
    path = await versions.publish("v", state)
    versions.write("v")
    assert versions.path("v") == path
    assert versions.unwritten("v") is state
    assert not path.exists()
    # One that is dropped before it is written leaves nothing.
    gone = await versions.publish("gone", make_state(2, optimizer=False))
    versions.write("gone")
    removing = threading.Thread(target=versions.remove, args=("gone",))
    removing.start()
    removing.join(0.1)
    may_write.set()
    removing.join(10)
    versions.flush()
    assert versions.unwritten("v") is None
    assert holds(path, 1)
    assert not gone.exists()
    assert len(found(memory, "tinker-local-*/*/")) == 1
    with pytest.raises(NotFoundError, match="gone"):
        versions.unwritten("gone")
    versions.close()


async def test_a_folder_is_written_when_the_first_samples_are_over_or_somebody_waits(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.backend.storage.versions.WRITE_DELAY", 1.0)
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    path = await versions.publish("v", make_state(1, optimizer=False))
    versions.write("v")
    assert versions.unwritten("v") is not None
    writing = versions._versions["v"].writing
    assert writing is not None
    await asyncio.wait_for(asyncio.wrap_future(writing), 60)
    assert holds(path, 1), "it was written although nothing waited for it"
    monkeypatch.setattr("tinker_local.backend.storage.versions.WRITE_DELAY", 60.0)
    for number in range(UNWRITTEN):
        await versions.publish(f"v{number}", make_state(number, optimizer=False))
        versions.write(f"v{number}")
    start = time.monotonic()
    await versions.publish("more", make_state(9, optimizer=False))  # the memory is full, so the writer hurries
    versions.write("more")
    versions.flush()
    await versions.publish("last", make_state(8, optimizer=False))
    versions.write("last")
    versions.close()
    assert time.monotonic() - start < 50, "it waited for the delay"


async def test_a_version_that_cannot_be_written_stays_in_memory(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(folder: Path, state: AdapterState) -> None:
        (folder / "half").write_bytes(b"0")
        raise OSError("no space left on device")

    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    monkeypatch.setattr("tinker_local.backend.storage.versions.write_adapter", full)
    states = [make_state(seed, optimizer=False) for seed in range(UNWRITTEN + 1)]
    for number, state in enumerate(states):
        await add(versions, f"v{number}", state)
    assert [versions.unwritten(f"v{number}") for number in range(len(states))] == states
    assert "no space left" in caplog.text
    assert found(memory, "tinker-local-*/*/*") == []
    versions.remove("v0")
    versions.close()


@pytest.mark.parametrize("relieve", ["write", "remove"])
async def test_only_a_few_versions_are_in_memory_alone(tmp_path: Path, relieve: str) -> None:
    """Who saves faster than the disk takes it waits, until a version has its folder or is not wanted any more."""
    versions = VersionFolders(tmp_path / "data", shared_memory=None)
    for number in range(UNWRITTEN):
        await versions.publish(f"v{number}", make_state(number, optimizer=False))
    given_up = asyncio.create_task(versions.publish("given-up", make_state(8, optimizer=False)))
    publishing = asyncio.create_task(versions.publish("more", make_state(9, optimizer=False)))
    await asyncio.wait((publishing,), timeout=0.2)
    given_up.cancel()
    await asyncio.wait((given_up,))
    assert not publishing.done()
    await asyncio.to_thread(getattr(versions, relieve), "v1")
    await asyncio.wait_for(publishing, 20)
    with pytest.raises(NotFoundError):
        versions.path("given-up")
    for name in ("v1", "v2", "more"):
        versions.remove(name)
    versions.remove("v1")
    versions.close()


async def test_older_versions_move_to_disk_and_keep_their_path_and_content(tmp_path: Path, memory: Path) -> None:
    versions = VersionFolders(tmp_path / "data", shared_memory=memory, memory_bytes=2 * SIZE)
    paths = [await add(versions, f"v{n}", make_state(n, optimizer=False)) for n in range(5)]
    assert [in_memory(path, memory) for path in paths] == [False, False, False, True, True]
    assert all(versions.path(f"v{n}") == path and holds(path, n) for n, path in enumerate(paths))
    assert versions.bytes_in_memory() == 2 * SIZE
    versions.remove("v4")
    await add(versions, "v5", make_state(5, optimizer=False))
    assert in_memory(paths[3], memory)
    versions.close()


async def test_a_version_too_large_for_memory_goes_to_disk_alone(tmp_path: Path, memory: Path) -> None:
    versions = VersionFolders(tmp_path / "data", shared_memory=memory, memory_bytes=2 * SIZE)
    small = await add(versions, "small", make_state(1, optimizer=False))
    large = await add(versions, "large", make_state(2, optimizer=False, width=1024))
    assert in_memory(small, memory)
    assert not in_memory(large, memory)
    versions.close()


async def test_a_shared_memory_that_is_nearly_full_is_spared(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=SIZE))
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    assert not in_memory(await add(versions, "v", make_state(1, optimizer=False)), memory)
    versions.close()


@pytest.mark.parametrize("shared_memory", [None, Path("/does/not/exist")])
async def test_without_shared_memory_versions_lie_on_disk(tmp_path: Path, shared_memory: Path | None) -> None:
    versions = VersionFolders(tmp_path, shared_memory=shared_memory)
    path = await add(versions, "v", make_state(1, optimizer=False))
    assert holds(path, 1)
    assert in_memory(path, tmp_path)
    versions.close()


async def test_whoever_reads_while_a_version_moves_reads_the_same(tmp_path: Path, memory: Path) -> None:
    versions = VersionFolders(tmp_path / "data", shared_memory=memory, memory_bytes=2 * SIZE)
    errors: list[BaseException] = []
    stop = threading.Event()
    path = await add(versions, "v0", make_state(0, optimizer=False))

    def read() -> None:
        while not stop.is_set():
            try:
                assert holds(path, 0)
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 20):
        await add(versions, f"v{number}", make_state(number, optimizer=False))
    stop.set()
    for reader in readers:
        reader.join()
    assert errors == []
    assert not in_memory(path, memory)
    versions.close()


async def test_close_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    versions = VersionFolders(tmp_path / "data", shared_memory=memory, memory_bytes=SIZE)
    for number in range(3):
        await add(versions, f"v{number}", make_state(number, optimizer=False))
    versions.close()
    versions.close()
    assert found(memory, "*/") == []
    assert found(tmp_path, "data/*") == []


async def test_what_a_killed_server_left_is_removed_but_not_what_a_living_one_has(tmp_path: Path, memory: Path) -> None:
    code = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from store_states import make_state
from tinker_local.backend.storage import VersionFolders
versions = VersionFolders(Path(sys.argv[1]), shared_memory=Path({str(memory)!r}), memory_bytes={SIZE})
for number in range(2):
    asyncio.run(versions.publish(str(number), make_state(number, optimizer=False)))
    versions.write(str(number))
versions.flush()
os.kill(os.getpid(), 9)
"""
    living = VersionFolders(tmp_path / "living", shared_memory=memory)
    path = await add(living, "v", make_state(7, optimizer=False))
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path / "killed"))
    assert await killed.wait() == -9
    assert len(found(memory, "*/")) == 2
    assert len(found(tmp_path, "killed/ephemeral/*")) == 3
    foreign = memory / "somebody-else"
    foreign.mkdir()
    # Any server of this user clears shared memory; the disk is cleared by the next one with that data folder.
    third = VersionFolders(tmp_path / "third", shared_memory=memory)
    assert len(found(memory, "*/")) == 3  # living, third, foreign
    assert holds(path, 7)
    again = VersionFolders(tmp_path / "killed", shared_memory=memory)
    assert found(tmp_path, "killed/ephemeral/*") == []
    for versions in (living, third, again):
        versions.close()
    assert found(memory, "*/") == [foreign]


def test_names_that_another_user_made_beforehand_in_shared_memory_are_left_alone(tmp_path: Path, memory: Path) -> None:
    own, precious = tmp_path / "own", tmp_path / "precious"
    own.mkdir()
    precious.write_text("mine")
    (memory / f"tinker-local-{os.getuid()}-lock").symlink_to(precious)  # older servers opened this one
    (memory / f"tinker-local-{os.getuid()}-dead").symlink_to(own)
    os.mkfifo(memory / f"tinker-local-{os.getuid()}-pipe")
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    assert len(list(memory.iterdir())) == 4
    versions.close()
    assert len(list(memory.iterdir())) == 3
    assert list(own.iterdir()) == []
    assert precious.read_text() == "mine"


def test_a_folder_that_another_server_removes_while_it_is_locked_is_made_again(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[Path] = []

    def slow_flock(descriptor: int, operation: int) -> None:
        if not removed and Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(memory):
            (folder,) = memory.iterdir()
            shutil.rmtree(folder)
            removed.append(folder)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    versions = VersionFolders(tmp_path / "data", shared_memory=memory)
    assert len(removed) == 1
    assert [path.is_dir() and path not in removed for path in memory.iterdir()] == [True]
    versions.close()


def test_servers_that_start_and_end_together_keep_their_folders_and_leave_none(tmp_path: Path, memory: Path) -> None:
    def start_and_end(number: int) -> bool:
        for _ in range(10):
            versions = VersionFolders(tmp_path / str(number), shared_memory=memory)
            folder = versions._memory
            kept = folder is not None and (folder / "lock").is_file()
            versions.close()
            if not kept:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(start_and_end, range(8))) == [True] * 8
    VersionFolders(tmp_path / "last", shared_memory=memory).close()
    assert list(memory.iterdir()) == []
