"""A trainer's process that ends or hangs is started again; runs that were saved go on, the others say how they can."""

import asyncio
import functools
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, ModelSource
from tinker_local.backend.fakes import FakeMemory, FakeModel, FakeRenderer, FakeSampler
from tinker_local.backend.models import supervision
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.process import calls, process_group
from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.child import LOAD, serve_calls
from tinker_local.backend.process.process_group import ProcessEndedError, ProcessGroup
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.types import Datum, LoraConfig, ModelInput, NotFoundError

from tests.http.conftest import BASE, Api, datum
from tests.http.supervised_apps import OTHER, apps, children, served, works_again

pytestmark = pytest.mark.more

Start = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start(tmp_path: Path, trainers: ModuleType) -> AsyncIterator[Start]:
    """`start(models=(...), factory=..., memory=..., **options)`: an app whose trainers are in processes."""

    async def begin(
        models: tuple[str, ...] = (BASE,), factory: Any = None, memory: FakeMemory | None = None, **options: Any
    ) -> Api:
        def load(source: ModelSource, options: BackendOptions) -> Engines:
            model = FakeModel(source.name)
            make = factory or functools.partial(trainers.fake, source.name)
            trainer = ProcessTrainer(make, timeout=options.trainer_timeout)
            trainer.load()
            return Engines(FakeRenderer(model), trainer, FakeSampler(model, memory), arch="fake", tolerance=1e-4)

        return await start_app(load, models, **options)

    async with apps(tmp_path / "data") as start_app:
        yield begin


def pid_of(api: Api, name: str = BASE) -> int:
    trainer = served(api, name).engines.trainer
    assert isinstance(trainer, ProcessTrainer)
    (pid,) = trainer.pids
    return pid


async def kill(api: Api, name: str = BASE) -> None:
    """Kill the trainer's process, and wait until the server has seen it."""
    os.kill(pid_of(api, name), signal.SIGKILL)
    await api.until(lambda: served(api, name).problem is not None)


async def trained(api: Api, model: str, seq_id: int) -> int:
    """A gradient and a step; the next `seq_id`."""
    await api.result(await api.gradient(model, seq_id))
    await api.result(await api.step(model, seq_id + 1))
    return seq_id + 2


async def loss(api: Api, model: str, seq_id: int) -> float:
    found = await api.result(await api.gradient(model, seq_id))
    return float(found.metrics["loss:sum"])


async def test_a_run_that_was_saved_goes_on_in_a_new_process_to_the_same_bits_on_fakes(start: Start) -> None:
    api = await start()
    session = await api.session()
    killed, spared = await api.model(session, 0), await api.model(session, 1)
    for model in (killed, spared):
        at = await trained(api, model, 1)
    await api.save(killed, at, "one")
    await api.save(spared, at, "one")
    before = pid_of(api)
    await kill(api)
    await works_again(api)
    assert pid_of(api) != before
    losses = [await loss(api, killed, at + 1)]
    await api.result(await api.step(killed, at + 2))  # with the moments of the first
    losses.append(await loss(api, killed, at + 3))
    body = {"session_id": session, "model_seq_id": 2, "path": f"tinker://{spared}/weights/one", "optimizer": True}
    third = (await api.result(await api.submit("load_weights", body)))["model_id"]
    expected = [await loss(api, third, 1)]
    await api.result(await api.step(third, 2))
    expected.append(await loss(api, third, 3))
    assert losses == expected


@pytest.mark.mutation(
    "goes-on-from-an-older-state", "RestoreRuns.lost", "if (gone := run.would_lose()) is not None:", "if gone := '':"
)
async def test_a_run_that_was_not_saved_ends_and_says_what_is_lost_and_how_to_go_on_on_fakes(start: Start) -> None:
    api = await start()
    model = await api.model()
    at = await trained(api, model, 1)
    path = await api.save(model, at, "one")
    at = await trained(api, model, at + 1)
    await kill(api)
    for request in (await api.gradient(model, at), await api.step(model, at + 1)):
        failure = await api.failure(request)
        assert failure.startswith(f"server: model {model} is gone: the trainer's process was ended by SIGKILL")
        assert "1 optimizer step is lost that no checkpoint has" in failure
        assert failure.endswith(
            f"Its last checkpoint is {path}; continue with create_training_client_from_state_with_optimizer"
        )
    answer = await api.get(f"training_runs/{model}")
    assert answer.status_code == 200
    await works_again(api)
    assert await api.healthy()


