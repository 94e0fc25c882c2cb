"""Whose turn it is: deficit round robin over owners, then over the sessions of each, then over their training runs.

Knows nothing of asyncio, trainers or clocks. The scheme is that of M. Shreedhar and G. Varghese, "Efficient fair
queueing using deficit round robin" (SIGCOMM 1995), with a session as their flow and a command as their packet:

1. Sessions stand in a ring. On its turn a session gets `quantum` and takes what it can pay for. It keeps the rest for
   its next turn only if it still has something to take. So a session that is idle, or waits for the end of a batch,
   saves nothing up. Between two sessions of an owner that always have something to take, the amounts received never
   differ by more than `quantum` + 2 x the largest cost, however many runs they have; with steps (point 5), 3 x
   `quantum` + 2 x (the largest cost of a gradient + that of a step).
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
6. Owners stand in a ring around these. While several have something queued, each gets the same in a batch: as much as
   the largest of their next gradients costs, but at least `LEAST_TURN` and at most `quantum`. Its sessions take their
   turns with that, and the next batch continues where they stopped. Its steps are paid for in the same way. So the one
   run of an owner does not wait for all sessions of another: for one turn of each other owner, as in point 1. Who is
   alone has no such limit, and owes nothing for what it took meanwhile.

Costs are in positions through forward and backward. The base model is frozen, so the backward pass computes gradients
of activations but not of its weights (adapters apart) and costs as much as the forward pass: a forward pass alone is
half of both.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LEAST_TURN = 1024
"""Of an owner, in positions: about as many as keep a GPU busy in one call."""


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
    def owner(self) -> str:
        """Whose share it takes from."""

    @property
    def session_id(self) -> str:
        """And from whose part of that."""

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

    @property
    def idle(self) -> bool:
        return all(model.idle for model in self.models.values())

    def settle(self) -> bool:
        """Without a gradient to take it saves nothing; with nothing queued it owes nothing, and this is false."""
        if self.gradient() is not None:
            return True
        self.on_turn = False
        self.deficit = 0
        if self.idle:
            self.debt = 0
            return False
        return True


@dataclass(slots=True, eq=False)
class _Batch(Generic[T]):
    """What a call of the trainer takes. `left`: positions for which there is room; `full`: a command found too few."""

    left: int
    full: bool = False
    taken: list[T] = field(default_factory=list)
    models: dict[int, Member[T]] = field(default_factory=dict)

    def take(self, model: Member[T], offer: Cost) -> None:
        self.left -= offer.positions
        self.taken.append(model.take())
        self.models[id(model)] = model


@dataclass(slots=True, eq=False)
class _Owner(Generic[T]):
    """`deficit`, `debt` and `on_turn` as those of a session, while other owners have something queued."""

    ring: OrderedDict[str, _Session[T]] = field(default_factory=OrderedDict)
    deficit: float = 0
    debt: int = 0
    on_turn: bool = False

    @property
    def idle(self) -> bool:
        return all(session.idle for session in self.ring.values())

    def gradient(self) -> Cost | None:
        """The next one."""
        for session in self.ring.values():
            if (found := session.gradient()) is not None:
                return found[1]
        return None

    def step(self, quantum: float = math.inf) -> tuple[_Session[T], Member[T], Cost] | None:
        """A command that is not a gradient, of a session that owes less than `quantum`."""
        for session in self.ring.values():
            if session.debt < quantum and (found := session.step()) is not None:
                return session, *found
        return None

    def begin_turn(self, amount: int) -> None:
        """Among several owners."""
        if self.on_turn:
            return
        self.on_turn = True
        paid = min(self.debt, amount if self.gradient() is None else amount // 2)
        self.debt -= paid
        self.deficit += amount - paid

    def settle(self) -> bool:
        """As each session does."""
        busy = False
        for session in self.ring.values():
            busy |= session.settle()
        if (self.on_turn or self.deficit or self.debt) and self.gradient() is None:
            self.on_turn = False
            self.deficit = 0
            if not busy:
                self.debt = 0
        return busy

    def fill(self, batch: _Batch[T], quantum: int) -> None:
        """Let the sessions take their turns, until the batch is full or complete for them, or `deficit` does not pay
        for the next gradient."""
        own: dict[int, Member[T]] = {}
        while turns := self._turns(own, quantum):
            for name in turns:
                session = self.ring[name]
                session.begin_turn(quantum)
                while (found := session.gradient()) is not None and found[1].cost <= session.deficit:
                    model, offer = found
                    batch.full = bool(batch.taken) and offer.positions > batch.left
                    if batch.full or offer.cost > self.deficit:
                        return  # the turn goes on in the next batch
                    session.deficit -= offer.cost
                    self.deficit -= offer.cost
                    session.models.move_to_end(id(model))
                    batch.take(model, offer)
                    own[id(model)] = model
                session.on_turn = False
                session.settle()
                self.ring.move_to_end(name)

    def _turns(self, batch: Mapping[int, Member[T]], quantum: int) -> list[str]:
        """The sessions that take their turns now, in order; none if the batch of these runs is complete."""
        turns = {name for name, session in self.ring.items() if session.gradient() is not None}
        if batch:
            waits = any(gradient_of(model) is None for model in batch.values())
            if not turns.issuperset(model.session_id for model in batch.values()) or (
                waits and any(self.ring[name].gradient(batch) is None for name in turns)
            ):
                return []
        if turns or not batch:
            turns |= {name for name, s in self.ring.items() if s.debt >= quantum and s.step() is not None}
        return [name for name in self.ring if name in turns]


class FairQueue(Generic[T]):
    """The training runs of one trainer, and which of them is next."""

    def __init__(self, quantum: int) -> None:
        if quantum < 2:
            raise ValueError(f"quantum: {quantum} is below 2")
        self._quantum = quantum
        self._least = min(LEAST_TURN, quantum)
        self._owners: OrderedDict[str, _Owner[T]] = OrderedDict()

    def add(self, model: Member[T]) -> None:
        owner = self._owners.setdefault(model.owner, _Owner())
        owner.ring.setdefault(model.session_id, _Session()).models[id(model)] = model

    def remove(self, model: Member[T]) -> None:
        """Ignores unknown runs."""
        ring = self._owners[model.owner].ring if model.owner in self._owners else {}
        session = ring.get(model.session_id)
        if session is not None and session.models.pop(id(model), None) is not None and not session.models:
            del ring[model.session_id]
            if not ring:
                del self._owners[model.owner]

    def _several(self) -> bool:
        """Whether more than one owner has something queued."""
        return len(self._owners) > 1 and sum(not owner.idle for owner in self._owners.values()) > 1

    # Between batches ------------------------------------------------------------------------------------------------

    def take_step(self) -> T | None:
        """Take a command that is not a gradient, of an owner and session that may run it now; None if there is none.
        The owner that owes the least is first."""
        several = self._several()
        owners: Iterable[_Owner[T]] = self._owners.values()
        for owner in sorted(owners, key=lambda owner: owner.debt) if several else owners:
            if several and owner.debt >= self._least:
                return None
            if (found := owner.step(self._quantum)) is not None:
                session, model, offer = found
                session.debt += offer.cost
                owner.debt += offer.cost if several else 0
                session.models.move_to_end(id(model))
                return model.take()
        return None

    def _may_step(self, owner: _Owner[T]) -> bool:
        """Whether one of several owners, and one of its sessions with a step, have nothing to pay first."""
        return owner.debt < self._least and owner.step(self._quantum) is not None

    def steps_wait(self) -> bool:
        """Whether a command other than a gradient waits for its session or owner to pay."""
        return any(owner.step() is not None for owner in self._owners.values())

    # A batch --------------------------------------------------------------------------------------------------------

    def take_batch(self, budget: int) -> list[T]:
        """Take the gradients of the trainer's next call.

        Empty if there is none, or if the sessions or owners of other commands have to pay first: then `steps_wait`.
        """
        busy = [owner for owner in self._owners.values() if owner.settle()]
        batch: _Batch[T] = _Batch(budget)
        if not busy:
            return batch.taken
        if len(busy) == 1:
            owner = busy[0]
            owner.deficit, owner.debt = math.inf, 0
            owner.fill(batch, self._quantum)
            owner.deficit, owner.on_turn = 0, False
            return batch.taken
        while turns := self._turns(batch):
            costs = [next_.cost for name in turns if (next_ := self._owners[name].gradient()) is not None]
            amount = min(self._quantum, max(self._least, *costs, 0))
            for name in turns:
                self._owners[name].begin_turn(amount)
                self._owners[name].fill(batch, self._quantum)
                if batch.full:
                    return batch.taken
                self._owners[name].on_turn = False
                self._owners.move_to_end(name)
        return batch.taken

    def _turns(self, batch: _Batch[T]) -> list[str]:
        """The owners that take their turns now, in order; none if that would delay a run in the batch."""
        if any(gradient_of(model) is None for model in batch.models.values()):
            return []
        turns = {name for name, owner in self._owners.items() if owner.gradient() is not None}
        if turns or not batch.taken:
            turns |= {name for name, owner in self._owners.items() if owner.step() and not self._may_step(owner)}
        return [name for name in self._owners if name in turns]


def gradient_of(model: Member[T]) -> Cost | None:
    """The gradient that a run has for a batch now."""
    offer = model.offer()
    return offer if offer is not None and offer.positions else None
