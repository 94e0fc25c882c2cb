"""The order in which ranks gather the units of sharded weights, with weights that only note it."""

from types import SimpleNamespace
from typing import Any

import pytest
from tinker_local.backend.training.parallel.sharded_weights import ShardedWalk, order_of

LAYERS = 4


class NotedWeights:
    """Notes `gather` and `drop`, and refuses to wait for what was not gathered."""

    def __init__(self, head_unit: int | None, *, together: bool = True) -> None:
        self.head_unit = head_unit
        self.gathered: dict[int, None] = {}
        self.noted: list[str] = []
        self.gathers = SimpleNamespace(together=together)

    def gather(self, number: int) -> None:
        if number not in self.gathered:
            self.noted.append(f"gather {number}")
            self.gathered[number] = None
        assert len([unit for unit in self.gathered if unit != self.head_unit]) <= 2

    def wait(self, number: int) -> None:
        assert number in self.gathered

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.gathered[number]


def walked(head: int | None, *, backward: bool, until: int) -> list[str]:
    """What a walk notes that is left after `until` units."""
    weights: Any = NotedWeights(head)
    order = order_of(LAYERS, head, backward=backward)
    walk = ShardedWalk(weights, order)
    for number in order[:until]:
        walk.head() if number == head else walk.layer(number)
        weights.noted.append("compute")
    walk.finish()
    found: list[str] = weights.noted
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head", [None, LAYERS])
def test_a_fake_walk_gathers_the_same_units_wherever_it_is_left(head: int | None, backward: bool) -> None:
    order = order_of(LAYERS, head, backward=backward)
    gathers = [
        [each for each in walked(head, backward=backward, until=until) if each != "compute"]
        for until in range(len(order) + 1)
    ]
    assert all(each == gathers[-1] for each in gathers)
    assert {int(each.split()[1]) for each in gathers[-1]} == set(order)


def test_a_fake_walk_sends_for_a_unit_before_the_one_in_front_of_it_computes() -> None:
    noted = walked(None, backward=False, until=LAYERS)
    assert noted[:5] == ["gather 0", "gather 1", "compute", "gather 2", "compute"]


def test_a_fake_walk_keeps_the_last_layer_around_the_head() -> None:
    assert order_of(3, 3, backward=True) == [0, 1, 2, 3, 2, 1, 0]
    assert order_of(3, None, backward=True) == [0, 1, 2, 1, 0]
    noted = [each for each in walked(LAYERS, backward=True, until=2 * LAYERS + 1) if each != "compute"]
    assert noted.count(f"gather {LAYERS - 1}") == 1


def test_a_fake_walk_refuses_to_leave_a_unit_out() -> None:
    weights: Any = NotedWeights(None)
    walk = ShardedWalk(weights, order_of(LAYERS, None, backward=False))
    walk.layer(0)
    with pytest.raises(AssertionError, match="unit 2 is read out of order: 1 is next"):
        walk.layer(2)


def test_a_fake_walk_whose_ranks_wait_for_no_one_ends_where_it_is_left() -> None:
    weights: Any = NotedWeights(None, together=False)
    walk = ShardedWalk(weights, order_of(LAYERS, None, backward=True))
    walk.layer(0)
    walk.finish()
    assert weights.noted == ["gather 0", "gather 1"]
    assert [*weights.gathered] == [0]
