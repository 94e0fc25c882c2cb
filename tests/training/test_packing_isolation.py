"""Data that share a micro-batch do not see each other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.trainer import TrainDatum, TrainWork

FAMILIES = ("qwen3", "qwen2_5_vl", "qwen3_vl")


def logprobs_of(trainer: Any, data: Any) -> Any:
    (result,) = trainer.forward_backward([TrainWork("a", data, "cross_entropy", backward=False)])
    return [output["logprobs"] for output in result.outputs]


def with_other_tokens(datum: Any, make: Any) -> Any:
    token_ids = datum.input.token_ids.copy()
    images = [p.image for p in datum.input.images]
    pixels = {image.content_hash: make.image(*image.grid_thw[1:]) for image in images}
    placements = tuple(replace(p, image=pixels[p.image.content_hash]) for p in datum.input.images)
    text = np.ones(len(token_ids), bool)
    for placement in placements:
        text[placement.offset : placement.offset + placement.image.num_tokens] = False
    token_ids[text] = make.rng.integers(3, 100, text.sum())
    return TrainDatum(
        replace(datum.input, token_ids=token_ids, images=placements), datum.target_tokens, datum.loss_inputs
    )


@pytest.mark.mutation(
    "one-segment-for-all", "packed_row", "Segments(lengths, device,", "Segments((sum(lengths),), device,"
)
@pytest.mark.parametrize(
    ("family", "with_images"), [(f, i) for f in FAMILIES for i in (False, True) if f != "qwen3" or not i]
)
def test_changing_one_datum_leaves_the_others_logprobs_unchanged(
    family: str, with_images: Any, trainer: Any, make: Any, add_adapter: Any
) -> None:
    ours = trainer(family)
    add_adapter(ours, "a")
    images = [(2, (4, 6)), (9, (2, 2))] if with_images else []
    first, second, third = make.datum(17, images), make.datum(17, images), make.datum(12, images[:1])
    before = logprobs_of(ours, [first, second, third])
    after = logprobs_of(ours, [with_other_tokens(first, make), second, third])
    assert np.abs(before[0] - after[0]).max() > 1e-2
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(before[2], after[2])


@pytest.mark.mutation(
    "images-at-the-start-of-the-batch",
    "_placements",
    "int(rows[placed.offset]), placed.image",
    "placed.offset, placed.image",
    cases=("qwen3_vl",),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_data_equal_each_alone(
    family: str, trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    """Values and gradients of text alone, images, and text beside images in one micro-batch."""
    ours = trainer(family, dtype="float64")
    add_adapter(ours, "a")
    data = [make.datum(n) for n in (7, 1, 12, 7, 30)]
    if family != "qwen3":
        data += [
            make.datum(20, [(3, (4, 4))]),
            make.datum(1 + 6, [(1, (4, 6))]),
            make.datum(20, [(0, (4, 4)), (4, (2, 4))]),
        ]
    packed = ours.forward_backward([TrainWork("a", data, "cross_entropy")])[0]
    together = gradients(ours, "a")
    ours.discard_gradients("a")
    for datum, output in zip(data, packed.outputs, strict=True):
        (alone,) = ours.forward_backward([TrainWork("a", [datum], "cross_entropy")])
        np.testing.assert_allclose(output["logprobs"], alone.outputs[0]["logprobs"], atol=2e-6)
    assert_close(together, gradients(ours, "a"), 1e-6)


def test_the_split_into_micro_batches_does_not_matter(
    trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    data = [make.datum(n) for n in (7, 1, 12, 7, 30, 3, 3, 25)]
    seen = []
    for budget in (1, 13, 8192):
        ours = trainer("qwen3", micro_batch_tokens=budget, dtype="float64")
        add_adapter(ours, "a")
        (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen.append((result, gradients(ours, "a")))
    for result, gradient in seen[:-1]:
        assert result.metrics["loss:sum"] == pytest.approx(seen[-1][0].metrics["loss:sum"], rel=1e-6)
        assert_close(gradient, seen[-1][1], 1e-6)
        for output, expected in zip(result.outputs, seen[-1][0].outputs, strict=True):
            np.testing.assert_allclose(output["logprobs"], expected["logprobs"], atol=2e-6)


def test_chunks_of_the_lm_head_do_not_matter(
    trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    """One row of logits at a time or all, with several adapters, several candidates, and rows without a gradient."""
    data = [make.datum(9), make.datum(5, candidates=3), make.datum(30)]
    data[2].loss_inputs["weights"][::2] = 0
    seen = []
    for elements in (1, 7 * 120, 2**25):
        ours = trainer("qwen3", logit_chunk_elements=elements, dtype="float64")
        add_adapter(ours, "a")
        add_adapter(ours, "b", rank=2, seed=5)
        results = ours.forward_backward([TrainWork(name, data, "cross_entropy") for name in "ab"])
        seen.append((results, {**gradients(ours, "a"), **{f"b.{k}": v for k, v in gradients(ours, "b").items()}}))
    for results, gradient in seen[:-1]:
        assert_close(gradient, seen[-1][1], 1e-6)
        for result, expected in zip(results, seen[-1][0], strict=True):
            assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)


@pytest.mark.mutation(
    "recomputed-without-adapters",
    "MlpPass.restore",
    "self.h_down = low_rank.down(self._active(gate_up))",
    "self.h_down = 0 * low_rank.down(self._active(gate_up))",
)
def test_recomputed_layers_give_the_same_gradients(
    trainer: Any, make: Any, add_adapter: Any, gradients: Any, assert_close: Any
) -> None:
    """With nothing kept, some activations kept, and everything kept."""
    seen, kept = [], []
    data = [make.datum(9), make.datum(30, [(2, (4, 4))])]
    for memory in (0, 1_060_000, 1_260_000, None):
        ours = trainer("qwen3_vl", activation_memory_bytes=memory, dtype="float64")
        add_adapter(ours, "a")
        add_adapter(ours, "b", rank=2, seed=5)
        plans = record_plans(ours)
        ours.forward_backward([TrainWork(name, data, "cross_entropy") for name in "ab"])
        seen.append({name: gradients(ours, name) for name in "ab"})
        kept.append(tuple(plans[0]))
    assert kept[0] == (Keep.INPUT, Keep.INPUT)
    assert len(set(kept)) == 4
    assert kept[3] == (Keep.ALL, Keep.ALL)
    for gradient in seen[:-1]:
        for name in "ab":
            assert_close(gradient[name], seen[-1][name], 1e-9)


def record_plans(ours: Any) -> Any:
    """Record the recompute policy of each micro-batch that follows."""
    plans, original = [], ours._runner._policy

    def record(*given: Any) -> Any:
        plans.append(original(*given))
        return plans[-1]

    ours._runner._policy = record
    return plans