async def autosaved(api: Api, model: str) -> str:
    """Save the run as the server does by itself; the path."""
    run = api.backend.runs.live(model)
    assert run is not None
    record = await api.backend.autosaves.save(run)
    assert record is not None
    return record.tinker_path


@pytest.mark.parametrize("last", ["autosave", "checkpoint"])
async def test_a_run_goes_on_from_its_last_checkpoint_or_autosave_to_the_same_bits_on_fakes(
    start: Start, last: str
) -> None:
    api = await start()
    session = await api.session()
    killed, spared = await api.model(session, 0), await api.model(session, 1)
    at = 1
    for _ in range(2):
        at = await trained(api, spared, at)
    expected = [await loss(api, spared, at)]
    await api.result(await api.step(spared, at + 1))
    expected.append(await loss(api, spared, at + 2))

    at, paths = 1, []
    for kind in sorted(("autosave", "checkpoint"), key=lambda kind: kind == last):
        at = await trained(api, killed, at)
        paths.append(await (autosaved(api, killed) if kind == "autosave" else api.save(killed, at, "mine")))
        at += kind == "checkpoint"
    await kill(api)
    await works_again(api)
    found = [await loss(api, killed, at)]
    await api.result(await api.step(killed, at + 1))
    assert [*found, await loss(api, killed, at + 2)] == expected
    await kill(api)
    failure = await api.failure(await api.step(killed, at + 3))
    assert "1 optimizer step is lost that no checkpoint has" in failure
    assert f"Its last checkpoint is {paths[-1]};" in failure


