"""Fill micro-batches and pack each into one row without padding. Host arrays only; independent of the model.

Legend: T positions of a micro-batch, M targets (positions times candidates), V image positions.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.parallel.shared_rows import RowRanks, SharedRow, share
from tinker_local.backend.training.trainer import TrainDatum, TrainWork

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Datum `index` of request `work` (its index in the call), and the adapter to use (None: the base model)."""

    work: int
    index: int
    adapter_id: str | None
    datum: TrainDatum

    @property
    def length(self) -> int:
        return self.datum.input.length


def items_of(works: Sequence[tuple[int, TrainWork]]) -> list[Item]:
    """All data of `works`, in order."""
    return in_order(Item(at, i, work.adapter_id, datum) for at, work in works for i, datum in enumerate(work.data))


def in_order(items: Iterable[Item]) -> list[Item]:
    """Sorted by adapter, then request, then length: a request's items must be adjacent, and attention takes adjacent
    sequences of equal length in one call."""
    by_request = sorted(items, key=lambda item: item.work)
    adapters = {adapter_id: at for at, adapter_id in enumerate(dict.fromkeys(item.adapter_id for item in by_request))}
    return sorted(by_request, key=lambda item: (adapters[item.adapter_id], item.work, item.length))


MAX_COLUMNS = 512
"""Maximum total rank of all adapters in one micro-batch. Every token is multiplied by all of them, so with more the
adapters would cost a considerable part of the model itself."""


def split(items: Sequence[Item], budget: int, ranks: Mapping[str | None, int]) -> list[list[Item]]:
    """Split `items` in order into as few micro-batches as possible, of at most `budget` positions and a total rank of
    `MAX_COLUMNS`. A longer item, or one of a larger rank, gets its own. `ranks`: of each adapter, whose items are
    adjacent.

    If they do not become more, they end where an adapter does: its matrices are copied and its gradients added once for
    each that it has a part in, and all rows are multiplied by the ranks of all adapters.
    """
    ends = _furthest_ends(items, budget, ranks)
    needed = [0] * (len(items) + 1)  # micro-batches for the items from each on
    for start in reversed(range(len(items))):
        needed[start] = 1 + needed[ends[start]]
    batches: list[list[Item]] = []
    start = 0
    while start < len(items):
        furthest = ends[start]
        as_few = (stop for stop in range(furthest, start, -1) if needed[stop] == needed[furthest])
        stop = next((stop for stop in as_few if _adapter_ends(items, stop)), furthest)
        batches.append(list(items[start:stop]))
        start = stop
    return batches


def _furthest_ends(items: Sequence[Item], budget: int, ranks: Mapping[str | None, int]) -> list[int]:
    """For each item, where a micro-batch that begins with it ends at the latest."""
    ends: list[int] = []
    length, columns, stop = 0, 0, 0
    held: Counter[str | None] = Counter()
    for start, first in enumerate(items):
        while stop < len(items):
            item = items[stop]
            wider = 0 if held[item.adapter_id] else ranks[item.adapter_id]
            too_wide = columns and wider and columns + wider > MAX_COLUMNS
            if stop > start and (length + item.length > budget or too_wide):
                break
            length, columns, stop = length + item.length, columns + wider, stop + 1
            held[item.adapter_id] += 1
        ends.append(stop)
        length -= first.length
        held[first.adapter_id] -= 1
        if not held[first.adapter_id]:
            columns -= ranks[first.adapter_id]
    return ends


def _adapter_ends(items: Sequence[Item], stop: int) -> bool:
    """Whether those from `stop` on begin with another adapter, or there are none."""
    return stop == len(items) or items[stop].adapter_id != items[stop - 1].adapter_id


