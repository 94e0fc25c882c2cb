"""Routers that take the experts that are given, in place of those with the largest scores.

All else is the router's: its scores are those of the experts that it takes, whatever it makes of them, and so is its
gradient. That is done where a router of transformers chooses, in its call of `topk`, so that nothing of any router is
written down here. Legend: T tokens, E experts, K experts of a token, L layers with experts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.types import UnsupportedError
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True, eq=False)
class LayerRoutes:
    """Of one layer: `numbers` [T, K], of a small dtype, all with the largest number of it for tokens whose experts are
    not known. `count`: E. `own` [T, K] of the same dtype gets what the router has chosen itself; None: it is not asked
    for."""

    numbers: torch.Tensor
    count: int
    own: torch.Tensor | None = None

    def taken(self, chosen: torch.Tensor) -> torch.Tensor:
        """The experts that are known, and otherwise those that the router has `chosen`, int64 [T, K] each."""
        if self.own is not None:
            self.own.copy_(chosen)
        known = self.numbers[:, :1] != torch.iinfo(self.numbers.dtype).max
        return torch.where(known, self.numbers.long(), chosen)


@dataclass(frozen=True, slots=True, eq=False)
class RowRoutes:
    """Of a row: `numbers` and `own` [T, L, K], as those of `LayerRoutes`. `count`: E."""

    numbers: torch.Tensor
    count: int
    own: torch.Tensor | None = None

    def layer(self, place: int) -> LayerRoutes:
        """Of the layer at `place` among those with experts."""
        own = None if self.own is None else self.own[:, place]
        return LayerRoutes(self.numbers[:, place], self.count, own)


class _Choice(TorchFunctionMode):
    """While it is entered, `topk` of K of E numbers, for each of T tokens, gives the experts of `routes`. `made`: how
    often it did."""

    def __init__(self, routes: LayerRoutes) -> None:
        super().__init__()
        self.routes = routes
        self.made = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        routes, scores = self.routes, args[0]
        shape = (len(routes.numbers), routes.count)
        if scores.shape != shape or found.indices.shape != routes.numbers.shape:  # of groups of experts
            return found
        self.made += 1
        experts = routes.taken(found.indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


_TOPK = {torch.topk, torch.Tensor.topk}


@contextmanager
def _taking(routes: LayerRoutes) -> Iterator[None]:
    choice = _Choice(routes)
    with choice:
        yield
    if choice.made != 1:
        raise UnsupportedError(f"the router chooses {choice.made} times by topk, not once: it takes no recorded routes")


@torch.no_grad()
def takes_routes(router: Any, hidden: int, chosen: int, count: int, *further: torch.Tensor) -> bool:
    """Whether `router`, a module that reads [T, `hidden`], takes `chosen` of `count` experts that are given. `further`:
    what else it reads. On the meta device, too."""
    parameter = next(router.parameters())
    experts = torch.arange(chosen, device=parameter.device)[None]
    try:
        with _taking(LayerRoutes(experts, count)):
            router(torch.ones(1, hidden, dtype=parameter.dtype, device=parameter.device), *further)
    except UnsupportedError:
        return False
    return True


def taking(routes: LayerRoutes | None) -> AbstractContextManager[None]:
    """A context in which one router takes `routes`, if there are any. UnsupportedError at its end if none did."""
    return nullcontext() if routes is None else _taking(routes)
