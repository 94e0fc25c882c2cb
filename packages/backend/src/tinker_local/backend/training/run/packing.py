"""Fill micro-batches and pack each into one row without padding. Host arrays only; independent of the model.

What data of a request share at their beginning is in a row once (`sharing.py`). Legend: T positions of a row, N of a
datum, M targets (positions times candidates), V image positions.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tinker_local.backend.rendering.rendered_input import RenderedImage
from tinker_local.backend.training.parallel.shared_rows import RowRanks, SharedRow, share
from tinker_local.backend.training.run.sharing import Int64Array, Places, places_of, shared_prefixes
from tinker_local.backend.training.trainer import TrainDatum, TrainWork


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Datum `index` of request `work` (its index in the call), and the adapter to use (None: the base model).
    `shared`: how many positions it begins with that the item before it begins with, too, if that is in the row."""

    work: int
    index: int
    adapter_id: str | None
    datum: TrainDatum
    shared: int = 0

    @property
    def length(self) -> int:
        return self.datum.input.length


def items_of(works: Sequence[tuple[int, TrainWork]], *, share: bool = False) -> list[Item]:
    """All data of `works`, in order. `share`: let those of a request share what they begin with."""
    items = [Item(at, i, work.adapter_id, datum) for at, work in works for i, datum in enumerate(work.data)]
    return in_order(items, share=share)


def in_order(items: Iterable[Item], *, share: bool = False) -> list[Item]:
    """Sorted by adapter, then request, since a request's items must be adjacent. Then by length: attention takes
    adjacent sequences of equal length in one call. With `share`, those that begin alike are adjacent."""
    by_request = sorted(items, key=lambda item: item.work)
    adapters = {adapter_id: at for at, adapter_id in enumerate(dict.fromkeys(item.adapter_id for item in by_request))}
    found = sorted(by_request, key=lambda item: (adapters[item.adapter_id], item.work, item.length))
    if not share:
        return [replace(item, shared=0) if item.shared else item for item in found]
    return [each for _, group in itertools.groupby(found, lambda item: item.work) for each in _shared(group)]


def _shared(group: Iterable[Item]) -> list[Item]:
    items = list(group)
    order = shared_prefixes([item.datum.input for item in items], [item.datum.routes for item in items])
    return [replace(items[at], shared=shared) for at, shared in order]


def row_length(items: Sequence[Item], least: int = 1) -> int:
    """How many positions a row of `items` has. What an item adds counts as `least` of them at least."""
    return sum(_added(item, least, first=not at) for at, item in enumerate(items))


