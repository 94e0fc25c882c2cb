"""`FakeMemory`: a device's memory that a trainer and a sampler share, counted in positions."""

from dataclasses import dataclass

from tinker_local.types import InternalError, NotEnoughMemoryError


@dataclass(slots=True, eq=False)
class FakeMemory:
    """`size` positions in all, of which a sampler takes `sampler` while it is awake. The trainer takes as many as its
    longest datum so far had, and keeps them until `release`, as a caching allocator does."""

    size: int
    sampler: int
    asleep: bool = False
    cached: int = 0

    def train(self, positions: int, where: str) -> None:
        """Let the trainer take a datum; NotEnoughMemoryError if it does not fit."""
        if positions > self.size - (0 if self.asleep else self.sampler):
            raise NotEnoughMemoryError(f"{where}: {positions} positions do not fit in the trainer's memory")
        self.cached = max(self.cached, positions)

    def release(self) -> None:
        """The trainer gives back what it keeps."""
        self.cached = 0

    def wake(self) -> None:
        """The sampler takes its part again; InternalError if the trainer is in the way."""
        if self.cached + self.sampler > self.size:
            raise InternalError(
                f"{self.size - self.cached} of {self.size} positions are free, the sampler takes {self.sampler}"
            )
        self.asleep = False
