"""Several requests in one call: sums, order, shared batches, and failures that affect only their own request."""

import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.lora.lora_batch import LoraBatch
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutPass
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.types import (
    AdamParams,
    InternalError,
    InvalidRequestError,
    LoraConfig,
    NotEnoughMemoryError,
    NotFoundError,
)
from torch.utils._python_dispatch import TorchDispatchMode


def scaled(datum: Any, name: Any, factor: Any) -> Any:
    return replace(
        datum, loss_inputs={**datum.loss_inputs, name: (datum.loss_inputs[name] * factor).astype(np.float32)}
    )


def run(trainer: Any, *works: Any) -> Any:
    results = trainer.forward_backward(works)
    assert all(isinstance(result, TrainResult) for result in results), results
    return results


@pytest.fixture
def ours(trainer: Any, add_adapter: Any, request: pytest.FixtureRequest) -> Any:
    """In float64 where a test does not say otherwise: rounding would hide small faults, or look like one."""
    made = trainer("qwen3", dtype=getattr(request, "param", "float64"))
    add_adapter(made, "a")
    add_adapter(made, "b", rank=8, seed=2, train_unembed=False)
    add_adapter(made, "c", rank=1, seed=3, train_attn=False)
    return made


@pytest.fixture
def gradient_of(ours: Any, gradients: Any) -> Any:
    """The gradient that requests add to adapter a, starting from none."""

    def read(*calls: Any) -> Any:
        ours.discard_gradients("a")
        for works in calls:
            run(ours, *works)
        return gradients(ours, "a")

    return read


# Sums


@pytest.mark.mutation(
    "normalised-by-weights",
    "cross_entropy.terms",
    "return Terms(-weights * logprobs, -weights)",
    "return Terms(-weights * logprobs / abs(weights).sum(), -weights / abs(weights).sum())",
    cases=("cross_entropy",),
)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_eight_times_the_coefficient_is_eight_times_loss_and_gradient(
    loss_fn: Any, ours: Any, make: Any, gradient_of: Any, assert_close: Any
) -> None:
    """For `dro` and `stable_reinforce`, this includes the penalty."""
    work = make.work("a", [9, 4, 20], loss_fn)
    config = {name: value * (8 if name in ("beta", "kl_coeff") else 1) for name, value in work.loss_config.items()}
    coefficient = "weights" if loss_fn == "cross_entropy" else "advantages"
    bigger = replace(work, data=[scaled(datum, coefficient, 8) for datum in work.data], loss_config=config)
    once, eight = run(ours, work, bigger)
    assert eight.metrics["loss:sum"] == pytest.approx(8 * once.metrics["loss:sum"], rel=1e-9)
    assert_close(gradient_of([bigger]), {k: 8 * v for k, v in gradient_of([work]).items()}, 1e-9)


@pytest.mark.mutation(
    "mean-gradient",
    "Loss.evaluate",
    "xp.where(active, derivative, 0.0))",
    "xp.where(active, derivative, 0.0) / len(logprobs))",
    cases=("cross_entropy",),
)
@pytest.mark.mutation(
    "mean-loss",
    "Tally.add",
    "computed.losses[span].sum(dtype=torch.float64)",
    "computed.losses[span].mean(dtype=torch.float64)",
    cases=("cross_entropy",),
)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_four_copies_give_four_times_the_gradient(
    loss_fn: Any, ours: Any, make: Any, gradient_of: Any, assert_close: Any
) -> None:
    work = make.work("a", [9, 4], loss_fn)
    four = replace(work, data=[*work.data] * 4)
    once, quadruple = run(ours, work, four)
    assert quadruple.metrics["loss:sum"] == pytest.approx(4 * once.metrics["loss:sum"], rel=1e-9)
    assert_close(gradient_of([four]), {k: 4 * v for k, v in gradient_of([work]).items()}, 1e-9)


