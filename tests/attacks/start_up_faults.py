"""What a start makes of a damaged data folder: seven acknowledged checkpoints, and one fault each."""

import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.storage.store_states import RUN, make_state, same_tensors

ROOT = Path(__file__).parents[2]
COUNT = 7

WRITE = f"""
import contextlib, os, shutil, sqlite3, sys
from pathlib import Path
from tests.storage.store_states import make_record, make_state
from tinker_local.backend.storage import Store
folder = Path(sys.argv[1])
store = Store(folder / "data")
for number in range({COUNT}):
    store.write_checkpoint(make_record(f"c{{number}}"), make_state(number), overwrite=False)
    if number == 0:
        with contextlib.closing(sqlite3.connect(folder / "data" / "metadata.sqlite3")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copytree(folder / "data", folder / "yesterday")
os._exit(0)
"""
"""Ends without closing the database, as a kill does; `yesterday` is a copy that was made after the first."""


@dataclass(frozen=True)
class Left:
    """After the start: complete folders on disk, checkpoints listed, those that read bit for bit; what was said."""

    folders: int
    listed: int
    intact: int
    told: tuple[str, ...]
    refused: str = ""


Fault = Callable[[Path], None]
DATABASE = "metadata.sqlite3"


def none(data: Path) -> None:
    """A kill alone."""


def wal_lost(data: Path) -> None:
    """The write-ahead log is gone."""
    for name in ("-wal", "-shm"):
        (data / f"{DATABASE}{name}").unlink(missing_ok=True)


def wal_corrupt(data: Path) -> None:
    """512 bytes in the middle of the write-ahead log are overwritten."""
    (data / f"{DATABASE}-shm").unlink(missing_ok=True)
    _overwrite(data / f"{DATABASE}-wal", 0.5, b"\x5a" * 512)


def yesterdays_database(data: Path) -> None:
    """The database comes from a backup, the folders do not."""
    for path in data.glob(f"{DATABASE}*"):
        path.unlink()
    for path in (data.parent / "yesterday").glob(f"{DATABASE}*"):
        shutil.copy(path, data / path.name)


def database_lost(data: Path) -> None:
    """No database at all."""
    for path in data.glob(f"{DATABASE}*"):
        path.unlink()


def database_header_corrupt(data: Path) -> None:
    """100 bytes at the start of the database are overwritten."""
    _checkpoint_wal(data)
    _overwrite(data / DATABASE, 0.0, b"\x5a" * 100)


def mounted_too_late(data: Path) -> None:
    """A start found `checkpoints` empty, the one after found them."""
    (data / "checkpoints").rename(data.parent / "away")
    (data / "checkpoints").mkdir()
    _start(data)
    shutil.rmtree(data / "checkpoints")
    (data.parent / "away").rename(data / "checkpoints")


def checkpoints_absent(data: Path) -> None:
    """A start found no folder `checkpoints`, the one after found it."""
    (data / "checkpoints").rename(data.parent / "away")
    _start(data)
    shutil.rmtree(data / "checkpoints", ignore_errors=True)
    (data.parent / "away").rename(data / "checkpoints")


def one_folder_lost(data: Path) -> None:
    """The folder of one checkpoint is gone."""
    shutil.rmtree(next(iter(sorted(data.glob("checkpoints/*/*/c3@*")))))


def weights_truncated(data: Path) -> None:
    """The weights of one checkpoint lack their second half."""
    path = _weights(data)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def weights_flipped(data: Path) -> None:
    """64 bytes at the end of one checkpoint's weights are flipped."""
    path = _weights(data)
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(255 - byte for byte in content[-64:]))


def metadata_lost(data: Path) -> None:
    """One checkpoint has no checkpoint.json, and the database is yesterday's."""
    next(iter(sorted(data.glob("checkpoints/*/*/c3@*/checkpoint.json")))).unlink()
    yesterdays_database(data)


FAULTS: dict[str, tuple[Fault, int]] = {
    each.__name__: (each, readable)
    for each, readable in (
        (none, 7),
        (wal_lost, 7),
        (wal_corrupt, 7),
        (yesterdays_database, 7),
        (database_lost, 7),
        (database_header_corrupt, 7),
        (mounted_too_late, 7),
        (checkpoints_absent, 7),
        (one_folder_lost, 6),
        (weights_truncated, 6),
        (weights_flipped, 6),
        (metadata_lost, 6),
    )
}
"""Each with how many checkpoints a server can still have read, if it lost none."""


def suffer(fault: Fault, scratch: Path) -> Left:
    """Write, damage, start: what is left. `scratch` is empty."""
    subprocess.run([sys.executable, "-c", WRITE, str(scratch)], cwd=ROOT, check=True)
    data = scratch / "data"
    fault(data)
    return _start(data)


def _start(data: Path) -> Left:
    from tinker_local.backend.storage import Store

    told = _Told()
    logging.getLogger().addHandler(told)
    try:
        try:
            store = Store(data)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
            return Left(_complete(data), 0, 0, tuple(told.lines), refused)
        records = store.list_checkpoints(RUN)
        intact = 0
        for record in records:
            with contextlib.suppress(Exception):
                state = store.read_checkpoint(record, optimizer=True)
                intact += same_tensors(state, make_state(int(record.name.removeprefix("c"))))
        store.close()
        return Left(_complete(data), len(records), intact, tuple(told.lines))
    finally:
        logging.getLogger().removeHandler(told)


def silently_wrong(data: Path) -> list[str]:
    """Checkpoints that read without an error as something else than what was saved."""
    from tinker_local.backend.storage import Store

    store, found = Store(data), []
    for record in store.list_checkpoints(RUN):
        with contextlib.suppress(Exception):
            state = store.read_checkpoint(record, optimizer=True)
            if not same_tensors(state, make_state(int(record.name.removeprefix("c")))):
                found.append(record.name)
    store.close()
    return found


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _complete(data: Path) -> int:
    """Folders with weights, wherever they were put."""
    return len({path.parent for path in data.rglob("adapter_model.safetensors")})


def _weights(data: Path) -> Path:
    return next(iter(sorted(data.glob("checkpoints/*/*/c3@*/adapter_model.safetensors"))))


def _overwrite(path: Path, share: float, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(int(share * path.stat().st_size))
        file.write(content)


def _checkpoint_wal(data: Path) -> None:
    import sqlite3

    with contextlib.closing(sqlite3.connect(data / DATABASE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def print_matrix() -> int:
    """The matrix as a table; 1 if a folder was lost."""
    print("| fault | folders left | listed | intact | silently wrong | said |\n|---|---|---|---|---|---|")
    lost = 0
    for name, (fault, _) in FAULTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            left = suffer(fault, Path(scratch))
            wrong = [] if left.refused else silently_wrong(Path(scratch) / "data")
        lost += left.folders < COUNT - (name == "one_folder_lost")
        said = "; ".join([left.refused] * bool(left.refused) + list(left.told)).replace(scratch, "")[:200] or "nothing"
        what = (fault.__doc__ or "").rstrip(".")
        print(f"| {what} | {left.folders} | {left.listed} | {left.intact} | {len(wrong)} | {said} |", flush=True)
    return int(lost > 0)
