"""Random schedules of in-flight saves, samples and faults, and what must hold of every token.

Each training run says one token after another, so the tokens of a sequence tell which weights drew them. The
server's answers are compared with that.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeRenderer, FakeSampler, FakeText
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.sampling.replica_pool import ReplicaPool
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.types import InternalError, SampleOutput

from tests.http.conftest import BASE, Api, WatchedTrainer, datum

T = TypeVar("T")


class ForcingTrainer(WatchedTrainer):
    """After each optimizer step, an adapter says one token alone, which tells the run and the step. `offsets`: by the
    id of an adapter."""

    def __init__(self, model: FakeModel, memory: FakeMemory | None) -> None:
        super().__init__(model, memory)
        self.offsets: dict[str, int] = {}
        self._steps: Counter[str] = Counter()

    def word(self, adapter_id: str, steps: int) -> int:
        """What it says after so many steps, of which there are less than 500 in a test."""
        return 1 + (self.offsets[adapter_id] + 7 * steps) % 500

    def create_adapter(self, adapter_id: str, *args: Any) -> None:
        super().create_adapter(adapter_id, *args)
        self.offsets[adapter_id] = 3 * len(self.offsets)

    def optim_step(self, adapter_id: str, params: Any) -> dict[str, float]:
        metrics = super().optim_step(adapter_id, params)
        self._steps[adapter_id] += 1
        for matrices in self._adapters[adapter_id].weights.values():
            matrices.a[:], matrices.b[:] = 0.0, 0.0
            matrices.a[0], matrices.b[self.word(adapter_id, self._steps[adapter_id]), 0] = 1.0, 50.0
        return metrics


class MortalSampler(FakeSampler):
    """Its process may end: what is in it fails, and the next one has nothing. `rng` says how long a change takes."""

    ready = True

    def __init__(self, model: FakeModel, memory: FakeMemory | None, rng: random.Random) -> None:
        super().__init__(model, memory)
        self._rng = rng
        self._end = asyncio.Event()
        self.refusals = 0

    def kill(self) -> None:
        """End the process and begin the next one."""
        self._end.set()
        self._end = asyncio.Event()
        self._versions.clear()
        self._targets.clear()

    async def _living(self, call: Coroutine[Any, Any, T]) -> T:
        end = asyncio.ensure_future(self._end.wait())
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                return task.result()
            raise ProcessEndedError("the sampler was killed by a test")
        finally:
            end.cancel()
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()

    async def load_version(self, version: AdapterVersion) -> None:
        await self._living(super().load_version(version))

    async def publish(self, target: str, version: AdapterVersion, number: int) -> None:
        await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.01)))
        if self.refusals:
            self.refusals -= 1
            raise InternalError("a test refuses this version")
        await self._living(super().publish(target, version, number))

    async def sample(self, work: SampleWork) -> SampleOutput:
        return await self._living(super().sample(work))


@asynccontextmanager
async def mortal_api(folder: Path, seed: int, replicas: int, faults: Collection[str]) -> AsyncIterator["Schedule"]:
    """A schedule on an app on fakes."""
    samplers: list[MortalSampler] = []
    trainers: list[ForcingTrainer] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        memory = FakeMemory(100, 60) if "sleep" in faults else None
        samplers.extend(MortalSampler(model, memory, random.Random(seed + at)) for at in range(replicas))
        sampler: Any = samplers[0] if replicas == 1 else ReplicaPool(samplers, 256)
        trainers.append(ForcingTrainer(model, memory))
        return Engines(FakeRenderer(model), trainers[0], sampler, arch="fake", tolerance=1e-4, text=FakeText(model))

    backend = InProcessBackend([ModelSource.parse(BASE)], BackendOptions(data_dir=folder, failure_pause=0.0), load=load)
    await backend.start()
    try:
        transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False) as http:
            yield Schedule(Api(backend, http), seed, trainers[0], samplers, frozenset(faults))
    finally:
        await backend.close()


@dataclass
class Run:
    """`saves`: the optimizer steps at each in-flight save, in order; `clients`: the sampler of each, and the number of
    its save."""

    model: str
    session: str
    seq_id: int = 1
    steps: int = 0
    sampler_seq_id: int = 0
    saves: list[int] = field(default_factory=list)
    clients: list[tuple[str, int]] = field(default_factory=list)

    def next_seq_id(self) -> int:
        self.seq_id += 1
        return self.seq_id - 1


class Schedule:
    """Acts at random on `api`. `counts`: what was done. What is wrong raises AssertionError."""

    def __init__(
        self, api: Api, seed: int, trainer: ForcingTrainer, samplers: list[MortalSampler], faults: frozenset[str]
    ) -> None:
        self.api, self.rng, self.faults = api, random.Random(seed), faults
        self.trainer, self.samplers = trainer, samplers
        self.counts: Counter[str] = Counter()
        self._next_sample = 0
        self._enough = asyncio.Event()
        self._stopped = False

    async def run(self, seconds: float, runs: int = 2, clients: int = 6) -> None:
        """Act for `seconds`, and until there were more than five saves and as many sequences whose weights moved."""
        async with asyncio.TaskGroup() as group:
            found = [await self._new_run() for _ in range(runs)]
            for each in found:
                group.create_task(self._train(each))
            for _ in range(clients):
                group.create_task(self._sample(found))
            if self.faults & {"kill", "refuse"}:
                group.create_task(self._break())
            if "end" in self.faults:
                group.create_task(self._vanish())
            await asyncio.sleep(seconds)
            await self._enough.wait()
            self._stopped = True
        for each in found:
            await self._last(each)
            await self._end(each)
        self.counts["sleeps"] = self.api.backend.models.get(BASE).memory_sharing.sleeps
        self._check_nothing_is_left()

    async def _new_run(self) -> Run:
        session = await self.api.session()
        run = Run(await self.api.model(session), session)
        await self._learn(run)
        await self._save(run, 1)
        return run

    async def _learn(self, run: Run) -> None:
        """Have the run say another token."""
        tokens = [5, 6] * (25 if "sleep" in self.faults and self.rng.random() < 0.3 else 1)
        await self.api.result(await self.api.gradient(run.model, run.next_seq_id(), [datum(tokens)]))
        await self.api.result(await self.api.step(run.model, run.next_seq_id()))
        run.steps += 1

    async def _save(self, run: Run, count: int) -> None:
        """Save `count` times without waiting for any."""
        requests = []
        for _ in range(count):
            run.saves.append(run.steps)
            body = {
                "model_id": run.model,
                "seq_id": run.next_seq_id(),
                "sampling_session_seq_id": run.sampler_seq_id,
                "kind": "inflight",
            }
            run.sampler_seq_id += 1
            requests.append((await self.api.submit("save_weights_for_sampler", body), len(run.saves)))
        for request, number in requests:
            saved = await self.api.result(request)
            run.clients.append((saved["sampling_session_id"], number))
            self.counts["saves"] += 1

    async def _train(self, run: Run) -> None:
        while not self._stopped:
            if self.rng.random() < 0.8:
                await self._learn(run)
            if self.rng.random() < 0.2:
                await self._save_snapshot(run)
            await self._save(run, self.rng.choice((1, 1, 1, 2, 5)))
            await asyncio.sleep(self.rng.choice((0, 0, 0.01, 0.05)))

    async def _save_snapshot(self, run: Run) -> None:
        """Its check may be in a process that is killed, twice if the machine is slow."""
        body = {"model_id": run.model, "seq_id": run.next_seq_id(), "sampling_session_seq_id": run.sampler_seq_id}
        run.sampler_seq_id += 1
        request = await self.api.submit("save_weights_for_sampler", {**body, "kind": "snapshot"})
        answer = await self.api.outcome(request)
        assert answer.status_code == 200, answer.text
        error = answer.json().get("error")
        assert error is None or any(each in error for each in self._may_fail()), error

    async def _sample(self, runs: list[Run]) -> None:
        while not self._stopped:
            run = self.rng.choice(runs)
            newest = self.rng.random() < 0.6
            sampler, since = run.clients[-1] if newest else self.rng.choice(run.clients)
            await self.one_sample(run, sampler, since)

    async def one_sample(self, run: Run, sampler: str, since: int) -> None:
        """Sample, and check every token."""
        count = self.rng.choice((1, 1, 4, 40))
        params: dict[str, Any] = {"max_tokens": self.rng.choice((1, 7, 60, 200)), "temperature": 0.0, "stop": []}
        self._next_sample += 1
        request = await self.api.sample(sampler, self._next_sample, (5, 9), sampling_params=params, num_samples=count)
        known = len(run.saves)
        answer = await self.api.outcome(request)
        if answer.headers["content-type"] == "application/json":
            error = answer.json()["error"]
            assert any(each in error for each in self._may_fail()), error
            self.counts["failed samples"] += 1
            return
        output = await self.api.result(request)
        assert len(output.sequences) == count
        for index, sequence in enumerate(output.sequences):
            told = await self.api.get(f"samplers/{sampler}/weights_of_tokens", sequence_id=f"{request}:{index}")
            assert told.status_code == 200, told.text
            spans = told.json()["drawn_under"]
            numbers = [span["version"] for span in spans]
            assert numbers == sorted(set(numbers)), numbers
            assert numbers[0] >= since, (numbers, since)
            assert sum(span["tokens"] for span in spans) == len(sequence.tokens) == params["max_tokens"]
            begin = 0
            for span in spans:
                assert span["optimizer_steps"] == run.saves[span["version"] - 1]
                drawn = set(sequence.tokens[begin : begin + span["tokens"]].tolist())
                assert drawn == {self.trainer.word(run.model, span["optimizer_steps"])}, (span, drawn)
                begin += span["tokens"]
            self.counts["sequences"] += 1
            self.counts["moved sequences"] += len(spans) > 1
            self.counts["newer than all saves at its begin"] += numbers[-1] > known
        if min(self.counts["saves"], self.counts["moved sequences"]) > 5:
            self._enough.set()

    def _may_fail(self) -> list[str]:
        found = []
        if "kill" in self.faults:
            found += ["the second time that this request was in it"]
        if "refuse" in self.faults:
            found += ["a test refuses this version"]
        return found

    async def _break(self) -> None:
        while not self._stopped:
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))
            sampler = self.rng.choice(self.samplers)
            if "kill" in self.faults:
                sampler.kill()
                self.counts["kills"] += 1
            if "refuse" in self.faults:
                sampler.refusals = 1
                self.counts["refusals"] += 1

    async def _vanish(self) -> None:
        """Runs whose sessions end while they save and sample."""
        while not self._stopped:
            run = await self._new_run()
            requests = [
                await self.api.sample(
                    run.clients[0][0], at, sampling_params={"max_tokens": 2000, "stop": []}, num_samples=20
                )
                for at in range(3)
            ]
            await self._learn(run)
            for _ in range(self.rng.choice((0, 1, 3))):
                body = {"model_id": run.model, "seq_id": run.next_seq_id(), "kind": "inflight"}
                run.sampler_seq_id += 1
                body["sampling_session_seq_id"] = run.sampler_seq_id
                requests.append(await self.api.submit("save_weights_for_sampler", body))
            await asyncio.sleep(self.rng.choice((0, 0, 0.005, 0.05)))
            await self._end(run)
            for request in requests:
                assert (await self.api.outcome(request)).status_code in (200, 410)
            self.counts["ended sessions"] += 1

    async def _last(self, run: Run) -> None:
        """After all that, a new save is served, and by older clients too."""
        for each in self.samplers:
            each.refusals = 0
        await self._learn(run)
        await self._save(run, 1)
        before = self.counts["failed samples"]
        for sampler, since in (run.clients[-1], run.clients[0]):
            await self.one_sample(run, sampler, since)
        assert self.counts["failed samples"] == before

    async def _end(self, run: Run) -> None:
        answer = await self.api.post(f"sessions/{run.session}/finish", {"reason": {"type": "success"}})
        assert answer.status_code == 204

    def _check_nothing_is_left(self) -> None:
        sampling = self.api.backend.sampling
        assert self.api.backend.folders._versions == {}
        assert sampling.targets._targets == {}
        assert sampling.token_weights._sessions == {}
        assert self.api.backend.models.get(BASE).counts.ephemeral_bytes == 0
        for sampler in self.samplers:
            assert sampler._targets == {}
        turns = self.api.backend.models.get(BASE).sample_turns
        left = turns.sequences, turns.requests, turns.unread, turns._owners
        assert left == (0, 0, 0, {}), left