def rounds(items: Sequence[Item], budget: int, ranks: Mapping[str | None, int], size: int) -> list[list[list[Item]]]:
    """Split `items` as `split` does, into rounds of one micro-batch for each of `size` trainer ranks, so that the
    largest one is as small as possible in the smallest number of rounds. In the last round, the last ranks may have
    none."""
    batches = split(items, budget, ranks)
    if size > 1 and batches:
        most = -(-len(batches) // size) * size
        low, high = 1, max(sum(item.length for item in batch) for batch in batches)
        while low < high:
            middle = (low + high) // 2
            if len(split(items, middle, ranks)) <= most:
                high = middle
            else:
                low = middle + 1
        # A round lasts as long as its largest micro-batch, so those of about one size share it.
        batches = sorted(split(items, high, ranks), key=lambda batch: -sum(item.length for item in batch))
    found = [batches[at : at + size] for at in range(0, len(batches), size)]
    # The largest goes to the first rank and to the last one in turn.
    return [each[::-1] if at % 2 and len(each) == size else each for at, each in enumerate(found)]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One micro-batch as a row of T positions.

    `token_ids` [T]. `starts`: first position of each item. `target_rows` [M] (ascending) and `target_ids` [M]: the
    position that predicts each target, and the target. A target outside the vocabulary becomes token 0; its coefficient
    is 0, which was checked, so this only affects its reported logprob. `target_starts`: each item's first target, then
    M. `images`: each image once, but for adapters that train the vision tower, which have `own_images`: each image once
    for each such adapter, those of an adapter adjacent. `image_rows` [V] (ascending): positions that hold image
    features; `feature_rows` [V]: which row of all images' features each of them gets, in the order `images`,
    `own_images`.
    """

    items: Sequence[Item]
    token_ids: Int64Array
    starts: Sequence[int]
    target_rows: Int64Array
    target_ids: Int64Array
    target_starts: Sequence[int]
    images: Sequence[RenderedImage]
    own_images: Sequence[tuple[str, RenderedImage]]
    image_rows: Int64Array
    feature_rows: Int64Array

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(item.length for item in self.items)

    @property
    def image_bounds(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of each image in the row, in no order."""
        return tuple(
            (start + placed.offset, start + placed.offset + placed.image.num_tokens)
            for item, start in zip(self.items, self.starts, strict=True)
            for placed in item.datum.input.images
        )

    def targets_of(self, item: int) -> slice:
        """The slice of the targets of item `item`."""
        return slice(self.target_starts[item], self.target_starts[item + 1])


def pack(items: Sequence[Item], vocab_size: int, towers: Collection[str | None] = ()) -> Packed:
    """Concatenate `items` into one row. `towers`: the adapters that train the vision tower."""
    starts = np.cumsum([0, *(item.length for item in items)])
    targets = [item.datum.target_tokens for item in items]
    target_ids = np.concatenate([target.reshape(-1) for target in targets])
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    images, own_images, image_rows, feature_rows = _place_images(items, starts, towers)
    return Packed(
        items=items,
        token_ids=np.concatenate([item.datum.input.token_ids for item in items]).astype(np.int64),
        starts=[int(start) for start in starts[:-1]],
        target_rows=np.concatenate(
            [np.repeat(np.arange(s, s + t.shape[0]), t[0].size) for s, t in zip(starts[:-1], targets, strict=True)]
        ),
        target_ids=np.where(outside, 0, target_ids),
        target_starts=[int(start) for start in np.cumsum([0, *(target.size for target in targets)])],
        images=images,
        own_images=own_images,
        image_rows=image_rows,
        feature_rows=feature_rows,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The positions [start, stop) of the row `packed` that this rank has: all, or its own of a row that is `shared`.
    `padding`: how many positions of no item are at the row's end, since each rank must have at least one. `targets`:
    the slice of those that these positions predict. `images`, `own_images`, `image_rows` (counted from `start`) and
    `feature_rows`: as of `Packed`, for these positions."""

    packed: Packed
    shared: SharedRow
    padding: int
    start: int
    stop: int
    targets: slice
    images: Sequence[RenderedImage]
    own_images: Sequence[tuple[str, RenderedImage]]
    image_rows: Int64Array
    feature_rows: Int64Array


def part_of(packed: Packed, ranks: RowRanks) -> Part:
    """This rank's part of a row that `ranks` share."""
    padding = max(0, ranks.size - len(packed.token_ids))
    shared = share(len(packed.token_ids) + padding, ranks)
    start, stop = shared.own.start, shared.own.stop
    first, last = (int(place) for place in np.searchsorted(packed.target_rows, (start, stop)))
    here = slice(*np.searchsorted(packed.image_rows, (start, stop)))
    # The features of those images alone that have a position here.
    all_images = [*packed.images, *(image for _, image in packed.own_images)]
    sizes = np.array([image.num_features for image in all_images], np.int64)
    ends, rows = np.cumsum(sizes), packed.feature_rows[here]
    image_of = np.searchsorted(ends, rows, side="right")
    used = np.zeros(len(sizes), np.bool_)
    used[image_of] = True
    skipped = np.cumsum(np.where(used, 0, sizes))
    images, own_images = used[: len(packed.images)], used[len(packed.images) :]
    return Part(
        packed=packed,
        shared=shared,
        padding=padding,
        start=start,
        stop=stop,
        targets=slice(first, last),
        images=[image for image, needed in zip(packed.images, images, strict=True) if needed],
        own_images=[each for each, needed in zip(packed.own_images, own_images, strict=True) if needed],
        image_rows=packed.image_rows[here] - start,
        feature_rows=rows - skipped[image_of],
    )


def spans(packed: Packed) -> list[tuple[int, slice]]:
    """The requests of a micro-batch, each with the slice of its targets; a request's items are adjacent."""
    found = []
    for at, group in itertools.groupby(range(len(packed.items)), key=lambda place: packed.items[place].work):
        places = list(group)
        found.append((at, slice(packed.targets_of(places[0]).start, packed.targets_of(places[-1]).stop)))
    assert len(dict(found)) == len(found), "a request's items are adjacent"
    return found


def _place_images(
    items: Sequence[Item], starts: Int64Array, towers: Collection[str | None]
) -> tuple[list[RenderedImage], list[tuple[str, RenderedImage]], Int64Array, Int64Array]:
    """Each image once (by content), those of `towers` by adapter, the positions of all placements in order, and their
    feature rows."""
    placements = []
    for item, start in zip(items, starts, strict=False):
        own = item.adapter_id if item.adapter_id in towers else None
        for placement in sorted(item.datum.input.images, key=lambda placement: placement.offset):
            key = own, placement.image.content_hash
            placements.append((key, int(start) + placement.offset, placement.image))
    distinct = {key: image for key, _, image in placements}
    ordered = sorted(distinct, key=lambda key: key[0] is not None)  # stable
    ends = np.cumsum([distinct[key].num_features for key in ordered])
    first_row = {key: int(end) - distinct[key].num_features for key, end in zip(ordered, ends, strict=True)}
    empty = np.empty(0, np.int64)
    return (
        [distinct[own, image] for own, image in ordered if own is None],
        [(own, distinct[own, image]) for own, image in ordered if own is not None],
        np.concatenate([empty, *(start + image.feature_places for _, start, image in placements)]),
        np.concatenate([empty, *(first_row[key] + np.arange(image.num_features) for key, _, image in placements)]),
    )
