"""Which data of a request begin alike, and where their positions are in a row that has what they share once.

A *prefix* is shared by data of one request, and so of one adapter, whose tokens, images and recorded experts are equal
up to there: all that a position depends on comes before it. So samples that took other experts for the end of their
prompt share what comes before, and each takes its own. Host arrays only.

Legend: N positions of a datum, T of a row.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedImage, RenderedInput
from tinker_local.backend.training.model.segments import NO_PARENT
from tinker_local.backend.training.routes import Routes, digests, first_difference

Int64Array = npt.NDArray[np.int64]

ImageKey = tuple[str, tuple[int, int, int], int]

LEAST_SHARED = 8
"""Positions of the shortest prefix that is shared."""
LEAST_PART = 32
"""A prefix is shared if it is at least this part, 1/32, of the longer datum: what attention copies for each datum costs
about as much as a hundredth of its positions."""


def shared_prefixes(
    inputs: Sequence[RenderedInput], routes: Sequence[Routes | None] | None = None
) -> list[tuple[int, int]]:
    """An order of `inputs` in which those that begin alike are adjacent, as (number in `inputs`, positions shared with
    the one before in this order). Groups, of which an input that shares nothing is one, are sorted by their longest.
    `routes`: of each, if experts are recorded of any."""
    images: dict[ImageKey, int] = {}
    for placed in itertools.chain.from_iterable(each.images for each in inputs):
        images.setdefault(_key(placed.image), -1 - len(images))
    contents = [_contents(each, images) for each in inputs]
    taken = [None] * len(inputs) if routes is None else routes
    keys = contents
    if any(each is not None for each in taken):
        known: dict[int, npt.NDArray[np.int32]] = {}
        of_routes = [digests(each, of.length, known) for each, of in zip(taken, inputs, strict=True)]
        keys = [np.stack(pair, axis=1) for pair in zip(contents, of_routes, strict=True)]
    order = sorted(range(len(inputs)), key=lambda at: keys[at].tobytes())
    groups: list[list[tuple[int, int]]] = []
    for before, at in zip([None, *order], order, strict=False):
        shared = 0
        if before is not None and (alike := _alike(contents[before], contents[at])):
            alike = _outside_images(first_difference(taken[before], taken[at], alike), inputs[at])
            shared = alike if alike >= _least(max(len(contents[before]), len(contents[at]))) else 0
        if shared:
            groups[-1].append((at, shared))
        else:
            groups.append([(at, 0)])
    # By length, since attention takes adjacent sequences of equal length in one call where it is not a kernel's.
    groups.sort(key=lambda group: (max(inputs[at].length for at, _ in group), min(at for at, _ in group)))
    return [each for group in groups for each in group]


def _key(image: RenderedImage) -> ImageKey:
    return image.content_hash, image.grid_thw, image.num_tokens


def _contents(input: RenderedInput, images: dict[ImageKey, int]) -> npt.NDArray[np.int32]:
    """What each position is: the token's id, or the negative number of an image, equal for equal ones. Where two such
    arrays part, both are outside of an image or at the start of one."""
    found = input.token_ids.copy()
    for placed in input.images:
        found[placed.offset : placed.offset + placed.image.num_tokens] = images[_key(placed.image)]
    return found


def _alike(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many positions both begin with."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _outside_images(position: int, input: RenderedInput) -> int:
    """`position`, or the start of the image that it is inside of."""
    inside = (each.offset for each in input.images if each.offset < position < each.offset + each.image.num_tokens)
    return next(inside, position)


def _least(longer: int) -> int:
    """How many positions are enough to share them, if the longer datum has so many."""
    return max(LEAST_SHARED, longer // LEAST_PART)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each datum is in a row. `rows`: of each the positions, [N] each. `lengths` and `parents` of the row's
    segments, as `Segments` has them."""

    rows: Sequence[Int64Array]
    lengths: tuple[int, ...]
    parents: tuple[int, ...]


def places_of(data: Iterable[tuple[int, int]]) -> Places:
    """Places for data of these lengths, each with how many positions it shares with the one before; of the first one
    that does not count."""
    rows: list[Int64Array] = []
    previous = {}  # of the first position of each segment, the position that comes before it in its sequences
    end = 0
    for length, shared in data:
        kept = rows[-1][:shared] if rows else np.empty(0, np.int64)
        last = int(kept[-1]) if len(kept) else NO_PARENT
        own = length - len(kept)
        if own and (last != end - 1 or last == NO_PARENT):
            previous[end] = last
            if last != NO_PARENT:
                previous.setdefault(last + 1, last)
        rows.append(np.concatenate([kept, np.arange(end, end + own)]))
        end += own
    starts = np.array(sorted(previous))
    of_row = np.searchsorted(starts, [previous[int(start)] for start in starts], side="right") - 1
    parents = tuple(int(each) for each in of_row)  # a start without one before it finds -1, which is NO_PARENT
    lengths = tuple(int(each) for each in np.diff([*starts, end]))
    return Places(rows, lengths, parents if any(parent != NO_PARENT for parent in parents) else ())
