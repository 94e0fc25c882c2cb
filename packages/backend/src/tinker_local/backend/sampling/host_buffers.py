"""Host memory for adapters, made before it is needed."""

import threading

import torch

DELAY_SECONDS = 0.5
"""How long after an adapter the memory of the next one is made: its first samples come first, and locking pages holds
up whatever else wants something of the GPU."""


class HostBuffers:
    """Vectors in host memory, each for one adapter.

    Fresh memory costs more than what is copied into it: the system maps it page by page, and CUDA locks every page
    (some 60 ms for the 175 MB of an adapter of rank 32 for an 8B model). Adapters of a run are of one size, so the
    next vector of the size taken last is made ahead, in a thread of its own.

    `pinned`: page-locked memory, which CUDA copies without blocking; torch keeps what was freed for the next.
    """

    def __init__(self, *, pinned: bool, delay_seconds: float = DELAY_SECONDS) -> None:
        self._pinned = pinned
        self._delay_seconds = delay_seconds
        self._lock = threading.Lock()
        self._spare: torch.Tensor | None = None
        self._timer: threading.Timer | None = None
        self._closed = False

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A vector of `count` numbers that nobody else has; what is in it is arbitrary. Any thread may call it."""
        with self._lock:
            spare, self._spare = self._spare, None
            if self._timer is not None:
                self._timer.cancel()
            if not self._closed:
                self._timer = threading.Timer(self._delay_seconds, self._make_spare, (count, dtype))
                self._timer.daemon = True
                self._timer.start()
        if spare is not None and spare.numel() == count and spare.dtype == dtype:
            return spare
        return torch.empty(count, dtype=dtype, pin_memory=self._pinned)

    def close(self) -> None:
        """Make no more, and let go of what was made ahead."""
        with self._lock:
            self._closed = True
            self._spare = None
            if self._timer is not None:
                self._timer.cancel()

    def _make_spare(self, count: int, dtype: torch.dtype) -> None:
        spare = torch.empty(count, dtype=dtype, pin_memory=self._pinned)
        spare.zero_()  # maps the pages
        with self._lock:
            if not self._closed:
                self._spare = spare
