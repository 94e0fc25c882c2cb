"""The maximum number of positions in a micro-batch, adapted to the memory: halved when it runs out, restored later."""

import logging

log = logging.getLogger(__name__)

FIRST_PATIENCE = 16
"""Calls that must succeed before a halved budget is doubled."""


class TokenBudget:
    """`tokens`: the current budget; starts at `most` and never exceeds it.

    Whatever took the memory may be gone (other adapters, another process on the device), so after some successful calls
    a halved budget is doubled. Each time this proves too much, twice as many calls must succeed before the next try.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._patience = FIRST_PATIENCE
        self._successes = 0
        self._grown = False

    @property
    def halved(self) -> bool:
        """Whether it is smaller than it may be."""
        return self.tokens < self._most

    def ran_out(self, tried: int) -> None:
        """Memory ran out with `tried` positions: halve the budget."""
        self.tokens = max(1, min(self.tokens, tried) // 2)
        if self._grown:
            self._patience *= 2
        self._grown, self._successes = False, 0
        log.warning("out of memory: micro-batches have at most %d positions for now", self.tokens)

    def succeeded(self) -> None:
        """A call had enough memory: after enough such calls, double the budget."""
        self._successes += 1
        if self.halved and self._successes >= self._patience:
            self.tokens = min(self._most, 2 * self.tokens)
            self._grown, self._successes = True, 0
            log.info("micro-batches may have %d positions again", self.tokens)
