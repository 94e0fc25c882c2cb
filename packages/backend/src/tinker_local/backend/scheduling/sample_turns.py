"""Whose samples the sampler gets next: owners share its places, and sessions those of their owner, in pieces of a few
sequences.

A place is one sequence in the sampler. A free place goes to the owner that has the fewest, and there to the session
that has the fewest; among equals to the one that has waited longest. So owners that always have something to sample get
equal numbers of places, however many sessions they have, requests they send and tokens they ask for. (Deficit round
robin, as in `fairness.py`, needs the cost of a request before it runs; the length of a sequence is not known then.)

Who is alone gets `places`, as many sequences as the sampler is to run at once. The sampler has room for `RESERVED`
more, which go to sessions that have nothing in it. So a short sample starts at once while others fill all places.

Prompts are read one after the other, before their sequences run. So only `PROMPTS_AHEAD` positions of prompts that are
not read are handed over for each replica, and one prompt of each session that has none there.
"""

import asyncio
import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from tinker_local.backend.sampling.sampler import RESERVED, SampleWork, do_nothing, of_all
from tinker_local.backend.scheduling.operations import ACTIVE, QueueState, paused
from tinker_local.types import SampleOutput

PIECE = RESERVED // 2
"""Most sequences of a request that are handed to the sampler at once. The last of them may exceed the places."""

PROMPTS_AHEAD = 2**15
"""A few steps of a GPU, so that none of them waits for the next prompts."""

Run = Callable[[SampleWork], Awaitable[SampleOutput]]


class _Member(Protocol):
    """`held`: its places. `turn`: which of its entries in `_Turns` counts, None if it waits for nothing."""

    held: int
    turn: int | None

    @property
    def waits(self) -> bool:
        """Whether it has something to hand over."""


Member = TypeVar("Member", bound=_Member)


class _Turns(Generic[Member]):
    """Who is next: the one with the fewest places, and among equals the one that has waited longest."""

    _count = itertools.count()

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Member]] = []  # places, which turn; old entries are skipped

    def enqueue(self, member: Member, members: int) -> None:
        """Give one of `members` a turn according to its places now, instead of its last one."""
        member.turn = next(self._count)
        heapq.heappush(self._heap, (member.held, member.turn, member))
        if len(self._heap) > 2 * members + 1000:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].turn and entry[2].waits]
            heapq.heapify(self._heap)

    def first(self) -> Member | None:
        """Who is next."""
        while self._heap:
            _, turn, member = self._heap[0]
            if turn == member.turn and member.waits:
                return member
            heapq.heappop(self._heap)
        return None

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(slots=True, eq=False)
class _Owner:
    name: str
    held: int = 0
    turn: int | None = None
    sessions: "dict[str, _Session]" = field(default_factory=dict)
    turns: "_Turns[_Session]" = field(default_factory=_Turns)

    @property
    def waits(self) -> bool:
        return self.turns.first() is not None


@dataclass(slots=True, eq=False)
class _Session:
    """`unread`: positions of its prompts that were handed over and are not read; `too_many`: its next prompt waits for
    others to be read."""

    id: str
    owner: _Owner
    waiting: "OrderedDict[_Request, None]" = field(default_factory=OrderedDict)
    held: int = 0
    turn: int | None = None
    unread: int = 0
    too_many: bool = False

    @property
    def waits(self) -> bool:
        return bool(self.waiting) and not self.too_many