@pytest.mark.mutation(
    "last-gradient-only",
    "HFTrainer._add_gradient",
    "gradient if adapter.gradient is None else adapter.gradient.add_(gradient)",
    "gradient",
    cases=("ppo",),
)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_plus_b_is_a_then_b(loss_fn: Any, ours: Any, make: Any, gradient_of: Any, assert_close: Any) -> None:
    """As one request, as two requests of one call, and as two calls."""
    first, second = make.work("a", [9, 4], loss_fn), make.work("a", [6, 30, 2], loss_fn)
    union = replace(first, data=[*first.data, *second.data])
    expected = gradient_of([union])
    assert_close(gradient_of([first], [second]), expected, 1e-9)
    assert_close(gradient_of([first, second]), expected, 1e-9)


def test_loss_is_the_sum_of_what_is_reported_per_position(ours: Any, make: Any) -> None:
    (result,) = run(ours, make.work("a", [9, 4, 20]))
    losses = np.concatenate([output["elementwise_loss"] for output in result.outputs])
    rounding = float(np.spacing(np.abs(losses)).sum())  # they are reported in float32
    assert result.metrics == {"loss:sum": pytest.approx(float(losses.sum(dtype=np.float64)), abs=rounding)}


# Targets


@pytest.mark.mutation(
    "targets-rebuilt",
    "pack",
    "targets = [item.datum.target_tokens for item in items]",
    "targets = [np.append(d.input.token_ids[1:], 0).astype(np.int64) if d.target_tokens.ndim == 1 else d.target_tokens"
    " for d in (item.datum for item in items)]",
)
def test_targets_are_those_given(ours: Any, make: Any) -> None:
    """Targets are neither shifted nor derived from the input: the same hidden states score any targets."""
    datum = make.datum(12)
    other = replace(datum, target_tokens=np.roll(datum.target_tokens, 3))
    wide = replace(
        datum,
        target_tokens=np.stack([datum.target_tokens, other.target_tokens], axis=1),
        loss_inputs={"weights": np.ones((12, 2), np.float32)},
    )
    works = [TrainWork("a", [d], "cross_entropy") for d in (datum, other, wide)]
    one, two, both = (result.outputs[0] for result in run(ours, *works))
    np.testing.assert_array_equal(both["logprobs"], np.stack([one["logprobs"], two["logprobs"]], axis=1))
    assert "elementwise_loss" in one
    assert "elementwise_loss" not in both
    mixed = run(ours, TrainWork("a", [datum, wide], "cross_entropy"))[0]
    assert [list(output) for output in mixed.outputs] == [["logprobs"]] * 2  # the SDK reads the same fields of all
    assert np.abs(one["logprobs"] - two["logprobs"]).max() > 1e-3


