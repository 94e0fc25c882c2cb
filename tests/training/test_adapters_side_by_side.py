"""Adapters of all kinds share matmuls: each gets the same results as alone, and their cost is bounded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.model.load_model import load_model
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL
from tinker_local.backend.training.run import packing
from tinker_local.backend.training.run.packing import Limits, items_of, split
from tinker_local.backend.training.run.passes import Passes
from tinker_local.backend.training.run.tally import Tally
from tinker_local.backend.training.run.token_budget import TokenBudget
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig

KINDS = {
    "a": {"rank": 4},
    "b": {"rank": 1, "seed": 2},
    "c": {"rank": 8, "seed": 3, "train_unembed": False},
    "d": {"rank": 3, "seed": 4, "train_mlp": False, "train_unembed": False},
    "e": {"rank": 16, "seed": 5, "train_attn": False},
    "f": {"rank": 2, "seed": 6, "train_attn": False, "train_mlp": False},
}


@pytest.fixture
def many(trainer: Any, add_adapter: Any, request: pytest.FixtureRequest) -> Any:
    """A trainer with an adapter of each of `KINDS`, in float64 where a test does not say otherwise."""
    ours = trainer("qwen3_vl", dtype=getattr(request, "param", "float64"))
    for name, config in KINDS.items():
        add_adapter(ours, name, **config)
    return ours


def works_of(make: Any) -> Any:
    data = {name: [make.datum(5 + 3 * i), make.datum(20, [(2, (4, 4))])] for i, name in enumerate(KINDS)}
    return [TrainWork(name, parts, "cross_entropy") for name, parts in data.items()]


@pytest.mark.mutation("columns-of-other-adapters-count", "LowRank.masked", "h if others is None else", "h if True else")
def test_ranks_and_flags_of_all_kinds_in_one_micro_batch_equal_each_alone(
    many: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    works = works_of(make)
    together = many.forward_backward(works)
    seen = {name: gradients(many, name) for name in KINDS}
    for work, result in zip(works, together, strict=True):
        many.discard_gradients(work.adapter_id)
        (alone,) = many.forward_backward([work])
        assert result.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-9)
        assert_close(seen[work.adapter_id], gradients(many, work.adapter_id), 1e-9)


@pytest.mark.mutation(
    "other-adapters-multiplied-by-zero",
    "LowRank.masked",
    "h.masked_fill_(others[:, None], 0)",
    "h.mul_(~others[:, None])",
)
@pytest.mark.mutation(
    "broken-weights-are-multiplied",
    "Adapter.computable",
    "self._computable = max(-low, high) <= self._largest_weight",
    "self._computable = True",
)
@pytest.mark.parametrize("many", ["float32"], indirect=True)
@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), 3e38, 8e37, 1e25])
def test_broken_weights_leave_adapters_that_share_their_matmuls_alone(
    broken: Any, many: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    works = works_of(make)
    many.forward_backward(works)
    expected = {name: gradients(many, name) for name in KINDS}
    for name in KINDS:
        many.discard_gradients(name)
    many._adapters["c"].weights[::7] = broken
    many._adapters["c"].take(many._adapters["c"])
    results = many.forward_backward(works)
    for name, result in zip(KINDS, results, strict=True):
        assert isinstance(result, TrainResult) == (name != "c"), name
        if name != "c":
            assert_close(gradients(many, name), expected[name], 1e-3)  # far more than rounding
    assert many._adapters["c"].gradient is None


@pytest.mark.parametrize("ranks", [(16,), (4,), (8, 24), (4, 12, 16)])
@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_memory_that_nothing_has_written_is_not_read(
    family: str, decoder: str, ranks: tuple[int, ...], trainer: Any, add_adapter: Any, make: Any, gradients: Any
) -> None:
    """Filled with NaN, it changes nothing. Adapters of rank 12 train attention and LM head alone."""
    ours = trainer(family, decoder=decoder)
    for rank in ranks:
        add_adapter(ours, f"of {rank}", rank=rank, seed=rank, train_mlp=rank != 12)
    works = [make.work(f"of {rank}", [9, 4]) for rank in ranks]
    seen = []
    for filled in (False, True):
        torch.use_deterministic_algorithms(filled)  # which fills new memory
        try:
            results = ours.forward_backward(works)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(isinstance(result, TrainResult) for result in results), results
        seen.append([gradients(ours, work.adapter_id) for work in works])
        for work in works:
            ours.discard_gradients(work.adapter_id)
    for plain, with_nan in zip(*seen, strict=True):
        for name, gradient in plain.items():
            np.testing.assert_array_equal(with_nan[name], gradient, err_msg=name)


def test_the_base_model_is_unaffected_by_its_adapters(many: Any, make: Any) -> None:
    """Rows without an adapter: `logprobs` of the base before and after the adapters have trained."""
    rendered = make.input(17)
    before = many.logprobs(None, rendered)
    many.forward_backward(works_of(make))
    np.testing.assert_array_equal(many.logprobs(None, rendered), before)
    assert np.abs(many.logprobs("a", rendered) - before).max() > 1e-3


def test_a_micro_batch_has_no_more_ranks_than_its_bound(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is multiplied by all ranks of its micro-batch."""
    monkeypatch.setattr(packing, "MAX_COLUMNS", 20)
    ranks = {name: config["rank"] for name, config in KINDS.items()} | {"huge": 64}
    works = [*works_of(make), TrainWork("huge", [make.datum(3), make.datum(3)], "cross_entropy")]
    items = items_of(list(enumerate(works)))
    batches = split(items, Limits(10**6), ranks)
    assert [item for batch in batches for item in batch] == items
    for batch in batches:
        adapters = {item.adapter_id for item in batch if item.adapter_id is not None}
        assert sum(ranks[name] for name in adapters) <= 20 or adapters == {"huge"}
    assert len(batches) == 3, "each batch is as full as possible"


