"""Trackers call the libraries of their makers, which are fakes here; keys do not pass through."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.client.train.trackers import TrackedRun, open_tracker
from tinker_local.types import InvalidRequestError


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun("project", "a1b2", tmp_path, {"learning_rate": 1e-4}, resumed_after=7)


class Recorder:
    """Stands for a library, and for what it returns: keeps each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **given: Any) -> "Recorder":
            self.calls.append((name, args, given))
            return self

        return call


def put(monkeypatch: pytest.MonkeyPatch, *names: str) -> Recorder:
    recorder = Recorder()
    for name in names:
        module = ModuleType(name)
        module.__getattr__ = recorder.__getattr__  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    return recorder


def test_wandb_gets_the_curve_on_a_fake_library(monkeypatch: pytest.MonkeyPatch, run: TrackedRun) -> None:
    recorder = put(monkeypatch, "wandb")
    tracker = open_tracker("wandb", run)
    tracker.log(8, {"loss": 1.5})
    tracker.close()
    assert [name for name, _, _ in recorder.calls] == ["Settings", "init", "log", "finish"]
    assert recorder.calls[0][2] == {"x_disable_meta": True}
    given = recorder.calls[1][2]
    assert (given["project"], given["id"], given["resume"]) == ("project", "a1b2", "allow")
    assert given["config"] == {"learning_rate": 1e-4}
    assert recorder.calls[2][1] == ({"loss": 1.5, "step": 8},)


def test_tensorboard_gets_the_curve_on_a_fake_library(monkeypatch: pytest.MonkeyPatch, run: TrackedRun) -> None:
    recorder = put(monkeypatch, "torch.utils.tensorboard")
    tracker = open_tracker("tensorboard", run)
    tracker.log(8, {"loss": 1.5, "accuracy": 0.5})
    tracker.close()
    assert recorder.calls == [
        ("SummaryWriter", (str(run.folder / "tensorboard"),), {"purge_step": 8}),
        ("add_scalar", ("loss", 1.5, 8), {}),
        ("add_scalar", ("accuracy", 0.5, 8), {}),
        ("close", (), {}),
    ]


def test_trackio_gets_the_curve_on_a_fake_library(monkeypatch: pytest.MonkeyPatch, run: TrackedRun) -> None:
    recorder = put(monkeypatch, "trackio")
    tracker = open_tracker("trackio", run)
    tracker.log(8, {"loss": 1.5})
    tracker.close()
    assert recorder.calls == [
        ("init", (), {"project": "project", "name": "a1b2", "config": {"learning_rate": 1e-4}, "resume": "allow"}),
        ("log", ({"loss": 1.5},), {"step": 8}),
        ("finish", (), {}),
    ]


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("wandb", "wandb", "track: wandb cannot be imported here .* pip install wandb"),
        ("tensorboard", "torch.utils.tensorboard", "track: tensorboard cannot be .* pip install torch tensorboard"),
        ("trackio", "trackio", "track: trackio cannot be imported here .* pip install trackio"),
    ],
)
def test_an_absent_library_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, run: TrackedRun, kind: str, module: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequestError, match=words):
        open_tracker(kind, run)


def test_an_unknown_tracker_is_refused(run: TrackedRun) -> None:
    with pytest.raises(InvalidRequestError, match="track: must be one of wandb, tensorboard, trackio, not 'mlflow'"):
        open_tracker("mlflow", run)
