"""What a training run may be by now, given everything that was answered: the history checker.

A run is a sequential object: gradients and steps in the order of their `seq_id`, each exactly once. The checker
computes the same on its own trainer. Where an answer leaves open whether a command ran, it follows both; later logprobs
and gradient norms tell which it was. If no state is left, no correct server has this history: a command was lost, ran
twice, or ran out of order.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.losses.loss import make_train_datum
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.types import AdamParams, Datum, LoraConfig, ModelInput

from tests.chaos.served import CLOSE, Served

Counted = tuple[int, AdapterState]
"""A state, and how many steps the run had taken to it."""


class Violation(AssertionError):
    """The server broke a promise."""


class Oracle:
    """One trainer for many checked runs; single-threaded."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._trainer = served.make_trainer()
        self._names = (f"state {number}" for number in itertools.count())

    @property
    def vocab_size(self) -> int:
        return self._trainer.vocab_size

    def length(self, model_input: ModelInput) -> int:
        """Positions."""
        return self.served.render(model_input, "data").length

    def new(self, config: LoraConfig) -> str:
        name = next(self._names)
        self._trainer.create_adapter(name, config)
        return name

    def load(self, state: AdapterState) -> str:
        name = next(self._names)
        self._trainer.load_adapter(name, state)
        return name

    def copy(self, name: str, gradients: Sequence[Sequence[Datum]]) -> str:
        """Another state like `name`, which has these gradients pending."""
        found = self.load(self.state(name))
        for data in gradients:
            self.gradient(found, data)
        return found

    def state(self, name: str) -> AdapterState:
        return self._trainer.capture(name, optimizer=True)

    def forget(self, name: str) -> None:
        self._trainer.remove_adapter(name)

    def gradient(self, name: str, data: Sequence[Datum], *, backward: bool = True) -> list[npt.NDArray[np.float32]]:
        """Logprobs per datum."""
        made = [
            make_train_datum(
                datum,
                self.served.render(datum.model_input, "data"),
                LOSSES["cross_entropy"],
                self._trainer.vocab_size,
                "data",
            )
            for datum in data
        ]
        (result,) = self._trainer.forward_backward([TrainWork(name, made, "cross_entropy", backward=backward)])
        if isinstance(result, Exception):
            raise result
        return [output["logprobs"] for output in result.outputs]

    def step(self, name: str, params: AdamParams) -> float:
        """The gradient's norm."""
        return self._trainer.optim_step(name, params)["grad_norm"]

    def discard(self, name: str) -> None:
        self._trainer.discard_gradients(name)

    def scores(self, name: str | None, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Prompt logprobs [N - 1]."""
        return self._trainer.logprobs(name, self.served.render(ModelInput.from_ints(tokens), "prompt"))


class Run:
    """The states in which one run may be.

    `forks`: how often it was left open whether a step ran.
    """

    def __init__(self, oracle: Oracle, names: Sequence[str]) -> None:
        self._oracle = oracle
        self._names = dict.fromkeys(names, 0)  # and the steps that it has taken in this state
        self._pending: list[Sequence[Datum]] = []
        self._poisoned = False
        self.forks = 0

    def states(self) -> list[Counted]:
        """Host copies."""
        return [(steps, self._oracle.state(name)) for name, steps in self._names.items()]

    def forward(self, data: Sequence[Datum], got: Sequence[npt.NDArray[np.float32]], what: str) -> None:
        """Keep the states in which `data` have these logprobs; Violation if there is none."""
        self._keep(lambda name: self._same(self._oracle.gradient(name, data, backward=False), got), what)

    def gradient(self, data: Sequence[Datum], got: Sequence[npt.NDArray[np.float32]], what: str) -> None:
        """A gradient that was answered."""
        self._keep(lambda name: self._same(self._oracle.gradient(name, data), got), what)
        self._pending.append(data)

    def failed_gradient(self) -> None:
        """A gradient that failed; the next step must fail, too."""
        self._poisoned = True

    def step(self, params: AdamParams, norm: float, what: str) -> None:
        """A step that was answered."""
        if self._poisoned:
            raise Violation(f"{what}: succeeded after a gradient that failed")
        close = self._oracle.served.close_norm
        self._keep(lambda name: math.isclose(self._oracle.step(name, params), norm, rel_tol=close), what)
        self._pending.clear()
        self._names = {name: steps + 1 for name, steps in self._names.items()}

    def failed_step(self, params: AdamParams) -> None:
        """A step that failed: with a failed gradient nothing is left of it, otherwise it may have run or not."""
        if not self._poisoned:
            self.forks += 1
            for name, steps in list(self._names.items()):
                ran = self._oracle.copy(name, self._pending)
                self._oracle.step(ran, params)
                self._names[ran] = steps + 1
        for name in self._names:
            self._oracle.discard(name)
        self._pending.clear()
        self._poisoned = False

    def later(self, data: Sequence[Sequence[Datum]], params: AdamParams) -> list[Counted]:
        """The states after these gradients, from scratch, and a step."""
        found = []
        for name, steps in self._names.items():
            self._oracle.step(ran := self._oracle.copy(name, data), params)
            found.append((steps + 1, self._oracle.state(ran)))
            self._oracle.forget(ran)
        return found

    def scores(self, tokens: Sequence[int], got: npt.NDArray[np.float32], what: str) -> None:
        """A sampler version of the run gave these logprobs of a prompt."""
        self._keep(lambda name: np.allclose(self._oracle.scores(name, tokens), got, atol=CLOSE), what)

    def forget(self) -> None:
        for name in self._names:
            self._oracle.forget(name)
        self._names.clear()

    def _keep(self, fits: Callable[[str], bool], what: str) -> None:
        kept = {name: steps for name, steps in self._names.items() if fits(name)}
        if not kept:
            raise Violation(f"{what}: fits none of {len(self._names)} states that the run may be in")
        for name in self._names.keys() - kept.keys():
            self._oracle.forget(name)
        self._names = kept

    def _same(self, expected: Sequence[npt.NDArray[np.float32]], got: Sequence[npt.NDArray[np.float32]]) -> bool:
        return len(expected) == len(got) and all(map(self._oracle.served.same, expected, got))
