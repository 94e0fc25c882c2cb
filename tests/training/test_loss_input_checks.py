"""Bad loss inputs are refused with the field's name and the numbers; nothing is repaired or dropped."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.losses import LOSSES, NEAREST, loss_of
from tinker_local.backend.training.losses.loss import make_train_datum
from tinker_local.types import (
    Datum,
    EncodedTextChunk,
    InvalidRequestError,
    ModelInput,
    ProvenanceSpan,
    TensorData,
    UnsupportedError,
)

N, VOCAB = 4, 100


def datum(spans: Any = None, **inputs: Any) -> Any:
    return Datum(
        model_input=ModelInput(chunks=(EncodedTextChunk(tokens=[1, 2, 3, 4]),)),
        loss_fn_inputs=inputs,
        model_input_spans=spans and spans[0],
        loss_fn_input_spans=spans and spans[1],
    )


def check(loss_fn: Any = "cross_entropy", spans: Any = None, **inputs: Any) -> Any:
    rendered = RenderedInput(np.arange(N, dtype=np.int32))
    return make_train_datum(datum(spans, **inputs), rendered, loss_of(loss_fn), VOCAB, "data[3]")


def refusal(*words: Any, loss_fn: Any = "cross_entropy", spans: Any = None, **inputs: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(loss_fn, spans, **inputs)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


TARGETS = np.array([5, 6, 7, 8])
ONES = np.ones(N, np.float32)


def test_absent_weights_are_ones() -> None:
    result = check(target_tokens=TARGETS)
    np.testing.assert_array_equal(result.loss_inputs["weights"], ONES)
    assert result.target_tokens.dtype == np.int64


def test_lists_become_arrays_of_the_right_kind() -> None:
    result = check("ppo", target_tokens=[1, 2, 3, 4], logprobs=[0, 0, 0, 0], advantages=[0, 1, 0, -1])
    assert {name: array.dtype for name, array in result.loss_inputs.items()} == dict.fromkeys(
        ("logprobs", "advantages"), np.dtype(np.float32)
    )


@pytest.mark.mutation(
    "sparse-cells-out-of-place",
    "TensorData.to_numpy",
    "dense[rows, self.sparse_col_indices] = self.data",
    "dense.reshape(-1)[: self.data.size] = self.data",
)
def test_sparse_targets_and_weights_are_made_dense() -> None:
    sparse = {
        "shape": (N, 3),
        "sparse_crow_indices": np.array([0, 1, 1, 3, 3]),
        "sparse_col_indices": np.array([2, 0, 1]),
    }
    result = check(
        target_tokens=TensorData(data=np.array([9, 8, 7]), dtype="int64", **sparse),
        weights=TensorData(data=np.array([0.5, -1.0, 2.0]), dtype="float32", **sparse),
    )
    assert result.target_tokens.tolist() == [[0, 0, 9], [0, 0, 0], [8, 7, 0], [0, 0, 0]]
    assert result.loss_inputs["weights"].tolist() == [[0, 0, 0.5], [0, 0, 0], [-1, 2, 0], [0, 0, 0]]


def test_lengths_that_differ_are_refused_with_both_numbers() -> None:
    refusal("data[3].loss_fn_inputs.target_tokens", 5, 4, target_tokens=np.arange(5))
    refusal("data[3].loss_fn_inputs.weights", [3], [4], target_tokens=TARGETS, weights=np.ones(3, np.float32))
    refusal("weights", [4], [4, 2], target_tokens=np.ones((4, 2), np.int64), weights=ONES)


def test_unknown_and_missing_inputs_are_refused_by_name() -> None:
    refusal("data[3].loss_fn_inputs.mask", "target_tokens, weights", target_tokens=TARGETS, mask=ONES)
    refusal("loss_fn_inputs.masks", "unknown to ppo", loss_fn="ppo", target_tokens=TARGETS, masks=ONES)
    refusal("data[3].loss_fn_inputs.target_tokens", "missing", weights=ONES)
    refusal("data[3].loss_fn_inputs.advantages", "missing", loss_fn="ppo", target_tokens=TARGETS, logprobs=ONES)


POLICY_LOSSES = [name for name, loss in LOSSES.items() if "weights" not in loss.inputs and loss.recorded is None]
POLICY = {"target_tokens": TARGETS, "logprobs": -ONES, "advantages": ONES}


def policy(loss_fn: str) -> dict[str, Any]:
    return POLICY | ({"sequence_ratio_mask": ONES} if loss_fn == "gspo" else {})


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@pytest.mark.parametrize("name", ["weights", "mask"])
def test_ones_beside_a_loss_without_weights_change_nothing(loss_fn: str, name: str) -> None:
    plain = check(loss_fn, **policy(loss_fn))
    for ones in (ONES, [1, 1, 1, 1], np.ones(N, np.int64)):
        given = check(loss_fn, **policy(loss_fn), **{name: ones})
        assert given.loss_inputs.keys() == plain.loss_inputs.keys()


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@pytest.mark.parametrize("name", ["weights", "mask"])
@pytest.mark.parametrize("value", [0.0, 0.5, -1.0, np.nan, np.inf])
def test_other_numbers_beside_a_loss_without_weights_are_refused_with_the_first(
    loss_fn: str, name: str, value: float
) -> None:
    """Ignoring a mask would train on what it leaves out."""
    given = ONES.copy()
    given[[2, 3]] = value, 7.0
    words = (f"data[3].loss_fn_inputs.{name}: {value} at position 2", f"{loss_fn} has no {name}", "advantages 0")
    refusal(*words, loss_fn=loss_fn, **policy(loss_fn), **{name: given})


def test_ones_of_another_shape_are_refused() -> None:
    for wrong in (ONES[:3], np.ones((N, 2), np.float32), np.ones((1, N), np.float32)):
        refusal("data[3].loss_fn_inputs.mask", list(wrong.shape), [N], loss_fn="ppo", **POLICY, mask=wrong)


@pytest.mark.mutation(
    "not-a-number-becomes-0",
    "_loss_input",
    "np.asarray(_of_targets_shape(tensor, targets, field_name), dtype=np.float32)",
    "np.nan_to_num(np.asarray(_of_targets_shape(tensor, targets, field_name), dtype=np.float32))",
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_numbers_that_are_not_finite_are_refused_with_their_position(name: Any, value: Any) -> None:
    inputs = {"logprobs": ONES.copy(), "advantages": ONES.copy()}
    inputs[name][2] = value
    refusal(f"data[3].loss_fn_inputs.{name}", value, "position 2", loss_fn="cispo", target_tokens=TARGETS, **inputs)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("loss_fn", [name for name, loss in LOSSES.items() if loss.recorded is None])
def test_targets_outside_the_vocabulary_are_refused_only_where_they_count(loss_fn: Any, token: Any) -> None:
    targets = TARGETS.copy()
    targets[1] = token
    loss = LOSSES[loss_fn]
    inputs = {name: ONES.copy() for name in loss.inputs}
    refusal("target_tokens", token, "position 1", VOCAB, loss_fn=loss_fn, target_tokens=targets, **inputs)
    for name in loss.target_inputs:
        inputs[name][1] = 0
    assert check(loss_fn, target_tokens=targets, **inputs).target_tokens[1] == token


def test_candidates_are_for_cross_entropy_only() -> None:
    wide = np.ones((N, 2), np.int64)
    assert check(target_tokens=wide).loss_inputs["weights"].shape == (N, 2)
    refusal("target_tokens", [4, 2], loss_fn="ppo", target_tokens=wide, logprobs=ONES, advantages=ONES)
    refusal("target_tokens", [4, 1, 1], target_tokens=np.ones((N, 1, 1), np.int64))
    refusal("target_tokens", [4, 0], target_tokens=np.ones((N, 0), np.int64))


def test_float_targets_are_refused() -> None:
    refusal("target_tokens", "int64", target_tokens=TARGETS.astype(np.float32))


def test_provenance_is_accepted_and_must_tile() -> None:
    def spans(*lengths: Any) -> Any:
        return tuple(ProvenanceSpan(source="sampled", sequence_id="s", offset=0, length=n) for n in lengths)

    check(spans=(spans(3, 1), spans(0, 4)), target_tokens=TARGETS)
    refusal("data[3].model_input_spans", 3, 4, spans=(spans(3), spans(4)), target_tokens=TARGETS)
    refusal("data[3].loss_fn_input_spans", 5, 4, spans=(spans(4), spans(2, 3)), target_tokens=TARGETS)


@pytest.mark.parametrize("loss_fn", NEAREST)
def test_losses_of_the_sdk_that_are_not_here_are_refused_with_the_nearest(loss_fn: Any) -> None:
    with pytest.raises(UnsupportedError, match=NEAREST[loss_fn]):
        loss_of(loss_fn).complete_settings({})
    with pytest.raises(UnsupportedError):
        check(loss_fn, target_tokens=TARGETS)


@pytest.mark.mutation(
    "unknown-loss-is-cross-entropy",
    "loss_of",
    '    known = ", ".join(LOSSES)\n',
    '    known = ", ".join(LOSSES)\n    return LOSSES.get(loss_fn, CROSS_ENTROPY)\n',
)
def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="cross_entropy, importance_sampling, ppo, cispo"):
        loss_of("cross-entropy").complete_settings({})


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("name", ["clip_low_threshold", "clip_high_threshold"])
def test_thresholds_as_tensors_are_refused_with_what_to_do(loss_fn: Any, name: Any) -> None:
    inputs = dict.fromkeys(LOSSES[loss_fn].inputs, ONES)
    refusal(
        f"data[3].loss_fn_inputs.{name}",
        "loss_fn_config",
        loss_fn=loss_fn,
        target_tokens=TARGETS,
        **inputs,
        **{name: ONES},
    )


def test_without_a_mask_the_sequence_ratio_is_of_what_spans_call_sampled() -> None:
    def span(source: Any, length: int) -> ProvenanceSpan:
        return ProvenanceSpan(source=source, sequence_id="s:0", length=length)

    spans = ([span("prompt", N)], [span("prompt", 1), span("sampled", 2), span("prompt", 1)])
    inputs = {"target_tokens": TARGETS, "logprobs": -ONES, "advantages": ONES}
    assert check("gspo", spans, **inputs).loss_inputs["sequence_ratio_mask"].tolist() == [0, 1, 1, 0]
    given = check("gspo", spans, **inputs, sequence_ratio_mask=ONES)
    assert given.loss_inputs["sequence_ratio_mask"].tolist() == [1] * N


def test_the_mask_of_the_sequence_ratio_is_checked() -> None:
    """Without spans the mask is required, finite, as long as the targets, and not empty if an advantage counts."""
    policy = {"loss_fn": "gspo", "target_tokens": TARGETS, "logprobs": -ONES}
    field = "data[3].loss_fn_inputs.sequence_ratio_mask"
    refusal(field, "missing", "provenance spans", advantages=ONES, **policy)
    refusal(field, [3], [4], advantages=ONES, sequence_ratio_mask=ONES[1:], **policy)
    refusal(field, "nan", "position 0", advantages=ONES, sequence_ratio_mask=ONES * np.nan, **policy)
    refusal(field, "0 at all 4 positions", "advantages", advantages=ONES, sequence_ratio_mask=0 * ONES, **policy)
    policy.pop("loss_fn")
    assert (
        not check("gspo", advantages=0 * ONES, sequence_ratio_mask=0 * ONES, **policy).loss_inputs["advantages"].any()
    )
    refusal("sequence_ratio_mask", "unknown to ppo", loss_fn="ppo", advantages=ONES, sequence_ratio_mask=ONES, **policy)


def test_settings_are_completed_by_the_documented_defaults() -> None:
    assert loss_of("ppo").complete_settings({}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_of("cispo").complete_settings({}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert loss_of("dro").complete_settings({}) == {"beta": 0.05}
    assert loss_of("gspo").complete_settings({}) == {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    assert loss_of("ppo").complete_settings({"clip_high_threshold": 2}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 2.0,
    }
    equal = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    assert loss_of("ppo").complete_settings(equal) == equal


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("ppo", {"epsilon": 0.2}),
        ("cross_entropy", {"clip_low_threshold": 0.8}),
        ("ppo", {"clip_low_threshold": "0.8"}),
        ("ppo", {"clip_low_threshold": float("nan")}),
        ("cispo", {"clip_high_threshold": float("inf")}),
        ("ppo", {"clip_low_threshold": -0.1}),
        ("ppo", {"clip_low_threshold": 1.5}),
        ("gspo", {"clip_low_threshold": 1.5}),
        ("gspo", {"epsilon": 3e-4}),
        ("dro", {"beta": -0.05}),
        ("dro", {"kl_coeff": 0.01}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(loss_fn: Any, config: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(config))}"):
        loss_of(loss_fn).complete_settings(config)


def test_checks_and_families_load_without_torch() -> None:
    code = (
        "import sys, tinker_local.backend.training.losses.loss, tinker_local.backend.training.optimizers\n"
        "import tinker_local.backend.families\n"
        "assert not {'torch', 'transformers', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
