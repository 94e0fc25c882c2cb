"""Fills micro-batches and lays each out as one row without padding. Arrays on the host only; knows no model.

Legend: T positions of a micro-batch, M targets (positions times candidates), V image positions.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.interface import RenderedImage
from tinker_local.backend.training.interface import TrainDatum, TrainWork

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Datum `index` of work `work` (its place in the call), and the adapter it is computed under (None: the base)."""

    work: int
    index: int
    adapter_id: str | None
    datum: TrainDatum

    @property
    def length(self) -> int:
        return self.datum.input.length


def items_of(works: Sequence[tuple[int, TrainWork]]) -> list[Item]:
    """All data of `works`, ordered so that each adapter's are neighbours, in it each work's, in it those of one length
    (attention takes neighbours of one length in one call)."""
    adapters = {adapter_id: place for place, adapter_id in enumerate(dict.fromkeys(w.adapter_id for _, w in works))}
    items = [Item(at, i, work.adapter_id, datum) for at, work in works for i, datum in enumerate(work.data)]
    return sorted(items, key=lambda item: (adapters[str(item.adapter_id)], item.work, item.length))


MAX_COLUMNS = 512
"""Most ranks, of all adapters, in one micro-batch: every token is multiplied by all of them, so that with more the
adapters would cost a good part of the model itself."""


def split(items: Sequence[Item], budget: int, ranks: Mapping[str | None, int]) -> list[list[Item]]:
    """`items` in order as micro-batches of at most `budget` positions and adapters of `MAX_COLUMNS` ranks in all; a
    longer one, or one of a larger rank, is alone in its own. `ranks`: of each adapter."""
    batches: list[list[Item]] = []
    free, columns, adapters = 0, 0, set[str | None]()
    for item in items:
        wider = 0 if item.adapter_id in adapters else ranks[item.adapter_id]
        if not batches or item.length > free or (columns and wider and columns + wider > MAX_COLUMNS):
            batches.append([])
            free, columns, adapters = budget, 0, set()
            wider = ranks[item.adapter_id]
        batches[-1].append(item)
        free -= item.length
        columns += wider
        adapters.add(item.adapter_id)
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One micro-batch as a row of T positions.

    `token_ids` [T]. `starts`: first position of each item. `target_rows` [M] (ascending) and `target_ids` [M]: the
    position that predicts each target, and the target; a target outside the vocabulary is token 0 here (its
    coefficient is 0, the checks saw to that, so only its reported logprob depends on it). `target_starts`: each
    item's first target, and M. `images`: each image once; `image_rows` [V] (ascending): positions that hold image
    features, `feature_rows` [V]: which row of all images' features each gets.
    """

    items: Sequence[Item]
    token_ids: Int64Array
    starts: Sequence[int]
    target_rows: Int64Array
    target_ids: Int64Array
    target_starts: Sequence[int]
    images: Sequence[RenderedImage]
    image_rows: Int64Array
    feature_rows: Int64Array

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(item.length for item in self.items)

    def targets_of(self, item: int) -> slice:
        """Where the targets of the item at place `item` are."""
        return slice(self.target_starts[item], self.target_starts[item + 1])


def pack(items: Sequence[Item], vocab_size: int) -> Packed:
    """Lay `items` out one behind the other."""
    starts = np.cumsum([0, *(item.length for item in items)])
    targets = [item.datum.target_tokens for item in items]
    target_ids = np.concatenate([target.reshape(-1) for target in targets])
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    images, image_rows, feature_rows = _place_images(items, starts)
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
        image_rows=image_rows,
        feature_rows=feature_rows,
    )


def spans(packed: Packed) -> list[tuple[int, slice]]:
    """The works of a micro-batch, each with where its targets are (its items are neighbours)."""
    found = []
    for at, group in itertools.groupby(range(len(packed.items)), key=lambda place: packed.items[place].work):
        places = list(group)
        found.append((at, slice(packed.targets_of(places[0]).start, packed.targets_of(places[-1]).stop)))
    return found


def _place_images(items: Sequence[Item], starts: Int64Array) -> tuple[list[RenderedImage], Int64Array, Int64Array]:
    """Each image once (by content), the positions of all placements in order, and their rows of features."""
    first_row: dict[str, int] = {}
    images: list[RenderedImage] = []
    rows: list[Int64Array] = []
    features: list[Int64Array] = []
    encoded = 0
    for item, start in zip(items, starts, strict=False):
        for placement in sorted(item.datum.input.images, key=lambda placement: placement.offset):
            image = placement.image
            if image.content_hash not in first_row:
                first_row[image.content_hash] = encoded
                images.append(image)
                encoded += image.num_tokens
            rows.append(start + placement.offset + np.arange(image.num_tokens))
            features.append(first_row[image.content_hash] + np.arange(image.num_tokens))
    empty = np.empty(0, np.int64)
    return images, np.concatenate([empty, *rows]), np.concatenate([empty, *features])