def _added(item: Item, least: int, *, first: bool) -> int:
    """How many positions `item` adds to a row, of which it may be the `first`; if any, `least` at least."""
    added = item.length - (0 if first else item.shared)
    return max(added, least) if added else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a micro-batch. `budget`: its positions, where what an item adds counts as `least` of them at least. `beyond`:
    whether data of a group may be in one row where one of them alone is longer than that."""

    budget: int
    least: int = 1
    beyond: bool = False

    def of_group(self, longest: int) -> int:
        """Positions of a row that goes on in a group whose longest datum has `longest`. A row of that datum is needed
        anyway: others may add a quarter of it, and at most the budget. Else a prompt that is longer than the budget
        would be computed for each datum."""
        return longest + min(self.budget, longest // 4) if self.beyond and longest > self.budget else self.budget


MAX_COLUMNS = 512
"""Maximum total rank of all adapters in one micro-batch. Every token is multiplied by all of them, so with more the
adapters would cost a considerable part of the model itself."""


def split(items: Sequence[Item], limits: Limits, ranks: Mapping[str | None, int]) -> list[list[Item]]:
    """Split `items` in order into as few micro-batches as possible, within `limits` and of a total rank of at most
    `MAX_COLUMNS`. A longer item, or one of a larger rank, gets its own. `ranks`: of each adapter, whose items are
    adjacent.

    If they do not become more, they end where an adapter does: its matrices are copied and its gradients added once for
    each that it has a part in, and all rows are multiplied by the ranks of all adapters. Else where the next item
    shares nothing: what it shares is computed in each micro-batch once.
    """
    ends = _furthest_ends(items, limits, ranks)
    needed = [0] * (len(items) + 1)  # micro-batches for the items from each on
    for start in reversed(range(len(items))):
        needed[start] = 1 + needed[ends[start]]
    batches: list[list[Item]] = []
    start = 0
    while start < len(items):
        furthest = ends[start]
        as_few = [stop for stop in range(furthest, start, -1) if needed[stop] == needed[furthest]]
        apart = next((stop for stop in as_few if stop == len(items) or not items[stop].shared), furthest)
        stop = next((stop for stop in as_few if _adapter_ends(items, stop)), apart)
        batches.append(list(items[start:stop]))
        start = stop
    return batches


def _furthest_ends(items: Sequence[Item], limits: Limits, ranks: Mapping[str | None, int]) -> list[int]:
    """For each item, where a micro-batch that begins with it ends at the latest."""
    ends: list[int] = []
    most = _most_positions(items, limits)
    length, columns, stop = 0, 0, 0
    held: Counter[str | None] = Counter()
    for start, first in enumerate(items):
        while stop < len(items):
            item = items[stop]
            wider = 0 if held[item.adapter_id] else ranks[item.adapter_id]
            too_wide = columns and wider and columns + wider > MAX_COLUMNS
            longer = _added(item, limits.least, first=stop == start)
            if stop > start and (length + longer > most[stop] or too_wide):
                break
            length, columns, stop = length + longer, columns + wider, stop + 1
            held[item.adapter_id] += 1
        ends.append(stop)
        length -= _added(first, limits.least, first=True)
        if stop > start + 1:
            second = items[start + 1]
            length += _added(second, limits.least, first=True) - _added(second, limits.least, first=False)
        held[first.adapter_id] -= 1
        if not held[first.adapter_id]:
            columns -= ranks[first.adapter_id]
    return ends


def _most_positions(items: Sequence[Item], limits: Limits) -> list[int]:
    """For each item, how many positions a row may have with it, if others are before it in the row."""
    starts = [at for at, item in enumerate(items) if not at or not item.shared]
    found: list[int] = []
    for start, stop in itertools.pairwise([*starts, len(items)]):
        of_group = limits.of_group(max(item.length for item in items[start:stop]))
        found += [limits.budget, *[of_group] * (stop - start - 1)]
    return found


def _adapter_ends(items: Sequence[Item], stop: int) -> bool:
    """Whether those from `stop` on begin with another adapter, or there are none."""
    return stop == len(items) or items[stop].adapter_id != items[stop - 1].adapter_id


def rounds(items: Sequence[Item], limits: Limits, ranks: Mapping[str | None, int], size: int) -> list[list[list[Item]]]:
    """Split `items` as `split` does, into rounds of one micro-batch for each of `size` trainer ranks, so that the
    largest one is as small as possible in the smallest number of rounds. In the last round, the last ranks may have
    none."""
    batches = split(items, limits, ranks)
    if size > 1 and batches:
        most = -(-len(batches) // size) * size
        low, high = 1, max(row_length(batch, limits.least) for batch in batches)
        while low < high:
            middle = (low + high) // 2
            if len(split(items, replace(limits, budget=middle), ranks)) <= most:
                high = middle
            else:
                low = middle + 1
        # A round lasts as long as its largest micro-batch, so those of about one size share it.
        batches = split(items, replace(limits, budget=high), ranks)
        batches.sort(key=lambda batch: -row_length(batch, limits.least))
    found = [batches[at : at + size] for at in range(0, len(batches), size)]
    # The largest goes to the first rank and to the last one in turn.
    return [each[::-1] if at % 2 and len(each) == size else each for at, each in enumerate(found)]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One micro-batch as a row of T positions.

    `places`: of each item's positions. `added`: how many positions each item adds to those of the items before it,
    which are its last ones. `token_ids` [T]. `target_rows` [M] and `target_ids` [M], item by item: the position that
    predicts each target, and the target. A target outside the vocabulary becomes token 0; its coefficient is 0, which
    was checked, so this only affects its reported logprob. `target_starts`: each item's first target, then M. `images`:
    each image once, but for adapters that train the vision tower, which have `own_images`: each image once for each
    such adapter, those of an adapter adjacent. `image_rows` [V] (ascending): positions that hold image features;
    `feature_rows` [V]: which row of all images' features each of them gets, in the order `images`, `own_images`.
    `image_bounds`: start and stop in the row of each image's features.
    """

    items: Sequence[Item]
    places: Places
    added: Sequence[int]
    token_ids: Int64Array
    target_rows: Int64Array
    target_ids: Int64Array
    target_starts: Sequence[int]
    images: Sequence[RenderedImage]
    own_images: Sequence[tuple[str, RenderedImage]]
    image_rows: Int64Array
    feature_rows: Int64Array
    image_bounds: Sequence[tuple[int, int]]

    def targets_of(self, item: int) -> slice:
        """The slice of the targets of item `item`."""
        return slice(self.target_starts[item], self.target_starts[item + 1])


