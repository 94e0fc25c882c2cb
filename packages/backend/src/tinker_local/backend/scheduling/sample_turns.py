"""Whose samples the sampler gets next: sessions share its places, in pieces of a few sequences.

A place is one sequence in the sampler. A free place goes to the session that has the fewest, and among equals to the
one that has waited longest. So sessions that always have something to sample get equal numbers of places, however many
requests they send and however long their sequences are. (Deficit round robin, as in `fairness.py`, needs the cost of a
request before it runs; the length of a sequence is not known then.)

A session that is alone gets `places`, as many sequences as the sampler is to run at once. The sampler has room for
`RESERVED` more, which go to sessions that have nothing in it. So a short sample starts at once while another session
fills all places with long ones.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from tinker_local.backend.sampling.sampler import RESERVED, SampleWork, ignore_begin
from tinker_local.types import SampleOutput

PIECE = RESERVED // 2
"""Most sequences of a request that are handed to the sampler at once. The last of them may exceed the places."""

Run = Callable[[SampleWork], Awaitable[SampleOutput]]


@dataclass(slots=True, eq=False)
class _Session:
    """`held`: its places. `turn`: which of its entries in the heap counts, None if it waits for nothing."""

    waiting: "OrderedDict[_Request, None]" = field(default_factory=OrderedDict)
    held: int = 0
    turn: int | None = None


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
            begun=ignore_begin,
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
    """Hands the samples of all sessions to one sampler.

    `places`: how many sequences it is to run at once. `sequences`: how many it has now, of `requests` requests. Belongs
    to one event loop.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.sequences = 0
        self.requests = 0
        self._sessions: dict[str, _Session] = {}
        self._turns: list[tuple[int, int, _Session]] = []  # a heap: places, which turn; old entries are skipped
        self._count = itertools.count()

    async def sample(self, session_id: str, work: SampleWork, run: Run) -> SampleOutput:
        """Run `work` in pieces, each with `run`, and join their results; cancelling it cancels them."""
        session = self._sessions.setdefault(session_id, _Session())
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
            await asyncio.gather(*running, return_exceptions=True)
            self.requests -= bool(request.handed)
            if not session.waiting and not session.held and self._sessions.get(session_id) is session:
                del self._sessions[session_id]
        sequences = tuple(sequence for output in outputs for sequence in output.sequences)
        return outputs[0].model_copy(update={"sequences": sequences})

    def _enqueue(self, session: _Session) -> None:
        """Give `session` a turn according to the places that it has now, instead of its last one."""
        session.turn = next(self._count)
        heapq.heappush(self._turns, (session.held, session.turn, session))
        if len(self._turns) > 2 * len(self._sessions) + 1000:
            self._turns = [entry for entry in self._turns if entry[1] == entry[2].turn and entry[2].waiting]
            heapq.heapify(self._turns)

    def _next(self) -> _Session | None:
        """The session whose turn it is, if there is a place for it."""
        while self._turns:
            held, turn, session = self._turns[0]
            if turn == session.turn and session.waiting:
                room = self.places + (0 if held else RESERVED)
                return session if self.sequences < room else None
            heapq.heappop(self._turns)
        return None

    def _hand_over(self) -> None:
        """Fill the places."""
        while (session := self._next()) is not None:
            request = next(iter(session.waiting))
            self.requests += not request.handed
            piece = request.next_piece()
            if request.handed == request.work.num_samples:
                del session.waiting[request]
            self._take(session, piece.num_samples)
            task = self._begin(request, piece)
            request.pieces.append(task)
            task.add_done_callback(request.piece_ended)

    def _take(self, session: _Session, places: int) -> None:
        """Count `places` of a session; negative: they are free."""
        self.sequences += places
        session.held += places
        if session.waiting:
            self._enqueue(session)

    def _begin(self, request: _Request, piece: SampleWork) -> asyncio.Future[SampleOutput]:
        """Run a piece; it frees a place with each sequence, and at its end those that are left."""
        loop, left = asyncio.get_running_loop(), piece.num_samples

        def free(places: int) -> None:
            nonlocal left
            places = min(places, left)
            if places:
                left -= places
                self._take(request.session, -places)
                self._hand_over()

        def ended() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(free, 1)

        task = asyncio.ensure_future(request.run(replace(piece, ended=ended)))
        task.add_done_callback(lambda _: free(left))  # not in the task, which may be cancelled before it starts
        return task
