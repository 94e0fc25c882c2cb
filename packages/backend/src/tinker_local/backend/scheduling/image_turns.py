"""Whose images are rendered next. Owners share the threads for it, and the memory of what was rendered; sessions share
those of their owner."""

from asyncio import Future, get_running_loop
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinker_local.backend.heap import memory_of_machine
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.scheduling.shared_bytes import SharedBytes

MOST_RENDERED_BYTES = max(4 * 2**30, memory_of_machine() // 4)
"""Of the images of all prompts in flight, and as many of all gradients that are prepared. An owner may have as many as
are left: half if it is alone."""


class ImageTurns:
    """Turns at `threads` that render images, for prompts that stay in memory from `keep` to `drop`.

    An owner has all threads but one at most, and a session all but two. So others find one, in whatever sessions and
    however long an image takes. Of those that wait, the owner with the fewest is next, and there the session with the
    fewest; among equals the one that was served the longest ago.

    An owner that holds more than its share of `most` bytes waits until some of its prompts have ended. What waits has
    only the bytes that were sent. Belongs to one event loop.
    """

    def __init__(self, threads: int, most: int = MOST_RENDERED_BYTES) -> None:
        self.memory = SharedBytes(most)
        self._threads = threads
        self._of_owner: Counter[str] = Counter()
        self._of_session: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, dict[Future[None], None]]] = {}  # owner, session, the oldest first
        self._uses: Counter[tuple[str, int]] = Counter()  # of images, by owner and identity

    @asynccontextmanager
    async def turn(self, owner: str, session_id: str) -> AsyncIterator[None]:
        """A thread for one prompt, or for a slice of a gradient."""
        turn: Future[None] = get_running_loop().create_future()
        self._waiting.setdefault(owner, {}).setdefault(session_id, {})[turn] = None
        self._give_turns()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                for counts, key in ((self._of_owner, owner), (self._of_session, session_id)):
                    counts[key] -= 1
                    if not counts[key]:
                        del counts[key]
            else:
                self._forget(owner, session_id, turn)
            self._give_turns()

    def _give_turns(self) -> None:
        while (found := self._next()) is not None:
            owner, session_id = found
            sessions = self._waiting.pop(owner)
            turns = sessions.pop(session_id)
            self._waiting[owner], sessions[session_id] = sessions, turns  # the last served comes last
            turn = next(iter(turns))
            self._forget(owner, session_id, turn)
            if not turn.cancelled():
                self._of_owner[owner] += 1
                self._of_session[session_id] += 1
                turn.set_result(None)

    def _forget(self, owner: str, session_id: str, turn: Future[None]) -> None:
        """No longer wait for a turn."""
        sessions = self._waiting.get(owner, {})
        turns = sessions.get(session_id, {})
        turns.pop(turn, None)
        if not turns:
            sessions.pop(session_id, None)
        if not sessions:
            self._waiting.pop(owner, None)

    def _next(self) -> tuple[str, str] | None:
        """Owner and session whose turn it is, if there is a thread and memory for it."""
        if self._of_owner.total() >= self._threads:
            return None
        most = max(1, self._threads - 2)  # of a session
        found: tuple[tuple[int, int], str, str] | None = None
        for owner, sessions in self._waiting.items():
            count = self._of_owner[owner]
            if count >= self._threads - 1 or self.memory.over(owner):
                continue
            for session_id in sessions:
                fewest = (count, self._of_session[session_id])
                if fewest[1] < most and (found is None or fewest < found[0]):
                    found = fewest, owner, session_id
        return None if found is None else found[1:]

    def keep(self, owner: str, prompt: RenderedInput) -> None:
        """Count the images of a prompt until `drop`; each once for its owner, if many prompts have it."""
        self._use(owner, prompt, 1)

    def drop(self, owner: str, prompt: RenderedInput) -> None:
        """Count a prompt no more."""
        self._use(owner, prompt, -1)
        self._give_turns()

    def _use(self, owner: str, prompt: RenderedInput, more: int) -> None:
        for key, image in {id(placed.image): placed.image for placed in prompt.images}.items():
            before = self._uses[owner, key]
            self._uses[owner, key] = after = before + more
            if not after:
                del self._uses[owner, key]
                self.memory.give(owner, image.num_bytes)
            elif not before:
                self.memory.take(owner, image.num_bytes)
