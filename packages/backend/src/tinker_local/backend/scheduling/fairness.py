"""Whose turn it is: deficit round robin over sessions, and in each over its models.

Knows nothing of asyncio, trainers or clocks. The scheme is that of M. Shreedhar and G. Varghese, "Efficient fair
queueing using deficit round robin" (SIGCOMM 1995), with a session as their flow and a command as their packet:

1. Sessions stand in a ring. On its turn a session is given `quantum` and takes what it can pay for; what is left of
   it is kept for its next turn only if the session still has something that could be taken. So who is idle, or waits
   for the end of a batch, saves nothing up. Between two sessions that always have something to take, what they were
   given never differs by more than `quantum` + 2 × the largest cost, however many models they have; with steps
   (point 5), 3 × `quantum` + 2 × (the largest cost of a gradient + that of a step).
2. In a session its models take turns, command by command. Whose turn it is keeps it until it can be paid for.
3. One call of the trainer takes gradients of many models and sessions: the order of the turns is cut into batches of
   at most `budget` positions (one command that is larger goes alone) and goes on with the next batch where it was cut.
4. A batch takes a second turn of the ring only if nobody waits for it to end for the sake of others: every session of
   the batch must have something more to put into it; and if a model has not, all sessions must have models that are
   not in the batch yet. So all models of a single session join one batch; and one whose optimizer step stands right
   behind its gradient waits for one turn of the others, a quantum and a command each, and not for the longest batch.
5. What is no gradient (a step, a save) runs between batches, as soon as it is at the head of its model, so that the
   model can join the next batch. The session owes its cost: who owes `quantum` or more runs no other, and half of the
   quantum of each turn (all of it, if there is no gradient to take) goes to what is owed.
Costs are in positions through forward and backward. The base model is frozen, so that the backward pass computes the
gradient of activations but none of weights (adapters apart) and costs what the forward pass costs: a forward pass
alone is half of both.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Cost(Protocol):
    """A command as fairness sees it: its `cost`, at least 1, and its `positions`, 0 if it is not a gradient and so does
    not share a batch."""

    @property
    def cost(self) -> int: ...

    @property
    def positions(self) -> int: ...


class Member(Protocol[T_co]):
    """A model as fairness sees it."""

    @property
    def session_id(self) -> str:
        """Whose share it takes from."""

    @property
    def idle(self) -> bool:
        """Whether nothing at all is queued for it."""

    def offer(self) -> Cost | None:
        """The command that could run now; None if nothing is queued or it is not ready."""

    def take(self) -> T_co:
        """Take what is offered: `offer` is then about what follows it."""


def gradient_cost(positions: int, *, backward: bool) -> int:
    """Cost of a gradient, or of a forward pass alone."""
    return positions if backward else (positions + 1) // 2


@dataclass(slots=True, eq=False)
class _Session(Generic[T]):
    """`deficit`: cost of gradients that it may still take. `debt`: cost of what it ran else and has not paid for.
    `on_turn`: has been given its quantum for this turn."""

    deficit: int = 0
    debt: int = 0
    on_turn: bool = False
    models: OrderedDict[int, Member[T]] = field(default_factory=OrderedDict)

    def gradient(self, besides: Collection[int] = ()) -> tuple[Member[T], Cost] | None:
        """Of the models with a gradient the one whose turn it is; `besides` those with these `id`s."""
        for key, model in self.models.items():
            if key not in besides and (offer := gradient_of(model)) is not None:
                return model, offer
        return None

    def step(self) -> tuple[Member[T], Cost] | None:
        """A model with something at its head that is no gradient."""
        for model in self.models.values():
            if (offer := model.offer()) is not None and not offer.positions:
                return model, offer
        return None

    def begin_turn(self, quantum: int) -> None:
        if not self.on_turn:
            self.on_turn = True
            paid = min(self.debt, quantum if self.gradient() is None else quantum // 2)
            self.debt -= paid
            self.deficit += quantum - paid

    def settle(self) -> None:
        """Who has no gradient to take saves nothing, and who has nothing queued at all owes nothing."""
        if self.gradient() is None:
            self.on_turn = False
            self.deficit = 0
            if all(model.idle for model in self.models.values()):
                self.debt = 0


class FairQueue(Generic[T]):
    """The models of one trainer, and who of them is next."""

    def __init__(self, quantum: int) -> None:
        if quantum < 2:
            raise ValueError(f"quantum: {quantum} is below 2")
        self._quantum = quantum
        self._ring: OrderedDict[str, _Session[T]] = OrderedDict()

    def add(self, model: Member[T]) -> None:
        self._ring.setdefault(model.session_id, _Session()).models[id(model)] = model

    def remove(self, model: Member[T]) -> None:
        """Unknown models are ignored."""
        session = self._ring.get(model.session_id)
        if session is not None and session.models.pop(id(model), None) is not None and not session.models:
            del self._ring[model.session_id]

    # Between batches ------------------------------------------------------------------------------------------------

    def take_step(self) -> T | None:
        """Take something that is no gradient, of whoever may run it now; None if nobody may."""
        for session in self._ring.values():
            if session.debt < self._quantum and (found := session.step()) is not None:
                model, offer = found
                session.debt += offer.cost
                session.models.move_to_end(id(model))
                return model.take()
        return None

    def steps_wait(self) -> bool:
        """Whether there is something that is no gradient, of a session that has to pay first."""
        return any(session.step() is not None for session in self._ring.values())

    # A batch --------------------------------------------------------------------------------------------------------

    def take_batch(self, budget: int) -> list[T]:
        """Take the gradients of the trainer's next call.

        Empty if nobody has one, or if whoever has something else has to pay for it first: then `steps_wait`.
        """
        for session in self._ring.values():
            session.settle()
        batch: list[T] = []
        models: dict[int, Member[T]] = {}
        left = budget
        while turns := self._turns(models):
            for name in turns:
                session = self._ring[name]
                session.begin_turn(self._quantum)
                while (found := session.gradient()) is not None and found[1].cost <= session.deficit:
                    model, offer = found
                    if batch and offer.positions > left:
                        return batch  # the turn goes on in the next batch
                    session.deficit -= offer.cost
                    left -= offer.positions
                    session.models.move_to_end(id(model))
                    batch.append(model.take())
                    models[id(model)] = model
                session.on_turn = False
                session.settle()
                self._ring.move_to_end(name)
        return batch

    def _turns(self, batch: Mapping[int, Member[T]]) -> list[str]:
        """The sessions that take their turns now, in order; none if the batch of these models is to end."""
        turns = {name for name, session in self._ring.items() if session.gradient() is not None}
        if batch:
            waits = any(gradient_of(model) is None for model in batch.values())
            if not turns.issuperset(model.session_id for model in batch.values()) or (
                waits and any(self._ring[name].gradient(batch) is None for name in turns)
            ):
                return []
        if turns or not batch:
            turns |= {name for name, s in self._ring.items() if s.debt >= self._quantum and s.step() is not None}
        return [name for name in self._ring if name in turns]


def gradient_of(model: Member[T]) -> Cost | None:
    """What a model has for a batch now."""
    offer = model.offer()
    return offer if offer is not None and offer.positions else None
