"""`FakeMemory`: device memory shared by a trainer and a sampler, counted in positions."""

from dataclasses import dataclass

from tinker_local.types import InternalError, NotEnoughMemoryError


@dataclass(slots=True, eq=False)
class FakeMemory:
    """`size` positions in all. The sampler takes `sampler` of them while it is awake. The trainer takes as many as its
    longest datum so far, and holds them until `release`, as a caching allocator does."""

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
        """The trainer gives its memory back."""
        self.cached = 0

    def wake(self) -> None:
        """The sampler takes its memory again; InternalError if the trainer holds too much."""
        if self.cached + self.sampler > self.size:
            raise InternalError(
                f"{self.size - self.cached} of {self.size} positions are free, the sampler takes {self.sampler}"
            )
        self.asleep = False