async def test_an_autosave_that_a_kill_interrupts_is_none_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start()
    model, other = await api.model(), await api.model()
    at = await trained(api, model, 1)
    path = await api.save(model, at, "one")
    await trained(api, model, at + 1)
    call, trainer = served(api).scheduler.call, served(api).engines.trainer
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def held(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function == trainer.read_adapter:
            reading.set()
            await go_on.wait()
        return await call(function, *args, **kwargs)

    monkeypatch.setattr(served(api).scheduler, "call", held)
    saving = asyncio.create_task(autosaved(api, model))
    await reading.wait()
    await kill(api)
    go_on.set()
    with pytest.raises(NotFoundError, match="autosave is not in the trainer"):
        await saving
    assert f"Its last checkpoint is {path};" in await api.failure(await api.step(model, at + 3))
    await works_again(api)
    await trained(api, other, 1)
    assert await autosaved(api, other) == f"tinker://{other}/weights/autosave"
    assert [record.name for record in api.backend.store.list_checkpoints(model)] == ["one"]


@pytest.mark.mutation(
    "lost-gradient-forgotten",
    "TrainingRun.would_lose",
    'lost" if self.queue.gradient else None',
    'lost" if False else None',
)
async def test_a_gradient_that_waited_for_its_step_is_not_dropped_in_silence_on_fakes(start: Start) -> None:
    api = await start()
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await kill(api)
    failure = await api.failure(await api.step(model, 2))
    assert "the gradient since the last optimizer step is lost" in failure
    assert failure.endswith("It has no saved checkpoint.")


async def test_requests_of_a_run_that_goes_on_wait_for_the_new_process_on_fakes(start: Start) -> None:
    api = await start()
    fresh, session = await api.model(), await api.session()
    await kill(api)
    creation = asyncio.create_task(api.model(session))
    gradient, step = await api.gradient(fresh, 1), await api.step(fresh, 2)
    assert "grad_norm" in (await api.result(step))["metrics"]
    assert (await api.result(gradient)).metrics["loss:sum"] > 0
    await trained(api, await creation, 1)


async def test_a_killed_call_fails_its_request_with_the_checkpoint_and_queued_ones_too_on_fakes(
    start: Start, trainers: ModuleType
) -> None:
    api = await start(factory=trainers.hanging)
    model = await api.model()
    at = await trained(api, model, 1)
    path = await api.save(model, at, "one")
    at = await trained(api, model, at + 1)
    running = await api.gradient(model, at, loss_fn="importance_sampling", data=[hanging()])
    queued = await api.step(model, at + 1)
    await api.until(lambda: bool(served(api).scheduler.running))
    await kill(api)
    assert path in await api.failure(running)
    assert path in await api.failure(queued)


async def test_health_is_503_from_the_death_to_the_restored_trainer_and_liveness_stays_200_on_fakes(
    start: Start,
) -> None:
    api = await start()
    assert (await api.get("healthz")).json() == {"status": "ok"}
    await kill(api)
    answer = await api.get("healthz")
    assert answer.status_code == 503
    assert answer.json()["status"] == "recovering"
    assert answer.json()["detail"].startswith(f"{BASE}: the trainer's process was ended by SIGKILL")
    assert (await api.get("livez")).status_code == 200
    (metrics,) = api.backend.metrics().values()
    assert not metrics.trainer_works
    await works_again(api)
    assert (await api.get("healthz")).json() == {"status": "ok"}
    (metrics,) = api.backend.metrics().values()
    assert (metrics.trainer_works, metrics.trainer_restarts) == (True, 1)


async def test_other_base_models_and_sampling_do_not_notice_on_fakes(start: Start) -> None:
    api = await start(models=(BASE, OTHER))
    session = await api.session()
    here, there = await api.model(session, 0), await api.model(session, 1, base_model=OTHER)
    sampler = await api.base_sampler(session)
    at = await trained(api, there, 1)
    await trained(api, here, 1)
    untouched = pid_of(api, OTHER)
    await kill(api)
    await api.result(await api.sample(sampler, 0))
    await trained(api, there, at)
    assert served(api).problem is not None, "the new process was ready too soon for this test"
    await works_again(api)
    assert pid_of(api, OTHER) == untouched


@pytest.mark.parametrize("how", ["stopped", pytest.param("hangs", marks=pytest.mark.more)])
async def test_a_process_that_does_not_answer_in_time_is_replaced_on_fakes(
    start: Start, trainers: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(process_group, "TICK", 0.1)
    api = await start(factory=trainers.hanging, trainer_timeout=1.0)
    model = await api.model()
    if how == "stopped":
        os.kill(pid_of(api), signal.SIGSTOP)
    failure = await api.failure(await api.gradient(model, 1, loss_fn="importance_sampling", data=[hanging()]))
    assert "gave no answer for 1 s, and was killed" in failure
    await works_again(api)
    assert "the optimizer step was not taken" in await api.failure(await api.step(model, 2))
    await trained(api, model, 3)


def hanging() -> Datum:
    """A datum for importance sampling, on which a `HangingTrainer` hangs."""
    return datum([5, 9, 20], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])


async def test_the_time_limit_grows_with_the_positions_on_fakes(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    trainer = ProcessTrainer(trainers.fake, timeout=5)
    try:
        trainer.load()
        call = trainer._calls.call

        def noted(seconds: float | None, *args: Any, **kwargs: Any) -> Any:
            limits.append(seconds)
            return call(seconds, *args, **kwargs)

        monkeypatch.setattr(trainer._calls, "call", noted)
        model = FakeRenderer(FakeModel(BASE))
        for count in (1, 300):
            trainer.logprobs(None, model.render(ModelInput.from_ints([5] * count), "test"))
        trainer.release_memory()
    finally:
        trainer.close()
    assert limits == [5.01, 8.0, 5.0]


def group_of(size: int, make: Callable[..., Any], trainers: ModuleType) -> "calls.Calls":
    """So many processes, each with what `make` makes of its number."""
    programs = [
        functools.partial(serve_calls, make=functools.partial(make, at), describe=trainers.described)
        for at in range(size)
    ]
    group = calls.Calls(ProcessGroup("trainer", programs))
    group.call(60, LOAD)
    return group


def test_a_call_that_only_one_process_of_a_group_got_ends_the_group_on_fakes(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first would run it together with the next call of the second."""
    both = group_of(2, trainers.numbered, trainers)
    try:
        send, sent = Channel.send_encoded, list[Channel]()

        def refused(channel: Channel, encoded: Any) -> None:
            sent.append(channel)
            if len(sent) == 2:
                raise OSError("no memory")
            send(channel, encoded)

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send_encoded", refused)
            with pytest.raises(OSError, match="no memory"):
                both.call(60, "remove_adapter", "a")
        assert both.group.wait(60)
        assert "did not get a call that others of its group got" in both.group.why
    finally:
        both.close()


def test_a_process_that_fails_alone_ends_the_others_that_wait_for_it_on_fakes(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "TICK", 0.1)
    monkeypatch.setattr(calls, "AFTER_FAILURE_SECONDS", 0.5)
    both = group_of(2, trainers.numbered, trainers)
    try:
        with pytest.raises(ProcessEndedError, match=r"gave no answer for 0 s, and was killed \(ValueError: alone\)"):
            both.call(30, "release_memory")
    finally:
        both.close()


def test_a_process_that_fails_after_another_has_answered_ends_those_that_wait_for_it_on_fakes(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "TICK", 0.1)
    monkeypatch.setattr(calls, "AFTER_FAILURE_SECONDS", 0.5)
    three = group_of(3, trainers.numbered, trainers)
    try:
        with pytest.raises(ProcessEndedError, match=r"gave no answer for 0 s, and was killed \(ValueError: alone\)"):
            three.call(20, "remove_adapter", "a")
    finally:
        three.close()


async def test_the_processes_of_a_group_end_together_on_fakes(trainers: ModuleType) -> None:
    ends: list[str] = []
    program = functools.partial(serve_calls, make=trainers.fake, describe=trainers.described, told=("images_encoded",))
    group = ProcessGroup("trainer", [program, program], lambda: ends.append("ended"))
    both = calls.Calls(group)
    assert both.call(None, LOAD) == "loaded"
    both.call(60, "create_adapter", "a", LoraConfig(rank=2))
    with pytest.raises(NotFoundError, match="b"):
        both.call(60, "discard_gradients", "b")
    pids = [member.pid for member in group.members]
    os.kill(pids[1], signal.SIGTERM)  # ignored
    both.call(60, "discard_gradients", "a")
    os.kill(pids[1], signal.SIGKILL)
    assert group.wait(60)
    with pytest.raises(ProcessEndedError, match="SIGKILL"):
        both.call(60, "discard_gradients", "a")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    both.close()
    assert ends == ["ended"]


def test_a_process_ended_by_a_signal_without_a_name_fails_its_calls_on_fakes(trainers: ModuleType) -> None:
    alone = group_of(1, trainers.numbered, trainers)
    os.kill(alone.group.members[0].pid, signal.SIGRTMIN + 1)
    try:
        assert alone.group.wait(20)
        with pytest.raises(ProcessEndedError, match=f"was ended by signal {signal.SIGRTMIN + 1}"):
            alone.call(20, "release_memory")
    finally:
        alone.close()


def test_a_process_that_hangs_in_the_kernel_holds_up_neither_calls_nor_the_end_on_fakes(
    trainers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose device hangs: no signal ends it."""
    monkeypatch.setattr(process_group, "TICK", 0.1)
    monkeypatch.setattr(process_group, "REAP_SECONDS", 0.2)
    monkeypatch.setattr(calls, "TICK", 0.1)
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.2)
    trainer = ProcessTrainer(trainers.hanging, timeout=0.2)
    trainer.load()
    (pid,) = trainer.pids
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ProcessEndedError, match="gave no answer for 0 s, and was killed"):
            trainer.release_memory()
        trainer.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


async def test_a_process_that_keeps_dying_is_started_ever_less_often_and_the_error_says_so_on_fakes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [supervision.pause_after(lives) for lives in (2, 3, 4, 50)] == [1.0, 2.0, 4.0, 60.0]
    monkeypatch.setattr(supervision, "SHORT_LIFE", 1000.0)
    monkeypatch.setattr(supervision, "PATIENCE", 0.0)
    api = await start()
    model = await api.model()
    await kill(api)
    await works_again(api)
    await kill(api)
    detail = (await api.get("healthz")).json()["detail"]
    assert detail.endswith("that was 2 times in a row soon after its start, so the next start waits 1 s")
    left = "no gradient is left since the last optimizer step"
    failure = await api.failure(await api.gradient(model, 1))
    assert failure == f"server: {detail.removeprefix(f'{BASE}: ')}; {left}"
    await works_again(api)
    monkeypatch.setattr(supervision, "SHORT_LIFE", 0.0)
    await kill(api)
    assert "; a new one is starting" in (await api.get("healthz")).json()["detail"]
    await works_again(api)


async def test_a_sampler_that_sleeps_is_woken_for_the_new_trainer_on_fakes(start: Start) -> None:
    """As at the start, the new trainer finds the memory that is its own, and the sampler has the rest."""
    api = await start(memory=FakeMemory(100, 60))
    model, sampler = await api.model(), await api.base_sampler()
    await served(api).memory_sharing._put_sampler_to_sleep()
    assert served(api).memory_sharing.asleep
    await kill(api)
    await api.result(await api.sample(sampler, 0))
    await works_again(api)
    assert not served(api).memory_sharing.asleep
    await trained(api, model, 1)


async def test_twenty_kills_leave_nothing_behind_on_fakes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "SHORT_LIFE", 0.0)
    api = await start()
    model = await api.model()

    def held() -> tuple[int, int, int]:
        gc.collect()
        memory = Path("/proc/self/maps").read_text().count("memfd:tinker-local")
        return len(list(Path("/proc/self/fd").iterdir())), memory, len(children(os.getpid()))

    seq_id = 1
    counts = []
    for number in range(22):
        await api.save(model, seq_id, f"at-{number}")
        seq_id += 1
        await kill(api)
        await works_again(api)
        seq_id = await trained(api, model, seq_id)
        counts.append(held())
    # What a kill leaves is left by each of the last 20. Threads of other tests may open a few files meanwhile.
    assert all(last < first + 10 for first, last in zip(counts[1], counts[-1], strict=True))


