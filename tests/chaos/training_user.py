"""Users who train, and check what a lost run's error says of the checkpoint to continue from."""

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.types import Datum, LoraConfig, ModelInput

from tests.chaos.chaos_users import PROMPT, Failed, Ledger, Owner, User, logprobs, png, scores
from tests.chaos.possible_states import Counted, Oracle, Run, Violation
from tests.chaos.served import Served

PATH = re.compile(r"tinker://[^\s;,]+?(?=[\s;,]|\.?$|\. )")
LOST_STEPS = re.compile(r"(\d+) optimizer steps? (?:is|are) lost")
RESTARTED = re.compile("the server was (?:restarted|stopped)")
REMEMBERED = 400
"""Steps whose states are kept, in case an autosave has them: minutes of training."""


@dataclass(slots=True)
class LostRun:
    """A run that has ended unasked.

    `why`: its error. `path`: the checkpoint that it names, or the last that was acknowledged. `history`: states by the
    number of steps; `possible`: how many it may have taken; `least`: in the last checkpoint that was acknowledged.
    `asked`, `made`, `worked`: when it was asked for, when it was there, and when the last round that worked began
    (monotonic).
    """

    model: str
    why: str
    path: str | None
    history: dict[int, list[AdapterState]]
    possible: set[int]
    least: int
    asked: float
    made: float
    worked: float