def pack(items: Sequence[Item], vocab_size: int, towers: Collection[str | None] = ()) -> Packed:
    """Put `items` into one row, without what each shares with the one before it. `towers`: the adapters that train the
    vision tower."""
    places = places_of((item.length, item.shared) for item in items)
    added = [item.length - (item.shared if at else 0) for at, item in enumerate(items)]
    targets = [item.datum.target_tokens for item in items]
    target_ids = np.concatenate([target.reshape(-1) for target in targets])
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    placements = _placements(items, places, added, towers)
    images, own_images, feature_rows = _features(placements)
    held = [(start, image.feature_places) for _, start, image in placements]
    bounds = [(start + int(own[0]), start + int(own[-1]) + 1) for start, own in held]
    new = [item.datum.input.token_ids[item.length - count :] for item, count in zip(items, added, strict=True)]
    return Packed(
        items=items,
        places=places,
        added=added,
        token_ids=np.concatenate(new).astype(np.int64),
        target_rows=np.concatenate(
            [np.repeat(rows, target[0].size) for rows, target in zip(places.rows, targets, strict=True)]
        ),
        target_ids=np.where(outside, 0, target_ids),
        target_starts=[int(start) for start in np.cumsum([0, *(target.size for target in targets)])],
        images=images,
        own_images=own_images,
        image_rows=np.concatenate(
            [np.empty(0, np.int64), *(start + image.feature_places for _, start, image in placements)]
        ),
        feature_rows=feature_rows,
        image_bounds=bounds,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The positions [start, stop) of the row `packed` that this rank has: all, or its own of a row that is `shared`.
    `padding`: how many positions of no item are at the row's end, since each rank must have at least one. `targets`:
    which of M these positions predict, ascending. `images`, `own_images`, `image_rows` (counted from `start`) and
    `feature_rows`: as of `Packed`, for these positions."""

    packed: Packed
    shared: SharedRow
    padding: int
    start: int
    stop: int
    targets: Int64Array
    images: Sequence[RenderedImage]
    own_images: Sequence[tuple[str, RenderedImage]]
    image_rows: Int64Array
    feature_rows: Int64Array


def part_of(packed: Packed, ranks: RowRanks) -> Part:
    """This rank's part of a row that `ranks` share."""
    padding = max(0, ranks.size - len(packed.token_ids))
    shared = share(len(packed.token_ids) + padding, ranks)
    start, stop = shared.own.start, shared.own.stop
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
        targets=np.flatnonzero((packed.target_rows >= start) & (packed.target_rows < stop)),
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


Placement = tuple[tuple[str | None, str], int, RenderedImage]
"""Whose features (an adapter that trains the tower, or None) and of which content; the first position; the image."""


def _placements(
    items: Sequence[Item], places: Places, added: Sequence[int], towers: Collection[str | None]
) -> list[Placement]:
    """All images of a row, in the order of their positions."""
    found: list[Placement] = []
    for item, rows, count in zip(items, places.rows, added, strict=True):
        own = item.adapter_id if item.adapter_id in towers else None
        new = [placed for placed in item.datum.input.images if placed.offset >= item.length - count]
        new.sort(key=lambda placed: placed.offset)
        found += [((own, placed.image.content_hash), int(rows[placed.offset]), placed.image) for placed in new]
    return found


def _features(
    placements: Sequence[Placement],
) -> tuple[list[RenderedImage], list[tuple[str, RenderedImage]], Int64Array]:
    """Each image once (by content), those of `towers` by adapter, and the feature rows of all placements in order."""
    distinct = {key: image for key, _, image in placements}
    ordered = sorted(distinct, key=lambda key: key[0] is not None)  # stable
    ends = np.cumsum([distinct[key].num_features for key in ordered])
    first_row = {key: int(end) - distinct[key].num_features for key, end in zip(ordered, ends, strict=True)}
    parts = [first_row[key] + np.arange(image.num_features) for key, _, image in placements]
    return (
        [distinct[own, image] for own, image in ordered if own is None],
        [(own, distinct[own, image]) for own, image in ordered if own is not None],
        np.concatenate([np.empty(0, np.int64), *parts]),
    )
