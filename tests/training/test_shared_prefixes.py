"""Requests whose data begin alike: results and gradients equal those of a trainer that computes each datum alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.families import FAMILIES
from tinker_local.backend.rendering.rendered_input import ImagePlacement
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.kernels.delta_segments import Chunks
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.run import packing
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig

from tests.float64 import InFloat64

DECODERS = ("written-out", "autograd")
PROMPT = 20


def group(make: Any, loss_fn: str = "cross_entropy", images: Any = (), **options: Any) -> list[Any]:
    """Samples of one prompt, two of which fork once more; the prompt and a sample again; and data that share
    nothing. Every position has a target."""
    prompt = make.input(PROMPT, images)
    data = make.group(prompt, (3, 5, 5, 1), loss_fn=loss_fn, **options)
    further = make.group(prompt, (9,), loss_fn=loss_fn, **options)[0].input
    data += make.group(further, (4, 7), loss_fn=loss_fn, **options)
    again = make.datum(data[1].input.length, loss_fn=loss_fn, **options)
    only = make.datum(PROMPT, loss_fn=loss_fn, **options)
    apart = make.datum(11, loss_fn=loss_fn, **options)
    return [data[0], replace(again, input=data[1].input), *data[1:], replace(only, input=prompt), apart]


def work(adapter_id: str, data: Any, loss_fn: str = "cross_entropy") -> TrainWork:
    return TrainWork(adapter_id, data, loss_fn, loss_of(loss_fn).complete_settings({}))


class Pair:
    """Two trainers of one model in float64, with and without sharing, and how many positions each computed."""

    def __init__(self, make_trainer: Any, add_adapter: Any, monkeypatch: Any, names: str = "a", **adapter: Any) -> None:
        self.rows = {True: 0, False: 0}
        with InFloat64():
            self.trainers = {share: make_trainer(dtype="float64", share_prefixes=share) for share in (True, False)}
        for each in self.trainers.values():
            for seed, name in enumerate(names, 1):
                add_adapter(each, name, seed=seed, rank=2 + seed, **adapter)
        pack = packing.pack

        def counted(*given: Any) -> Any:
            found = pack(*given)
            self.rows[self._share] += len(found.token_ids)
            return found

        monkeypatch.setattr("tinker_local.backend.training.run.passes.pack", counted)

    def results(self, share: bool, works: list[TrainWork]) -> Any:
        self._share = share
        with InFloat64():
            return self.trainers[share].forward_backward(works)

    def check(self, works: list[TrainWork], gradients: Any, assert_close: Any, *, fewer: float = 1.0) -> None:
        """`fewer`: how many times fewer positions are computed, at least."""
        found = {}
        for share, trainer in self.trainers.items():
            results = self.results(share, works)
            names = dict.fromkeys(each.adapter_id for each in works)
            found[share] = results, {name: gradients(trainer, name) for name in names}
        assert self.rows[False] >= fewer * self.rows[True]
        for shared, alone in zip(found[True][0], found[False][0], strict=True):
            assert shared.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-12, abs=1e-12)
            for one, other in zip(shared.outputs, alone.outputs, strict=True):
                assert one.keys() == other.keys()
                for name in one:
                    np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-12)
        for name, gradient in found[False][1].items():
            assert_close(found[True][1][name], gradient, 1e-12)


@pytest.fixture
def pair(trainer: Any, add_adapter: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(family: str = "qwen3", names: str = "a", adapter: Any = None, **options: Any) -> Pair:
        def make_trainer(**more: Any) -> HFTrainer:
            found: HFTrainer = trainer(family, **options, **more)
            return found

        return Pair(make_trainer, add_adapter, monkeypatch, names, **(adapter or {}))

    return make


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_all_losses_are_as_if_each_datum_were_alone(
    loss_fn: str, decoder: str, pair: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    pair(decoder=decoder).check([work("a", group(make, loss_fn), loss_fn)], gradients, assert_close, fewer=2.0)


def test_candidates_of_a_shared_position_add_their_gradients(
    pair: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    pair().check([work("a", group(make, candidates=3))], gradients, assert_close, fewer=2.0)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("tower", [False, True])
def test_an_image_in_the_prompt_is_there_once(
    family: str, tower: bool, decoder: str, pair: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    """Positions after an image go on from the prompt's; a tower that trains gets the gradients of all samples."""
    data = group(make, images=[(3, (4, 6))])
    other = make.image(4, 6)
    moved = tuple(ImagePlacement(each.offset, other) for each in data[0].input.images)
    data.append(replace(data[0], input=replace(data[0].input, images=moved)))  # another picture: not shared
    two = pair(family, decoder=decoder, adapter={"train_vision": tower})
    two.check([work("a", data)], gradients, assert_close, fewer=1.7)


