"""When an operation was in which stage: what a session's trace is made of."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeVar

from tinker_local.types import ApiError

P = ParamSpec("P")
R = TypeVar("R")

Stage = Literal["waiting", "fetching", "preparing", "running", "finishing", "reading", "writing", "loading"]
"""`waiting`: for others, for a thread, or for a place on the device. `fetching`: images that a prompt names.
`preparing`: decoding, rendering and checking. `running`: in the trainer, or in the sampler from when a first sequence
has its place there. `finishing`: results become public types. `reading`, `writing`: a checkpoint. `loading`: a version
into the sampler, and seeing that it is right."""

LONGEST_ERROR = 500
"""Characters of an error that are kept."""

clock = time.monotonic_ns


@dataclass(slots=True, eq=False)
class Timeline:
    """One operation in time; every time is of `clock`, nanoseconds.

    Attributes
    ----------
    stages: each stage and when it began; it ends when the next begins, the last one with the operation.
    ended: 0 as long as it has not.
    outcome: `ok`, or the category of the error.
    facts: counts that are known of it: datums, tokens, images, ...
    """

    request_id: str
    kind: str
    stages: list[tuple[Stage, int]] = field(default_factory=lambda: [("waiting", clock())])
    ended: int = 0
    outcome: str = ""
    error: str = ""
    facts: dict[str, int] | None = None

    def enter(self, stage: Stage) -> None:
        """It is in `stage` from now on; from any thread, one at a time."""
        self.stages.append((stage, clock()))

    def during(self, stage: Stage, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, to be called in a thread, of an operation that is in `stage` meanwhile and waits afterwards."""

        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter("waiting")

        return called

    def note(self, **facts: int) -> None:
        """Add to `facts`."""
        self.facts = facts if self.facts is None else {**self.facts, **facts}

    def end(self, error: ApiError | None = None) -> None:
        """It has ended; of an error only its text is kept, not what it holds."""
        self.outcome = "ok" if error is None else error.category
        if error is not None:
            self.error = str(error)[:LONGEST_ERROR].encode("utf-8", "replace").decode("utf-8")
        self.ended = clock()  # last, as a trace may be written meanwhile
