"""Whose turn it is: deficit round robin over sessions, and within each over its training runs.

Knows nothing of asyncio, trainers or clocks. The scheme is that of M. Shreedhar and G. Varghese, "Efficient fair
queueing using deficit round robin" (SIGCOMM 1995), with a session as their flow and a command as their packet:

1. Sessions stand in a ring. On its turn a session gets `quantum` and takes what it can pay for. It keeps the rest for
   its next turn only if it still has something to take. So a session that is idle, or waits for the end of a batch,
   saves nothing up. Between two sessions that always have something to take, the amounts received never differ by more
   than `quantum` + 2 x the largest cost, however many runs they have; with steps (point 5), 3 x `quantum` + 2 x (the
   largest cost of a gradient + that of a step).
2. Within a session its runs take turns, command by command. A run keeps its turn until its session can afford the
   command.
3. One call of the trainer takes gradients of many runs and sessions. The order of the turns is cut into batches of at
   most `budget` positions (a larger command goes alone), and the next batch continues where the last was cut.
4. A batch takes a second turn of the ring only if it delays none of its members for the sake of others: every session
   in the batch must have more to add, and if one of its runs has not, all sessions must have runs outside the batch. So
   all runs of a single session join one batch; and a run whose optimizer step follows its gradient waits for one turn
   of the others, a quantum and a command each, not for the longest batch.
5. Commands other than gradients (a step, a save) run between batches, as soon as they are at the head of their run, so
   that the run can join the next batch. The session owes their cost: at a debt of `quantum` it runs no more of them,
   and half of the quantum of each turn (all of it, without a gradient to take) pays the debt.

Costs are in positions through forward and backward. The base model is frozen, so the backward pass computes gradients
of activations but not of its weights (adapters apart) and costs as much as the forward pass: a forward pass alone is
half of both.
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
    """A training run as fairness sees it."""

    @property
    def session_id(self) -> str:
        """Whose share it takes from."""

    @property
    def idle(self) -> bool:
        """Whether nothing is queued for it."""

    def offer(self) -> Cost | None:
        """The command that could run now; None if nothing is queued or it is not ready."""

    def take(self) -> T_co:
        """Take the offered command; `offer` then gives the next."""


def gradient_cost(positions: int, *, backward: bool) -> int:
    """Cost of a gradient, or of a forward pass alone."""
    return positions if backward else (positions + 1) // 2


@dataclass(slots=True, eq=False)
class _Session(Generic[T]):
    """`deficit`: cost of gradients that it may still take. `debt`: unpaid cost of its other commands. `on_turn`: it has
    received its quantum for this turn."""

    deficit: int = 0
    debt: int = 0
    on_turn: bool = False
    models: OrderedDict[int, Member[T]] = field(default_factory=OrderedDict)

    def gradient(self, besides: Collection[int] = ()) -> tuple[Member[T], Cost] | None:
        """The run whose turn it is among those with a gradient, except those with the `id`s in `besides`."""
        for key, model in self.models.items():
            if key not in besides and (offer := gradient_of(model)) is not None:
                return model, offer
        return None

    def step(self) -> tuple[Member[T], Cost] | None:
        """A run with a command at its head that is not a gradient."""
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
        """Without a gradient to take it saves nothing; with nothing queued it owes nothing."""
        if self.gradient() is None:
            self.on_turn = False
            self.deficit = 0
            if all(model.idle for model in self.models.values()):
                self.debt = 0


class FairQueue(Generic[T]):
    """The training runs of one trainer, and which of them is next."""

    def __init__(self, quantum: int) -> None:
        if quantum < 2:
            raise ValueError(f"quantum: {quantum} is below 2")
        self._quantum = quantum
        self._ring: OrderedDict[str, _Session[T]] = OrderedDict()

    def add(self, model: Member[T]) -> None:
        self._ring.setdefault(model.session_id, _Session()).models[id(model)] = model

    def remove(self, model: Member[T]) -> None:
        """Ignores unknown runs."""
        session = self._ring.get(model.session_id)
        if session is not None and session.models.pop(id(model), None) is not None and not session.models:
            del self._ring[model.session_id]

    # Between batches ------------------------------------------------------------------------------------------------

    def take_step(self) -> T | None:
        """Take a command that is not a gradient, of a session that may run it now; None if there is none."""
        for session in self._ring.values():
            if session.debt < self._quantum and (found := session.step()) is not None:
                model, offer = found
                session.debt += offer.cost
                session.models.move_to_end(id(model))
                return model.take()
        return None

    def steps_wait(self) -> bool:
        """Whether a command other than a gradient waits for its session to pay."""
        return any(session.step() is not None for session in self._ring.values())

    # A batch --------------------------------------------------------------------------------------------------------

    def take_batch(self, budget: int) -> list[T]:
        """Take the gradients of the trainer's next call.

        Empty if there is none, or if the sessions of other commands have to pay first: then `steps_wait`.
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
        """The sessions that take their turns now, in order; none if the batch of these runs is complete."""
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
    """The gradient that a run has for a batch now."""
    offer = model.offer()
    return offer if offer is not None and offer.positions else None
