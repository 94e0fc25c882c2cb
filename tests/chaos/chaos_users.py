"""Users in threads: they repeat what was not answered, as the SDK does, and check every answer against the history."""

import io
import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tinker_local.types import Datum, ForwardBackwardRequest, ImageChunk
from tinker_local.types.codec import (
    decode_forward_backward_output,
    decode_sample_output,
    encode_forward_backward_request,
)

from tests.attacks.tenant import PROTOBUF, Connection
from tests.chaos.possible_states import Counted, Violation
from tests.chaos.served import Served

PATIENCE = 900.0
"""Seconds for which a request is repeated. A start of vLLM on a busy machine took 319."""

LOST = re.compile(
    r"model \S+ is gone|has ended|was restarted|last checkpoint|no saved checkpoint|there is no (model|session)"
)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has a key."""

    name: str

    @property
    def key(self) -> str:
        return f"tml-{self.name}-horse-battery"


class Failed(Exception):
    """A permanent answer: a failed future, or a refusal."""

    @property
    def lost(self) -> bool:
        """The run or the session is not there any more."""
        return LOST.search(str(self)) is not None


def silent(_: str) -> None:
    """Say nothing."""


@dataclass
class Ledger:
    """What was promised.

    `acknowledged`: states in which a checkpoint of training may be, by path; `undecided`: of saves without an answer;
    `versions`: prompt logprobs of a named sampler version; `samples`: tokens and logprobs by source, prompt and seed;
    `owners`: names of sessions' owners; `ends`: when the server ended (monotonic), and whether nothing kept it from
    saving every step; `trainer_ends`: when a fault ended the trainer's process.
    """

    acknowledged: dict[str, list[Counted]] = field(default_factory=dict)
    undecided: dict[str, list[Counted]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    versions: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    samples: dict[tuple[str, str], tuple[list[int], npt.NDArray[np.float32]]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    ends: list[tuple[float, bool]] = field(default_factory=list)
    trainer_ends: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    say: Callable[[str], None] = silent

    def count(self, what: str, times: int = 1) -> None:
        with self.lock:
            self.done[what] += times

    def owner_of(self, id_: str) -> str | None:
        """Who owns a session, a run or a checkpoint; None for a session whose creation was not answered."""
        return self.owners.get(id_.removeprefix("tinker://").partition(":")[0])

    def violated(self, what: str) -> None:
        with self.lock:
            self.violations.append(what)
        self.say(f"VIOLATION {what}")


class Wireless:
    """A connection that does not give up: repeats a request, byte for byte, until it is answered for good."""

    def __init__(self, url: str, owner: Owner, ledger: Ledger) -> None:
        self._connection = Connection(url, owner.key)
        self._ledger = ledger

    def call(self, method: str, path: str, body: bytes | None, kind: str = "application/json") -> tuple[str, bytes]:
        """Content type and content of the answer with status 2xx."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                status, given, content = self._connection.send(method, path, body, Content_Type=kind)
            except (OSError, HTTPException):
                status, given, content = 0, "", b"no connection"
            with self._ledger.lock:
                self._ledger.statuses[status] += 1
            if status in (200, 204):
                return given, content
            text = content.decode("utf-8", "replace")
            if status == 409 or (status >= 500 and status != 503):
                self._ledger.violated(f"{method} {path}: {status} {text[:300]}")
            if status not in (0, 408, 429) and status < 500:
                raise Failed(f"{status}: {text}")
            if time.monotonic() > end:
                raise TimeoutError(f"{method} {path}: {status} {text[:300]} for {PATIENCE:.0f} s")
            if status != 408:
                time.sleep(0.1)

    def post(self, path: str, body: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("POST", path, json.dumps(body).encode())[1] or b"{}")
        return found

    def get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("GET", path, None)[1])
        return found

    def gradient(self, model: str, seq_id: int, data: Sequence[Datum], *, forward_only: bool = False) -> str:
        request = ForwardBackwardRequest(
            model_id=model, seq_id=seq_id, data=tuple(data), loss_fn="cross_entropy", forward_only=forward_only
        )
        body = encode_forward_backward_request(request)
        return str(json.loads(self.call("POST", "forward_backward", body, PROTOBUF)[1])["request_id"])

    def result(self, request_id: str) -> Any:
        """Decoded; Failed if the operation failed."""
        body = json.dumps({"request_id": request_id, "allow_metadata_only": True}).encode()
        kind, content = self.call("POST", "retrieve_future", body)
        if kind == PROTOBUF:
            return (decode_sample_output if ":sample:" in request_id else decode_forward_backward_output)(content)
        found = json.loads(content)
        if "error" in found:
            raise Failed(f"{found['category']}: {found['error']}")
        return found

    def submit(self, path: str, body: Any) -> str:
        return str(self.post(path, body)["request_id"])

    def sample(self, sampler: str, seq_id: int, chunks: list[dict[str, Any]], seed: int, **fields: Any) -> Any:
        params = {"max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": seed}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": chunks}, "num_samples": 1}
        return self.result(self.submit("asample", {**body, "sampling_params": params, "type": "sample", **fields}))


