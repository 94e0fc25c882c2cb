"""Users who sample, and one who begins more training runs than it may."""

import itertools
import json
import time
from contextlib import suppress

import numpy as np

from tests.chaos.chaos_users import Failed, Ledger, Owner, User, png, text
from tests.chaos.possible_states import Violation
from tests.chaos.served import Served


class Samples(User):
    """The same prompts and seeds again and again, with images too: equal answers from equal weights, for ever."""

    def __init__(self, url: str, served: Served, seed: int, owner: Owner, ledger: Ledger, *, images: bool) -> None:
        super().__init__(url, served, seed, owner, ledger)
        self._samplers: dict[str, str] = {}
        self._images = [png(number) for number in range(6)] if images else []
        self._samples = itertools.count()

    def lose(self) -> None:
        super().lose()
        self._samplers.clear()

    def round(self) -> None:
        self.open_session()
        with self.ledger.lock:
            versions = [path for path in self.ledger.versions if self.ledger.owner_of(path) == self.owner.name]
        sources = ["base", *versions]
        source = self.rng.choice(sources[-8:])
        if source not in self._samplers:
            body = {"session_id": self.session, "sampling_session_seq_id": next(self._numbers)}
            body |= {"base_model": self.served.name} if source == "base" else {"model_path": source}
            self._samplers[source] = str(self.wire.post("create_sampling_session", body)["sampling_session_id"])
        number, seed = self.rng.randrange(4), self.rng.randrange(4)
        chunks = [text([5 + number, 9, 20])]
        if self._images:
            chunks += [self.rng.choice(self._images).model_dump(mode="json", exclude_none=True), text([7])]
        try:
            got = self.wire.sample(self._samplers[source], next(self._samples), chunks, seed)
        except Failed:
            self.ledger.count("sample failed")
            time.sleep(0.1)
            raise
        (sequence,) = got.sequences
        key = (source, json.dumps([chunks, seed]))
        tokens, logprobs = list(sequence.tokens), np.asarray(sequence.logprobs, np.float32)
        with self.ledger.lock:
            first_tokens, first = self.ledger.samples.setdefault(key, (tokens, logprobs))
        self.ledger.count("sample with an image" if self._images else "sample")
        if tokens != first_tokens or not self.served.same(first, logprobs):
            raise Violation(f"{source}: another sample than before from the same prompt and seed")


QUOTA = 2
"""Adapters that the owner of a `Crowds` may have."""


class Crowds(User):
    """Begins one training run more than its owner may have, which is refused, and ends them."""

    def round(self) -> None:
        self.open_session()
        for number in range(QUOTA + 1):
            body = {"session_id": self.session, "model_seq_id": number, "base_model": self.served.name}
            try:
                self.wire.result(self.wire.submit("create_model", {**body, "lora_config": {"rank": 2}}))
            except Failed as error:
                if f"the most is {QUOTA} (--quota)" not in str(error):
                    self._finish()  # a repeated request for this run would fail as this one did
                    raise
                break
        else:
            raise Violation(f"{self.owner.name} has {QUOTA + 1} runs, the quota is {QUOTA}")
        used = self.wire.get("usage")["owners"][0]["used"]["adapters"]
        if used > QUOTA:
            raise Violation(f"{self.owner.name} has {used} adapters, the quota is {QUOTA}")
        self._finish()
        if number < QUOTA:  # until the sessions that it lost end, their runs count
            time.sleep(1)
            raise Failed(f"only {number} runs could be made")
        self.ledger.count("run beyond the quota refused")
        if self.served.real:  # others need the processor more
            time.sleep(0.3)

    def _finish(self) -> None:
        session, self.session = self.session, ""
        with suppress(Failed):  # it has ended
            self.wire.call("POST", f"sessions/{session}/finish", b"{}")
