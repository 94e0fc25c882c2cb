"""Weights are read into the kernel's cache while a start imports libraries."""

from pathlib import Path

import pytest
from tinker_local.backend import weight_files
from tinker_local.backend.weight_files import INDEX, SINGLE, read_ahead

SIZE = 5 * 2**20 + 3


def bytes_read() -> int:
    """By this process so far, from the disk or the cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("names", [[SINGLE], ["model-1.safetensors", "model-2.safetensors"]])
def test_all_weights_are_read_in_a_thread(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_AHEAD", 2**20)
    for name in names:
        (tmp_path / name).write_bytes(bytes(SIZE))
    if len(names) > 1:
        listed = ", ".join(f'"{at}": "{name}"' for at, name in enumerate(names))
        (tmp_path / INDEX).write_text(f'{{"weight_map": {{{listed}}}}}')
    before = bytes_read()
    thread = read_ahead(str(tmp_path))
    assert thread is not None
    thread.join(60)
    assert bytes_read() - before >= len(names) * SIZE


def test_weights_that_are_not_here_or_are_too_large_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ahead(str(tmp_path / "nowhere")) is None
    assert read_ahead("no-such/model") is None
    (tmp_path / INDEX).write_text("{}")
    assert read_ahead(str(tmp_path)) is None  # what is wrong with it, the start says
    (tmp_path / INDEX).unlink()
    (tmp_path / SINGLE).write_bytes(bytes(SIZE))
    monkeypatch.setattr(weight_files, "memory_of_machine", lambda: 2 * SIZE - 1)
    assert read_ahead(str(tmp_path)) is None
    monkeypatch.setattr(weight_files, "memory_of_machine", lambda: 2 * SIZE)
    assert read_ahead(str(tmp_path)) is not None
