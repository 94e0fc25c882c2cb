"""Garbage collection while modules are imported."""

import gc
import sys
import types
from collections.abc import Iterator

import pytest
from tinker_local.backend.heap import while_importing


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_collection_waits_for_an_import_and_then_leaves_what_it_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    with while_importing("a_module_of_this_test"):
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "a_module_of_this_test", types.ModuleType("a_module_of_this_test"))
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    assert frozen > 0
    with while_importing("a_module_of_this_test"):  # an engine that is built again
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_failed_import_leaves_collection_on_and_nothing_frozen() -> None:
    gc.unfreeze()
    with pytest.raises(ImportError), while_importing("a_module_of_this_test"):
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_import_within_another_changes_nothing() -> None:
    gc.unfreeze()
    gc.disable()
    try:
        with while_importing("a_module_of_this_test"):
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
