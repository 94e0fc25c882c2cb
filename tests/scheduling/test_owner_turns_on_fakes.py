"""Owners share a trainer, in however many sessions and runs each of them trains."""

import asyncio
import random

import pytest
from tinker_local.backend.scheduling.fairness import LEAST_TURN

from tests.scheduling.traffic import Model, World, outcome
from tests.scheduling.virtual_time import VirtualLoop, run

SECONDS = 10.0


async def lock_step(world: World, model: Model, positions: int, rng: random.Random) -> None:
    """A gradient and a step, each sent some milliseconds after the result of the one before."""
    while world.loop.time() < SECONDS:
        for kind, size in (("forward_backward", positions), ("optim_step", 0)):
            await asyncio.sleep(0.003 * (0.5 + rng.random()))
            sent = await world.send(model, model.ids(1)[0], kind, size)  # type: ignore[arg-type]
            assert sent is not None
            await outcome(sent.operation)


def steps_of(world: World, model: Model) -> int:
    return sum(sent.model is model and sent.kind == "optim_step" for sent in world.ran)


def trained(*owners: tuple[str, int, int]) -> tuple[World, dict[str, float]]:
    """Owners with so many sessions of a run each, all of so many positions: the steps that a run of each has made."""

    async def main(loop: VirtualLoop) -> World:
        world, rng = World(loop, quantum=8192, batch_tokens=65_536), random.Random(5)
        clients = [
            lock_step(world, world.open(f"{owner}{at}", owner=owner), positions, rng)
            for owner, sessions, positions in owners
            for at in range(sessions)
        ]
        await world.finish(*clients)
        return world

    world = run(main)
    steps = {
        owner: sum(steps_of(world, model) for model in world.models if model.queue.owner == owner) / sessions
        for owner, sessions, _ in owners
    }
    return world, steps


@pytest.mark.parametrize("positions", [64, 512, 4096])
def test_one_run_of_an_owner_is_not_one_of_all_runs_of_another_on_fakes(positions: int) -> None:
    """Bob has one run, and each of Alice's 32 sessions has one: he waits at most half as long as each of these."""
    world, steps = trained(("alice", 32, positions), ("bob", 1, 64))
    assert steps["bob"] > 2 * steps["alice"]
    for batch in world.batches:
        owners = {sent.model.queue.owner for sent in batch}
        alices = [sent.positions for sent in batch if sent.model.queue.owner == "alice"]
        assert len(owners) == 1 or sum(alices) <= max(2 * LEAST_TURN, positions)


def test_owners_with_the_same_work_share_every_call_on_fakes() -> None:
    """They are not made to wait for one another where one call has room for all."""
    world, steps = trained(*((f"owner-{at}", 1, 512) for at in range(8)))
    assert max(steps.values()) <= 1.1 * min(steps.values())
    assert sum(map(len, world.batches)) / len(world.batches) > 7


def test_sessions_of_a_server_with_one_owner_share_calls_as_before_on_fakes() -> None:
    world, _ = trained(("alice", 33, 64))
    assert sum(map(len, world.batches)) / len(world.batches) > 30


@pytest.mark.parametrize("seed", range(3))
def test_owners_get_the_same_however_many_sessions_they_have_on_fakes(seed: int) -> None:
    """Both always have something to take: in every interval what they get differs by a turn and two commands."""
    rng = random.Random(seed)
    quantum, largest = rng.choice([512, 2048]), rng.choice([100, 1500])

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, quantum=quantum, batch_tokens=rng.choice([largest, 16_384]))
        for owner, sessions in (("alice", 20), ("bob", 1), ("carol", 3)):
            for at in range(sessions):
                model = world.open(f"{owner}{at}", owner=owner, released=False)
                for _ in range(600 // sessions):
                    world.submit(model, model.ids(1)[0], "forward_backward", rng.randint(1, largest))
        await world.finish()
        return world

    world, got = run(main), {"alice": 0, "bob": 0, "carol": 0}
    left = {owner: sum(len(m.sent) for m in world.models if m.queue.owner == owner) for owner in got}
    spread = [0]
    for sent in world.ran:
        owner = sent.model.queue.owner
        got[owner] += sent.cost
        left[owner] -= 1
        if min(left.values()) < 20:
            break
        spread.append(max(got.values()) - min(got.values()))
    assert len(spread) > 300
    assert max(spread) <= 2 * (quantum + 2 * largest)
