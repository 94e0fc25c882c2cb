"""Users who sample, and one who begins more training runs than it may."""

import base64
import io
import itertools
import json
import time
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from tests.chaos.chaos_users import Failed, Ledger, Owner, User, text
from tests.chaos.possible_states import Violation


class Samples(User):
    """The same prompts and seeds again and again, with images too: equal answers from equal weights, for ever."""

    def __init__(self, url: str, base_model: str, seed: int, owner: Owner, ledger: Ledger, *, images: bool) -> None:
        super().__init__(url, base_model, seed, owner, ledger)
        self._samplers: dict[str, str] = {}
        self._images = [_png(number) for number in range(6)] if images else []
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
            body |= {"base_model": self.base_model} if source == "base" else {"model_path": source}
            self._samplers[source] = str(self.wire.post("create_sampling_session", body)["sampling_session_id"])
        number, seed = self.rng.randrange(4), self.rng.randrange(4)
        chunks = [text([5 + number, 9, 20])]
        if self._images:
            chunks += [self._images[self.rng.randrange(len(self._images))], text([7])]
        try:
            got = self.wire.sample(self._samplers[source], next(self._samples), chunks, seed)
        except Failed:
            self.ledger.count("sample failed")
            time.sleep(0.1)
            raise
        (sequence,) = got.sequences
        key = (source, json.dumps([chunks, seed]))
        content = np.asarray(sequence.tokens, np.int32).tobytes() + np.asarray(sequence.logprobs, np.float32).tobytes()
        with self.ledger.lock:
            first = self.ledger.samples.setdefault(key, content)
        self.ledger.count("sample with an image" if self._images else "sample")
        if first != content:
            raise Violation(f"{source}: another sample than before from the same prompt and seed")


def _png(seed: int) -> dict[str, Any]:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + seed, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return {"type": "image", "data": base64.b64encode(file.getvalue()).decode(), "format": "png"}


QUOTA = 2
"""Adapters that the owner of a `Crowds` may have."""


class Crowds(User):
    """Begins one training run more than its owner may have, which is refused, and ends them."""

    def round(self) -> None:
        self.open_session()
        for number in range(QUOTA + 1):
            body = {"session_id": self.session, "model_seq_id": number, "base_model": self.base_model}
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

    def _finish(self) -> None:
        session, self.session = self.session, ""
        with suppress(Failed):  # it has ended
            self.wire.call("POST", f"sessions/{session}/finish", b"{}")
