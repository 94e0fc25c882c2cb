"""The real scheduler under random traffic in virtual time: order, fairness, no starvation, no idle trainer, budget.

The trainer and the clients are made up; the scheduler, its queues and its bounds are not.
"""

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tinker_local.backend.scheduling.run_queue import COPY_COST, Bounds, Load
from tinker_local.types import GoneError, InvalidRequestError

from tests.scheduling.traffic import UNBOUNDED, Model, Sent, World, bounds_of, lock_step, outcome, pipelined
from tests.scheduling.virtual_time import VirtualLoop, run

TIGHT = bounds_of(Load(60, 30_000), Load(20, 12_000))
LARGEST = 1500


def simulate(seed: int, bounds: Bounds) -> World:
    """Some sessions with some models each, of clients of all kinds; some models are closed in the middle."""
    rng = random.Random(seed)

    async def main(loop: VirtualLoop) -> World:
        world = World(
            loop,
            bounds=bounds,
            batch_tokens=rng.choice([1000, 4096, 20_000]),
            quantum=rng.choice([64, 512, 4096]),
            prepare_seconds=lambda: rng.choice([0.0, 0.001, 0.05 * rng.random()]),
        )
        clients = []
        for session in range(rng.randint(1, 5)):
            for _ in range(rng.choice([1, 1, 2, 6])):
                model = world.open(f"s{session}", gap_patience=rng.choice([0.2, 5.0]))
                client = rng.choice([pipelined, pipelined, lock_step])
                clients.append(client(world, model, rng, steps=rng.randint(1, 12), largest=rng.choice([50, LARGEST])))
                if rng.random() < 0.1:
                    clients.append(close_later(world, model, 3 * rng.random()))
        await world.finish(*clients)
        return world

    return run(main)