@pytest.mark.mutation(
    "same-target-twice-counts-once",
    "LmHead._gradient",
    "of_target = _sums(derivative, chunk.same, len(chunk.same))[chunk.same]",
    "of_target = derivative",
)
def test_candidates_add_up_like_separate_data(
    trainer: Any, add_adapter: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    ours = trainer("qwen3", dtype="float64")
    add_adapter(ours, "a")
    wide = make.datum(12, candidates=3)
    wide.target_tokens[2:5, 1] = wide.target_tokens[2:5, 0]  # the same target twice
    wide.loss_inputs["weights"][7] = (1, -1, 0)  # a row whose softmax has no gradient
    columns = [
        replace(
            wide,
            target_tokens=np.ascontiguousarray(wide.target_tokens[:, k]),
            loss_inputs={"weights": np.ascontiguousarray(wide.loss_inputs["weights"][:, k])},
        )
        for k in range(3)
    ]
    run(ours, TrainWork("a", [wide], "cross_entropy"))
    together = gradients(ours, "a")
    ours.discard_gradients("a")
    run(ours, TrainWork("a", columns, "cross_entropy"))
    assert_close(together, gradients(ours, "a"), 1e-9)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_positions_with_coefficient_zero_add_nothing_whatever_their_target(
    loss_fn: Any, ours: Any, make: Any, gradient_of: Any, assert_close: Any
) -> None:
    datum = make.datum(20, loss_fn=loss_fn)
    loss = LOSSES[loss_fn]
    for name in loss.target_inputs:
        datum.loss_inputs[name][::2] = 0
    hostile_targets = datum.target_tokens.copy()
    hostile_targets[::2] = [-7, 10**9] * 5
    hostile = replace(datum, target_tokens=hostile_targets)
    config = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    config = {name: value for name, value in config.items() if name in loss.settings}
    works = [TrainWork("a", [d], loss_fn, config) for d in (datum, hostile)]
    plain, strange = run(ours, *works)
    assert strange.metrics["loss:sum"] == plain.metrics["loss:sum"]
    np.testing.assert_array_equal(strange.outputs[0]["logprobs"][1::2], plain.outputs[0]["logprobs"][1::2])
    assert np.isfinite(strange.outputs[0]["logprobs"]).all()
    expected = gradient_of([works[0]])
    assert_close(gradient_of([works[1]]), expected, 0.0)


def test_all_weights_zero_reports_logprobs_and_leaves_no_gradient(ours: Any, make: Any, gradients: Any) -> None:
    datum = scaled(make.datum(12), "weights", 0)
    (result,) = run(ours, TrainWork("a", [datum], "cross_entropy"))
    assert result.metrics["loss:sum"] == 0
    assert (result.outputs[0]["logprobs"] < 0).all()
    assert not any(array.any() for array in gradients(ours, "a").values())


# Order and shared batches


@pytest.mark.mutation(
    "first-loss-for-all",
    "LossEvaluation.derive",
    "loss = LOSSES[part.work.loss_fn]",
    "loss = LOSSES[self._parts[0].work.loss_fn]",
)
@pytest.mark.mutation(
    "totals-of-the-batch",
    "Tally.result",
    "loss.metrics(work.loss)",
    "loss.metrics(sum(other.loss for other in self.works.values()))",
)
@pytest.mark.mutation(
    "packed-order",
    "Tally.add",
    "outputs[item.index] = output",
    "outputs[self.works[item.work].outputs.index({})] = output",
)
def test_results_come_in_request_order_with_several_losses_in_one_call(ours: Any, make: Any) -> None:
    works = [
        make.work(adapter, lengths, loss_fn)
        for adapter, lengths, loss_fn in [
            ("b", [30, 2, 9], "ppo"),
            ("a", [5, 4, 40], "cross_entropy"),
            ("b", [7], "cispo"),
            ("a", [9, 3], "importance_sampling"),
            ("c", [12, 1], "cross_entropy"),
            ("b", [8, 6], "gspo"),
            ("c", [5, 11], "dro"),
        ]
    ]
    together = run(ours, *works)
    for work, result in zip(works, together, strict=True):
        assert [output["logprobs"].shape for output in result.outputs] == [d.target_tokens.shape for d in work.data]
        for index, output in enumerate(result.outputs):
            (alone,) = run(ours, replace(work, data=[work.data[index]]))
            np.testing.assert_allclose(output["logprobs"], alone.outputs[0]["logprobs"], atol=2e-6)
        (alone,) = run(ours, work)
        assert result.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], rel=1e-9)


def test_adapters_that_share_micro_batches_compute_what_each_does_alone(
    ours: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    """Ranks 4, 8 and 1 with different flags in one forward."""
    works = {name: make.work(name, [9, 4, 20, 9]) for name in "abc"}
    together = dict(zip(works, run(ours, *works.values()), strict=True))
    cobatched = {name: gradients(ours, name) for name in works}
    for name, work in works.items():
        ours.discard_gradients(name)
        (alone,) = run(ours, work)
        for output, expected in zip(together[name].outputs, alone.outputs, strict=True):
            np.testing.assert_allclose(output["logprobs"], expected["logprobs"], atol=1e-6)
        assert_close(cobatched[name], gradients(ours, name), 1e-9)


def test_a_forward_never_touches_gradients(ours: Any, make: Any, gradients: Any, assert_close: Any) -> None:
    work = make.work("a", [9, 4])
    (trained,) = run(ours, work)
    before = gradients(ours, "a")
    forward, _ = run(ours, replace(work, backward=False), make.work("b", [5]))
    assert_close(gradients(ours, "a"), before, 0.0)
    assert forward.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-9)


