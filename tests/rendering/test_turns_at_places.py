"""Turns at places: all at once or none, in order, and given back whatever happens to who holds or awaits them."""

import asyncio

import pytest
from tinker_local.backend.rendering.turns_at_places import TurnsAtPlaces

A, B, AB = frozenset("a"), frozenset("b"), frozenset("ab")


class Visitor:
    """Holds turns from when `inside` is set until `leave`."""

    def __init__(self, turns: TurnsAtPlaces, places: frozenset[str]) -> None:
        self.inside = False
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(turns, places))

    async def _visit(self, turns: TurnsAtPlaces, places: frozenset[str]) -> None:
        async with turns.at(places):
            self.inside = True
            await self._go.wait()

    async def leave(self) -> None:
        self._go.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_for_one_place_holds_none_of_another() -> None:
    turns = TurnsAtPlaces(2)
    at_a = [Visitor(turns, A) for _ in range(2)]
    both = [Visitor(turns, AB) for _ in range(3)]
    at_b = [Visitor(turns, B) for _ in range(2)]
    await settle()
    assert [visitor.inside for visitor in (*at_a, *both, *at_b)] == [True] * 2 + [False] * 3 + [True] * 2
    await at_a[0].leave()
    await settle()
    assert not any(visitor.inside for visitor in both), "b is full"
    await at_b[0].leave()
    await settle()
    assert [visitor.inside for visitor in both] == [True, False, False]
    for visitor in (at_a[1], at_b[1], *both):
        await visitor.leave()


@pytest.mark.parametrize("when", ["while it waits", "as its turn is given", "as one ends"])
async def test_whoever_gives_up_leaves_room_also_if_the_turn_was_just_given(when: str) -> None:
    turns = TurnsAtPlaces(1)
    first, second, third = (Visitor(turns, A) for _ in range(3))
    await settle()
    if when != "while it waits":
        first._go.set()
    if when == "as its turn is given":
        await asyncio.sleep(0)  # `first` has left, and `second` has not run
    second.task.cancel()
    await settle()
    assert second.task.cancelled()
    assert not second.inside
    await first.leave()
    await settle()
    assert third.inside
    await third.leave()
    fourth = Visitor(turns, A)
    await settle()
    assert fourth.inside
    await fourth.leave()
