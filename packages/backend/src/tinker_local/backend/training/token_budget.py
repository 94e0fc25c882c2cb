"""How many positions a micro-batch may have: fewer when memory has run out, more again when it has long sufficed."""

import logging

log = logging.getLogger(__name__)

FIRST_PATIENCE = 16
"""Calls that must have sufficed memory before a budget that was halved is doubled."""


class TokenBudget:
    """`tokens` begins at `most` and never exceeds it.

    What took the memory may be gone (other adapters, a neighbour on the device), so a budget that has sufficed for some
    calls is doubled. Each time that this turns out too much, twice as many calls must suffice before it is tried again.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._patience = FIRST_PATIENCE
        self._sufficed = 0
        self._grown = False

    def lacked(self, tried: int) -> None:
        """Memory ran out with `tried` positions."""
        self.tokens = max(1, min(self.tokens, tried) // 2)
        if self._grown:
            self._patience *= 2
        self._grown, self._sufficed = False, 0
        log.warning("out of memory: micro-batches have at most %d positions for now", self.tokens)

    def sufficed(self) -> None:
        """A call ended without lack of memory."""
        self._sufficed += 1
        if self.tokens < self._most and self._sufficed >= self._patience:
            self.tokens = min(self._most, 2 * self.tokens)
            self._grown, self._sufficed = True, 0
            log.info("micro-batches may have %d positions again", self.tokens)