def test_logprobs_of_a_sequence_are_those_of_its_own_next_tokens(ours: Any, make: Any) -> None:
    datum = make.datum(12)
    datum = replace(datum, target_tokens=np.append(datum.input.token_ids[1:], 0).astype(np.int64))
    (result,) = run(ours, TrainWork("a", [datum], "cross_entropy"))
    np.testing.assert_allclose(ours.logprobs("a", datum.input), result.outputs[0]["logprobs"][:-1], atol=1e-6)
    assert np.abs(ours.logprobs(None, datum.input) - ours.logprobs("a", datum.input)).max() > 1e-3
    assert ours.logprobs("a", make.input(1)).shape == (0,)


# Failures


def test_requests_that_cannot_run_fail_alone_and_name_the_datum(
    ours: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    good = make.work("a", [9, 4])
    out_of_range = make.work("a", [3, 5])
    out_of_range.data[1].input.token_ids[2] = 120
    results = ours.forward_backward(
        [make.work("a", [5, 513]), good, make.work("absent", [3]), out_of_range, make.work("b", [5])]
    )
    too_long, fine, unknown, token, other = results
    assert isinstance(too_long, InvalidRequestError)
    assert "data[1].model_input: 513 positions" in str(too_long)
    assert "512" in str(too_long)
    assert isinstance(unknown, NotFoundError)
    assert isinstance(token, InvalidRequestError)
    assert "data[1].model_input: token 120" in str(token)
    assert isinstance(fine, TrainResult)
    assert isinstance(other, TrainResult)
    together = gradients(ours, "a")
    ours.discard_gradients("a")
    run(ours, good)
    assert_close(gradients(ours, "a"), together, 1e-9)


def test_malformed_data_fails_its_own_request(ours: Any, make: Any) -> None:
    """Data that bypassed `make_train_datum`."""
    good = make.work("a", [9, 4])
    datum = make.datum(5)
    wrong = {
        "loss_fn: unknown loss": TrainWork("a", [datum], "mse"),
        "takes logprobs, advantages, sampled": TrainWork("a", [datum], "stable_reinforce"),
        "loss_fn_config.epsilon": TrainWork("a", [datum], "cross_entropy", {"epsilon": 1}),
        "takes logprobs, advantages": TrainWork("a", [datum], "ppo"),
        "data[0].loss_fn_inputs: cross_entropy takes weights of shape [5], not nothing": TrainWork(
            "a", [replace(datum, loss_inputs={})], "cross_entropy"
        ),
        "shape [4] for 5 positions": TrainWork(
            "a", [replace(datum, target_tokens=datum.target_tokens[1:])], "cross_entropy"
        ),
    }
    results = ours.forward_backward([*wrong.values(), good])
    assert isinstance(results.pop(), TrainResult)
    for message, result in zip(wrong, results, strict=True):
        assert isinstance(result, InvalidRequestError)
        assert message in str(result)


def test_absent_settings_take_their_defaults(ours: Any, make: Any) -> None:
    work = make.work("a", [9, 4], "ppo")
    given, absent = run(ours, work, replace(work, loss_config={}))
    assert given.metrics == pytest.approx(absent.metrics, rel=1e-9)


def infinite_ratio(make: Any, adapter_id: Any) -> Any:
    work = make.work(adapter_id, [6, 8, 3], "importance_sampling")
    work.data[1].loss_inputs["logprobs"][4] = -5000
    return work


@pytest.mark.mutation(
    "not-a-number-passes", "MicroBatchRunner.finish", "            if not finite.all():\n", "            if False:\n"
)
@pytest.mark.mutation(
    "one-failure-fails-the-batch",
    "HFTrainer._train",
    "for part in [again] if failed else",
    "for part in [] if failed else",
)
def test_a_loss_that_is_not_finite_fails_its_request_and_leaves_no_gradient(
    ours: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    good, sibling, other = make.work("a", [9, 4]), make.work("a", [6, 30, 2], "ppo"), make.work("b", [5, 7])
    run(ours, good)
    run(ours, sibling, other)
    expected = {name: gradients(ours, name) for name in "ab"}
    for name in "ab":
        ours.discard_gradients(name)
    run(ours, good)
    results = ours.forward_backward([infinite_ratio(make, "a"), sibling, infinite_ratio(make, "b"), other])
    for failed in (results[0], results[2]):
        assert isinstance(failed, InvalidRequestError)
        assert "data[1]: the loss is not finite at position 4" in str(failed)
    assert all(isinstance(results[i], TrainResult) for i in (1, 3))
    for name in "ab":
        assert_close(gradients(ours, name), expected[name], 1e-9)


@pytest.mark.parametrize("ours", ["float32"], indirect=True)
@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_a_threshold_that_float32_cannot_hold_means_no_bound(loss_fn: Any, ours: Any, make: Any) -> None:
    """Clients send it for "no upper bound", here next to a request of another model."""
    work, other = make.work("a", [6, 8], loss_fn), make.work("b", [5])
    results = [
        ours.forward_backward([replace(work, loss_config={"clip_high_threshold": high}), other])
        for high in (1e30, 1e39, sys.float_info.max)
    ]
    assert all(isinstance(result, TrainResult) for pair in results for result in pair)
    first, *others = (pair[0].metrics for pair in results)
    assert others == [first, first]


def test_a_failed_request_costs_the_others_one_more_pass_in_all(
    ours: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass each would let a client slow the others down to one request at a time."""
    passes, original = [], ours._runner.run

    def counted(packed: Any, *args: Any, **options: Any) -> Any:
        passes.append(packed)
        return original(packed, *args, **options)

    monkeypatch.setattr(ours._runner, "run", counted)
    works = [make.work("a", [6, 5]) for _ in range(5)]
    results = ours.forward_backward([*works[:3], infinite_ratio(make, "a"), *works[3:], infinite_ratio(make, "a")])
    assert [at for at, result in enumerate(results) if not isinstance(result, TrainResult)] == [3, 6]
    assert len(passes) == 2


def test_a_failure_in_a_late_micro_batch_takes_the_earlier_ones_back(
    trainer: Any, add_adapter: Any, make: Any, gradients: Any
) -> None:
    ours = trainer("qwen3", micro_batch_tokens=8)
    add_adapter(ours, "a")
    work = make.work("a", [3, 4, 5, 8], "importance_sampling")
    work.data[3].loss_inputs["logprobs"][0] = -500
    (failed,) = ours.forward_backward([work])
    assert isinstance(failed, InvalidRequestError)
    assert not any(array.any() for array in gradients(ours, "a").values())


@pytest.mark.parametrize("ours", ["float32"], indirect=True)
def test_a_gradient_that_is_not_finite_fails_its_request_only(
    ours: Any, make: Any, gradients: Any, assert_close: Any
) -> None:
    """The loss is finite, but its gradient overflows float32."""
    good = make.work("c", [9, 4])
    run(ours, good)
    expected = gradients(ours, "c")
    ours.discard_gradients("c")
    huge = make.work("c", [9])
    huge.data[0].loss_inputs["weights"][:] = 2e37
    for order in ([huge, good], [good, huge]):
        ours.discard_gradients("c")
        results = ours.forward_backward(order)
        assert isinstance(results[order.index(huge)], InvalidRequestError)
        assert "gradient is not finite" in str(results[order.index(huge)])
        assert isinstance(results[order.index(good)], TrainResult)
        assert_close(gradients(ours, "c"), expected, 1e-3)  # far more than rounding


@pytest.mark.mutation(
    "steps-untried",
    "Optimizer.step",
    "            self._try(xp, weights, gradient, state, settings, norm, tensors, limits)\n",
    "            pass\n",
)
@pytest.mark.parametrize(
    ("size", "settings", "named"),
    [
        (1.0, {"eps": 0.0}, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight and of "),
        (1e21, {}, "exp_avg_sq of base_model.model.model.layers.0."),
        (1.0, {"learning_rate": 1e30, "weight_decay": 3e8}, "base_model.model.model.layers.0."),
    ],
)
def test_a_step_that_would_leave_what_is_not_finite_changes_nothing_and_drops_its_gradient(
    ours: Any, make: Any, gradients: Any, size: float, settings: dict[str, float], named: str
) -> None:
    """The first gradient of A is 0, since B is: without eps, AdamW divides 0 by 0."""
    ours.remove_adapter("a")
    ours.create_adapter("a", LoraConfig(rank=4, seed=1))
    for name in "ab":
        run(ours, make.work(name, [9, 4]))
    ours._adapters["a"].gradient *= size
    others = gradients(ours, "b")
    before = [ours.capture(name, optimizer=True) for name in "ab"]
    with pytest.raises(InvalidRequestError, match="the step was not taken and the gradient was discarded") as refused:
        ours.optim_step("a", AdamParams(**settings))
    assert named in str(refused.value)
    for name, state in zip("ab", before, strict=True):
        now = ours.capture(name, optimizer=True)
        assert now.step == state.step == 0
        for tensors, expected in ((now.tensors, state.tensors), (now.optimizer, state.optimizer)):
            for key, array in expected.items():
                np.testing.assert_array_equal(tensors[key], array)
    assert not any(array.any() for array in gradients(ours, "a").values())
    for key, array in gradients(ours, "b").items():
        np.testing.assert_array_equal(array, others[key])
    run(ours, make.work("a", [9, 4]))
    assert ours.optim_step("a", AdamParams())["grad_norm"] > 0


@pytest.mark.parametrize("ours", ["float32"], indirect=True)
def test_broken_weights_fail_only_their_own_requests(ours: Any, make: Any, gradients: Any) -> None:
    run(ours, make.work("a", [9]))
    ours.optim_step("a", AdamParams(learning_rate=1e30))
    broken, fine = ours.forward_backward([make.work("a", [9, 4]), make.work("b", [5])])
    assert isinstance(broken, InvalidRequestError)
    assert "not finite" in str(broken)
    assert isinstance(fine, TrainResult)
    assert all(np.isfinite(array).all() for array in gradients(ours, "b").values())


def test_a_gradient_lost_inside_the_model_is_an_error_of_the_server(
    ours: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with reentrant activation checkpointing, where autograd gives zeros and torch raises no error."""
    monkeypatch.setattr(LoraBatch, "add_gradients", lambda self, adapter, flat, groups: None)
    work = make.work("a", [9])
    (result,) = ours.forward_backward([replace(work, data=[scaled(work.data[0], "weights", 0.0)])])
    assert isinstance(result, TrainResult), "no target has a gradient"
    work.data[0].loss_inputs["weights"][:] = 1
    (result,) = ours.forward_backward([work])
    assert isinstance(result, InternalError)
    assert "zero" in str(result)


def test_a_first_gradient_that_cancels_to_zero_is_not_an_error(ours: Any, make: Any, gradients: Any) -> None:
    """The same candidate twice with opposite weights. Later gradients are still checked."""
    datum = make.datum(9, candidates=2)
    work = TrainWork("a", [datum], "cross_entropy")
    datum.target_tokens[:, 1] = datum.target_tokens[:, 0]
    datum.loss_inputs["weights"][:] = (1, -1)
    run(ours, work)
    assert not any(array.any() for array in gradients(ours, "a").values())
    assert not ours._adapters["a"].gradient_seen
    run(ours, make.work("a", [9]))
    assert ours._adapters["a"].gradient_seen


def test_a_first_gradient_of_a_certain_target_is_not_an_error(trainer: Any, make: Any, add_adapter: Any) -> None:
    """A loaded adapter that has memorised its data: p rounds to 1 in float32, so log p = 0."""
    ours = trainer("qwen3")
    ours._loaded.model.lm_head.weight.mul_(1000)
    add_adapter(ours, "a")
    datum = make.datum(1)
    all_ids = replace(datum, target_tokens=np.arange(120)[None], loss_inputs={"weights": np.ones((1, 120), np.float32)})
    (found,) = run(ours, TrainWork("a", [all_ids], "cross_entropy", backward=False))
    datum.target_tokens[0] = found.outputs[0]["logprobs"].argmax()
    datum.loss_inputs["weights"][:] = 1
    (result,) = run(ours, TrainWork("a", [datum], "cross_entropy"))
    assert result.outputs[0]["logprobs"] == 0


def test_a_loaded_adapter_whose_a_is_zero_is_not_an_error(ours: Any, make: Any) -> None:
    """If A is zero, so is B's gradient, but not A's."""
    adapter = ours._adapters["a"]
    for spec in adapter.specs:
        if spec.factor == "A":
            spec.view(adapter.weights).zero_()
    work = make.work("a", [9])
    work.data[0].loss_inputs["weights"][:] = 1
    run(ours, work)


# Memory


def out_of_memory_above(ours: Any, monkeypatch: pytest.MonkeyPatch, positions: Any) -> Any:
    """Make the decoder run out of memory, as CUDA does, for rows longer than `positions`; returns the lengths tried."""
    tried = []
    original = ours._runner._decoder.forward

    def forward(row: Any, lora: Any, policy: Any, walk: Any) -> Any:
        tried.append(len(row.embeds))
        if tried[-1] > positions:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(row, lora, policy, walk)

    monkeypatch.setattr(ours._runner._decoder, "forward", forward)
    return tried


def test_running_out_of_memory_halves_the_budget_and_tries_again(
    ours: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [make.work("a", [9, 4, 20, 9]), make.work("b", [5, 6, 7])]
    expected = run(ours, *works)
    expected_gradients = {name: gradients(ours, name) for name in "ab"}
    for name in "ab":
        ours.discard_gradients(name)
    tried = out_of_memory_above(ours, monkeypatch, 30)
    results = run(ours, *works)
    assert tried[0] == 60
    assert max(tried[1:]) <= 30
    assert ours.micro_batch_tokens == 30
    for result, wanted in zip(results, expected, strict=True):
        assert result.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-9)
    for name in "ab":
        assert_close(gradients(ours, name), expected_gradients[name], 1e-9)


def test_waiting_batches_are_split_to_the_halved_budget_too(
    ours: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At their old size, each would run out of memory in turn and halve the budget once more."""
    ours._budget.tokens = 40
    tried = out_of_memory_above(ours, monkeypatch, 25)
    run(ours, make.work("a", [20] * 8), make.work("b", [9, 5]))
    assert ours.micro_batch_tokens == 20
    assert tried[0] == 40
    assert max(tried[1:]) <= 20


@pytest.mark.more
def test_a_budget_that_was_halved_grows_back_when_memory_suffices(
    ours: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory still does not suffice, the budget is tried again, less often each time."""
    work = make.work("a", [9, 4, 20, 9, 18])
    monkeypatch.setattr(ours._budget, "_most", 60)
    ours._budget.tokens = 60
    with monkeypatch.context() as scarce:
        tried = out_of_memory_above(ours, scarce, 30)
        for _ in range(120):
            run(ours, work)
        failures = [at for at, length in enumerate(tried) if length > 30]
        gaps = [later - earlier for earlier, later in itertools.pairwise(failures)]
        assert len(failures) >= 3
        assert gaps == sorted(gaps), "tries become rarer"
        assert gaps[-1] >= 2 * gaps[0] - 4
    for _ in range(300):
        if ours.micro_batch_tokens == 60:
            break
        run(ours, work)
    assert ours.micro_batch_tokens == 60


def test_memory_that_runs_out_in_the_backward_leaves_nothing_half_done(
    ours: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make.work("a", [9, 4, 20, 9])
    run(ours, work)
    expected = gradients(ours, "a")
    ours.discard_gradients("a")
    original, calls = WrittenOutPass.backward, []

    def backward(done: Any, grad: Any) -> Any:
        calls.append(len(grad))
        embeds_grad = original(done, grad)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embeds_grad

    monkeypatch.setattr(WrittenOutPass, "backward", backward)
    run(ours, work)
    assert len(calls) > 1
    assert_close(gradients(ours, "a"), expected, 1e-9)


def test_memory_that_runs_out_after_the_last_micro_batch_leaves_nothing_half_done(
    ours: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first adapter would have its gradient by then, if that was added before the others were checked."""
    original = ours._gradient_fault

    def look(adapter_id: Any, tally: Any) -> Any:
        if adapter_id == "b":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(adapter_id, tally)

    monkeypatch.setattr(ours, "_gradient_fault", look)
    with pytest.raises(torch.OutOfMemoryError):
        ours.forward_backward([make.work("a", [9]), make.work("b", [5])])
    assert ours._adapters["a"].gradient is None


class OneAllocationFails(TorchDispatchMode):
    """Raises OutOfMemoryError before operator number `at`, counting only operators that allocate their result."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = func._schema.name.endswith("_") or any(argument.is_out for argument in func._schema.arguments)
        if in_place or func.is_view:
            return func(*args, **(kwargs or {}))
        if len(self.sizes) == self.at:
            self.sizes.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = func(*args, **(kwargs or {}))
        self.sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.more
@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_memory_that_runs_out_anywhere_leaves_nothing_half_done(
    decoder: Any, trainer: Any, add_adapter: Any, make: Any
) -> None:
    """Whichever allocation fails, a request adds all of its gradient to its adapter or none."""
    ours = trainer("qwen3_vl", dtype="float64", image_cache_bytes=0, decoder=decoder)
    add_adapter(ours, "a")
    add_adapter(ours, "b", rank=2, seed=2)
    works = [
        TrainWork("a", [make.datum(7), make.datum(9, [(2, (4, 4))])], "cross_entropy"),
        make.work("b", [6, 4], "ppo"),
        make.work("a", [3, 4, 5], "importance_sampling"),
    ]
    alone = []
    for work in works:
        run(ours, work)
        alone.append(ours._adapters[work.adapter_id].gradient)
        ours.discard_gradients(work.adapter_id)

    def attempt(at: Any) -> Any:
        ours._budget.tokens = 13  # one micro-batch has both adapters, some have one datum
        with OneAllocationFails(at) as memory:
            try:
                results = ours.forward_backward(works)
            except torch.OutOfMemoryError:
                results = [None] * len(works)
        for adapter_id, adapter in ours._adapters.items():
            ran = [
                w.adapter_id == adapter_id and isinstance(r, TrainResult) for w, r in zip(works, results, strict=True)
            ]
            expected = sum(gradient for gradient, there in zip(alone, ran, strict=True) if there)
            found = torch.zeros_like(adapter.weights) if adapter.gradient is None else adapter.gradient
            torch.testing.assert_close(found, expected + torch.zeros_like(found), msg=f"allocation {at}, {adapter_id}")
            ours.discard_gradients(adapter_id)
        return memory.sizes, [isinstance(result, TrainResult) for result in results]

    sizes, _ = attempt(-1)
    whole = {adapter.weights.numel() for adapter in ours._adapters.values()}  # gradients of an adapter, not of a layer
    places = {at for at, size in enumerate(sizes) if size in whole} | set(range(0, len(sizes), len(sizes) // 20))
    outcomes = [attempt(at)[1] for at in sorted(places)]
    assert [True] * 3 in outcomes, "tried again in smaller micro-batches"
    assert any(True in outcome and False in outcome for outcome in outcomes), (
        "a datum that does not fit fails only its request"
    )


def test_a_datum_that_does_not_fit_alone_fails_its_request_only(
    ours: Any, make: Any, gradients: Any, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, other = make.work("a", [9, 4]), make.work("b", [5])
    run(ours, good, other)
    expected = {name: gradients(ours, name) for name in "ab"}
    for name in "ab":
        ours.discard_gradients(name)
    out_of_memory_above(ours, monkeypatch, 30)
    failed, fine, also_fine = ours.forward_backward([make.work("a", [7, 50]), good, other])
    assert isinstance(failed, NotEnoughMemoryError)
    assert "data[1]: 50 positions" in str(failed)
    assert isinstance(fine, TrainResult)
    assert isinstance(also_fine, TrainResult)
    for name in "ab":
        assert_close(gradients(ours, name), expected[name], 1e-9)
