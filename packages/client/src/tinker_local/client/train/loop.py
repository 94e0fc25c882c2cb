"""The loop: steps, evaluations and checkpoints of a run, in order, with one step always submitted ahead.

`forward_backward` and `optim_step` of a step are both submitted before either is awaited, and so is the next step, as
the documentation of the hosted service advises: the server then never waits for this program. It runs them in the order
in which they were submitted, so an evaluation or a checkpoint between two steps sees exactly the steps before it.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker_local.client.train.curve import draw_curve
from tinker_local.client.train.evaluate import Answered, Answerer, Evaluation
from tinker_local.client.train.objectives import Objective, Pending, Say
from tinker_local.client.train.run_folder import RunFolder, SavedStep
from tinker_local.client.train.schedule import Plan
from tinker_local.client.train.trackers import Tracker
from tinker_local.types import ApiError

IN_FLIGHT = 2
"""Steps that are submitted before the first of them is awaited."""

PACE = 10
"""Steps over which tokens per second are averaged: the answers to two steps may arrive at the same moment."""

LINES = 50
"""Lines about steps in a run, about."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
"""Characters with which a model could command the terminal, and new lines."""


class DivergedError(ApiError):
    """The loss became NaN or infinite."""


@dataclass(slots=True)
class _Step:
    number: int
    rate: float
    gradient: Pending
    update: Any