@pytest.mark.parametrize(
    "state", ["stopped", "hangs", *(pytest.param(e, marks=pytest.mark.more) for e in ("restarts", "pauses"))]
)
async def test_a_server_stops_within_seconds_whatever_its_trainer_does_on_fakes(
    start: Start, trainers: ModuleType, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 600.0)
    monkeypatch.setattr(supervision, "LONGEST_PAUSE", 600.0)
    monkeypatch.setattr(calls, "CLOSE_SECONDS", 0.5)
    api = await start(factory=trainers.hanging)
    model = await api.model()
    request = None
    if state == "stopped":
        os.kill(pid_of(api), signal.SIGSTOP)
        request = await api.gradient(model, 1)
    elif state == "hangs":
        request = await api.gradient(model, 1, loss_fn="importance_sampling", data=[hanging()])
        await api.until(lambda: bool(served(api).scheduler.running))
    else:
        await kill(api)
        if state == "pauses":
            await works_again(api)
            await kill(api)
    pids = [pid_of(api)]
    began = time.monotonic()
    await api.backend.close()
    # The limit of a test is the bound: each state lasts 600 s by itself. In practice it is two to four seconds.
    assert time.monotonic() - began < 120
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    if request is not None:
        operation = api.backend.operations.get(request)
        assert operation is not None
        assert "the server was stopped" in str(operation._future.exception())