async def close_later(world: World, model: Model, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await world.close(model)


def all_sent(world: World) -> Iterable[Sent]:
    return (sent for model in world.models for sent in model.sent.values())


def check_order(world: World) -> None:
    """Each model's commands ran once, by seq_id; what did not run failed, and for a reason."""
    for model in world.models:
        ran = [sent.seq_id for sent in world.ran if sent.model is model]
        assert ran == sorted(set(ran))
    for sent in all_sent(world):
        assert sent.operation.done
        if sent.ran_at is None:
            error = asyncio.run(outcome(sent.operation))
            assert isinstance(error, GoneError | InvalidRequestError), error
            assert isinstance(error, GoneError) == sent.model.queue.closed or "bad" in str(error)


def check_budget(world: World) -> None:
    for batch in world.batches:
        assert len(batch) == 1 or sum(sent.positions for sent in batch) <= world.batch_tokens


def check_no_starvation(world: World) -> None:
    """What could run waited for a bounded cost of others: each model of its session once, at half a quantum a turn,
    and in each turn a quantum and a command of every other session."""
    sessions: dict[str, int] = {}
    for model in world.models:
        sessions[model.queue.session_id] = sessions.get(model.queue.session_id, 0) + 1
    largest = max([LARGEST, COPY_COST])
    for sent in world.ran:
        if sent.ready_after is not None:
            own = sessions[sent.model.queue.session_id] * 2 * largest + world.quantum
            turns = 2 * own / world.quantum + 2
            others = (len(sessions) - 1) * ((turns + 2) * world.quantum + 2 * largest)
            assert sent.ran_after - sent.ready_after <= own + turns * world.quantum + others


@pytest.mark.parametrize("bounds", [UNBOUNDED, TIGHT], ids=["unbounded", "tight"])
@pytest.mark.parametrize("seeds", [range(at, at + 10) for at in range(0, 40, 10)], ids=str)
def test_random_traffic_keeps_order_budget_and_starves_nobody_on_fakes(seeds: range, bounds: Bounds) -> None:
    refused = 0
    for seed in seeds:
        world = simulate(seed, bounds)
        check_order(world)
        check_budget(world)
        check_no_starvation(world)
        refused += world.refused
    assert (refused > 0) == (bounds is TIGHT)


# Fairness ------------------------------------------------------------------------------------------------------------


def largest_difference(world: World, a: Model, b: Model) -> int:
    """Of the cost that the sessions of two models were given, over all intervals in which both models had gradients."""
    left = {model: sum(sent.positions > 0 for sent in model.sent.values()) for model in (a, b)}
    signs = {a.queue.session_id: 1, b.queue.session_id: -1}
    difference = [0]
    for sent in world.ran:
        difference.append(difference[-1] + sent.cost * signs.get(sent.model.queue.session_id, 0))
        if sent.model in left and sent.positions:
            left[sent.model] -= 1
            if left[sent.model] < 2:
                break
    return max(difference) - min(difference)


async def backlog(world: World, model: Model, sizes: Callable[[], int], count: int, step_every: int | None) -> None:
    """Everything at once."""
    for at in range(1, count + 1):
        world.submit(model, model.ids(1)[0], "forward_backward", sizes())
        if step_every is not None and at % step_every == 0:
            world.submit(model, model.ids(1)[0], "optim_step")


@pytest.mark.more
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_sessions_get_the_same_however_many_models_they_have_on_fakes(seed: int, steps: bool) -> None:
    """Q + 2 Max of deficit round robin (3 Q + 2 Max + 2 S with steps), over every interval, for every pair."""
    rng = random.Random(seed)
    quantum, largest = rng.choice([64, 512, 2048]), rng.choice([100, 1500])

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=quantum, batch_tokens=rng.choice([largest, 4096, 16_384]))
        for session, models in enumerate((1, 50, rng.randint(2, 9))):
            smallest = rng.choice([1, largest])
            for at in range(models):
                # The first model of each session always has a gradient, so that the session always has one to take.
                count = 600 // models * (3 if at == 0 and steps else 1)
                every = rng.choice([1, 3, None]) if steps and at else None
                model = world.open(f"s{session}", released=False)
                await backlog(world, model, functools.partial(rng.randint, smallest, largest), count, every)
        await world.finish()
        return world

    world = run(main)
    bound = quantum + 2 * largest + (2 * (quantum + 128) if steps else 0)
    firsts = {model.queue.session_id: model for model in reversed(world.models)}
    for a, b in itertools.combinations(firsts.values(), 2):
        assert largest_difference(world, a, b) <= bound


def test_one_session_with_many_saves_keeps_nobody_waiting_on_fakes() -> None:
    """Steps are paid for: between two batches a session runs a quantum of them, and not all it has."""

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=2048)
        busy, other = world.open("busy", released=False), world.open("other", released=False)
        for _ in range(300):
            world.submit(busy, busy.ids(1)[0], "save_weights")
        await backlog(world, other, lambda: 1000, 40, 1)
        await world.finish()
        return world

    world = run(main)
    saves = [0]
    for sent in world.ran:
        if sent.model.queue.session_id == "busy":
            saves[-1] += 1
        else:
            saves.append(0)
    assert max(saves[:80]) <= 2 * 2048 // COPY_COST
    assert sum(saves) == 300


def test_step_behind_a_gradient_waits_for_one_turn_of_the_others_on_fakes() -> None:
    """A long chain of another session, or of the same session, fills no batch on which a step waits."""

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=1024, batch_tokens=50_000)
        await backlog(world, world.open("same", released=False), lambda: 500, 400, None)
        await backlog(world, world.open("other", released=False), lambda: 500, 400, None)
        await backlog(world, world.open("same", released=False), lambda: 100, 20, 1)
        await world.finish()
        return world

    world = run(main)
    stepping = world.models[2]
    steps = [at for at, sent in enumerate(world.ran) if sent.model is stepping and sent.kind == "optim_step"]
    for before, after in itertools.pairwise(steps):
        assert sum(sent.cost for sent in world.ran[before + 1 : after + 1]) <= 2 * (1024 + 500) + 100 + 128


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [1, 4, 12])
def test_pipelined_models_run_as_one_batch_each_round_on_fakes(sessions: int) -> None:
    """Twelve clients that submit (gradient, step) x 20 without waiting are 20 batches of 12, and not 240 of one."""

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=8192, batch_tokens=65_536)
        for at in range(12):
            await backlog(world, world.open(f"s{at % sessions}", released=False), lambda: 2000, 20, 1)
        await world.finish()
        return world

    world = run(main)
    assert [len(batch) for batch in world.batches] == [12] * 20


