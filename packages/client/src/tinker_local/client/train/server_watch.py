"""Says when the server of a run no longer answers. The SDK repeats its requests, for hours and without a word."""

import threading
import time
from collections.abc import Callable
from typing import Self

import httpx

EVERY = 15.0
"""Seconds from one look to the next."""
PATIENCE = 60.0
"""Seconds without an answer after which it is said; then after twice as many, and so on."""


class ServerWatch:
    """A context that asks the server at `url` for its health now and then, and calls `say` with a line when it has been
    silent for `patience` seconds, and when it answers again. Any answer counts, a refusal too. `url` None: nothing."""

    def __init__(
        self, url: str | None, say: Callable[[str], None], *, every: float = EVERY, patience: float = PATIENCE
    ) -> None:
        self._url = url
        self._say = say
        self._every = every
        self._patience = patience
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._url is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)  # a look may be under way

    def _watch(self) -> None:
        answered, said_after = time.monotonic(), 0.0
        while not self._ended.wait(self._every):
            if self._answers():
                if said_after:
                    self._say(f"{self._url} answers again")
                answered, said_after = time.monotonic(), 0.0
                continue
            silent = time.monotonic() - answered
            if silent >= (2 * said_after or self._patience) and not self._ended.is_set():
                self._say(
                    f"{self._url} has not answered for {silent:.0f} s; the run goes on if it does. Ctrl-C twice ends "
                    "the run, and --resume goes on from its last checkpoint"
                )
                said_after = silent

    def _answers(self) -> bool:
        try:
            httpx.get(f"{self._url}/api/v1/healthz", timeout=min(10.0, self._every))
        except httpx.TransportError:
            return False
        return True
