"""The kinds of frozen matrices, by the name in `TrainerConfig.weights`."""

from collections.abc import Mapping

from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import MakeMatrix
from tinker_local.types import UnsupportedError

KINDS: Mapping[str, MakeMatrix] = {"dense": dense}


def maker_of(kind: str, *, shards: int, experts: bool) -> MakeMatrix:
    """Makes matrices of `kind`. UnsupportedError if there is no such kind; or, for another than the dense one, if the
    model has `experts`, whose stacks are dense; or if `shards` ranks hold parts of the weights, which are gathered
    where a dense matrix reads them, and are not there yet when another kind copies them."""
    if kind not in KINDS:
        raise UnsupportedError(f"weights {kind!r} is none of {', '.join(KINDS)}")
    if shards > 1 and kind != "dense":
        raise UnsupportedError(f"weights {kind!r} cannot be divided over {shards} ranks: only dense ones can")
    if experts and kind != "dense":
        raise UnsupportedError(f"weights {kind!r} are not made of experts yet")
    return KINDS[kind]