def test_chunks_of_one_request_and_requests_without_a_step_between_share_a_batch_on_fakes() -> None:
    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=512, batch_tokens=4000)
        await backlog(world, world.open("s", released=False), lambda: 500, 24, 8)
        await world.finish()
        return world

    assert [len(batch) for batch in run(main).batches] == [8, 8, 8]


def test_model_whose_data_is_long_in_preparation_holds_nobody_up_on_fakes() -> None:
    """And joins as soon as it is ready."""

    async def main(loop: VirtualLoop) -> World:
        seconds = iter([5.0])
        world = World(loop, prepare_seconds=lambda: next(seconds, 0.0))
        slow, other = world.open("slow"), world.open("other")
        world.submit(slow, slow.ids(1)[0], "forward_backward", 100)
        await backlog(world, other, lambda: 100, 200, 1)
        await world.finish()
        return world

    world = run(main)
    times: dict[Any, list[float]] = {}
    for sent in world.ran:
        times.setdefault(sent.model.queue.session_id, []).append(sent.ran_at or 0.0)
    gaps = [after - before for before, after in itertools.pairwise(times["other"])]
    assert max(gaps) < 0.2
    assert 5.0 <= times["slow"][0] < 5.2


async def closed_loop(world: World, model: Model, rng: random.Random, *, away: float, seconds: float) -> None:
    """Sends a gradient, then a step, then the next gradient, each `away` seconds (more or less) after the result of
    the one before."""
    while world.loop.time() < seconds:
        for kind, positions in (("forward_backward", 64), ("optim_step", 0)):
            await asyncio.sleep(away * (0.5 + rng.random()))
            sent = await world.send(model, model.ids(1)[0], kind, positions)  # type: ignore[arg-type]
            assert sent is not None
            await outcome(sent.operation)


def test_clients_that_wait_for_their_results_run_together_on_fakes() -> None:
    """The first client back does not run alone; else half of them would always run while the other half waits."""

    async def main(loop: VirtualLoop) -> World:
        world, rng = World(loop, seconds_per_call=0.05), random.Random(7)
        models = [world.open(f"s{at}") for at in range(8)]
        await world.finish(*(closed_loop(world, model, rng, away=0.004, seconds=20) for model in models))
        return world

    sizes = [len(batch) for batch in run(main).batches]
    assert sum(sizes) / len(sizes) > 7.5


def test_clients_that_stay_away_are_not_waited_for_on_fakes() -> None:
    """Beside one who comes and goes slowly, the trainer works all the time for one who has always something to run."""

    async def main(loop: VirtualLoop) -> World:
        world, rng = World(loop, seconds_per_call=0.05), random.Random(7)
        await backlog(world, world.open("busy"), lambda: 64, 300, 1)
        await world.finish(closed_loop(world, world.open("slow"), rng, away=0.03, seconds=15))
        return world

    world = run(main)
    at = max(at for at, sent in enumerate(world.ran) if sent.model is world.models[0])
    ran = world.ran[: at + 1]
    calls = len({sent.ran_at for sent in ran if sent.positions})
    busy = 0.05 * calls + sum(1e-4 * sent.positions if sent.positions else 0.005 for sent in ran)
    assert calls > 250
    assert ran[-1].ran_at is not None
    assert ran[-1].ran_at < 1.03 * busy