def test_micro_batches_end_where_an_adapter_does_if_no_more_are_needed(make: Any) -> None:
    """With 40 positions, the items in order fill three: [a a b] [b b c] [c]."""
    lengths = {"a": (10, 20), "b": (5, 15, 15), "c": (20, 10)}
    works = [TrainWork(name, [make.datum(n) for n in each], "cross_entropy") for name, each in lengths.items()]
    items = items_of(list(enumerate(works)))

    def parts(budget: int) -> list[list[tuple[str | None, int]]]:
        return [
            [(item.adapter_id, item.length) for item in batch]
            for batch in split(items, Limits(budget), dict.fromkeys(lengths, 4))
        ]

    assert parts(40) == [[("a", 10), ("a", 20)], [("b", 5), ("b", 15), ("b", 15)], [("c", 10), ("c", 20)]]
    # Two micro-batches would become three if the first one ended with a.
    assert parts(50) == [[("a", 10), ("a", 20), ("b", 5), ("b", 15)], [("b", 15), ("c", 10), ("c", 20)]]


@pytest.mark.mutation(
    "items-split-again-out-of-order",
    "Passes._smaller",
    "in_order([*itertools.chain(*larger), *later], share=self._share)",
    "[*itertools.chain(*larger), *later]",
)
def test_items_that_are_split_again_keep_those_of_a_request_together(make: Any) -> None:
    """Several ranks run the largest micro-batches first, so what is left when memory runs out is in another order."""
    lengths = ((10, 10), (1, 2, 3), (4,), (10,))
    works = {
        at: TrainWork("run", [make.datum(length) for length in each], "cross_entropy")
        for at, each in enumerate(lengths)
    }
    items = items_of(list(works.items()))
    runner: Any = SimpleNamespace(columns_of=lambda adapter: 4, least_segment=1)
    ranks: Any = SimpleNamespace(size=2)
    adapters: Any = {"run": None}
    passes = Passes(runner, adapters, TokenBudget(20), 100, torch.device("cpu"), ranks, ONE_HAS_ALL, share=False)
    largest, waiting = (items[:2], items[4:6]), [[items[6:], items[2:4]]]  # 20 and 7 positions, then 10 and 3
    again = [items for each in passes._smaller(largest, waiting, Tally(works)) for items in each]
    assert sorted([(item.work, item.length) for item in items] for items in again) == [
        [(0, 10)],
        [(0, 10)],
        [(1, 1), (1, 2), (1, 3), (2, 4)],
        [(3, 10)],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_are_as_few_as_if_each_were_filled_in_order(
    seed: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As few as there can be, for items in a given order."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(packing, "MAX_COLUMNS", 20)
    ranks = {f"run {at}": int(rank) for at, rank in enumerate(rng.integers(1, 12, 6))}
    works = [TrainWork(name, [make.datum(int(n)) for n in rng.integers(1, 30, 5)], "cross_entropy") for name in ranks]
    items = items_of(list(enumerate(works)))
    batches = split(items, Limits(60), ranks)
    assert [item for batch in batches for item in batch] == items
    assert all(sum(item.length for item in batch) <= 60 for batch in batches)
    fullest = [[items[0]]]
    for item in items[1:]:
        tried = [*fullest[-1], item]
        if (
            sum(each.length for each in tried) > 60
            or sum(ranks[name] for name in {str(i.adapter_id) for i in tried}) > 20
        ):
            fullest.append([])
        fullest[-1].append(item)
    assert len(batches) == len(fullest)


def test_joined_weights_are_the_models_own(model_path: Any) -> None:
    """Joined projections take no extra memory: the modules' weights are views of them."""
    loaded = load_model(TrainerConfig(str(model_path("qwen3")), name="m", dtype="float32", device="cpu"))
    decoder: Any = loaded.decoder
    layer, (attention, mlp) = loaded.model.model.layers[0], decoder.layers[0]
    for joined, modules in (
        (attention.qkv.weight, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
        (mlp.gate_up.weight, (layer.mlp.gate_proj, layer.mlp.up_proj)),
    ):
        assert torch.equal(joined, torch.cat([module.weight for module in modules]))
        assert modules[0].weight.data_ptr() == joined.data_ptr()
        assert modules[1].weight.data_ptr() == joined[len(modules[0].weight) :].data_ptr()


def test_a_decoder_of_another_kind_is_refused_by_name(model_path: Any, tmp_path: Path) -> None:
    import json
    import shutil

    from tinker_local.types import UnsupportedError

    folder = tmp_path / "gelu"
    shutil.copytree(model_path("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(UnsupportedError, match="mlp: GELUActivation is none of silu, gelu_tanh"):
        load_model(TrainerConfig(str(folder), name="m", dtype="float32", device="cpu", decoder="written-out"))


def test_scores_beyond_the_rank_bound_train_in_turn(
    many: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound changes only how micro-batches are split."""
    works = [replace(work, data=work.data[:1]) for work in works_of(make)]
    seen = []
    for bound in (packing.MAX_COLUMNS, 5):
        monkeypatch.setattr(packing, "MAX_COLUMNS", bound)
        for name in KINDS:
            many.discard_gradients(name)
        results = many.forward_backward(works)
        seen.append(({name: gradients(many, name) for name in KINDS}, [r.metrics["loss:sum"] for r in results]))
    np.testing.assert_allclose(seen[0][1], seen[1][1], rtol=1e-9)
    for name in KINDS:
        assert_close(seen[0][0][name], seen[1][0][name], 1e-9)
