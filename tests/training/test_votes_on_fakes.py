"""What several ranks do when a step fails on one of them, with a single process that votes alone."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.parallel.joined_ranks import JoinedRanks
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL
from tinker_local.backend.training.run.micro_batch import MicroBatchRunner
from tinker_local.backend.training.run.packing import Item
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.backend.weights.large_weights import RESIDENT, Walk


class LonelyRanks(JoinedRanks):
    """Rank 0 of one, without connections. `gathers`: how many there were."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.gathers = 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self.gathers += 1
        return [list(numbers)]


class Activations:
    """Stands for memory of a device."""


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
@pytest.mark.usefixtures("no_garbage_collection")
def test_what_a_failed_step_has_allocated_is_free_after_the_vote_on_fakes(kind: type[Exception]) -> None:
    """A reference cycle would keep it while the next, smaller micro-batch runs."""
    kept: list[weakref.ref[Activations]] = []

    def step() -> None:
        activations = Activations()
        kept.append(weakref.ref(activations))
        raise kind("at the end of the step")

    if kind is ValueError:
        with pytest.raises(ValueError, match="at the end"):
            LonelyRanks().attempt(step)
    else:
        assert LonelyRanks().attempt(step) == (None, (0,))
    assert kept[0]() is None


class UnspeakableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError("\udc80"), UnspeakableError()], ids=["surrogate", "no text"])
def test_an_error_of_any_text_is_told_to_the_others_on_fakes(error: Exception) -> None:
    def step() -> None:
        raise error

    ranks = LonelyRanks()
    with pytest.raises(type(error)) as raised:
        ranks.attempt(step)
    assert raised.value is error
    assert ranks.gathers == 2, "how it ended, and the text"


def test_a_rank_that_lacks_memory_for_logprobs_walks_with_the_others_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded ranks that walk would wait for it."""
    noted: list[str] = []

    class NotedRunner(MicroBatchRunner):
        def __init__(self) -> None:
            self._loaded: Any = type("Loaded", (), {"vocab_size": 50})
            self._row_ranks = ONE_HAS_ALL

        @contextmanager
        def _walks(self) -> Iterator[Walk]:
            noted.append("walks")
            yield RESIDENT

        def walk(self, *, backward: bool) -> Any:
            return self._walks()

        def _lora_batch(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for the adapters")

    tokens = np.arange(3, dtype=np.int32)
    item = Item(0, 0, None, TrainDatum(RenderedInput(tokens, ()), tokens.astype(np.int64), {}))
    with pytest.raises(torch.OutOfMemoryError, match="for the adapters"):
        NotedRunner().logprobs([item], {})
    assert noted == ["walks"]
