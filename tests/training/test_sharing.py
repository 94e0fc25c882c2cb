"""Where data that begin alike are in a row, against the tokens themselves."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.training.kernels.delta_segments import CHUNK, Chunks
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.run import sharing
from tinker_local.backend.training.run.packing import Item, Limits, in_order, pack, row_length, split
from tinker_local.backend.training.run.sharing import places_of, shared_prefixes
from tinker_local.backend.training.trainer import TrainDatum

from tests.training.test_attention_of_forks import path_of

TOKENS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=9), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any common beginning is worth sharing."""
    monkeypatch.setattr(sharing, "LEAST_SHARED", 1)


def inputs_of(make: Any, tokens: list[list[int]]) -> Any:
    inputs = [make.input(len(each)) for each in tokens]
    for each, ids in zip(inputs, tokens, strict=True):
        each.token_ids[:] = ids
    return inputs


def items_of_tokens(make: Any, tokens: list[list[int]]) -> list[Item]:
    data = (TrainDatum(each, np.zeros(each.length, np.int64), {}) for each in inputs_of(make, tokens))
    return in_order((Item(0, at, None, datum) for at, datum in enumerate(data)), share=True)


def check_row(items: list[Item], row: Any, places: Any) -> None:
    """Each item's positions have its tokens and are the path of one segment, or the beginning of it."""
    segments = Segments(places.lengths, "cpu", parents=places.parents)  # type: ignore[arg-type]  # the host's alone
    assert sum(places.lengths) == len(row)
    ends = np.cumsum(places.lengths)
    for item, rows in zip(items, places.rows, strict=True):
        np.testing.assert_array_equal(row[rows], item.datum.input.token_ids)
        last = int(np.searchsorted(ends, rows[-1], side="right"))
        path = [np.arange(segments.starts[at], ends[at]) for at in path_of(segments, last)]
        np.testing.assert_array_equal(np.concatenate(path)[: len(rows)], rows)


@given(TOKENS)
def test_each_prefix_is_in_the_row_once(tokens: list[list[int]]) -> None:
    from tests.training.conftest import Maker

    make = Maker(np.random.default_rng(0))
    items = items_of_tokens(make, tokens)
    packed = pack(items, 100)
    check_row(items, packed.token_ids, packed.places)
    prefixes = {tuple(each[:length]) for each in tokens for length in range(1, len(each) + 1)}
    assert len(packed.token_ids) == row_length(items) == len(prefixes)
    assert sorted(item.index for item in items) == list(range(len(tokens)))


@given(TOKENS, st.integers(1, 20))
def test_micro_batches_of_shared_data_keep_the_budget_and_have_all(tokens: list[list[int]], budget: int) -> None:
    from tests.training.conftest import Maker

    items = items_of_tokens(Maker(np.random.default_rng(0)), tokens)
    batches = split(items, Limits(budget), {None: 0})
    assert list(itertools.chain(*batches)) == items
    for batch in batches:
        packed = pack(batch, 100)
        check_row(batch, packed.token_ids, packed.places)
        assert len(packed.token_ids) == row_length(batch)
        assert len(batch) == 1 or row_length(batch) <= budget


def test_the_descendants_of_a_segment_follow_it() -> None:
    places = places_of([(6, 0), (8, 4), (9, 7), (5, 4), (3, 0), (3, 3)])
    assert places.lengths == (4, 2, 3, 1, 2, 1, 3)
    assert places.parents == (NO_PARENT, 0, 0, 2, 2, 0, NO_PARENT)
    assert places.rows[5].tolist() == places.rows[4].tolist() == [13, 14, 15]


def test_data_that_go_on_where_another_ends_are_one_segment() -> None:
    places = places_of([(3, 0), (5, 3), (9, 5)])
    assert (places.lengths, places.parents) == ((9,), ())


def test_a_fork_at_the_end_of_another_cuts_what_goes_on() -> None:
    places = places_of([(3, 0), (5, 3), (6, 3)])
    assert (places.lengths, places.parents) == ((3, 2, 3), (NO_PARENT, 0, 0))


