"""The kinds of frozen matrices, by the name in `TrainerConfig.weights`."""

from collections.abc import Mapping

from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import MakeMatrix
from tinker_local.backend.weights.packed import packed
from tinker_local.backend.weights.precision import BITS
from tinker_local.backend.weights.published import WEIGHTS
from tinker_local.types import UnsupportedError

KINDS: Mapping[str, MakeMatrix] = {"dense": dense, **dict.fromkeys((*BITS, WEIGHTS), packed)}


def maker_of(kind: str, *, shards: int, experts: bool) -> MakeMatrix:
    """Makes matrices of `kind`; UnsupportedError if there is no such kind.

    `experts`, whose stacks `packed_stack.py` packs, are made here in 8 and 4 bits, and not of published checkpoints.
    `shards`, ranks that hold parts of the weights, take dense matrices alone: these are gathered where a dense matrix
    reads them, and another kind would copy them before they are there.
    """
    if kind not in KINDS:
        raise UnsupportedError(f"weights {kind!r} is none of {', '.join(KINDS)}")
    if shards > 1 and kind != "dense":
        raise UnsupportedError(f"{kind} weights cannot be divided over {shards} ranks: only dense ones can")
    if experts and kind not in ("dense", *BITS):
        raise UnsupportedError(f"{kind} weights are not made of experts yet")
    return KINDS[kind]
