"""Images are rendered in turns of owners and sessions, and only while there is memory for more of them."""

import asyncio

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.scheduling.image_turns import ImageTurns
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.backend.scheduling.run_queue import CommandLog, GradientCommand, RunQueue
from tinker_local.backend.scheduling.train_scheduler import AT_ONCE_OF_AN_OWNER, Preparations
from tinker_local.backend.training.trainer import TrainDatum, TrainWork


def image(name: str, size: int) -> RenderedImage:
    return RenderedImage(name, 1, np.zeros((0, 1), np.float32), (1, 1, 1), item_bytes=size)


def prompt(*images: RenderedImage) -> RenderedInput:
    return RenderedInput(np.zeros(len(images), np.int32), tuple(ImagePlacement(0, each) for each in images))


class Renderings:
    """Prompts that wait for a turn, or are being rendered until `end`."""

    def __init__(self, turns: ImageTurns) -> None:
        self._turns = turns
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, *names: str) -> None:
        """`alice/1/a`: an owner, a session, and any name."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._render(name))
        await settled()

    async def _render(self, name: str) -> None:
        owner, session, _ = name.split("/")
        async with self._turns.turn(owner, f"{owner}/{session}"):
            self.inside.append(name)
            await self._ends[name].wait()
            self.inside.remove(name)

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settled()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_two_sessions_of_one_owner_leave_an_image_thread_to_another() -> None:
    renderings = Renderings(ImageTurns(4))
    alices = [f"alice/{session}/{number}" for number in range(4) for session in (1, 2)]
    await renderings.begin(*alices)
    assert renderings.inside == ["alice/1/0", "alice/2/0", "alice/1/1"]
    await renderings.begin("bob/1/0")
    assert renderings.inside[3:] == ["bob/1/0"]
    await renderings.end("bob/1/0", *alices)


async def test_one_session_leaves_a_thread_to_another_of_its_owner() -> None:
    renderings = Renderings(ImageTurns(4))
    await renderings.begin(*(f"alice/1/{number}" for number in range(5)), "alice/2/0")
    assert renderings.inside == ["alice/1/0", "alice/1/1", "alice/2/0"]


async def test_the_owner_and_the_session_with_the_fewest_are_next() -> None:
    renderings = Renderings(ImageTurns(4))
    await renderings.begin("alice/1/0", "alice/1/1", "alice/2/0", "bob/1/0")
    await renderings.begin("alice/1/2", "alice/1/3", "alice/2/1", "bob/1/1", "bob/2/0")
    await renderings.end("alice/2/0")
    assert renderings.inside[3:] == ["bob/2/0"]  # 2 and 1 are held; bob has the fewest, and session 2 of bob none
    await renderings.end("bob/1/0")
    assert renderings.inside[3:] == ["bob/1/1"]
    await renderings.end("alice/1/0", "alice/1/1")
    assert renderings.inside[2:] == ["alice/2/1", "alice/1/2"]
    await renderings.cancel("alice/1/3")
    await renderings.end("alice/1/2", "alice/2/1", "bob/1/1", "bob/2/0")
    turns = renderings._turns._places._turns
    assert [*turns._waiting, *turns._running, *turns._running_of] == []


async def test_a_turn_that_was_just_given_to_one_that_gives_up_goes_to_the_next() -> None:
    turns = ImageTurns(2)
    renderings = Renderings(turns)
    await renderings.begin("alice/1/0", "alice/1/1", "alice/1/2")
    assert renderings.inside == ["alice/1/0"]
    renderings._ends["alice/1/0"].set()
    await asyncio.sleep(0)
    renderings._tasks["alice/1/1"].cancel()
    await settled()
    assert renderings.inside == ["alice/1/2"]
    await renderings.cancel("alice/1/2")
    assert not turns._places._turns._running


async def test_prompts_are_rendered_only_while_their_owner_has_memory_left() -> None:
    turns = ImageTurns(4, most=100)
    renderings = Renderings(turns)
    held = prompt(image("a", 60))
    turns.keep("alice", held)
    await renderings.begin("alice/1/0", "bob/1/0")
    assert renderings.inside == ["bob/1/0"]
    more = prompt(image("b", 1000))
    turns.keep("bob", more)
    await renderings.begin("bob/1/1", "carol/1/0")
    assert renderings.inside == ["bob/1/0", "carol/1/0"]  # who has nothing always may have one
    turns.drop("bob", more)
    await settled()
    assert renderings.inside == ["bob/1/0", "carol/1/0", "bob/1/1"]
    turns.drop("alice", held)
    await settled()
    assert renderings.inside[3:] == ["alice/1/0"]
    assert turns.memory.total == 0


async def test_an_image_of_many_prompts_counts_once_for_its_owner() -> None:
    turns, shared = ImageTurns(4, most=100), image("a", 10)
    prompts = [prompt(shared, shared, image(str(number), 1)) for number in range(5)]
    for each in prompts:
        turns.keep("alice", each)
    turns.keep("bob", prompts[0])
    assert [turns.memory.of(owner) for owner in ("alice", "bob")] == [15, 11]
    for each in prompts:
        turns.drop("alice", each)
    turns.drop("bob", prompts[0])
    assert (turns.memory.total, turns._uses) == (0, {})


# Gradients that are prepared ahead ------------------------------------------------------------------------------------


def gradient(size: int) -> GradientCommand:
    async def prepare() -> TrainWork:
        datum = TrainDatum(prompt(image("a", size)), np.zeros(1, np.int64), {})
        return TrainWork("m", [datum], "cross_entropy")

    return GradientCommand(Operation("m:1", "forward_backward"), prepare)


def run_of(owner: str, session: str) -> RunQueue:
    return RunQueue(f"{owner}:{session}", session, owner, CommandLog(), lambda: 0.0, released=True)


async def started(preparations: Preparations) -> int:
    """How many gradients were prepared, when no more are."""
    count = 0
    while tasks := preparations.start():
        count += len(tasks)
        await asyncio.gather(*tasks)
        await settled()
    return count


async def test_gradients_are_prepared_only_while_their_owner_has_memory_left() -> None:
    """And one of the owner that can run, whatever the others hold that cannot."""
    preparations = Preparations(1000, most=100)
    waits, first, second, bobs = run_of("alice", "1"), run_of("alice", "2"), run_of("alice", "3"), run_of("bob", "4")
    for queue in (waits, first, second, bobs):
        preparations.add(queue)
    waits.add(2, gradient(60))  # its first one never comes
    assert await started(preparations) == 1
    waits.add(3, gradient(60))
    assert await started(preparations) == 0
    for queue in (first, second):
        queue.add(1, gradient(60))
    assert await started(preparations) == 1
    bobs.add(1, gradient(60))
    bobs.add(2, gradient(60))
    assert await started(preparations) == 1
    assert (waits.rendered, first.rendered, second.rendered, bobs.rendered) == (60, 60, 0, 60)
    first.take()
    assert await started(preparations) == 1
    second.take()
    bobs.take()
    preparations.remove(waits)
    assert await started(preparations) == 1
    assert (first.rendered, second.rendered, bobs.rendered) == (0, 0, 60)


@pytest.mark.mutation(
    "preparations-for-one-owner", "Preparations._next", "if count >= AT_ONCE_OF_AN_OWNER or (", "if ("
)
async def test_sessions_of_one_owner_leave_preparations_to_another() -> None:
    preparations, never = Preparations(1000), asyncio.Event()

    async def stuck() -> TrainWork:
        await never.wait()
        raise AssertionError

    for number in range(12):
        queue = run_of("alice", str(number))
        preparations.add(queue)
        queue.add(1, GradientCommand(Operation("m:1", "forward_backward"), stuck))
    tasks = preparations.start()
    assert len(tasks) == AT_ONCE_OF_AN_OWNER
    preparations.add(bobs := run_of("bob", "b"))
    bobs.add(1, gradient(0))
    assert len(preparations.start()) == 1
    assert bobs._preparing == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