def test_images_are_shared_by_their_content_and_shape(make: Any) -> None:
    image, other = make.image(4, 4), make.image(4, 4)
    first, same, different = (make.input(12, [(3, each)]) for each in (image, image, other))
    for each in (same, different):
        each.token_ids[:] = first.token_ids
    assert [shared for _, shared in shared_prefixes([first, same])] == [0, 12]
    assert [shared for _, shared in shared_prefixes([first, different])] == [0, 3]


def test_pad_ids_in_a_text_are_no_image(make: Any) -> None:
    image = make.input(12, [(3, make.image(4, 4))])
    text = make.input(12)
    text.token_ids[:] = image.token_ids
    assert [shared for _, shared in shared_prefixes([image, text])] == [0, 3]


def test_short_prefixes_are_computed_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long datum is not copied for a few positions less."""
    monkeypatch.setattr(sharing, "LEAST_SHARED", 8)
    start = list(range(3, 20))
    assert [shared for _, shared in shared_prefixes(inputs_of(make, [start[:9], [*start[:7], 50]]))] == [0, 0]
    assert [shared for _, shared in shared_prefixes(inputs_of(make, [start[:9], [*start[:8], 50]]))] == [0, 8]
    long = inputs_of(make, [[*start, 50], [*start, *[60] * 600]])
    assert [shared for _, shared in shared_prefixes(long)] == [0, 0]


def test_another_request_or_adapter_shares_nothing(make: Any) -> None:
    datum = make.datum(20)
    items = in_order([Item(0, 0, "a", datum), Item(1, 0, "a", datum), Item(2, 0, "b", datum)], share=True)
    assert [item.shared for item in items] == [0, 0, 0]


def test_micro_batches_end_between_groups_if_they_do_not_become_more(make: Any) -> None:
    groups = [[[*range(start, start + 10), end] for end in (50, 51, 52)] for start in (3, 20)]
    batches = split(items_of_tokens(make, [*groups[0], *groups[1]]), Limits(24), {None: 0})
    assert [row_length(batch) for batch in batches] == [13, 13]


def test_a_prompt_longer_than_a_micro_batch_is_computed_once(make: Any) -> None:
    """The row of its longest datum is needed anyway; more than a quarter does not go beside it."""
    prompt = list(range(3, 103))
    items = items_of_tokens(make, [[*prompt, end] for end in range(50, 90)])
    assert [len(batch) for batch in split(items, Limits(40, beyond=True), {None: 0})] == [26, 14]
    assert [len(batch) for batch in split(items, Limits(8, beyond=True), {None: 0})] == [9, 9, 9, 9, 4]
    assert all(len(batch) == 1 for batch in split(items, Limits(40), {None: 0}))


def test_turns_of_a_long_conversation_are_one_row(make: Any) -> None:
    whole = list(range(3, 103))
    items = items_of_tokens(make, [whole[:length] for length in (10, 30, 60, 80, 100)])
    assert [row_length(batch) for batch in split(items, Limits(20, beyond=True), {None: 0})] == [100]


@given(TOKENS, st.integers(1, 20), st.integers(1, 8))
def test_no_row_is_longer_than_its_group_allows(tokens: list[list[int]], budget: int, least: int) -> None:
    from tests.training.conftest import Maker

    items = items_of_tokens(Maker(np.random.default_rng(0)), tokens)
    batches = split(items, Limits(budget, least, beyond=True), {None: 0})
    assert list(itertools.chain(*batches)) == items
    longest = max(item.length for item in items)
    for batch in batches:
        most = max(budget, longest + min(budget, longest // 4))
        assert len(batch) == 1 or row_length(batch, least) <= most


def test_short_segments_count_as_the_memory_that_they_take(make: Any) -> None:
    """Linear attention has whole chunks, of 64 positions, for each segment."""
    items = items_of_tokens(make, [[*range(3, 93), end] for end in range(3, 43)])
    batches = split(items, Limits(91 + 5 * 64, CHUNK), {None: 0})
    assert [len(batch) for batch in batches] == [6] * 6 + [4]
    for batch in batches:
        places = pack(batch, 100).places
        chunks = Chunks.of(places.lengths, places.parents, torch.device("cpu"))
        assert sum(chunks.alive) * chunks.size <= 91 + 5 * 64 + 2 * CHUNK
