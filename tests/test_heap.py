"""Garbage collection while modules are imported, and memory that is kept."""

import ctypes
import gc
import os
import subprocess
import sys
import types

import pytest
from tinker_local.backend.heap import while_importing

NAME = "a_module_of_this_test"
OF_MALLOC = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
BUFFERS = """
import os, sys, threading, time
from pathlib import Path
from tinker_local.backend import heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

heap.IDLE_SECONDS = 0.5 if "at rest" in sys.argv else 600
heap.keep_freed_memory()
before = resident()
thread = threading.Thread(target=lambda: [b"x" * (size << 20) for size in (1, 40, 200)])
thread.start()
thread.join()
print(resident() - before)
if "at rest" in sys.argv:
    end = time.monotonic() + 120
    while resident() - before > 20 and time.monotonic() < end:
        time.sleep(0.05)
else:
    heap.give_memory_back()
print(resident() - before)
"""
"""A program: MiB resident after a thread has filled and freed 241, and after they are given back."""


def test_collection_waits_for_an_import_and_then_leaves_what_it_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with while_importing(NAME):
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, NAME, types.ModuleType(NAME))
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    assert frozen > before
    with while_importing(NAME):  # an engine that is built again
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_a_failed_import_leaves_collection_on_and_nothing_more_frozen() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), while_importing(NAME):
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before


def test_an_import_within_another_changes_nothing() -> None:
    before = gc.get_freeze_count()
    gc.disable()
    try:
        with while_importing(NAME):
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() <= before
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc")
@pytest.mark.parametrize("when", ["at once", "at rest"])
def test_memory_that_a_thread_frees_is_kept_until_it_is_given_back(when: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OF_MALLOC}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    printed = subprocess.check_output([sys.executable, "-c", BUFFERS, when], env=environment, text=True)
    kept, left = map(int, printed.split())
    assert kept > 240 or when == "at rest"  # on a busy machine it may have rested already
    assert left < 20
