"""The start sees whether the experts that vLLM records are those it takes: real engines on a tiny mixture."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.models import served_models
from tinker_local.backend.models.agreement import LENGTHS, Probes
from tinker_local.backend.models.routes_check import (
    SAMPLES,
    RoutesCheck,
    Sampled,
    check_routes,
    judge_routes,
    other_experts,
)
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import DType
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.training.routes import RoutedLayers, Routes
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import Replayed
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.record_routes import RouteTable
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import SampledSequence

DTYPES = ("float32", pytest.param("bfloat16", marks=pytest.mark.more))
LEAST: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.01}
PROBES = [RenderedInput(((np.arange(length) * 7919 + 11) % 380).astype(np.int32)) for length in LENGTHS]
DECODING = 2 * SAMPLES
"""The most positions of a step that computes no prompt."""

Check = Callable[[], RoutesCheck]
Keep = Callable[[RouteTable, Any], None]
keep: Keep = RouteTable.keep
finish: Any = RouteTable.finish


@pytest.fixture(scope="module", params=DTYPES)
def check(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Of a sampler and a trainer, each in this process."""
    dtype: DType = request.param
    folder = make_tiny_text_model(tmp_path_factory.mktemp("checked") / "model", family="qwen3_moe")
    thread = EngineThread()
    sampler = VLLMSampler(EngineOptions(str(folder), dtype=dtype, record_routes=True, max_sequences=8), thread)
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", dtype=dtype, device="cpu"))

    async def call(method: Callable[..., Replayed], *args: Any, **given: Any) -> Replayed:
        return method(*args, **given)

    def checked() -> RoutesCheck:
        assert sampler.routed is not None
        return asyncio.run(check_routes(trainer, sampler, call, sampler.routed, PROBES, 256, LEAST[dtype], 0))

    checked()  # so that what is stale later is of an earlier request
    yield checked
    asyncio.run(sampler.close())
    thread.stop()


def test_what_vllm_records_is_taken(check: Check) -> None:
    found = check()
    assert found.problem == ""
    assert found.other < 0.02
    assert found.replayed <= found.without + 1e-6
    assert "% are not those of the trainer's routers, and with them its logprobs" in str(found)


def of_steps(change: Callable[[Any, Any], Any], *, decoding: bool = False) -> Keep:
    """A recorder that keeps, of each step or of those that only decode, what `change` makes of the experts of this step
    and of the last one, [tokens, L, K] each."""
    last: list[Any] = []

    def broken(table: RouteTable, slots: Any) -> None:
        taken = table._step.clone()
        count = len(slots[table._layer])
        if last and not (decoding and count > DECODING):
            table._step.copy_(change(taken, last[0]))
        keep(table, slots)
        table._step.copy_(taken)
        last[:] = [taken]

    return broken


def exchanged(taken: Any, last: Any) -> Any:
    found = taken.clone()
    found[: 2 * SAMPLES] = taken[: 2 * SAMPLES].roll(1, 0)
    return found


def one_layer_stale(taken: Any, last: Any) -> Any:
    found = taken.clone()
    found[:, 1] = last[:, 1]
    return found


