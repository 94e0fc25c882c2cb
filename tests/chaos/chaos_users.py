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
from tinker_local.backend.training.trainer import AdapterState
from tinker_local.types import AdamParams, Datum, ForwardBackwardRequest, LoraConfig, ModelInput
from tinker_local.types.codec import (
    decode_forward_backward_output,
    decode_sample_output,
    encode_forward_backward_request,
)

from tests.attacks.tenant import PROTOBUF, Connection
from tests.chaos.possible_states import Oracle, Run, Violation

PATIENCE = 300.0
"""Seconds for which a request is repeated."""

ADAM = AdamParams(learning_rate=0.03, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
LOST = re.compile(
    r"model \S+ is gone|has ended|was restarted|last checkpoint|no saved checkpoint|there is no (model|session)"
)
PATH = re.compile(r"tinker://[^\s;,]+?(?=[\s;,]|\.?$|\. )")


class Failed(Exception):
    """A permanent answer: a failed future, or a refusal."""

    @property
    def lost(self) -> bool:
        """The run or the session is not there any more."""
        return LOST.search(str(self)) is not None


@dataclass
class Ledger:
    """What was promised.

    `acknowledged`: states in which a checkpoint of training may be, by path; `undecided`: of saves without an answer;
    `versions`: prompt logprobs of a named sampler version; `samples`: by source, prompt and seed.
    """

    acknowledged: dict[str, list[AdapterState]] = field(default_factory=dict)
    undecided: dict[str, list[AdapterState]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    versions: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    samples: dict[tuple[str, str], bytes] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.done[what] += 1

    def violated(self, what: str) -> None:
        with self.lock:
            self.violations.append(what)


class Wireless:
    """A connection that does not give up: repeats a request, byte for byte, until it is answered for good."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._connection = Connection(url, "tml-local")
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


class User:
    """A thread that goes round after round; `rounds` of them ended well."""

    def __init__(self, url: str, base_model: str, seed: int, ledger: Ledger) -> None:
        self.url, self.base_model, self.ledger = url, base_model, ledger
        self.rng = random.Random(seed)
        self.wire = Wireless(url, ledger)
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
                self.round()
                self.rounds += 1
            except Violation as error:
                self.ledger.violated(f"{type(self).__name__}: {error}")
                self.lose()
            except Failed as error:
                self.ledger.count("rounds cut short")
                if error.lost:
                    self.lose()
            except Exception as error:
                self.ledger.violated(f"{type(self).__name__}: {type(error).__name__}: {error}")
                self.lose()

    def _beat(self) -> None:
        wire = Wireless(self.url, self.ledger)
        while not self._stop.wait(3.0):
            try:
                if session := self.session:
                    wire.post("session_heartbeat", {"session_id": session})
            except (Failed, TimeoutError):
                pass

    def open_session(self) -> None:
        if not self.session:
            self.session = str(self.wire.post("create_session", {"tags": [], "user_metadata": {}})["session_id"])

    def lose(self) -> None:
        """Begin again with another session."""
        self.session = ""

    def round(self) -> None:
        raise NotImplementedError


class Trains(User):
    """Gradients out of order and twice, steps, saves, deletions; continues from the last checkpoint of a lost run."""

    def __init__(self, url: str, base_model: str, seed: int, ledger: Ledger) -> None:
        super().__init__(url, base_model, seed, ledger)
        self._oracle = Oracle(base_model)
        self._config = LoraConfig(rank=self.rng.choice([2, 4]), seed=seed)
        self._model = ""
        self._run: Run | None = None
        self._seq_id = 0
        self._saved: list[str] = []  # of this run, oldest first
        self._continue: str | None = None
        self._history: list[AdapterState] = []
        self.recoveries = 0
        self.forks = 0

    def lose(self) -> None:
        super().lose()
        if self._run is not None:
            self.forks += self._current().forks
            self._current().forget()
        self._run, self._model, self._seq_id = None, "", 0

    def round(self) -> None:
        if self._run is None:
            self._begin()
        try:
            actions = [self._train, self._save, self._publish, self._sample_ephemeral, self._delete]
            self.rng.choices(actions, [12, 3, 2, 2, 1])[0]()
        except Failed as error:
            if error.lost:
                self._lost(str(error))
            raise

    def _ids(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _begin(self) -> None:
        self.open_session()
        path, number = self._continue, next(self._numbers)
        if path is None:
            config = self._config.model_dump(exclude_none=True)
            body = {"session_id": self.session, "model_seq_id": number, "base_model": self.base_model}
            made = self.wire.result(self.wire.submit("create_model", {**body, "lora_config": config}))
            self._run = Run(self._oracle, [self._oracle.new(self._config)])
        else:
            body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": True}
            try:
                made = self.wire.result(self.wire.submit("load_weights", body))
            except Failed as error:
                if str(error).startswith(("user", "404")) and not error.lost:
                    raise Violation(f"an acknowledged checkpoint cannot be loaded: {error}") from None
                raise
            known = self.ledger.acknowledged.get(path) or self.ledger.undecided.get(path) or self._history
            self._run = Run(self._oracle, [self._oracle.load(state) for state in known])
            self.recoveries += 1
            self.ledger.count("continued from a checkpoint")
        self._model = str(made["model_id"])
        self._saved, self._history = [], self._current().states()
        self._forward("first forward")

    def _lost(self, why: str) -> None:
        """The error must name the last checkpoint that was acknowledged, or a later one."""
        self.ledger.count("runs lost")
        found = PATH.findall(why)
        named = next((path for path in found if "/weights/" in path), None)
        if self._saved and self._model and f"{self._model} is gone" in why:
            if named is None:
                raise Violation(f"the error of a lost run names no checkpoint, {self._saved[-1]} was saved: {why}")
            if named in self._saved[:-1]:
                raise Violation(f"the error names {named}, the last one is {self._saved[-1]}")
        if named is None and self._saved:
            named = self._saved[-1]
        known = self.ledger.acknowledged.keys() | self.ledger.undecided.keys()
        if named is not None and not named.endswith("/autosave") and named not in known:
            raise Violation(f"the error names {named}, which was never saved: {why}")
        self._continue = named or self._continue

    def _data(self, bad: bool = False) -> tuple[Datum, ...]:
        found = []
        for _ in range(self.rng.randint(1, 3)):
            tokens = [self.rng.randrange(1, 500) for _ in range(self.rng.randint(3, 12))]
            targets = [600 if bad else token for token in tokens[1:]]
            found.append(
                Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets})
            )
        return tuple(found)

    def _current(self) -> Run:
        assert self._run is not None
        return self._run

    def _forward(self, what: str) -> None:
        data = self._data()
        got = self.wire.result(self.wire.gradient(self._model, self._ids(), data, forward_only=True))
        self._current().forward(data, _logprobs(got), f"{self._model}: {what}")
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
        body = {"model_id": self._model, "seq_id": step, "adam_params": ADAM.model_dump(), "type": "optim_step"}
        promise = self.wire.submit("optim_step", body)
        if self.rng.random() < 0.3 and self.wire.submit("optim_step", body) != promise:
            raise Violation(f"{self._model}: seq_id {step} has two request ids")
        for seq_id, data in chunks:
            try:
                run.gradient(data, _logprobs(self.wire.result(asked[seq_id])), f"{self._model}: gradient {seq_id}")
                self.ledger.count("gradient")
            except Failed as error:
                self.ledger.count("gradient failed")
                if error.lost:
                    if not bad:  # all of it may have run before the answers were lost, and an autosave may hold it
                        self._history += run.later([data for _, data in chunks], ADAM)
                    raise
                run.failed_gradient()
        try:
            run.step(ADAM, self.wire.result(promise)["metrics"]["grad_norm"], f"{self._model}: step {step}")
            self.ledger.count("step")
        except Failed as error:
            self.ledger.count("step failed")
            run.failed_step(ADAM)
            self._history += run.states()
            if error.lost:
                raise
        self._history = (self._history + run.states())[-60:]

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


PROMPT = [5, 9, 20, 31, 44, 7]


def scores(wire: Wireless, sampler: str, seq_id: int) -> npt.NDArray[np.float32]:
    """Logprobs of `PROMPT` but its first token."""
    got = wire.sample(sampler, seq_id, [text(PROMPT)], 1, prompt_logprobs=True)
    return np.array(got.prompt_logprobs[1:], np.float32)


def _logprobs(output: Any) -> list[npt.NDArray[np.float32]]:
    return [np.asarray(each["logprobs"].to_numpy(), np.float32) for each in output.loss_fn_outputs]


class Samples(User):
    """The same prompts and seeds again and again, with images too: equal answers from equal weights, for ever."""

    def __init__(self, url: str, base_model: str, seed: int, ledger: Ledger, *, images: bool) -> None:
        super().__init__(url, base_model, seed, ledger)
        self._samplers: dict[str, str] = {}
        self._images = [_png(number) for number in range(6)] if images else []
        self._samples = itertools.count()

    def lose(self) -> None:
        super().lose()
        self._samplers.clear()

    def round(self) -> None:
        self.open_session()
        with self.ledger.lock:
            sources = ["base", *self.ledger.versions]
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
    import base64

    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + seed, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return {"type": "image", "data": base64.b64encode(file.getvalue()).decode(), "format": "png"}


def audit(url: str, base_model: str, ledger: Ledger, rng: random.Random, most: int = 25) -> Counter[str]:
    """After the faults: everything that was acknowledged is listed, loads and equals; what was deleted is not there."""
    wire, found = Wireless(url, ledger), Counter[str]()
    session = str(wire.post("create_session", {"tags": [], "user_metadata": {}})["session_id"])
    numbers = itertools.count()
    runs = {path.split("/")[2] for path in [*ledger.acknowledged, *ledger.versions, *ledger.deleted]}
    listed = set()
    for run in runs:
        listed |= {
            each["tinker_path"] for each in wire.get(f"training_runs/{run}/checkpoints?limit=1000")["checkpoints"]
        }
    for path in [*ledger.acknowledged, *ledger.versions]:
        found["acknowledged checkpoints"] += 1
        if path not in listed:
            ledger.violated(f"{path} was acknowledged and is not listed")
    for path in ledger.deleted & listed:
        ledger.violated(f"{path} was deleted and is listed")
    oracle = Oracle(base_model)
    for path in _some(rng, ledger.acknowledged, most):
        body = {"session_id": session, "model_seq_id": next(numbers), "path": path, "optimizer": True}
        model = str(wire.result(wire.submit("load_weights", body))["model_id"])
        run_states = Run(oracle, [oracle.load(state) for state in ledger.acknowledged[path]])
        data = [Datum(model_input=ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": PROMPT[1:]})]
        for seq_id, forward_only in ((1, True), (2, False)):
            got = _logprobs(wire.result(wire.gradient(model, seq_id, data, forward_only=forward_only)))
            _checked(ledger, (run_states.forward if forward_only else run_states.gradient), data, got, path)
        step = {"model_id": model, "seq_id": 3, "adam_params": ADAM.model_dump(), "type": "optim_step"}
        norm = wire.result(wire.submit("optim_step", step))["metrics"]["grad_norm"]
        _checked(ledger, run_states.step, ADAM, norm, path)
        got = _logprobs(wire.result(wire.gradient(model, 4, data, forward_only=True)))
        _checked(ledger, run_states.forward, data, got, f"{path}, one step later")
        found["loaded and trained on"] += 1
    for path in _some(rng, ledger.versions, most):
        body = {"session_id": session, "sampling_session_seq_id": next(numbers), "model_path": path}
        sampler = str(wire.post("create_sampling_session", body)["sampling_session_id"])
        if not np.array_equal(scores(wire, sampler, 0), ledger.versions[path]):
            ledger.violated(f"{path}: other logprobs than when it was saved")
        found["sampled again"] += 1
    return found


def _some(rng: random.Random, paths: dict[str, Any], most: int) -> list[str]:
    return rng.sample(sorted(paths), min(most, len(paths)))


def _checked(ledger: Ledger, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except Violation as error:
        ledger.violated(str(error))