def text(tokens: Sequence[int]) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def png(seed: int) -> ImageChunk:
    """Noise in 40 rows and more."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + seed, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return ImageChunk(data=file.getvalue(), format="png")


class User:
    """A thread that goes round after round; `rounds` of them ended well."""

    def __init__(self, url: str, served: Served, seed: int, owner: Owner, ledger: Ledger) -> None:
        self.url, self.served, self.owner, self.ledger = url, served, owner, ledger
        self.rng = random.Random(seed)
        self.wire = Wireless(url, owner, ledger)
        self.rounds = 0
        self.session = ""
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._loop, self._beat)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                self.ledger.violated(f"{type(self).__name__} hangs")

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                if self.rng.random() < 0.05:
                    self.look_around()
                self.round()
                self.rounds += 1
            except Violation as error:
                self.ledger.violated(f"{type(self).__name__}: {error}")
                self.lose()
            except Failed as error:
                self.ledger.count("rounds cut short")
                self._stop.wait(0.05)
                if error.lost:
                    self.lose()
            except Exception as error:
                self.ledger.violated(f"{type(self).__name__}: {type(error).__name__}: {error}")
                self.lose()

    def _beat(self) -> None:
        wire = Wireless(self.url, self.owner, self.ledger)
        while not self._stop.wait(3.0):
            try:
                if session := self.session:
                    wire.post("session_heartbeat", {"session_id": session})
            except (Failed, TimeoutError):
                pass

    def open_session(self) -> None:
        if not self.session:
            body = {"tags": [], "user_metadata": {"of": self.owner.name}}
            session = str(self.wire.post("create_session", body)["session_id"])
            self.ledger.owners[session] = self.owner.name
            self.session = session

    def lose(self) -> None:
        """Begin again with another session."""
        self.session = ""

    def round(self) -> None:
        raise NotImplementedError

    def look_around(self) -> None:
        """Listings show this owner's things alone, and what another has does not exist."""
        self.ledger.count("look around")
        shown = [str(each["tinker_path"]) for each in self.wire.get("checkpoints?limit=1000")["checkpoints"]]
        shown += self.wire.get("sessions?limit=1000")["sessions"]
        urn = f"tml:organization_user:{self.owner.name}"
        for run in self.wire.get("training_runs?limit=1000")["training_runs"]:
            shown.append(run["training_run_id"])
            if run["model_owner"] != urn:
                raise Violation(f"{self.owner.name} sees a run of {run['model_owner']}")
        for session in self.wire.post("sessions/search", {"limit": 100})["sessions"]:
            shown.append(session["session_id"])
            if (session["owner"], session["user_metadata"]["of"]) != (urn, self.owner.name):
                raise Violation(f"{self.owner.name} sees a session of {session}")
        owned = [owner["owner"] for owner in self.wire.get("usage")["owners"]]
        if owned != [self.owner.name]:
            raise Violation(f"{self.owner.name} sees what {owned} use")
        for id_ in shown:
            if self.ledger.owner_of(id_) not in (self.owner.name, None):
                raise Violation(f"{self.owner.name} sees {id_} of {self.ledger.owner_of(id_)}")
        self._look_for_what_others_have()

    def _look_for_what_others_have(self) -> None:
        with self.ledger.lock:
            sessions = [id_ for id_, owner in self.ledger.owners.items() if owner != self.owner.name]
        paths = [*self.ledger.acknowledged.copy(), *self.ledger.versions.copy()]
        paths = [path for path in paths if self.ledger.owner_of(path) != self.owner.name]
        if not paths:
            return
        path = self.rng.choice(paths)
        run = path.split("/")[2]
        sampling = {"session_id": self.session, "sampling_session_seq_id": next(self._numbers), "model_path": path}
        looks: list[Callable[[], Any]] = [
            lambda: self.wire.post("weights_info", {"tinker_path": path}),
            lambda: self.wire.get(f"training_runs/{run}"),
            lambda: self.wire.get(f"training_runs/{run}/checkpoints"),
            lambda: self.wire.get(f"sessions/{self.rng.choice(sessions)}"),
            lambda: self.wire.post("create_sampling_session", sampling),
        ]
        for look in looks:
            try:
                found = look()
            except Failed as error:
                if not (error.lost or str(error).startswith("404")):
                    raise Violation(f"{self.owner.name} asked for {path} of another: {error}") from None
            else:
                raise Violation(f"{self.owner.name} found {path} of another: {found}")


PROMPT = [5, 9, 20, 31, 44, 7]


def scores(wire: Wireless, sampler: str, seq_id: int) -> npt.NDArray[np.float32]:
    """Logprobs of `PROMPT` but its first token."""
    got = wire.sample(sampler, seq_id, [text(PROMPT)], 1, prompt_logprobs=True)
    return np.array(got.prompt_logprobs[1:], np.float32)


def logprobs(output: Any) -> list[npt.NDArray[np.float32]]:
    """Of each datum."""
    return [np.asarray(each["logprobs"].to_numpy(), np.float32) for each in output.loss_fn_outputs]
