"""What has to be true when the faults have ended."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tinker_local.types import Datum, ModelInput

from tests.chaos.chaos_users import PROMPT, Ledger, Owner, Wireless, logprobs, scores
from tests.chaos.possible_states import Oracle, Run, Violation
from tests.chaos.served import Served

MOST = 15
"""Checkpoints of each kind and owner that are loaded."""


def audit(url: str, served: Served, ledger: Ledger, owners: Sequence[Owner], rng: random.Random) -> Counter[str]:
    """Everything that was acknowledged is listed for its owner alone, loads and equals; what was deleted is gone; the
    quotas count what there is."""
    found, oracle = Counter[str](), Oracle(served)
    for owner in owners:
        _Audit(url, ledger, owner, oracle, rng, found).run()
    return found


class _Audit:
    def __init__(
        self,
        url: str,
        ledger: Ledger,
        owner: Owner,
        oracle: Oracle,
        rng: random.Random,
        found: Counter[str],
    ) -> None:
        self._wire = Wireless(url, owner, ledger)
        self._ledger, self._owner, self._oracle = ledger, owner, oracle
        self._rng, self._found, self._numbers = rng, found, itertools.count()

    def run(self) -> None:
        self._check_listing()
        body = {"tags": [], "user_metadata": {"of": self._owner.name}}
        self._session = str(self._wire.post("create_session", body)["session_id"])
        for path in self._some(self._ledger.acknowledged):
            self._train_on(path)
        for path in self._some(self._ledger.versions):
            body = {"session_id": self._session, "sampling_session_seq_id": next(self._numbers), "model_path": path}
            sampler = str(self._wire.post("create_sampling_session", body)["sampling_session_id"])
            if not self._oracle.served.same(scores(self._wire, sampler, 0), self._ledger.versions[path]):
                self._ledger.violated(f"{path}: other logprobs than when it was saved")
            self._found["sampled again"] += 1

    def _own(self, paths: Any) -> list[str]:
        return [path for path in paths if self._ledger.owner_of(path) == self._owner.name]

    def _some(self, paths: Any) -> list[str]:
        own = sorted(self._own(paths))
        return self._rng.sample(own, min(MOST, len(own)))

    def _check_listing(self) -> None:
        listed: dict[str, int] = {}
        for offset in itertools.count(0, 1000):
            page = self._wire.get(f"checkpoints?limit=1000&offset={offset}")["checkpoints"]
            listed |= {each["tinker_path"]: each["size_bytes"] for each in page}
            if len(page) < 1000:
                break
        for path in self._own([*self._ledger.acknowledged, *self._ledger.versions]):
            self._found["acknowledged"] += 1
            if path not in listed:
                self._ledger.violated(f"{path} was acknowledged and is not listed")
        for path in self._ledger.deleted & listed.keys():
            self._ledger.violated(f"{path} was deleted and is listed")
        for path in listed:
            self._found["autosaves"] += path.endswith("/autosave")
            if self._ledger.owner_of(path) != self._owner.name:
                self._ledger.violated(f"{self._owner.name} sees {path} of {self._ledger.owner_of(path)}")
        (usage,) = self._wire.get("usage")["owners"]
        if usage["used"]["storage_bytes"] != sum(listed.values()):
            self._ledger.violated(f"{self._owner.name}: {sum(listed.values())} bytes are listed, the usage is {usage}")

    def _train_on(self, path: str) -> None:
        body = {"session_id": self._session, "model_seq_id": next(self._numbers), "path": path, "optimizer": True}
        model = str(self._wire.result(self._wire.submit("load_weights", body))["model_id"])
        run = Run(self._oracle, [self._oracle.load(state) for _, state in self._ledger.acknowledged[path]])
        data = [Datum(model_input=ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": PROMPT[1:]})]
        for seq_id, forward_only in ((1, True), (2, False)):
            got = logprobs(self._wire.result(self._wire.gradient(model, seq_id, data, forward_only=forward_only)))
            self._check(run.forward if forward_only else run.gradient, data, got, path)
        step = {
            "model_id": model,
            "seq_id": 3,
            "adam_params": self._oracle.served.adam.model_dump(),
            "type": "optim_step",
        }
        norm = self._wire.result(self._wire.submit("optim_step", step))["metrics"]["grad_norm"]
        self._check(run.step, self._oracle.served.adam, norm, path)
        got = logprobs(self._wire.result(self._wire.gradient(model, 4, data, forward_only=True)))
        self._check(run.forward, data, got, f"{path}, one step later")
        self._found["loaded and trained on"] += 1

    def _check(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except Violation as error:
            self._ledger.violated(str(error))