@dataclass(slots=True, eq=False)
class _Request:
    """`handed`: how many of its sequences the sampler got, in `pieces`. `done`: all pieces have ended, or one has
    failed."""

    session: _Session
    work: SampleWork
    run: Run
    done: asyncio.Future[None]
    handed: int = 0
    pieces: list[asyncio.Future[SampleOutput]] = field(default_factory=list)

    def next_piece(self) -> SampleWork:
        """The next sequences. The first piece answers what is asked about the prompt, and reports the begin."""
        work, first = self.work, self.handed
        self.handed = min(first + PIECE, work.num_samples)
        piece = replace(work, num_samples=self.handed - first, first_sample=work.first_sample + first)
        if not first:
            return piece
        return replace(
            piece,
            prompt_logprobs=False,
            topk_prompt_logprobs=0,
            target_prompt_logprobs=None,
            prompt_alt_tokens_k=0,
            prompt_logprobs_last_n=None,
            begun=do_nothing,
        )

    def piece_ended(self, task: asyncio.Future[SampleOutput]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.done.done():
            return
        if task.cancelled():
            self.done.cancel()
        elif error is not None:
            self.done.set_exception(error)
        elif self.handed == self.work.num_samples and all(piece.done() for piece in self.pieces):
            self.done.set_result(None)


class SampleTurns:
    """Hands the samples of all owners to one sampler.

    `places`: how many sequences it is to run at once; `prompts_ahead`: most positions of prompts that it has and has
    not read, when another session waits. `sequences`: how many it has now, of `requests` requests; `unread`: positions
    of prompts that it has and has not read. Belongs to one event loop.
    """

    def __init__(self, places: int, prompts_ahead: int = PROMPTS_AHEAD) -> None:
        self.places = places
        self.prompts_ahead = prompts_ahead
        self.sequences = 0
        self.requests = 0
        self.unread = 0
        self._owners: dict[str, _Owner] = {}
        self._turns: _Turns[_Owner] = _Turns()
        self._new: dict[_Session, None] = {}  # that wait and hold nothing, the oldest first
        self._too_many: list[_Session] = []

    async def sample(self, owner_name: str, session_id: str, work: SampleWork, run: Run) -> SampleOutput:
        """Run `work` in pieces, each with `run`, and join their results; cancelling it cancels them."""
        owner = self._owners.setdefault(owner_name, _Owner(owner_name))
        session = owner.sessions.setdefault(session_id, _Session(session_id, owner))
        request = _Request(session, work, run, asyncio.get_running_loop().create_future())
        session.waiting[request] = None
        self._enqueue(session)
        self._hand_over()
        try:
            await request.done
            outputs = [piece.result() for piece in request.pieces]
        finally:
            session.waiting.pop(request, None)
            running = [piece for piece in request.pieces if not piece.done()]
            for piece in running:
                piece.cancel()
            try:
                await asyncio.gather(*running, return_exceptions=True)
            finally:  # also if it is cancelled here, once more or after an error
                self.requests -= bool(request.handed)
                self._forget(session)
        sequences = tuple(sequence for output in outputs for sequence in output.sequences)
        return outputs[0].model_copy(update={"sequences": sequences, "times": of_all(outputs)})

    def _forget(self, session: _Session) -> None:
        """Forget a session if it has nothing, and its owner if it has no other."""
        owner = session.owner
        if session.waiting or session.held:
            return
        self._new.pop(session, None)
        if owner.sessions.get(session.id) is session:
            del owner.sessions[session.id]
        if not owner.sessions and self._owners.get(owner.name) is owner:
            del self._owners[owner.name]

    def _enqueue(self, session: _Session) -> None:
        if session.held or not session.waiting:
            self._new.pop(session, None)
        else:
            self._new.setdefault(session)
        if session.waits:
            session.owner.turns.enqueue(session, len(session.owner.sessions))
        self._turns.enqueue(session.owner, len(self._owners))

    def _next(self) -> _Session | None:
        """The session whose turn it is, if there is a place for it."""
        if self.sequences < self.places:
            owner = self._turns.first()
            return None if owner is None else owner.turns.first()
        if self.sequences >= self.places + RESERVED:
            return None
        next_owner = self._turns.first() if self.sequences < self.places + RESERVED // 2 else None
        for session in self._new:  # the last half is for owners that have nothing
            if session.waits and (not session.owner.held or session.owner is next_owner):
                return session
        return None

    def _hand_over(self) -> None:
        """Fill the places."""
        while (session := self._next()) is not None:
            request = next(iter(session.waiting))
            length = 0 if request.handed else request.work.prompt.length
            if length and session.unread and self.unread + length > self.prompts_ahead:
                session.too_many = True
                self._too_many.append(session)
                continue
            self.requests += not request.handed
            piece = request.next_piece()
            if request.handed == request.work.num_samples:
                del session.waiting[request]
            self._take(session, piece.num_samples)
            task = self._begin(request, piece, length)
            request.pieces.append(task)
            task.add_done_callback(request.piece_ended)

    def _take(self, session: _Session, places: int) -> None:
        """Count `places` of a session; negative: they are free."""
        self.sequences += places
        session.held += places
        session.owner.held += places
        self._enqueue(session)
        self._forget(session)  # here too: a request can end between the end of its piece and that of its places

    def _begin(self, request: _Request, piece: SampleWork, length: int) -> asyncio.Future[SampleOutput]:
        """Run a piece, for which `length` positions of the prompt are read; it frees a place with each sequence, and at
        its end those that are left."""
        loop, session, left, unread = asyncio.get_running_loop(), request.session, piece.num_samples, length
        session.unread += length
        self.unread += length

        def free(places: int) -> None:
            nonlocal left
            places = min(places, left)
            if places:
                left -= places
                self._take(session, -places)
                self._hand_over()

        def read() -> None:
            nonlocal unread
            if unread:
                session.unread -= unread
                self.unread -= unread
                unread = 0
                self._look_again()
                self._hand_over()

        def ended() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(free, 1)

        def begun() -> None:
            piece.begun()
            if not loop.is_closed():
                loop.call_soon_threadsafe(read)

        def all_ended(_: object) -> None:
            read()
            free(left)

        task = asyncio.ensure_future(request.run(replace(piece, ended=ended, begun=begun if length else piece.begun)))
        task.add_done_callback(all_ended)  # not in the task, which may be cancelled before it starts
        return task

    def _look_again(self) -> None:
        """Prompts were read: let those that wait for that have their turns again."""
        waiting, self._too_many = self._too_many, []
        for session in waiting:
            session.too_many = False
            self._enqueue(session)


# What a sample waits for ----------------------------------------------------------------------------------------------


COUNT_SECONDS = 1.0
"""How old the state that a poll of a sample gets may be."""


def sample_states(in_flight: Iterable[tuple[str, int]], sequences_waiting: int) -> list[QueueState]:
    """The states of the samples in a sampler.

    `in_flight`: the session and the number of sequences of each sample, in the order in which the sampler takes them.
    `sequences_waiting`: how many sequences, the last in that order, have no place on the device yet. A sample waits if
    none of its sequences has one.
    """
    order = list(in_flight)
    left = sum(sequences for _, sequences in order)
    before: Counter[str] = Counter()
    states = []
    for place, (session, sequences) in enumerate(order):
        requests, sessions = place - before[session], len(before) - (session in before)
        waits = left <= sequences_waiting and requests > 0
        states.append(paused("the sampler is full with", requests, sessions) if waits else ACTIVE)
        left -= sequences
        before[session] += 1
    return states


class SamplerQueue:
    """The samples in one sampler, in order, and those that wait for a place in it; and what each waits for. Thousands
    of polls share one count, which is repeated at most every `COUNT_SECONDS`."""

    def __init__(self) -> None:
        self._samples: dict[object, tuple[str, int]] = {}
        self._outside: dict[object, str] = {}
        self._states: dict[object, QueueState] = {}
        self._counted_at = -COUNT_SECONDS

    def wait(self, sample: object, session_id: str) -> None:
        """Add a sample that has no place."""
        self._outside[sample] = session_id

    def enter(self, sample: object, session_id: str, sequences: int) -> None:
        """Let a sample of `sequences` sequences into the sampler, if it is not there."""
        if self._outside.pop(sample, None) is not None:
            self._samples[sample] = (session_id, sequences)

    def leave(self, sample: object) -> None:
        """Remove a sample that has ended."""
        self._samples.pop(sample, None)
        self._outside.pop(sample, None)
        self._states.pop(sample, None)

    def __contains__(self, sample: object) -> bool:
        return sample in self._samples or sample in self._outside

    def state(self, sample: object, sequences_waiting: int) -> QueueState:
        """What a sample waits for that is in the sampler or has no place in it."""
        now = time.monotonic()
        if sample not in self._states or now - self._counted_at >= COUNT_SECONDS:
            states = sample_states(self._samples.values(), sequences_waiting)
            self._states = dict(zip(self._samples, states, strict=True))
            inside = Counter(session for session, _ in self._samples.values())
            for outside, session in self._outside.items():
                requests, sessions = inside.total() - inside[session], len(inside) - (session in inside)
                self._states[outside] = paused("the sampler is full with", requests, sessions) if requests else ACTIVE
            self._counted_at = now
        return self._states[sample]
