"""Whose images are rendered next. Owners share the threads for it, and the memory of what was rendered; sessions share
those of their owner."""

from contextlib import AbstractAsyncContextManager

from tinker_local.backend.heap import memory_of_machine
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.scheduling.shared_bytes import SharedBytes
from tinker_local.backend.threads import Ledger, Places, Who

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
        self._places = Places(threads, threads - 1, max(1, threads - 2), lambda owner: not self.memory.over(owner))
        self._uses: Ledger[tuple[str, int]] = Ledger()  # of images, by owner and identity

    def turn(self, owner: str, session_id: str) -> AbstractAsyncContextManager[None]:
        """A thread for one prompt, or for a slice of a gradient."""
        return self._places.turn(Who(owner, session_id))

    def keep(self, owner: str, prompt: RenderedInput) -> None:
        """Count the images of a prompt until `drop`; each once for its owner, if many prompts have it."""
        self._use(owner, prompt, 1)

    def drop(self, owner: str, prompt: RenderedInput) -> None:
        """Count a prompt no more."""
        self._use(owner, prompt, -1)
        self._places.give()

    def _use(self, owner: str, prompt: RenderedInput, more: int) -> None:
        for key, image in {id(placed.image): placed.image for placed in prompt.images}.items():
            before = self._uses[owner, key]
            self._uses[owner, key] = after = before + more
            if not after:
                self.memory.give(owner, image.num_bytes)
            elif not before:
                self.memory.take(owner, image.num_bytes)
