"""Promise 17: a checkpoint that was acknowledged survives `kill -9`, and nothing half-written is ever seen."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker_local.backend.storage import Store

from tests.storage.store_states import make_state, same_tensors

pytestmark = pytest.mark.more

WRITER = Path(__file__).parent / "writer_to_kill.py"
KILLS = 15
DELETED = -1


Said = tuple[str, str, int]
"""What a writer said: try or done, name, seed."""


@pytest.fixture
def run_and_kill(tmp_path: Path) -> Iterator[Callable[[int, int, float], list[Said]]]:
    """Runs a writer, kills it so many seconds after it said so many lines, and returns what it said."""
    command = [sys.executable, "-u", str(WRITER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as forker:
        told, said = forker.stdin, forker.stdout
        assert told is not None
        assert said is not None

        def run(first_seed: int, count: int, seconds: float) -> list[Said]:
            told.write(f"{tmp_path} {first_seed}\n")
            ready, pid = said.readline().split()
            assert ready == "ready"
            first = [said.readline() for _ in range(count)]
            time.sleep(seconds)
            os.kill(int(pid), signal.SIGKILL)
            lines = [*first, *iter(said.readline, "dead\n")]
            return [(word, name, int(seed)) for word, name, seed in map(str.split, lines)]

        yield run
        told.close()


def check(store: Store, allowed: dict[str, set[int]]) -> None:
    """Every checkpoint is one of its allowed states, whole; one that may not be absent is there."""
    records = {record.name: record for record in store.list_checkpoints("5f1c9d5e-0000:train:0")}
    for name, seeds in allowed.items():
        if name not in records:
            assert DELETED in seeds, f"{name} is lost, it should be one of {seeds}"
            continue
        state = store.read_checkpoint(records[name], optimizer=True)
        assert state.step in seeds
        assert same_tensors(state, make_state(state.step, width=2048))
        allowed[name] = {state.step}
    folders = {store.checkpoint_folder(record) for record in records.values()}
    root = next(iter(folders)).parent if folders else None
    assert root is None or set(root.iterdir()) == folders, "something half-written or unrecorded is left"


def test_acknowledged_checkpoints_survive_kill_minus_nine(
    tmp_path: Path, run_and_kill: Callable[[int, int, float], list[Said]]
) -> None:
    rng = random.Random(0)
    allowed: dict[str, set[int]] = {}
    acknowledged = interrupted = 0
    for kill in range(KILLS):
        for word, name, seed in run_and_kill(1 + kill * 1000, rng.randint(0, 8), rng.uniform(0, 0.02)):
            if word == "try":  # from now on either the old or the new one
                allowed[name] = allowed.get(name, {DELETED}) | {seed}
            else:
                allowed[name] = {seed}
                acknowledged += 1
        interrupted += sum(len(seeds) > 1 for seeds in allowed.values())
        store = Store(tmp_path)
        check(store, allowed)
        store.close()
    print(f"{acknowledged} acknowledged, {interrupted} interrupted by {KILLS} kills")
    assert acknowledged > 15
    assert interrupted > 3, "the kills came between the writes, nothing was tested"


@pytest.mark.mutation(
    "recorded-before-it-is-written",
    "Store.write_checkpoint",
    "            written = self._folders.write(record, state, self._belongs_to(record), encrypt)\n"
    "            try:\n                replaced = self._commit(written, overwrite)\n",
    "            replaced = self._commit(record, overwrite)\n"
    "            try:\n                written = self._folders.write(record, state)\n",
)
@pytest.mark.parametrize("moment", ["write_adapter", "_put_in_place", "_commit", "remove_folder"])
def test_a_write_cut_off_at_any_step_leaves_old_or_new(tmp_path: Path, moment: str) -> None:
    """The same, cut at each step in turn: the process ends without running any clean-up."""
    code = f"""
import os, sys
sys.path.insert(0, {str(WRITER.parent)!r})
from pathlib import Path
from store_states import make_record, make_state
from tinker_local.backend.storage import Store, checkpoint_folders as folders
store = Store(Path({str(tmp_path)!r}))
store.write_checkpoint(make_record("a"), make_state(1), overwrite=False)
owner = {{"write_adapter": folders, "_put_in_place": folders.CheckpointFolders}}.get({moment!r}, Store)
setattr(owner, {moment!r}, lambda *a, **k: os._exit(9))
store.write_checkpoint(make_record("a"), make_state(2), overwrite=True)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    store = Store(tmp_path)
    (record,) = store.list_checkpoints("5f1c9d5e-0000:train:0")
    state = store.read_checkpoint(record, optimizer=True)
    assert same_tensors(state, make_state(2 if moment == "remove_folder" else 1))
    folder = store.checkpoint_folder(record)
    assert list(folder.parent.iterdir()) == [folder]
    store.close()
