"""Curves in wandb, TensorBoard or trackio, each through the library that its makers publish.

They are imported when a run begins that wants one. A library finds its key where it always does (`wandb login`,
`WANDB_API_KEY`): neither keys nor the server's address pass through here.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinker_local.types import InvalidRequestError


class Tracker(Protocol):
    """Where a curve is shown. Implement it for one of yours."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker gets to know. `name` is the same when a run is resumed. `resumed_after`: the step after which it
    goes on; None for a new one."""

    project: str
    name: str
    folder: Path
    settings: Mapping[str, Any]
    resumed_after: int | None = None


def open_tracker(kind: str, run: TrackedRun) -> Tracker:
    """`wandb`, `tensorboard` or `trackio`; InvalidRequestError for another name, or if its library is absent."""
    makers: dict[str, Callable[[TrackedRun], Tracker]] = {
        "wandb": _Wandb,
        "tensorboard": _TensorBoard,
        "trackio": _Trackio,
    }
    if kind not in makers:
        raise InvalidRequestError(f"track: must be one of {', '.join(makers)}, not {kind!r}")
    return makers[kind](run)


def _library(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequestError(
            f"track: {install.split()[-1]} cannot be imported here ({error}); pip install {install}"
        ) from None


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        wandb = _library("wandb", "wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.name,
            resume="allow",
            config=dict(run.settings),
            dir=str(run.folder),
            settings=wandb.Settings(x_disable_meta=True),  # the command line, which may have a key, is not sent
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})  # wandb's own step only rises, and an evaluation has its step's number

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        board = _library("torch.utils.tensorboard", "torch tensorboard")
        purge = None if run.resumed_after is None else run.resumed_after + 1
        self._writer = board.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        self._trackio = _library("trackio", "trackio")
        self._trackio.init(project=run.project, name=run.name, config=dict(run.settings), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()
