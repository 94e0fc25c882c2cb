"""Direct preference optimization (Rafailov et al., 2023), as `tinker_cookbook.preference.train_dpo` does it: the loss
is computed here, on logprobs of the server, by the SDK's `forward_backward_custom`.

The reference is the weights that training begins with. Its logprobs are computed once, by a forward pass of the same
trainer before the first step, so that the loss of the first step is ln 2 but for rounding. They are kept in a file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker_local.client.train.examples import Example, Preference, Rows
from tinker_local.client.train.objectives import Pending, Say, forward_in_order, pieces, weights_of
from tinker_local.types import InvalidRequestError

Pair = tuple[float, float]
"""Of the chosen and the rejected answer: the sum of the logprobs of its trained tokens, in nats."""


def dpo_metrics(policy: np.ndarray, reference: np.ndarray, beta: float) -> dict[str, float]:
    """The loss and what it says of a batch. `policy`, `reference`: float64 [pairs, 2], each row a `Pair`.

    loss = mean of -log sigmoid(beta * ((policy - reference) of chosen - (policy - reference) of rejected)).
    accuracy: the share of pairs whose chosen answer gained more (a tie is none). reward: beta * (policy - reference).
    """
    gains = beta * (policy - reference)
    margins = gains[:, 0] - gains[:, 1]
    return {
        "loss": float(np.logaddexp(0.0, -margins).mean()),
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean()),
        "chosen_reward": float(gains[:, 0].mean()),
        "rejected_reward": float(gains[:, 1].mean()),
    }


class Preferences:
    """DPO on rows of pairs. `file`: keeps the logprobs of the reference, for a run that is resumed."""

    def __init__(self, rows: Rows, beta: float, file: Path) -> None:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise InvalidRequestError(
                "preference pairs: the SDK computes this loss with torch, which is not installed; pip install torch"
            ) from None
        self._rows = rows
        self._beta = beta
        self._file = file
        self._reference: dict[int, Pair] = {}

    def prepare(self, client: tinker.TrainingClient, rows: Sequence[int], begun: bool, say: Say) -> None:
        """Compute the logprobs of the reference, or read them if the run goes on. InvalidRequestError if they are gone:
        the weights that they were computed with no longer are."""
        if begun:
            self._reference = self._read()
            if missing := [row for row in rows if row not in self._reference]:
                raise InvalidRequestError(
                    f"{self._file}: lacks the reference of {len(missing)} of {len(rows)} rows, and a resumed run "
                    "cannot compute it; begin again in another folder"
                )
            return
        say(f"reference: logprobs of {len(rows)} pairs under the weights that training begins with")
        found = dict(zip(rows, self._pairs(client, rows), strict=True))
        new = self._file.with_suffix(".new")
        new.write_text("".join(json.dumps([row, *pair]) + "\n" for row, pair in found.items()))
        new.replace(self._file)
        self._reference = found

    def gradient(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Pending:
        """See `Objective`; "loss" is the mean over the pairs."""
        examples = self._examples(rows)
        reference = np.array([self._reference[row] for row in rows], np.float64)
        loss = dpo_loss([weights_of(each) for each in examples], reference, self._beta)
        future = client.forward_backward_custom([each.datum for each in examples], loss)
        return _PreferencePending(future, sum(each.trained for each in examples))

    def measure(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Mapping[str, float]:
        """`held_out_loss` and, by `held_out_...`, the rest of `dpo_metrics`."""
        policy = np.array(list(self._pairs(client, rows)), np.float64)
        reference = np.array([self._reference[row] for row in rows], np.float64)
        return {f"held_out_{name}": value for name, value in dpo_metrics(policy, reference, self._beta).items()}

    def _pairs(self, client: tinker.TrainingClient, rows: Sequence[int]) -> Iterator[Pair]:
        sums = (
            float(weights_of(example) @ logprobs)
            for example, logprobs in forward_in_order(client, (self._examples(piece) for piece in pieces(rows)))
        )
        for chosen in sums:
            yield chosen, next(sums)

    def _examples(self, rows: Sequence[int]) -> list[Example]:
        """Chosen, rejected, chosen, rejected, ..."""
        found: list[Example] = []
        for row in rows:
            pair = self._rows.examples(row)
            if not isinstance(pair, Preference):
                raise InvalidRequestError(
                    f"{pair[0].place}: is one answer and not a pair; train it without preferences"
                )
            found += [pair.chosen, pair.rejected]
        return found

    def _read(self) -> dict[int, Pair]:
        try:
            lines = self._file.read_text().splitlines()
        except OSError as error:
            raise InvalidRequestError(f"{self._file}: {error.strerror}; a resumed run needs it") from None
        try:
            return {int(row): (float(chosen), float(rejected)) for row, chosen, rejected in map(json.loads, lines)}
        except (ValueError, TypeError):
            raise InvalidRequestError(f"{self._file}: is not what a run wrote; begin again in another folder") from None


def dpo_loss(weights: Sequence[np.ndarray], reference: np.ndarray, beta: float) -> Any:
    """The function that `forward_backward_custom` takes. `weights`: float64 [T] of each datum, chosen and rejected in
    turn. `reference`: float64 [pairs, 2].

    It takes the data and a float32 tensor [T] of logprobs for each, and returns the loss as a float64 scalar, which can
    be differentiated, and the numbers of `dpo_metrics`. Sums are in float64: an answer's logprob may be in the
    hundreds, and the loss is about the difference of two of them.
    """

    def loss(data: list[tinker.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        import torch

        sums = torch.stack(
            [
                each.double() @ torch.as_tensor(weight, dtype=torch.float64)
                for each, weight in zip(logprobs, weights, strict=True)
            ]
        ).reshape(-1, 2)
        gains = beta * (sums - torch.as_tensor(reference))
        value = torch.nn.functional.softplus(gains[:, 1] - gains[:, 0]).mean()
        return value, dpo_metrics(sums.detach().numpy(), reference, beta)

    return loss


class _PreferencePending:
    def __init__(self, future: Any, tokens: int) -> None:
        self._future = future
        self._tokens = tokens

    def metrics(self) -> Mapping[str, float]:
        given = self._future.result().metrics
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        return {name: float(given[name]) for name in names} | {"tokens": float(self._tokens)}