class Trains(User):
    """Gradients out of order and twice, steps, saves, deletions; continues from the last checkpoint of a lost run."""

    def __init__(self, url: str, served: Served, seed: int, owner: Owner, ledger: Ledger) -> None:
        super().__init__(url, served, seed, owner, ledger)
        self._oracle = Oracle(served)
        self._config = LoraConfig(rank=self.rng.choice([2, 4]), seed=seed)
        self._model = ""
        self._run: Run | None = None
        self._seq_id = 0
        self._saved: list[str] = []  # of this run, oldest first
        self._least = 0  # steps in the last of them
        self._asked = self._made = self._worked = 0.0
        self._history: dict[int, list[AdapterState]] = {}
        self._perhaps: set[int] = set()
        self._unchecked: LostRun | None = None
        self._continue: LostRun | None = None
        self.recoveries = 0
        self.forks = 0

    def lose(self) -> None:
        """Begin again with another run."""
        super().lose()
        if self._run is not None:
            self.forks += self._current().forks
            self._current().forget()
        self._run, self._model, self._seq_id = None, "", 0

    def round(self) -> None:
        if self._run is None:
            self._begin()
        start = time.monotonic()
        try:
            actions = [self._train, self._save, self._publish, self._sample_ephemeral, self._delete]
            self.rng.choices(actions, [12, 3, 2, 2, 1])[0]()
            self._worked = start
        except Failed as error:
            if error.lost:
                self._lost(str(error))
            raise

    def _ids(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _begin(self) -> None:
        self.open_session()
        if (lost := self._unchecked) is not None:
            try:
                self._check_loss(lost)
            except Violation:
                self._unchecked = None
                raise
            self._unchecked = None
        number, self._asked = next(self._numbers), time.monotonic()
        if self._continue is None:
            config = self._config.model_dump(exclude_none=True)
            body = {"session_id": self.session, "model_seq_id": number, "base_model": self.served.name}
            made = self.wire.result(self.wire.submit("create_model", {**body, "lora_config": config}))
            run = Run(self._oracle, [self._oracle.new(self._config)])
        else:
            try:
                made, run = self._load(self._continue, number)
            except Violation:
                self._continue = None
                raise
            self.recoveries += 1
        self._run, self._model = run, str(made["model_id"])
        self._made = self._worked = time.monotonic()
        self._saved, self._least, self._history, self._perhaps = [], 0, {}, set()
        self._remember(run.states())
        self._forward("first forward")

    def _load(self, lost: LostRun, number: int) -> tuple[dict[str, Any], Run]:
        """Continue from the checkpoint of a lost run: the answer, and the states in which the new one may be."""
        path = lost.path
        assert path is not None
        autosaved = path.endswith("/autosave")
        steps = {self._autosaved_steps(path)} if autosaved else set()
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": True}
        try:
            made: dict[str, Any] = self.wire.result(self.wire.submit("load_weights", body))
        except Failed as error:
            if str(error).startswith(("user", "400", "404")) and not error.lost:
                raise Violation(f"an acknowledged checkpoint cannot be loaded: {error}") from None
            raise
        if autosaved:
            steps.add(self._autosaved_steps(path))  # one that was still written then
            known = [state for count in steps for state in lost.history.get(count, [])]
            self.ledger.count("continued from an autosave")
        else:
            known = [state for _, state in self.ledger.acknowledged.get(path) or self.ledger.undecided[path]]
            self.ledger.count("continued from a save")
        if not known:
            raise Violation(f"{path} is of {steps} steps, the run had {sorted(lost.history)}")
        return made, Run(self._oracle, [self._oracle.load(state) for state in known])

    def _autosaved_steps(self, path: str) -> int:
        """How many steps the autosave says that it has."""
        run = path.split("/")[2]
        for checkpoint in self.wire.get(f"training_runs/{run}/checkpoints")["checkpoints"]:
            if checkpoint["tinker_path"] == path:
                return int(checkpoint["user_metadata"]["optimizer_steps"])
        raise Violation(f"the error of {run} names {path}, which is not listed")

    def _remember(self, states: Sequence[Counted]) -> None:
        for steps, state in states:
            self._history.setdefault(steps, []).append(state)
        for steps in sorted(self._history)[:-REMEMBERED]:
            del self._history[steps]

    def _lost(self, why: str) -> None:
        """The error must name the last checkpoint that was acknowledged, or a later one."""
        self.ledger.count("runs lost")
        if self._run is None:
            return
        named = next((path for path in PATH.findall(why) if "/weights/" in path), None)
        of_model = f"{self._model} is gone" in why
        if self._saved and of_model:
            if named is None:
                raise Violation(f"the error of a lost run names no checkpoint, {self._saved[-1]} was saved: {why}")
            if named in self._saved[:-1]:
                raise Violation(f"the error names {named}, the last one is {self._saved[-1]}")
        if named is None and self._saved:
            named = self._saved[-1]
        own = f"tinker://{self._model}/weights/"
        if named is not None and (
            not named.startswith(own) or not (self._is_known(named) or named == f"{own}autosave")
        ):
            raise Violation(f"the error names {named}, which {self._model} never saved: {why}")
        possible = {steps for steps, _ in self._run.states()} | self._perhaps
        times = self._asked, self._made, self._worked
        lost = LostRun(self._model, why, named, self._history, possible, self._least, *times)
        if of_model:
            self._unchecked = lost
        if named is not None:
            self._continue = lost

    def _is_known(self, path: str) -> bool:
        return path in self.ledger.acknowledged or path in self.ledger.undecided

    def _check_loss(self, lost: LostRun) -> None:
        """Nothing acknowledged is missing in the checkpoint that the error names, and the rest is as it says."""
        if lost.path is None:
            counts = {0}
        elif lost.path.endswith("/autosave"):
            counts = {self._autosaved_steps(lost.path)}
        else:
            counts = {steps for steps, _ in self.ledger.acknowledged.get(lost.path) or self.ledger.undecided[lost.path]}
        if max(counts) < lost.least:
            raise Violation(f"a checkpoint of {lost.least} steps was acknowledged, this has {counts}: {lost.why}")
        if self._was_saved(lost):
            self.ledger.count("run that a stop ended")
            if not counts & lost.possible:
                raise Violation(f"a stop saved {counts} steps of {sorted(lost.possible)}: {lost.why}")
        if (said := LOST_STEPS.search(lost.why)) is not None:
            self.ledger.count("error with the number of lost steps")
            if not {count + int(said[1]) for count in counts} & lost.possible:
                raise Violation(f"the checkpoint has {counts} steps of {sorted(lost.possible)}: {lost.why}")

    def _was_saved(self, lost: LostRun) -> bool:
        """Whether a stop of the server ended it, had to save it, and could."""
        if not RESTARTED.search(lost.why) or any(when > lost.worked for when in self.ledger.trainer_ends):
            return False
        after = [(when, saves) for when, saves in self.ledger.ends if when > lost.asked]
        return bool(after) and after[0][0] > lost.made and after[0][1]

    def _data(self, bad: bool = False) -> tuple[Datum, ...]:
        found = []
        for _ in range(self.rng.randint(1, 3)):
            tokens = [self.rng.randrange(1, 500) for _ in range(self.rng.randint(3, 12))]
            targets, given = tokens[1:], ModelInput.from_ints(tokens[:-1])
            if self.served.real and self.rng.random() < 0.3:
                given = ModelInput(chunks=(png(self.rng.randrange(6)), *given.chunks))
                targets = [0] * (self._oracle.length(given) - len(targets)) + targets
            if bad:
                targets = [self._oracle.vocab_size for _ in targets]
            found.append(Datum(model_input=given, loss_fn_inputs={"target_tokens": targets}))
        return tuple(found)

    def _current(self) -> Run:
        assert self._run is not None
        return self._run

    def _forward(self, what: str) -> None:
        data = self._data()
        got = self.wire.result(self.wire.gradient(self._model, self._ids(), data, forward_only=True))
        self._current().forward(data, logprobs(got), f"{self._model}: {what}")
        self.ledger.count("forward")

    def _train(self) -> None:
        """Up to three gradients in any order, each perhaps twice, then a step."""
        run, bad = self._current(), self.rng.random() < 0.05
        chunks = [(self._ids(), self._data(bad)) for _ in range(self.rng.randint(1, 3))]
        step = self._ids()
        asked: dict[int, str] = {}
        for seq_id, data in self.rng.sample(chunks, len(chunks)):
            for _ in range(self.rng.choice([1, 1, 2])):
                request_id = self.wire.gradient(self._model, seq_id, data)
                if asked.setdefault(seq_id, request_id) != request_id:
                    raise Violation(f"{self._model}: seq_id {seq_id} has two request ids")
        body = {
            "model_id": self._model,
            "seq_id": step,
            "adam_params": self.served.adam.model_dump(),
            "type": "optim_step",
        }
        promise = self.wire.submit("optim_step", body)
        if self.rng.random() < 0.3 and self.wire.submit("optim_step", body) != promise:
            raise Violation(f"{self._model}: seq_id {step} has two request ids")
        for seq_id, data in chunks:
            try:
                run.gradient(data, logprobs(self.wire.result(asked[seq_id])), f"{self._model}: gradient {seq_id}")
                self.ledger.count("gradient")
            except Failed as error:
                self.ledger.count("gradient failed")
                if error.lost:
                    if not bad:  # all of it may have run before the answers were lost, and an autosave may hold it
                        later = run.later([data for _, data in chunks], self.served.adam)
                        self._remember(later)
                        self._perhaps = {steps for steps, _ in later}
                    raise
                run.failed_gradient()
        try:
            run.step(self.served.adam, self.wire.result(promise)["metrics"]["grad_norm"], f"{self._model}: step {step}")
            self.ledger.count("step")
        except Failed as error:
            self.ledger.count("step failed")
            run.failed_step(self.served.adam)
            if error.lost:
                self._remember(run.states())
                raise
        self._remember(run.states())

    def _save(self) -> None:
        name, seq_id = f"c{next(self._numbers)}", self._ids()
        path = f"tinker://{self._model}/weights/{name}"
        states = self._current().states()
        self.ledger.undecided[path] = states
        body = {"model_id": self._model, "seq_id": seq_id, "path": name, "overwrite": False, "type": "save_weights"}
        try:
            got = self.wire.result(self.wire.submit("save_weights", body))["path"]
        except Failed:
            self.ledger.count("save failed")
            raise
        if got != path:
            raise Violation(f"saved as {got} instead of {path}")
        self.ledger.acknowledged[path] = states
        self._saved.append(path)
        self._least = min(steps for steps, _ in states)
        self.ledger.count("save")

    def _publish(self) -> None:
        """A named sampler version; what it says of a prompt stays."""
        body = {"model_id": self._model, "seq_id": self._ids(), "path": f"s{next(self._numbers)}"}
        path = self.wire.result(self.wire.submit("save_weights_for_sampler", body))["path"]
        self.ledger.count("named version")
        body = {"session_id": self.session, "sampling_session_seq_id": next(self._numbers), "model_path": path}
        sampler = str(self.wire.post("create_sampling_session", body)["sampling_session_id"])
        found = self._check_scores(sampler)
        with self.ledger.lock:
            self.ledger.versions[path] = found

    def _sample_ephemeral(self) -> None:
        number = next(self._numbers)
        body = {"model_id": self._model, "seq_id": self._ids(), "sampling_session_seq_id": number, "kind": "snapshot"}
        saved = self.wire.result(self.wire.submit("save_weights_for_sampler", body))
        self._check_scores(str(saved["sampling_session_id"]))
        self.ledger.count("ephemeral version")

    def _check_scores(self, sampler: str) -> npt.NDArray[np.float32]:
        for number in itertools.count():
            try:
                got = scores(self.wire, sampler, number)
                break
            except Failed as error:
                if error.lost or number == 20:
                    raise
                time.sleep(0.3)
        self._current().scores(PROMPT, got, f"{sampler}: logprobs of a version")
        return got

    def _delete(self) -> None:
        """Any but the last; deleted is deleted, for good."""
        if len(self._saved) < 2:
            return
        path = self._saved.pop(0)
        del self.ledger.acknowledged[path]
        run, _, name = path.removeprefix("tinker://").partition("/weights/")
        try:
            self.wire.call("DELETE", f"training_runs/{run}/checkpoints/weights/{name}", None)
        except Failed as error:
            if not str(error).startswith("404"):  # a deletion that was repeated finds nothing
                raise
        self.ledger.deleted.add(path)
        self.ledger.count("deletion")
