"""`FakeSampler`: samples from the bigram model and immutable versions of adapters on it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tinker_local.backend.adapters.adapter import LORA_ALPHA, AdapterDType, AdapterVersion
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS
from tinker_local.backend.adapters.checksums import check_files
from tinker_local.backend.fakes.fake_grammar import next_tokens, texts_of
from tinker_local.backend.fakes.fake_memory import FakeMemory
from tinker_local.backend.fakes.fake_model import (
    EOS_ID,
    FakeModel,
    FakeTower,
    Features,
    Float64Array,
    IntArray,
    LoraMatrices,
    decode,
    log_softmax,
)
from tinker_local.backend.sampling.prompt_scores import (
    PromptQuestions,
    PromptScores,
    check_sample_topk,
    prompt_questions,
)
from tinker_local.backend.sampling.sampler import DrawnTokens, EngineClock, SampleWork, scores_alone, token_budget
from tinker_local.backend.training.module_outputs import ModuleOutputs
from tinker_local.backend.training.rotations import Rotations
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.types import (
    DrawnUnder,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TopkLogprobs,
)
from tinker_local.types.requests_and_results import StopReason


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    matrices: dict[str, LoraMatrices]
    rank: int


_BASE = _Weights({}, 1)


@dataclass(slots=True, eq=False)
class _Target:
    """What in-flight samples run on; the two change together, by one assignment."""

    now: tuple[int, _Weights]


TOKENS_AT_ONCE, PROMPT_ROWS_AT_ONCE, ANSWER_ROWS_AT_ONCE = 16, 64, 512

Steps = Iterator[SampleOutput | None]
"""None while there is more to sample, and then the result."""


class FakeFollower:
    """Another rank of a sampler, over the socket `link` to the first one, which tells it nothing."""

    def __init__(self, link: int) -> None:
        self._link = socket.socket(fileno=link)

    def follow(self) -> None:
        """Return when the first rank has ended."""
        self._link.recv(1)


class FakeSampler:
    """Implements `sampling.sampler.Sampler` on a `FakeModel`. NumPy runs in worker threads, never on the event loop.

    The requests in it take turns of `TOKENS_AT_ONCE` or `PROMPT_ROWS_AT_ONCE`, as sequences in a real sampler advance
    together. A request has begun when what is asked about its prompt is answered.

    Sequences stop at EOS (token 0) as well as at the given stop strings or ids; `stop=[]` disables EOS, too. Stop
    strings are matched on the sampled text, one character per token. Under a grammar it spells one of a few texts
    (`fake_grammar.py`). Sleep mode needs `memory` shared with a trainer.
    """

    def __init__(self, model: FakeModel, memory: FakeMemory | None = None) -> None:
        self._model = model
        self._versions: dict[str, _Weights] = {}
        self._targets: dict[str, _Target] = {}
        self._tower = FakeTower()
        self._memory = memory
        self._in_use = 0
        self._waiting: dict[threading.Event, int] = {}  # number of sequences of each request that no thread has started
        self.can_sleep = memory is not None
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="fake-sampler")
        self.max_context_length = model.max_context_length
        self.adapter_dtype: AdapterDType = "float32"
        self.routed: RoutedLayers | None = None
        self.why_not_in_flight = ""

    @property
    def images_encoded(self) -> int:
        """How many images a vision tower would have encoded."""
        return self._tower.images_encoded

    @property
    def versions_loaded(self) -> int:
        """How many versions are in memory."""
        return len(self._versions)

    @property
    def sequences_waiting(self) -> int:
        """How many sequences wait for a thread."""
        return sum(list(self._waiting.values()))

    @property
    def kv_cache_used(self) -> float:
        """0: it keeps no keys and values."""
        return 0.0

    @property
    def asleep(self) -> bool:
        """Whether it sleeps."""
        return self._memory is not None and self._memory.asleep

    async def load_version(self, version: AdapterVersion) -> None:
        """Read the version's folder; InvalidRequestError if its tensors do not match the model."""
        with self._using():
            await self._weights(version)

    async def remove_version(self, version: AdapterVersion) -> None:
        """Forget `version`; running samples continue with it."""
        self._versions.pop(version.name, None)

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        """Running samples take the new weights at their next token."""
        known = self._targets.get(target)
        if known is not None and known.now[0] >= number:
            return
        with self._using():
            weights = await asyncio.to_thread(self._read, version)
        known = self._targets.setdefault(target, _Target((number, weights)))
        if known.now[0] < number:
            known.now = number, weights

    async def end_target(self, target: str) -> None:
        """Forget it."""
        self._targets.pop(target, None)

    async def _target(self, work: SampleWork) -> _Target:
        """What `work` runs on."""
        if work.moving is None:
            return _Target((0, await self._weights(work.version)))
        assert work.version is not None
        await self.publish(work.moving.target, work.version, work.moving.number)
        return self._targets[work.moving.target]

    async def sample(self, work: SampleWork) -> SampleOutput:
        """Sample in a thread; cancelling stops the thread at the next token."""
        with self._using():
            clock = EngineClock()
            weights = await self._target(work)
            clock.load_since(clock.submitted)
            stop_thread = threading.Event()
            loop = asyncio.get_running_loop()
            self._waiting[stop_thread] = work.num_samples
            try:
                steps, output = await loop.run_in_executor(
                    self._threads, self._begin, work, weights, stop_thread, clock
                )
                while output is None:
                    output = await loop.run_in_executor(self._threads, next, steps)
                return output
            finally:
                self._waiting.pop(stop_thread, None)
                stop_thread.set()

    async def sleep(self) -> None:
        """Give up the memory; InternalError while requests are in flight."""
        if self._memory is None:
            raise InternalError("this sampler has no memory to give")
        if self._in_use:
            raise InternalError(f"{self._in_use} requests are in flight")
        await asyncio.sleep(0.01)  # copying the weights takes a while
        self._memory.asleep = True

    async def wake(self) -> None:
        """Take the memory back; InternalError if it is not free."""
        assert self._memory is not None
        await asyncio.sleep(0.01)
        self._memory.wake()

    async def rotations(
        self, layers: Sequence[int] | None, positions: npt.NDArray[np.int64], replica: int = 0
    ) -> Rotations:
        """A bigram model has no attention."""
        return {}

    async def module_outputs(self, work: SampleWork) -> ModuleOutputs:
        """A bigram model has no modules."""
        return {}

    async def pulse(self) -> None:
        """Return at once: what runs in threads takes turns."""

    @contextmanager
    def _using(self) -> Iterator[None]:
        if self.asleep:
            raise InternalError("the sampler sleeps")
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1

    async def close(self) -> None:
        """Stop the threads; running samples fail, waiting ones are cancelled."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._versions.clear()
        self._targets.clear()

    async def _weights(self, version: AdapterVersion | None) -> _Weights:
        if version is None:
            return _BASE
        if version.name not in self._versions:
            self._versions[version.name] = await asyncio.to_thread(self._read, version)
        return self._versions[version.name]

    def _read(self, version: AdapterVersion) -> _Weights:
        state = version.unwritten()
        if state is not None:
            return _Weights(self._model.read_adapter(state.tensors, state.lora_config.rank), state.lora_config.rank)
        try:
            if not version.just_written:
                check_files(version.path, (CONFIG, WEIGHTS), f"sampler version {version.name}")
            config = json.loads((version.path / CONFIG).read_text())
            tensors = load_file(version.path / WEIGHTS)
        except (OSError, InvalidRequestError, SafetensorError) as error:
            if version.path.is_dir():
                raise
            raise NotFoundError(f"sampler version {version.name}: its folder is gone") from error
        if config["lora_alpha"] != LORA_ALPHA:
            raise InvalidRequestError(f"lora_alpha: {config['lora_alpha']} in {version.name}, expected {LORA_ALPHA}")
        return _Weights(self._model.read_adapter(tensors, config["r"]), config["r"])

    def _begin(
        self, work: SampleWork, weights: _Target, cancelled: threading.Event, clock: EngineClock
    ) -> tuple[Steps, SampleOutput | None]:
        """The steps, and what the first of them gives."""
        self._waiting.pop(cancelled, None)
        steps = self._sample(work, weights, cancelled, clock)
        return steps, next(steps)

    def _sample(self, work: SampleWork, target: _Target, cancelled: threading.Event, clock: EngineClock) -> Steps:
        prompt, params = work.prompt, work.params
        scored = scores_alone(work, params.max_tokens)
        budget = token_budget(prompt.length, params.max_tokens, self.max_context_length, scored=scored)
        is_stop = _stop_rule(params)
        texts = None if work.grammar is None else texts_of(work.grammar)
        self._tower.encode(prompt)
        features = self._model.features(prompt)
        seeds: Sequence[int | None] = work.seeds() or [None] * work.num_samples
        sequences = [
            _Sequence(np.random.default_rng(seed), int(features.tokens[-1]), work.topk_sample_logprobs)
            for seed in seeds
        ]
        numbers = {id(sequence): work.first_sample + index for index, sequence in enumerate(sequences)}
        questions = prompt_questions(work, self._model.vocab_size)
        check_sample_topk(work.topk_sample_logprobs, work.num_samples, budget, self._model.vocab_size)
        asked = {}
        if questions is not None:
            scores = yield from self._answers(questions, work, target.now[1])
            asked = scores.fields(questions)
        clock.begin()
        work.begun()
        spent, first_token = 0, 0.0
        for position in range(budget):
            running = [sequence for sequence in sequences if not sequence.stopped]
            if not running:
                break
            if spent >= TOKENS_AT_ONCE:
                yield None
                spent = 0
            spent += len(running)
            if cancelled.is_set() or self._closed.is_set():
                raise InternalError("the sampler was closed, or the request cancelled")
            tokens = np.array([sequence.last_token for sequence in running], np.int64)
            codes = np.full_like(tokens, features.codes[-1])
            number, weights = target.now
            logits = self._model.logits(Features(tokens, codes), weights.matrices, weights.rank)
            if work.penalties is not None:
                for row, sequence in zip(logits, running, strict=True):
                    counts = np.bincount(sequence.tokens, minlength=len(row))
                    row -= work.penalties.presence * (counts > 0) + work.penalties.frequency * counts
            if texts is not None:
                for row, sequence in zip(logits, running, strict=True):
                    allowed = next_tokens(texts, decode(sequence.tokens))
                    row[np.setdiff1d(np.arange(len(row)), allowed)] = -np.inf
            # All at once: one after the other took 111 µs each, in which other threads wait.
            # Subtract the maximum first, so that even the smallest temperature does not overflow.
            log_p = log_softmax((logits - logits.max(axis=1, keepdims=True)) / (params.temperature or 1.0))
            for sequence, row, token in zip(running, log_p, choose(log_p, params, running), strict=True):
                sequence.extend(row, token, is_stop)
                sequence.numbers.append(number)
                if work.drawn is not None:
                    work.drawn(sequence.drawn(numbers[id(sequence)], last=position == budget - 1))
                if sequence.stopped:
                    work.ended()
            first_token = first_token or time.monotonic()
        in_flight = work.moving is not None
        results = tuple(sequence.result(in_flight=in_flight) for sequence in sequences)
        clock.ended = time.monotonic()
        times = clock.times(first_token, max(len(sequence.tokens) for sequence in sequences))
        yield SampleOutput(sequences=results, times=times, **asked)

    def _answers(
        self, questions: PromptQuestions, work: SampleWork, weights: _Weights
    ) -> Generator[None, None, PromptScores]:
        first, end, k = questions.first_row, questions.num_rows, questions.topk
        prompt = self._model.features(work.prompt)
        pairs = np.stack([prompt.tokens, prompt.codes])[:, first:end]
        distinct, kind_of = np.unique(pairs, axis=1, return_inverse=True)
        kinds, kind_of = Features(*distinct), kind_of.reshape(-1)  # rows with equal features have equal logits
        log_p = np.empty((len(kinds.tokens), self._model.vocab_size))
        ids, logprobs = np.empty((len(log_p), k), np.int32), np.empty((len(log_p), k), np.float32)
        for begin in range(0, len(log_p), PROMPT_ROWS_AT_ONCE):
            part = slice(begin, min(begin + PROMPT_ROWS_AT_ONCE, len(log_p)))
            features = Features(kinds.tokens[part], kinds.codes[part])
            log_p[part] = log_softmax(self._model.logits(features, weights.matrices, weights.rank))
            if k:
                ids[part], logprobs[part] = likeliest(log_p[part], k)
            yield
        scores, targets, draws = questions.unanswered(), questions.targets, questions.draws
        scored = slice(max(first, questions.chosen_from), end)
        of_scored = kind_of[scored.start - first :]
        scores.chosen[scored] = log_p[of_scored, questions.next_ids[scored]]
        for begin in range(0, len(of_scored) if k else 0, ANSWER_ROWS_AT_ONCE):
            rows = slice(scored.start + begin, min(scored.start + begin + ANSWER_ROWS_AT_ONCE, end))
            kinds_of_rows = kind_of[rows.start - first : rows.stop - first]
            for of_kinds, of_rows in ((ids, scores.topk_ids), (logprobs, scores.topk_logprobs)):
                np.take(of_kinds, kinds_of_rows, axis=0, out=of_rows[rows], mode="clip")  # other threads run meanwhile
            yield
        if targets is not None:
            scores.targets[:] = log_p[kind_of[targets.rows - first], targets.ids]
        if draws is not None:
            for row, uniforms in enumerate(draws.uniforms(0, end)):
                drawn = _at_temperature(log_p[kind_of[row]], draws.temperature, uniforms)
                scores.drawn_ids[row], scores.drawn_logprobs[row] = drawn, log_p[kind_of[row], drawn]
                if row % PROMPT_ROWS_AT_ONCE == 0:
                    yield
        return scores


@dataclass(slots=True, eq=False)
class _Sequence:
    rng: np.random.Generator
    last_token: int
    """The token that the next one follows; -1 after an image."""
    topk: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = field(default_factory=list)
    """Ids and logprobs [1, topk] for each token, if they were asked for."""
    stopped: bool = False
    numbers: list[int] = field(default_factory=list)
    """Of the version that drew each token; 0 for one that does not move."""

    def extend(self, log_p_v: Float64Array, token: int, is_stop: Callable[[list[int]], bool]) -> None:
        self.tokens.append(token)
        self.logprobs.append(float(log_p_v[token]))
        if self.topk:
            self.likeliest.append(likeliest(log_p_v[None], self.topk))
        self.last_token = token
        self.stopped = is_stop(self.tokens)

    def drawn(self, number: int, *, last: bool) -> DrawnTokens:
        """The newest token of sequence `number`; `last`: there is room for no other."""
        reason: StopReason | None = "stop" if self.stopped else "length" if last else None
        rows = self.likeliest[-1:]
        likeliest = tuple(tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True)) for ids, values in rows)
        logprob = float(np.float32(self.logprobs[-1]))
        return DrawnTokens(number, (self.tokens[-1],), (logprob,), likeliest, reason)

    def result(self, *, in_flight: bool) -> SampledSequence:
        """A bigram model keeps no keys, so no token is drawn on older ones."""
        spans = [DrawnUnder(version=number, tokens=len(list(same))) for number, same in groupby(self.numbers) if number]
        reason: StopReason = "stop" if self.stopped else "length"
        topk = None
        if self.likeliest:
            ids, logprobs = zip(*self.likeliest, strict=True)
            topk = TopkLogprobs(token_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs))
        return SampledSequence(
            stop_reason=reason,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            topk_logprobs=topk,
            drawn_under=tuple(spans) if in_flight else None,
        )


def likeliest(log_p_nv: Float64Array, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and logprobs [N, k] of the likeliest tokens, most likely first."""
    ids = np.argsort(-log_p_nv, axis=1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(log_p_nv, ids, axis=1).astype(np.float32)


def _at_temperature(log_p_v: Float64Array, temperature: float, uniforms: npt.NDArray[np.float64]) -> IntArray:
    """Tokens drawn from softmax(log_p / T), one for each of `uniforms`."""
    if temperature == 0:
        return np.full(uniforms.size, log_p_v.argmax())
    cumulative = np.exp((log_p_v - log_p_v.max()) / temperature).cumsum()
    return np.asarray(np.searchsorted(cumulative, uniforms * cumulative[-1], side="right"), np.int64)


def choose(log_p_nv: Float64Array, params: SamplingParams, sequences: Sequence[_Sequence]) -> list[int]:
    """Draw from each row of `log_p_nv` after top_k and then top_p, with the generator of its sequence; the most likely
    token at temperature 0."""
    if params.temperature == 0:
        return [int(token) for token in log_p_nv.argmax(axis=1)]
    order: IntArray = np.argsort(-log_p_nv, axis=1)
    if params.top_k != -1:
        order = order[:, : params.top_k]
    p = np.exp(np.take_along_axis(log_p_nv, order, axis=1))
    p /= p.sum(axis=1, keepdims=True)
    # top_p keeps the tokens up to and including the one at which the sum reaches top_p.
    kept = np.cumsum(p, axis=1) - p < params.top_p
    cumulative = np.cumsum(np.where(kept, p, 0.0), axis=1)
    draws = np.array([sequence.rng.random() for sequence in sequences])
    drawn = (cumulative <= (draws * cumulative[:, -1])[:, None]).sum(axis=1)
    # The product may round up to the last sum.
    drawn = np.minimum(drawn, kept.sum(axis=1) - 1)
    return [int(row[place]) for row, place in zip(order, drawn, strict=True)]


def _stop_rule(params: SamplingParams) -> Callable[[list[int]], bool]:
    """Whether a sequence ends with its last token."""
    if params.stop is None:
        return lambda tokens: tokens[-1] == EOS_ID
    stops = (params.stop,) if isinstance(params.stop, str) else params.stop
    if not stops:
        return lambda tokens: False
    ids = {EOS_ID, *(stop for stop in stops if isinstance(stop, int))}
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if "" in texts:
        raise InvalidRequestError("sampling_params.stop: an empty string would stop everywhere")
    longest = max(map(len, texts), default=0)
    return lambda tokens: tokens[-1] in ids or (bool(texts) and decode(tokens[-longest:]).endswith(texts))
