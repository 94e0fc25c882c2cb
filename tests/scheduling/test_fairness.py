"""Deficit round robin by itself: whose turn it is, what a batch takes, what is paid for."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.scheduling.fairness import LEAST_TURN, FairQueue, gradient_cost


class Command(NamedTuple):
    cost: int
    positions: int


STEP = Command(10, 0)


def gradient(cost: int) -> Command:
    return Command(cost, cost)


@dataclass(eq=False)
class Model:
    session_id: str
    offers: list[Command] = field(default_factory=list)
    ready: bool = True
    owner: str = "local"

    @property
    def idle(self) -> bool:
        return not self.offers

    def offer(self) -> Command | None:
        return self.offers[0] if self.offers and self.ready else None

    def take(self) -> tuple["Model", Command]:
        return self, self.offers.pop(0)


def queue(quantum: int, *models: Model) -> FairQueue[tuple[Model, Command]]:
    made: FairQueue[tuple[Model, Command]] = FairQueue(quantum)
    for model in models:
        made.add(model)
    return made


def costs(batch: list[tuple[Model, Command]], model: Model) -> int:
    return sum(offer.cost for whose, offer in batch if whose is model)


def test_models_of_a_session_take_turns_command_by_command() -> None:
    models = [Model("s", [gradient(10)] * 3) for _ in range(3)]
    batch = queue(1000, *models).take_batch(1000)
    assert [models.index(model) for model, _ in batch] == [0, 1, 2] * 3


def test_batch_is_cut_at_the_budget_and_the_turn_goes_on_in_the_next() -> None:
    one, two = Model("s", [gradient(40)] * 4), Model("t", [gradient(40)] * 4)
    fair = queue(80, one, two)
    taken = [[whose.session_id for whose, _ in fair.take_batch(100)] for _ in range(4)]
    assert taken == [["s", "s"], ["t", "t"], ["s", "s"], ["t", "t"]]


def test_command_larger_than_the_budget_goes_alone() -> None:
    large, small = Model("s", [gradient(500), gradient(10)]), Model("t", [gradient(10)] * 2)
    fair = queue(1000, large, small)
    assert [offer.cost for _, offer in fair.take_batch(100)] == [500]
    assert sorted(offer.cost for _, offer in fair.take_batch(100)) == [10, 10, 10]


def test_who_has_nothing_to_take_saves_nothing_up() -> None:
    """After a hundred batches in each of which it could have taken more, a session gets what the others get."""
    waits, other = Model("s"), Model("t", [gradient(10)] * 10_000)
    fair = queue(100, waits, other)
    for _ in range(100):
        waits.offers = [gradient(10), STEP]
        fair.take_batch(1000)
        waits.offers.clear()
    waits.offers = [gradient(10)] * 1000
    batch = fair.take_batch(1000)
    assert abs(costs(batch, waits) - costs(batch, other)) <= 100 + 2 * 10


def test_unready_model_is_passed_over_and_first_when_it_is_ready() -> None:
    slow, other = Model("s", [gradient(10)], ready=False), Model("s", [gradient(10)] * 4)
    fair = queue(20, slow, other)
    assert [whose for whose, _ in fair.take_batch(20)] == [other, other]
    slow.ready = True
    assert [whose for whose, _ in fair.take_batch(20)] == [slow, other]


def test_session_in_debt_pays_before_it_runs_another_step_and_its_gradients_go_on() -> None:
    saves, gradients = Model("s", [Command(60, 0)] * 50), Model("s", [gradient(100)] * 5)
    fair = queue(100, saves, gradients)
    steps = []
    while gradients.offers:
        steps.append(0)
        while fair.take_step() is not None:
            steps[-1] += 1
        fair.take_batch(100)
    assert max(steps) == 2
    assert len(steps) <= 10  # half of its turns' quantum is the gradients'
    while saves.offers:
        while fair.take_step() is not None:
            pass
        fair.take_batch(100)  # with no gradient left a turn only pays


def test_forward_pass_alone_costs_half_of_both() -> None:
    assert gradient_cost(100, backward=True) == 100
    assert gradient_cost(100, backward=False) == 50
    assert gradient_cost(1, backward=False) == 1


def test_quantum_must_be_something_to_halve() -> None:
    with pytest.raises(ValueError, match="quantum: 1"):
        FairQueue(1)


def test_owner_takes_as_much_as_the_next_gradient_of_another_while_that_has_one() -> None:
    alices = [Model(f"a{at}", [gradient(300)] * 20, owner="alice") for at in range(20)]
    bob = Model("b", [gradient(2000)], owner="bob")
    fair = queue(8192, *alices, bob)
    batch = fair.take_batch(65_536)
    assert [offer.cost for whose, offer in batch if whose is bob] == [2000]
    assert sum(offer.cost for whose, offer in batch if whose is not bob) <= 2000
    assert sum(offer.cost for _, offer in fair.take_batch(65_536)) > 20 * 300  # alone she takes all


def test_owner_that_owes_for_steps_pays_before_it_runs_more_of_them_and_others_are_first() -> None:
    alices = [Model(f"a{at}", [Command(128, 0)] * 10, owner="alice") for at in range(20)]
    bob = Model("b", [gradient(64), Command(128, 0)], owner="bob")
    fair = queue(8192, *alices, bob)
    taken = 0
    while fair.take_step() is not None:
        taken += 1
    assert taken == LEAST_TURN // 128
    assert [whose for whose, _ in fair.take_batch(65_536)] == [bob]
    assert bob in [step[0] for _ in range(2) if (step := fair.take_step()) is not None]
    while any(model.offers for model in alices):  # alone she owes no one
        assert fair.take_step() is not None or fair.take_batch(65_536) == []


def _command(cost: int) -> Command:
    return Command(cost, 0) if cost % 7 == 0 else gradient(cost)


@given(
    quantum=st.integers(2, 300),
    budget=st.integers(1, 1000),
    sessions=st.lists(
        st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=8), min_size=1, max_size=4), max_size=4
    ),
    owners=st.integers(1, 3),
)
def test_everything_is_taken_once_in_order_and_in_budget(
    quantum: int, budget: int, sessions: list[list[list[int]]], owners: int
) -> None:
    """Costs that are multiples of seven are steps."""
    models = [
        Model(f"s{at}", [_command(cost) for cost in commands], owner=f"o{at % owners}")
        for at, session in enumerate(sessions)
        for commands in session
    ]
    wanted = {id(model): list(model.offers) for model in models}
    taken: dict[int, list[Command]] = {id(model): [] for model in models}
    fair = queue(quantum, *models)
    while True:
        while (step := fair.take_step()) is not None:
            taken[id(step[0])].append(step[1])
        batch = fair.take_batch(budget)
        for model, offer in batch:
            taken[id(model)].append(offer)
        assert len(batch) <= 1 or sum(offer.positions for _, offer in batch) <= budget
        if not batch and not fair.steps_wait():
            break
    assert taken == wanted
