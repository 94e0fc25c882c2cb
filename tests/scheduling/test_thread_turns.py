"""Owners take turns in the threads of the server, and sessions those of their owner."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from tinker_local.backend.threads import ACTING, Places, Threads, Turns, Who, acting_for


class Calls:
    """Calls that note their names as they begin, and end when `end` is set."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.begun: list[str] = []
        self.end = threading.Event()

    def run(self, name: str, *, waits: bool = False) -> "asyncio.Future[None]":
        """`alice/1/a`: an owner, a session, and any name."""
        owner, session, _ = name.split("/")

        def call() -> None:
            self.begun.append(name)
            if waits:
                assert self.end.wait(60)

        with acting_for(owner, session):
            return self._threads.run(call)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # set by threads
            await asyncio.sleep(0.001)


async def test_an_owner_leaves_a_thread_to_others() -> None:
    calls = Calls(Threads("test", 3, of_owner=2))
    alices = [calls.run(f"alice/{at}/x", waits=True) for at in range(50)]
    await calls.run("bob/1/x")
    assert len(calls.begun) == 3
    calls.end.set()
    await asyncio.gather(*alices)
    assert len(calls.begun) == 51


async def test_owners_and_then_their_sessions_take_turns() -> None:
    calls = Calls(Threads("test", 1))
    first = calls.run("alice/1/0", waits=True)
    await until(lambda: bool(calls.begun))
    names = [*(f"alice/1/{at}" for at in range(1, 4)), "alice/2/0", "bob/1/0", "bob/1/1"]
    waiting = [calls.run(name) for name in names]
    calls.end.set()
    await asyncio.gather(first, *waiting)
    assert calls.begun[1:] == ["alice/1/1", "bob/1/0", "alice/2/0", "bob/1/1", "alice/1/2", "alice/1/3"]


async def test_a_call_that_was_cancelled_does_not_begin() -> None:
    calls = Calls(Threads("test", 1))
    first, second = calls.run("alice/1/0", waits=True), calls.run("alice/1/1")
    await until(lambda: bool(calls.begun))
    second.cancel()
    await asyncio.sleep(0)
    calls.end.set()
    await first
    await calls.run("alice/1/2")
    assert calls.begun == ["alice/1/0", "alice/1/2"]


async def test_errors_are_those_of_the_call() -> None:
    threads = Threads("test", 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 1 + 1) == 2


def test_a_thread_goes_on_when_the_loop_of_its_call_has_ended() -> None:
    threads, begun, end = Threads("test", 1), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert end.wait(60)

    async def leave() -> None:
        threads.run(call)
        await asyncio.to_thread(begun.wait, 60)

    async def use() -> int:
        async with asyncio.timeout(60):
            return await threads.run(lambda: 1 + 1)

    asyncio.run(leave())
    end.set()
    assert asyncio.run(use()) == 2


async def test_folders_that_hang_keep_neither_others_nor_the_end_of_the_program_waiting() -> None:
    calls = Calls(Threads("test", 2, of_owner=1, may_hang=True))
    hangs = [calls.run(f"alice/1/{at}", waits=True) for at in range(10)]
    await until(lambda: bool(calls.begun))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "test")
    await calls.run("bob/1/0")
    assert calls.begun == ["alice/1/0", "bob/1/0"]
    calls.end.set()
    await asyncio.gather(*hangs)


async def test_a_task_works_for_the_owner_for_whom_it_was_made() -> None:
    async def work() -> Who:
        await asyncio.sleep(0)
        return ACTING.get()

    with acting_for("alice", "1"):
        task = asyncio.create_task(work())
    assert ACTING.get() == Who()
    assert await task == Who("alice", "1")


def test_turns_forget_who_has_nothing() -> None:
    turns: Turns[str] = Turns(2, 1)
    for at in range(4):
        turns.wait(Who("alice", str(at % 2)), f"a{at}")
    taken = [turns.take(), turns.take(), turns.take()]
    assert taken == [(Who("alice", "0"), "a0"), (Who("alice", "1"), "a1"), None]  # two of an owner, one of a session
    turns.forget(Who("alice", "0"), "a2")
    turns.ended(Who("alice", "0"))
    assert turns.take() is None  # session 1 has one already
    turns.ended(Who("alice", "1"))
    assert turns.take(lambda owner: owner != "alice") is None
    assert turns.take() == (Who("alice", "1"), "a3")
    turns.ended(Who("alice", "1"))
    assert (len(turns), turns._waiting, turns._running, turns._running_of) == (0, {}, {}, {})


async def test_places_of_one_owner_are_left_to_others_in_turn() -> None:
    """As those where grammars are compiled: one of Bob is not behind all of Alice's."""
    places, inside, end = Places(4, 3), list[str](), asyncio.Event()

    async def use(owner: str) -> None:
        async with places.turn(Who(owner)):
            inside.append(owner)
            await end.wait()

    alices = [asyncio.create_task(use("alice")) for _ in range(20)]
    await until(lambda: len(inside) == 3)
    bobs = [asyncio.create_task(use("bob")) for _ in range(2)]
    await until(lambda: len(inside) == 4)
    alices.pop(0).cancel()
    await until(lambda: len(inside) == 5)
    assert inside == ["alice"] * 3 + ["bob"] * 2  # the one with fewer is next
    end.set()
    await asyncio.gather(*alices, *bobs)
    assert len(places._turns) == 0
