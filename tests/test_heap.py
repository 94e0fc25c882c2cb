"""Garbage collection while modules are imported."""

import gc
import sys
import types

import pytest
from tinker_local.backend.heap import while_importing

NAME = "a_module_of_this_test"


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
