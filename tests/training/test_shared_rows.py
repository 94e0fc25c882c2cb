"""Ranks that share rows (context parallelism) compute what one rank does, and fail together or not at all.

Every rank runs `shared_rows_program.py` once, in a process over gloo; the tests look at what it saw.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.tiny_models.make_models import make_tiny_text_model
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.parallel.joined_ranks import GONE, JoinedRowRanks
from tinker_local.backend.training.parallel.shared_rows import RowLeftError, RowRanks, SharedRow, share
from tinker_local.backend.training.run.packing import Item, pack, part_of

from tests.training import rank_program, shared_rows_program
from tests.training.conftest import SMALL, Maker
from tests.training.rank_program import RETRIED, TRAINERS, Fault, Seen
from tests.training.shared_rows_program import FAMILIES, IN_FLOAT32, LAYOUTS, TWO
from tests.training.test_ranks import assert_equal, deviation, spawned, tensors

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def folder(model_path: Callable[[str], Path]) -> Path:
    for model in ("qwen3_vl_kv4", "qwen3_untied_kv4", "gpt_oss"):
        model_path(model)
    return model_path("gpt_oss").parent


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return spawned(folder, 2, "two", "shared_rows_program")


@pytest.fixture(scope="module")
def four(folder: Path, model_path: Callable[[str], Path]) -> list[dict[str, Any]]:
    model_path("qwen2_5_vl")
    for family in FAMILIES:
        path = folder / f"{family}_shared"
        if family != "qwen2_5_vl" and " " not in family and not path.exists():
            linear = family == "qwen3_5_text"
            shape = QWEN3_5_SHAPE if linear else replace(SMALL, num_heads=4, num_kv_heads=2, intermediate_size=64)
            make_tiny_text_model(path, family=family, shape=shape)
    return spawned(folder, 4, "four", "shared_rows_program")


@pytest.fixture(scope="module")
def one(folder: Path) -> Mapping[str, Seen]:
    return {
        label: rank_program.run(
            rank_program.make_trainer(folder, label, context_parallel=1), images=label.startswith("image")
        )
        for label in TRAINERS
    }


def assert_trained_alike(several: list[Seen], alone: Seen, tolerance: float) -> None:
    """Results, gradients and steps are those of one rank, and the same to the bit on all."""
    assert any(array.any() for array in alone.gradients.values())
    for seen in several:
        assert deviation(seen.gradients, alone.gradients) <= tolerance
        assert deviation(tensors(seen.trained), tensors(alone.trained)) <= 10 * tolerance
        np.testing.assert_allclose(seen.logprobs, alone.logprobs, atol=max(tolerance, 1e-7))
        for call, wanted in alone.results.items():
            for found, expected in zip(seen.results[call], wanted, strict=True):
                if isinstance(expected, str):
                    assert found == expected
                    continue
                assert not isinstance(found, str), found
                assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
                for output, right in zip(found.outputs, expected.outputs, strict=True):
                    assert deviation(output, right) <= 1e-5
        for name in ("results", "gradients", "norms", "saved", "trained", "logprobs"):
            assert_equal(getattr(seen, name), getattr(several[0], name))


def tolerance(label: str) -> float:
    return 1e-12 if "float64" in label else 1e-5


@pytest.mark.parametrize("label", TWO)
def test_two_ranks_that_share_rows_train_what_one_does(one: Any, two: Any, label: str) -> None:
    assert_trained_alike([seen[label] for seen in two], one[label], tolerance(label))


def test_losses_of_a_whole_datum_know_the_logprobs_of_all_ranks(folder: Path, two: Any) -> None:
    alone = shared_rows_program.of_whole_data(folder)
    assert all(array.any() for array in alone.values())
    for seen in two:
        assert deviation(seen["whole data"], alone) <= 1e-12


def test_the_vision_tower_is_trained_by_images_of_which_each_rank_has_a_part(folder: Path, two: Any) -> None:
    alone = shared_rows_program.of_tower(folder)
    for seen in two:
        assert deviation(seen["tower"], alone) <= 1e-12


def test_a_row_has_as_many_times_the_positions_as_ranks_share_it(two: Any) -> None:
    for seen in two:
        assert seen["rounds"] == [[[2, 40, 50]], [[60]]]


def test_a_save_of_ranks_that_share_rows_goes_on_on_one(folder: Path, two: Any) -> None:
    saved, trained = two[0]["text"].saved, two[0]["text"].trained
    alone = rank_program.resumed(rank_program.make_trainer(folder, "text", context_parallel=1), saved, images=False)
    assert deviation(tensors(alone.trained), tensors(trained)) <= 1e-5


def test_heads_that_ranks_cannot_divide_are_refused_with_the_numbers(two: Any) -> None:
    for seen in two:
        assert seen["one KV head"].startswith("UnsupportedError: ")
        assert "its 1 heads cannot be divided among 2 ranks" in seen["one KV head"]


def test_a_failure_on_one_rank_of_a_row_is_one_of_all_and_changes_nothing(
    folder: Path, model_path: Callable[[str], Path]
) -> None:
    model_path("qwen3_deep")
    both = spawned(folder, 2, "faults", "shared_rows_program")
    for name in both[0]:
        kind, place = name.partition(": ")[2].split(" in ", 1)
        found: list[Fault] = [seen[name] for seen in both]
        assert all(fault.same and fault.again for fault in found), name
        lacked = kind == "memory" and place in RETRIED
        assert [fault.error is None for fault in found] == [lacked, lacked], name
        if kind == "exception":
            assert found[1].error == "ZeroDivisionError: injected"
            assert found[0].error == "InternalError: rank 1 of the trainer failed: ZeroDivisionError: injected"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_that_share_rows_train_what_one_does(one: Any, four: Any, layout: str) -> None:
    label = LAYOUTS[layout][0]
    assert_trained_alike([seen[layout] for seen in four], one[label.removesuffix(", sharded")], tolerance(label))


def test_four_ranks_train_the_vision_tower_as_one_does(folder: Path, four: Any) -> None:
    alone = shared_rows_program.of_tower(folder)
    for seen in four:
        assert deviation(seen["tower"], alone) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_share_rows(folder: Path, four: Any, family: str) -> None:
    alone = shared_rows_program.of_family(folder, family)
    assert alone.any()
    for seen in four:
        assert deviation({"a": seen[family]}, {"a": alone}) <= (1e-5 if family in IN_FLOAT32 else 1e-12)


def test_ranks_share_rows_whose_sequences_share_their_beginning(folder: Path, four: Any) -> None:
    alone = shared_rows_program.of_forks(folder)
    assert all(array.any() for array in alone.values())
    for seen in four:
        assert deviation(seen["forks"], alone) <= 1e-12


def test_a_number_of_ranks_that_rows_cannot_divide_is_refused(four: Any) -> None:
    for seen in four:
        assert seen["three of four"] == "ValueError: context_parallel 3: it must divide the number of ranks, 4"


# Attention ------------------------------------------------------------------------------------------------------------


class ThreadRanks(RowRanks):
    """Rank `rank` of those that share `posts`, where each leaves what it sends, and `barrier`; each in a thread."""

    def __init__(self, rank: int, posts: list[Sequence[torch.Tensor]], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(posts)
        self._posts, self._barrier = posts, barrier

    def exchange(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self._posts[self.rank] = send.split([*sent])
        self._barrier.wait(60)
        found = [parts[self.rank] for parts in self._posts]
        self._barrier.wait(60)
        assert [len(part) for part in found] == [*received]
        return torch.cat(found)


@pytest.mark.mutation(
    "heads-in-order-of-ranks",
    "SharedRow.to_heads",
    "unflatten(1, (size, -1))",
    "unflatten(1, (-1, size)).transpose(1, 2)",
)
@pytest.mark.mutation(
    "sinks-of-the-first-heads",
    "AttentionRule.of_heads",
    "[ranks.rank]",
    "[0]",
)
@pytest.mark.parametrize("size", [2, 4])
def test_attention_of_ranks_that_share_a_row_is_that_of_one(size: int) -> None:
    lengths, heads, kv_heads = (20, 1, 17), 8, 4
    row = share(sum(lengths), RowRanks())
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=noise)

    query, grad = random(sum(lengths), heads, 16), random(sum(lengths), heads, 16)
    key, value = random(sum(lengths), kv_heads, 16), random(sum(lengths), kv_heads, 16)
    rule = AttentionRule(0.2, window=9, sinks=random(heads))

    def attended(shared: SharedRow) -> list[torch.Tensor]:
        segments = Segments(lengths, torch.device("cpu"), shared=shared.or_none)
        q, k, v, g = (tensor[shared.own] for tensor in (query, key, value, grad))
        output, logsumexp = attend(q, k, v, segments, rule)
        return [output, *attend_backward(g, q, k, v, output, logsumexp, segments, rule)]

    posts: list[Sequence[torch.Tensor]] = [()] * size
    barrier = threading.Barrier(size)
    rows = [share(sum(lengths), ThreadRanks(rank, posts, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        parts = [*threads.map(attended, rows)]
    for name, wanted, *found in zip(("output", "query", "key", "value"), attended(row), *parts, strict=True):
        torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-12, msg=name)


# What a rank tells the others -----------------------------------------------------------------------------------------


class TellingRanks(JoinedRowRanks):
    """Rank 0 of two; the other one says `answer`, and nothing is connected."""

    def __init__(self, answer: int = 0) -> None:
        self.rank, self.size = 0, 2
        self.told: list[int] = []
        self.answer = answer

    def _least(self, number: int) -> int:
        self.told.append(number)
        return min(number, self.answer)

    def _leave(self) -> None:
        self.told.append(GONE)


def test_a_rank_that_fails_tells_those_that_share_its_row_once() -> None:
    ranks = TellingRanks()

    def fails() -> None:
        assert ranks.least(5) == 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ranks.sharing():
        fails()
    assert ranks.told == [5, GONE]
    with ranks.sharing():
        pass
    assert ranks.told[2:] == [0], "so that one which fails at the end is noticed"


def test_a_rank_whose_neighbour_has_failed_leaves_and_says_no_more() -> None:
    ranks = TellingRanks(answer=GONE)
    with pytest.raises(RowLeftError), ranks.sharing():
        ranks.add_up(torch.zeros(1))
    assert ranks.told == [0]


# The part of one rank -------------------------------------------------------------------------------------------------


class Rank(RowRanks):
    """Rank `rank` of `size`, which exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_parts_have_every_position_target_and_image_position_once(size: int) -> None:
    make = Maker(np.random.default_rng(0))
    picture = make.image(8, 8)
    data = [make.datum(30, [(2, picture)], candidates=2), make.datum(9), make.datum(40, [(1, (4, 4)), (20, picture)])]
    items = [Item(0, at, "ab"[at % 2], datum) for at, datum in enumerate(data)]
    packed = pack(items, 120, {"b"})
    images = [image.content_hash for image in packed.images] + [f"{a}{i.content_hash}" for a, i in packed.own_images]
    sizes = [image.num_tokens for image in [*packed.images, *(image for _, image in packed.own_images)]]
    feature = np.repeat(images, sizes)
    parts = [part_of(packed, Rank(rank, size)) for rank in range(size)]
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == max(len(packed.token_ids), size)
    assert max(lengths) - min(lengths) <= 1
    assert [part.start for part in parts] == [0, *np.cumsum(lengths)[:-1]]
    targets = np.arange(len(packed.target_rows))
    np.testing.assert_array_equal(np.concatenate([targets[part.targets] for part in parts]), targets)
    rows, features = [], []
    for part in parts:
        rows.append(part.image_rows + part.start)
        own = [image.content_hash for image in part.images] + [f"{a}{i.content_hash}" for a, i in part.own_images]
        counts = [image.num_tokens for image in [*part.images, *(image for _, image in part.own_images)]]
        features.append(np.repeat(own, counts)[part.feature_rows])
        assert {*features[-1]} == {*own}, "no image is encoded for nothing"
    np.testing.assert_array_equal(np.concatenate(rows), packed.image_rows)
    np.testing.assert_array_equal(np.concatenate(features), feature[packed.feature_rows])
