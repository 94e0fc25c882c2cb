"""What a step minimises. `Supervised` learns answers; `preferences.Preferences` learns which of two is better."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tinker
from tinker_local.client.train.examples import Example, Preference, Rows
from tinker_local.types import InvalidRequestError

ROWS_AT_ONCE = 64
"""Rows of one forward pass that only measures."""

IN_FLIGHT = 2
"""Forward passes that are submitted before the first of them is awaited."""

Say: TypeAlias = Callable[[str], None]


class Pending(Protocol):
    """A gradient that was submitted."""

    def metrics(self) -> Mapping[str, float]:
        """Waits for it. "loss" is what the step minimises; "tokens" counts trained tokens."""
        ...


class Objective(Protocol):
    """How rows become a gradient, and a number on held-out rows. Implement it to train with a loss of yours."""

    def prepare(self, client: tinker.TrainingClient, rows: Sequence[int], begun: bool, say: Say) -> None:
        """Whatever the rows (to train on, and held out) need once, before the first step. `begun`: a resumed run, whose
        weights are no longer those that training began with."""
        ...

    def gradient(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Pending:
        """Submit the gradient of a step on these rows, without waiting for it."""
        ...

    def measure(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Mapping[str, float]:
        """Of the current weights on rows that are not trained on; "held_out_loss" is one of the names."""
        ...


def weights_of(example: Example) -> np.ndarray:
    """float64 [T], one for each target."""
    return np.asarray(example.datum.loss_fn_inputs["weights"].to_numpy(), np.float64)


def forward_in_order(
    client: tinker.TrainingClient, batches: Iterator[Sequence[Example]]
) -> Iterator[tuple[Example, np.ndarray]]:
    """Each example with its targets' logprobs, float64 [T], under the current weights; some passes are in flight."""
    waiting: deque[tuple[Sequence[Example], Any]] = deque()

    def finished() -> Iterator[tuple[Example, np.ndarray]]:
        examples, future = waiting.popleft()
        outputs = future.result().loss_fn_outputs
        for example, output in zip(examples, outputs, strict=True):
            yield example, np.asarray(output["logprobs"].to_numpy(), np.float64)

    for examples in batches:
        waiting.append((examples, client.forward([each.datum for each in examples], "cross_entropy")))
        if len(waiting) > IN_FLIGHT:
            yield from finished()
    while waiting:
        yield from finished()


def pieces(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """At most `ROWS_AT_ONCE` each."""
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[begin : begin + ROWS_AT_ONCE]


class Supervised:
    """Cross entropy of the answers: the mean over all trained tokens of a step, in nats.

    Each token counts the same, as in TRL; a long answer counts more than a short one.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def prepare(self, client: tinker.TrainingClient, rows: Sequence[int], begun: bool, say: Say) -> None:
        """Nothing."""

    def gradient(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Pending:
        """See `Objective`. The weights of a step's tokens have the sum 1."""
        examples = self._examples(rows)
        total = sum(float(weights_of(each).sum()) for each in examples)
        if total <= 0:
            raise InvalidRequestError(f"{examples[0].place}: no token of this step is trained on")
        data = [_scaled(each, 1 / total) for each in examples]
        return _SupervisedPending(
            client.forward_backward(data, "cross_entropy"), sum(each.trained for each in examples)
        )

    def measure(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Mapping[str, float]:
        """`held_out_loss`: nats per trained token, over all of them."""
        loss = tokens = 0.0
        batches = (self._examples(piece) for piece in pieces(rows))
        for example, logprobs in forward_in_order(client, batches):
            weights = weights_of(example)
            loss -= float(weights @ np.where(weights > 0, logprobs, 0.0))
            tokens += float(weights.sum())
        return {"held_out_loss": loss / tokens}

    def _examples(self, rows: Sequence[int]) -> list[Example]:
        found: list[Example] = []
        for row in rows:
            rendered = self._rows.examples(row)
            if isinstance(rendered, Preference):
                raise InvalidRequestError(f"{rendered.place}: is a pair of answers; train it with preferences")
            found += rendered
        return found


class _SupervisedPending:
    def __init__(self, future: Any, tokens: int) -> None:
        self._future = future
        self._tokens = tokens

    def metrics(self) -> Mapping[str, float]:
        return {"loss": float(self._future.result().metrics["loss:sum"]), "tokens": float(self._tokens)}


def _scaled(example: Example, factor: float) -> tinker.Datum:
    """The datum with each weight times `factor`."""
    given = example.datum
    inputs: dict[str, Any] = {
        **given.loss_fn_inputs,
        "weights": tinker.TensorData.from_numpy((weights_of(example) * factor).astype(np.float32)),
    }
    return tinker.Datum(model_input=given.model_input, loss_fn_inputs=inputs)