BROKEN: dict[str, Callable[[], Keep]] = {
    "the buffer of the last step": lambda: of_steps(lambda taken, last: last),
    "the buffer of the last step in decoding alone": lambda: of_steps(lambda taken, last: last, decoding=True),
    "one layer of the last step in decoding alone": lambda: of_steps(one_layer_stale, decoding=True),
    "layers exchanged": lambda: of_steps(lambda taken, last: taken.flip(1)),
    "zeros": lambda: of_steps(lambda taken, last: taken * 0),
    "zeros in decoding alone": lambda: of_steps(lambda taken, last: taken * 0, decoding=True),
    "those of the sequence beside it": lambda: of_steps(exchanged, decoding=True),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_recorder_that_is_wrong_is_found(how: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouteTable, "keep", BROKEN[how]())
    problem = check().problem
    assert "of those recorded in layer" in problem
    assert "are not those of the trainer's router (at most" in problem


@pytest.mark.parametrize("shift", [1, -1])
def test_experts_of_the_position_beside_it_are_found(shift: int, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(table: RouteTable, request_id: str, blocks: Any, positions: int) -> None:
        finish(table, request_id, blocks, positions)
        pending = table._finished[request_id]
        pending._rows = pending._rows.roll(shift, 0)

    monkeypatch.setattr(RouteTable, "finish", shifted)
    assert "are not those of the trainer's router" in check().problem


def test_positions_without_a_record_and_experts_that_do_not_exist_are_found(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouteTable, "keep", of_steps(lambda taken, last: taken * 0 + 255, decoding=True))
    assert "the sampler has none of 23 of 39 positions of a sample" in check().problem
    monkeypatch.setattr(RouteTable, "keep", of_steps(lambda taken, last: taken * 0 + 8))
    assert "those of a sample name experts 8 to 8 of 8" in check().problem
    monkeypatch.setattr(RouteTable, "finish", lambda *args: None)
    assert "returned none with a sample that asked for them" in check().problem


def test_a_context_without_room_for_samples_takes_none() -> None:
    nothing: Any = None
    found = asyncio.run(check_routes(nothing, nothing, nothing, RoutedLayers((0,), 1, 4), PROBES, 16, 1e-4, 0))
    assert "a context of 16 positions has no room" in found.problem


def test_one_replica_that_is_wrong_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    async def found(*args: Any) -> RoutesCheck:
        looked.append(args[-1])
        return RoutesCheck(0.01, 0.1, 0.1, "wrong" if looked[-1] == 1 else "")

    monkeypatch.setattr(served_models, "check_routes", found)
    engines = SimpleNamespace(trainer=None, sampler=None, least_rounding=1e-4)
    model: Any = SimpleNamespace(
        replicas=3,
        routed=ROUTED,
        routes=None,
        engines=engines,
        scheduler=SimpleNamespace(call=None),
        probes=Probes((), ()),
        max_context_length=256,
    )
    asyncio.run(ServedModel.check_routes(model))
    assert looked == [0, 1]
    assert (model.routed, model.routes.problem) == (None, "wrong")


ROUTED = RoutedLayers((1, 4), 2, 8)


def judged(
    recorded: Any = None, *, without: float = 0.01, replayed: float = 0.01, nudged: float = 0.002, flips: float = 0.0
) -> RoutesCheck:
    """Of one sample of 30 tokens after 10. `flips`: the share of experts that rounding changes in the trainer."""
    rng = np.random.default_rng(0)
    own = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (40, 2, 1)), axis=-1)[..., :2]
    theirs = np.full(30, -3.0, np.float32)
    routes = Routes.of((own if recorded is None else recorded(own.copy()))[:39])
    sequence = SampledSequence(stop_reason="length", tokens=np.arange(30), logprobs=theirs)
    sample = Sampled(RenderedInput(np.arange(10, dtype=np.int32)), sequence.model_copy(update={"routes": routes}))

    def passed(away: float, experts: Any = own) -> Replayed:
        return Replayed(np.concatenate([np.full(9, 7.0), theirs + away]).astype(np.float32), experts)

    changed = own.copy()
    changed[: round(40 * flips)] = (changed[: round(40 * flips)] + 4) % 8
    nudges = [passed(without + nudged, changed)]
    return judge_routes([sample], ROUTED, passed(without), passed(replayed), nudges, 0.001)


def test_logprobs_may_be_farther_with_recorded_experts_by_rounding_alone() -> None:
    assert judged(replayed=0.0115).problem == ""
    found = judged(replayed=0.0125)
    assert found.problem == (
        "with those recorded the trainer's logprobs of samples differ from the sampler's by 0.0125 nats on average, "
        "and without by 0.01 (at most 0.002 more is normal)"
    )
    assert judged(replayed=0.0108, nudged=0.0).problem == ""
    assert "at most 0.001 more" in judged(replayed=0.0112, nudged=0.0).problem
    assert "nan nats" in judged(replayed=float("nan")).problem


def test_a_layer_may_have_as_many_other_experts_as_rounding_explains() -> None:
    def of_some(positions: slice) -> Callable[[Any], Any]:
        def change(experts: Any) -> Any:
            experts[positions, 1] = (experts[positions, 1] + 3) % 8
            return experts

        return change

    assert judged(of_some(slice(10, 11))).problem == ""
    assert "layer 4 for sampled tokens" in judged(of_some(slice(10, 20))).problem
    assert "layer 4 for prompts" in judged(of_some(slice(2, 8))).problem
    assert judged(of_some(slice(10, 14)), flips=0.2).problem == ""
    always = judged(of_some(slice(0, 40)), flips=0.9).problem
    assert "(at most 38% is normal)" in always


def test_an_expert_that_is_recorded_twice_counts_once() -> None:
    own = np.array([[[3, 5]], [[3, 5]], [[3, 5]]], np.uint8)
    recorded = np.array([[[3, 3]], [[5, 3]], [[0, 1]]], np.uint8)
    assert other_experts(recorded, own).tolist() == [[0.5], [0.0], [1.0]]