class Loop:
    """Trains `client` by `plan`. `held_out`: rows to evaluate on; may be empty. `stopped`: whether to end early, asked
    between steps."""

    def __init__(
        self,
        client: tinker.TrainingClient,
        objective: Objective,
        plan: Plan,
        held_out: Sequence[int],
        folder: RunFolder,
        answerer: Answerer,
        *,
        evaluation: Evaluation | None = None,
        trackers: Sequence[Tracker] = (),
        stopped: Callable[[], bool] = lambda: False,
        say: Say = print,
    ) -> None:
        self._client = client
        self._objective = objective
        self._plan = plan
        self._settings = plan.settings
        self._held_out = held_out
        self._folder = folder
        self._answerer = answerer
        self._evaluation = evaluation
        self._trackers = trackers
        self._stopped = stopped
        self._say = say
        self._waiting: deque[_Step] = deque()
        self._seconds = 0.0
        self._pace: deque[tuple[float, float]] = deque(maxlen=PACE)

    def run(self, begin: int) -> SavedStep:
        """Train on from step `begin` (0: from the start) to the end, or until `stopped`; returns the last checkpoint.

        Raises DivergedError if a loss is not finite; the checkpoints before it stay.
        """
        self._seconds = time.monotonic()
        evaluated = {row["step"] for row in self._folder.metrics() if "held_out_loss" in row}
        saved: SavedStep | None = None
        if self._due(begin, self._settings.evaluate_every) and begin not in evaluated:
            self._evaluate(begin)
        step = begin
        while step < self._plan.total and not self._stopped():
            step += 1
            self._submit(step)
            while len(self._waiting) >= IN_FLIGHT:
                self._finish()
            saved = None
            if self._held_out and self._due(step, self._settings.evaluate_every):
                self._drain()
                self._evaluate_or_save(step)
            if step < self._plan.total and self._settings.save_every and step % self._settings.save_every == 0:
                self._drain()
                saved = self._save(step, self._settings.ttl_seconds)
        self._drain()
        self._draw()
        if step == self._plan.total:
            return self._save(step, None)
        return saved or self._save(step, self._settings.ttl_seconds)

    def _due(self, step: int, every: int) -> bool:
        return step in (0, self._plan.total) or (every > 0 and step % every == 0)

    def _submit(self, step: int) -> None:
        chosen = self._settings
        rate = self._plan.learning_rate(step)
        gradient = self._objective.gradient(self._client, self._plan.rows_of(step))
        update = self._client.optim_step(
            tinker.AdamParams(
                learning_rate=rate,
                beta1=chosen.beta1,
                beta2=chosen.beta2,
                eps=chosen.eps,
                weight_decay=chosen.weight_decay,
                grad_clip_norm=chosen.clip,
            )
        )
        self._waiting.append(_Step(step, rate, gradient, update))

    def _finish(self) -> None:
        """Wait for the oldest step, and write it down."""
        step = self._waiting.popleft()
        metrics = {
            **step.gradient.metrics(),
            "learning_rate": step.rate,
            "epoch": float(self._plan.epoch_of(step.number)),
        }
        updated = step.update.result().metrics or {}
        if "grad_norm" in updated:
            metrics["grad_norm"] = float(updated["grad_norm"])
        now = time.monotonic()
        metrics["seconds"], self._seconds = now - self._seconds, now
        self._pace.append((metrics["seconds"], metrics["tokens"]))
        self._log(step.number, metrics)
        if not math.isfinite(metrics["loss"]):
            raise DivergedError(
                f"step {step.number}: the loss is {metrics['loss']}; try a lower learning_rate than "
                f"{self._settings.learning_rate:g}"
            )
        if step.number % max(1, self._plan.total // LINES) == 0 or step.number == self._plan.total:
            self._say(self._line(step, metrics))

    def _drain(self) -> None:
        while self._waiting:
            self._finish()

    def _line(self, step: _Step, metrics: Mapping[str, float]) -> str:
        seconds, tokens = (sum(each) for each in zip(*self._pace, strict=True))
        left = seconds / len(self._pace) * (self._plan.total - step.number)
        more = f"  accuracy {metrics['accuracy']:.2f}" if "accuracy" in metrics else ""
        return (
            f"step {step.number}/{self._plan.total}  loss {metrics['loss']:.4f}{more}  learning rate {step.rate:.2g}  "
            f"{tokens / max(seconds, 1e-9):,.0f} trained tokens/s  {_duration(left)} left"
        )

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._folder.log({"step": step, **metrics})
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def _evaluate(self, step: int) -> None:
        """Measure the held-out rows with the current weights; nothing if there are none, or the run is to stop."""
        if not self._held_out or self._stopped():
            return
        metrics = dict(self._objective.measure(self._client, self._held_out))
        answered = self._answers()
        if self._evaluation is not None:
            scores = [each.score for each in answered if each.score is not None]
            metrics[f"held_out_{self._evaluation.name}"] = sum(scores) / len(scores)
        self._log(step, metrics)
        told = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        self._say(f"step {step}/{self._plan.total}  {told}  ({len(self._held_out)} rows)")
        for each in answered[: self._settings.samples_shown]:
            self._say(f"    {self._answerer.place(each.row)}: says {_shown(each.said)}, wanted {_shown(each.wanted)}")
        self._seconds = time.monotonic()

    def _evaluate_or_save(self, step: int) -> None:
        """`_evaluate`; if it fails, as a judge of the user's may, the steps so far are saved first."""
        try:
            self._evaluate(step)
        except ApiError:
            self._save(step, self._settings.ttl_seconds if step < self._plan.total else None)
            raise

    def _answers(self) -> list[Answered]:
        """Of some of the held-out rows, evenly spread; scored if there is an evaluation."""
        chosen = self._settings
        count = min(len(self._held_out), chosen.samples_shown if self._evaluation is None else chosen.answer_rows)
        if count == 0:
            return []
        places = np.linspace(0, len(self._held_out) - 1, count).round().astype(int)
        sampler = self._client.save_weights_and_get_sampling_client().result()
        found = self._answerer.answers(sampler, [self._held_out[place] for place in places], chosen.answer_tokens)
        return found if self._evaluation is None else self._answerer.scored(found, self._evaluation)

    def _save(self, step: int, ttl_seconds: int | None) -> SavedStep:
        name = f"step-{step:06d}"
        state = self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)
        paths = state.result().path, sampler.result().path
        try:
            saved = self._folder.saved(step, *paths, ttl_seconds)
        except OSError:
            self._say(f"step {step}/{self._plan.total}  saved {paths[0]}, which {self._folder.path} could not note")
            raise
        until = f", until {saved.expires:%Y-%m-%d %H:%M} UTC" if saved.expires else ""
        self._say(f"step {step}/{self._plan.total}  saved {saved.state}{until}")
        self._seconds = time.monotonic()
        return saved

    def _draw(self) -> None:
        rows = self._folder.metrics()
        for name in ("loss", "held_out_loss"):
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if len(points) > 1:
                self._say("\n".join([f"{name.replace('_', ' ')} by step", *draw_curve(points)]))


def _shown(text: str) -> str:
    clean = _CONTROL.sub(" ", text).strip()
    return repr(clean if len(clean) <= 100 else f"{clean[:97]}...")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
