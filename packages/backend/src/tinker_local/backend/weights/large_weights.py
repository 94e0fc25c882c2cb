"""The frozen weights that are large, those of the layers and of the LM head: whole on each rank, or a part of each.

A micro-batch walks through them in a fixed order. It says what it is about to read, and the walk makes that readable.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Walk(Protocol):
    """One way through the weights: layers 0, 1, ..., the LM head, and for a backward the layers from the last one back.
    Each may be entered again until the next one is; none may be left out."""

    def layer(self, index: int) -> None:
        """Make the weights of layer `index` readable."""

    def head(self) -> None:
        """Make the LM head's matrix readable."""


class LargeWeights(Protocol):
    """Where the weights are while no one reads them. The tensors of the modules are the same objects all the time."""

    def walk(self, *, backward: bool) -> AbstractContextManager[Walk]:
        """Walk through the weights once. All ranks must walk, in the same way, also those that have nothing to compute:
        leaving the context, early or with an exception, walks the rest of the way, for the others' sake."""


class ResidentWeights:
    """Everything is on this device at any time. Implements `LargeWeights`, and its own walk."""

    @contextmanager
    def walk(self, *, backward: bool) -> Iterator[Walk]:
        """See `LargeWeights.walk`."""
        yield self

    def layer(self, index: int) -> None:
        """See `Walk.layer`."""

    def head(self) -> None:
        """See `Walk.head`."""


RESIDENT = ResidentWeights()


@contextmanager
def entering(layers: Any, weights: LargeWeights) -> Iterator[None]:
    """Walk through `weights` while transformers runs its modules `layers` once, each in its turn."""
    with weights.walk(backward=False) as walk:
        hooks = [
            layer.register_forward_pre_hook(lambda *_, index=index: walk.layer(index))
            for index, layer in enumerate(layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