@pytest.mark.parametrize("budget", [1, 24, 30, 41])
def test_groups_larger_than_a_micro_batch(budget: int, pair: Any, make: Any, gradients: Any, assert_close: Any) -> None:
    pair(micro_batch_tokens=budget).check([work("a", group(make))], gradients, assert_close)


@pytest.mark.parametrize("activation_memory_bytes", [1, None])
def test_several_adapters_and_requests_in_one_row(
    activation_memory_bytes: Any, pair: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    """Equal data of two adapters and of two requests are apart. With recomputed layers and kept ones."""
    data = group(make)
    works = [work("a", data), work("b", data), work("a", data[:3]), work("b", group(make, "ppo"), "ppo")]
    two = pair(names="ab", activation_memory_bytes=activation_memory_bytes)
    two.check(works, gradients, assert_close, fewer=1.9)


@pytest.mark.parametrize("elements", [1, 7 * 120])
def test_chunks_of_the_lm_head_may_cut_a_group(
    elements: int, pair: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    pair(logit_chunk_elements=elements).check([work("a", group(make, "gspo"), "gspo")], gradients, assert_close)


FURTHER = ("gemma2", "gemma3", "gpt_oss", "llama", "qwen3_moe", "qwen3_vl_moe")
"""Windows, soft caps, sinks, pictures that see forward, experts."""


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("family", FURTHER)
def test_other_families(
    family: str,
    decoder: str,
    tmp_path: Path,
    add_adapter: Any,
    make: Any,
    gradients: Any,
    assert_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    (make_tiny_text_model if FAMILIES[family].vision is None else make_tiny_vl_model)(folder, family=family)

    def make_trainer(**options: Any) -> HFTrainer:
        return HFTrainer(TrainerConfig(str(folder), name=family, device="cpu", decoder=decoder, **options))  # type: ignore[arg-type]

    two = Pair(make_trainer, add_adapter, monkeypatch)
    two.check([work("a", group(make))], gradients, assert_close, fewer=2.0)


def test_a_request_that_fails_names_its_own_position(pair: Any, make: Any) -> None:
    data = group(make, "ppo")
    data[2].loss_inputs["logprobs"][PROMPT + 1] = -1e38
    two = pair()
    shared, alone = (two.results(share, [work("a", data, "ppo")])[0] for share in (True, False))
    for error in (shared, alone):
        assert f"data[2]: the loss is not finite at position {PROMPT + 1}" in str(error)


@pytest.mark.parametrize("most", [0, 1, 30, 50])
def test_a_group_in_too_little_memory_is_tried_in_smaller_rows(
    most: int, pair: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt longer than a micro-batch, turns that begin with one another, and many equal data. Where memory has
    room for `most` positions, what is longer fails its request, and no row is tried without end."""
    prompt = make.input(40)
    data = [*make.group(prompt, (0, 3, 3, 1)), *make.group(make.input(9), (0, 0, 0))]
    turn = data[1].input
    data += [replace(make.datum(length), input=replace(turn, token_ids=turn.token_ids[:length])) for length in (20, 30)]
    two = pair(micro_batch_tokens=16)
    two.check([work("a", data)], gradients, assert_close, fewer=3.0)

    run, tried = two.trainers[True]._runner.run, []

    def limited(packed: Any, *given: Any, **options: Any) -> Any:
        tried.append(len(packed.token_ids))
        assert len(tried) < 60
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(packed, *given, **options)

    monkeypatch.setattr(two.trainers[True]._runner, "run", limited)
    result = two.results(True, [work("a", data)])[0]
    if most >= 50:
        assert not isinstance(result, Exception)
    else:
        assert "positions do not fit in the trainer's memory" in str(result)


@pytest.mark.parametrize("decoder", DECODERS)
def test_rows_of_short_answers_keep_to_the_plan_of_linear_attention(
    decoder: str, pair: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of one token takes a chunk: no row has many times as many positions in chunks as it may have."""
    spread, positions = Chunks.spread, []

    def counted(chunks: Chunks, x: Any) -> Any:
        positions.append(sum(chunks.alive) * chunks.size)
        return spread(chunks, x)

    two = pair("qwen3_5_text", decoder=decoder, micro_batch_tokens=256)
    monkeypatch.setattr(Chunks, "spread", counted)
    two.check([work("a", make.group(make.input(70), (1,) * 12))], gradients, assert_close, fewer=2.0)
    assert max(positions) <= 2 * 256
