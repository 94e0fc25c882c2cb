"""The fake trainer keeps the trainer's contract: gradients against autograd, sums, steps, state."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter import LORA_ALPHA
from tinker_local.backend.fakes import FakeModel, FakeTrainer, encode
from tinker_local.backend.fakes.fake_model import IMAGE_CODES
from tinker_local.backend.fakes.fake_trainer import evaluate
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig, NotFoundError

VOCAB = 24
MODEL = FakeModel(vocab_size=VOCAB, seed=3)
IMAGE = RenderedImage("ab" * 32, 3, np.zeros((3, 3), np.float32), (1, 1, 3))


def trainer_with_adapter(rank: int = 4) -> FakeTrainer:
    trainer = FakeTrainer(MODEL)
    trainer.create_adapter("m", LoraConfig(rank=rank, seed=1))
    trainer.forward_backward([TrainWork("m", [random_datum(99)], "cross_entropy")])
    trainer.optim_step("m", AdamParams(learning_rate=0.05))  # B is not 0 from here on
    return trainer


def random_datum(seed: int, loss_fn: str = "cross_entropy", length: int = 12, columns: int | None = None) -> TrainDatum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    tokens[5:8] = MODEL.image_pad_id
    shape = (length,) if columns is None else (length, columns)
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name in LOSSES[loss_fn].inputs}
    if "sequence_ratio_mask" in inputs:
        inputs["sequence_ratio_mask"] = (inputs["sequence_ratio_mask"] > -0.5).astype(np.float32)
    if "logprobs" in inputs:
        inputs["logprobs"] -= 3
    images = (ImagePlacement(5, IMAGE),) if seed % 2 else ()
    return TrainDatum(RenderedInput(tokens, images), rng.integers(0, VOCAB, shape), inputs)


def run(trainer: FakeTrainer, data: list[TrainDatum], loss_fn: str = "cross_entropy", **options: Any) -> TrainResult:
    (result,) = trainer.forward_backward([TrainWork("m", data, loss_fn, **options)])
    if isinstance(result, Exception):
        raise result
    return result


def gradients(trainer: FakeTrainer) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in trainer._adapters["m"].gradients.items()}


def autograd(trainer: FakeTrainer, datum: TrainDatum, loss_fn: str) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Loss, logprobs and gradients of one datum, written a second time with torch."""
    state = trainer.capture("m", optimizer=False)
    tensors = {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in state.tensors.items()
    }
    length = datum.input.length
    x = torch.zeros(length, VOCAB + IMAGE_CODES, dtype=torch.float64)
    in_image = np.zeros(length, bool)
    for placement in datum.input.images:
        in_image[placement.offset : placement.offset + placement.image.num_tokens] = True
        x[placement.offset :, VOCAB + int(placement.image.content_hash, 16) % IMAGE_CODES] = 1
    for position in np.flatnonzero(~in_image):
        x[position, int(datum.input.token_ids[position])] = 1
    logits = x @ torch.tensor(MODEL.base)
    for name in [name for name in tensors if "lora_A" in name]:
        b = tensors[name.replace("lora_A", "lora_B")]
        logits = logits + LORA_ALPHA / state.lora_config.rank * (x @ tensors[name].T @ b.T)
    targets = torch.tensor(datum.target_tokens).reshape(length, -1)
    logprobs = logits.log_softmax(-1).gather(1, targets).reshape(datum.target_tokens.shape)
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in datum.loss_inputs.items()}
    if loss_fn == "cross_entropy":
        loss = -(given["weights"] * logprobs).sum()
    else:
        ratio, advantages = torch.exp(logprobs - given["logprobs"]), given["advantages"]
        marked = given.get("sequence_ratio_mask", torch.ones(length)) != 0
        of_sequence = ratio[marked].log().mean().exp().detach() * torch.exp(logprobs - logprobs.detach())
        kept = ratio[marked].log().mean().abs() <= np.log(2)
        pull = torch.where(ratio <= 2, ratio - 1 - ratio.log(), 1 - np.log(2) + ratio.log() - np.log(2))
        loss = {
            "importance_sampling": -(ratio * advantages).sum(),
            "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(),
            "cispo": -(ratio.clamp(0.0, 4.0).detach() * logprobs * advantages).sum(),
            "dro": -(logprobs * advantages - 0.025 * (logprobs - given["logprobs"]) ** 2).sum(),
            "stable_reinforce": (0.01 * pull - kept * ratio.clamp(max=2).detach() * advantages * logprobs).sum(),
            "gspo": -torch.minimum(of_sequence * advantages, of_sequence.clamp(0.9997, 1.0004) * advantages).sum(),
        }[loss_fn]
    loss.backward()
    return loss.item(), logprobs.detach().numpy(), {name: tensor.grad.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("seed", [4, 5])  # without and with an image
def test_fake_losses_and_gradients_equal_autograd(loss_fn: str, seed: int) -> None:
    trainer = trainer_with_adapter()
    datum = random_datum(seed, loss_fn, length=40)
    expected_loss, expected_logprobs, expected = autograd(trainer, datum, loss_fn)
    result = run(trainer, [datum], loss_fn)
    assert result.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-12)
    np.testing.assert_allclose(result.outputs[0]["logprobs"], expected_logprobs, rtol=1e-6)
    for name, gradient in gradients(trainer).items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-12, err_msg=name)


def test_fake_cross_entropy_takes_k_targets_per_position() -> None:
    trainer = trainer_with_adapter()
    datum = random_datum(4, columns=3)
    expected_loss, expected_logprobs, expected = autograd(trainer, datum, "cross_entropy")
    result = run(trainer, [datum])
    assert result.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-12)
    np.testing.assert_allclose(result.outputs[0]["logprobs"], expected_logprobs, rtol=1e-6)
    assert "elementwise_loss" not in result.outputs[0]
    mixed = run(trainer_with_adapter(), [random_datum(4), datum])
    assert [list(output) for output in mixed.outputs] == [["logprobs"]] * 2  # the SDK reads the same fields of all
    for name, gradient in gradients(trainer).items():
        np.testing.assert_allclose(gradient, expected[name], atol=1e-12)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_fake_loss_is_a_sum_over_requests(loss_fn: str) -> None:
    data = [random_datum(seed, loss_fn) for seed in range(4)]
    together, apart = trainer_with_adapter(), trainer_with_adapter()
    total = run(together, data, loss_fn).metrics["loss:sum"]
    parts = [run(apart, data[:1], loss_fn), run(apart, data[1:], loss_fn)]
    assert total == pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-12)
    for name, gradient in gradients(together).items():
        np.testing.assert_allclose(gradients(apart)[name], gradient, atol=1e-12)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_fake_coefficient_zero_adds_exactly_nothing(loss_fn: str) -> None:
    datum = random_datum(4, loss_fn)
    for name in LOSSES[loss_fn].target_inputs:
        datum.loss_inputs[name][3:6] = 0
    trainer, wild = trainer_with_adapter(), trainer_with_adapter()
    run(trainer, [datum], loss_fn)
    datum.target_tokens[3:6] = [10**6, -100, 2**40]
    if loss_fn in ("importance_sampling", "ppo", "cispo"):
        datum.loss_inputs["logprobs"][3:6] = -1e30
    result = run(wild, [datum], loss_fn)
    assert all(np.array_equal(gradients(wild)[name], value) for name, value in gradients(trainer).items())
    assert np.isfinite(result.outputs[0]["logprobs"]).all()


def test_fake_forward_leaves_gradients_alone() -> None:
    trainer = trainer_with_adapter()
    first = run(trainer, [random_datum(4)], backward=False)
    assert gradients(trainer) == {}
    second = run(trainer, [random_datum(4)])
    assert first.metrics == second.metrics


def test_fake_failed_request_adds_nothing_and_others_go_on() -> None:
    trainer = trainer_with_adapter()
    good, bad = random_datum(4), random_datum(6)
    bad.loss_inputs["weights"][2] = np.nan
    results = trainer.forward_backward(
        [
            TrainWork("m", [good, bad], "cross_entropy"),
            TrainWork("m", [good], "no_such_loss"),
            TrainWork("m", [good], "ppo", {"clip": 1.0}),
            TrainWork("gone", [good], "cross_entropy"),
            TrainWork("m", [good], "cross_entropy"),
        ]
    )
    messages = [str(result) for result in results[:4]]
    assert "data[1]: the loss is not finite at position 2" in messages[0]
    assert "'no_such_loss'" in messages[1]
    assert "loss_fn_config.clip" in messages[2]
    assert isinstance(results[3], NotFoundError)
    assert isinstance(results[4], TrainResult)
    alone = trainer_with_adapter()
    run(alone, [good])
    assert all(np.array_equal(gradients(trainer)[name], value) for name, value in gradients(alone).items())


def test_fake_target_outside_the_vocabulary_is_refused_with_its_number() -> None:
    datum = random_datum(4)
    datum.target_tokens[2] = 777
    with pytest.raises(InvalidRequestError, match=r"data\[0\].*777.*24"):
        run(trainer_with_adapter(), [datum])


def test_fake_optim_step_equals_torch_adamw() -> None:
    trainer = trainer_with_adapter()
    trainer.load_adapter("m", trainer.capture("m", optimizer=False))  # a fresh optimizer
    start = trainer.capture("m", optimizer=False).tensors
    tensors = {name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in start.items()}
    settings = AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    optimizer = torch.optim.AdamW(tensors.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step in range(5):
        run(trainer, [random_datum(step)])
        for name, gradient in gradients(trainer).items():
            tensors[name].grad = torch.tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_(tensors.values(), 0.5)
        optimizer.step()
        assert trainer.optim_step("m", settings)["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, value in trainer.capture("m", optimizer=False).tensors.items():
        np.testing.assert_allclose(value, tensors[name].detach().numpy(), atol=2e-6)


def test_fake_new_adapter_changes_nothing_and_seed_fixes_it() -> None:
    trainer = FakeTrainer(MODEL)
    prompt = RenderedInput(np.arange(20, dtype=np.int32))
    for name, seed in [("a", 7), ("b", 7), ("c", -7), ("d", None), ("e", None)]:
        trainer.create_adapter(name, LoraConfig(rank=2, seed=seed))
        assert np.array_equal(trainer.logprobs(name, prompt), trainer.logprobs(None, prompt))
    key = "base_model.model.lm_head.lora_A.weight"
    a, b, c, d, e = (trainer.capture(name, optimizer=False).tensors[key] for name in "abcde")
    assert np.array_equal(a, b)
    assert not any(np.array_equal(x, y) for x, y in [(a, c), (a, d), (d, e)])


def test_fake_lora_flags_choose_the_modules() -> None:
    trainer = FakeTrainer(MODEL)
    trainer.create_adapter("m", LoraConfig(rank=2, train_attn=False, train_mlp=False))
    assert {name.split(".lora_")[0] for name in trainer.capture("m", optimizer=False).tensors} == {
        "base_model.model.lm_head"
    }
    with pytest.raises(InvalidRequestError, match="train_attn"):
        trainer.create_adapter("n", LoraConfig(train_attn=False, train_mlp=False, train_unembed=False))


def test_fake_restored_adapter_goes_on_bit_for_bit() -> None:
    trainer = trainer_with_adapter()
    state = trainer.capture("m", optimizer=True)
    restored = FakeTrainer(MODEL)
    restored.load_adapter("m", state)
    for step in range(3):
        for one in (trainer, restored):
            run(one, [random_datum(step)])
            one.optim_step("m", AdamParams(learning_rate=0.02))
    expected, got = trainer.capture("m", optimizer=True), restored.capture("m", optimizer=True)
    assert got.step == expected.step == 4
    assert all(np.array_equal(got.tensors[name], value) for name, value in expected.tensors.items())
    assert got.optimizer is not None
    assert expected.optimizer is not None
    assert all(np.array_equal(got.optimizer[name], value) for name, value in expected.optimizer.items())
    # What was captured is a copy.
    assert not np.array_equal(
        state.tensors["base_model.model.lm_head.lora_B.weight"],
        expected.tensors["base_model.model.lm_head.lora_B.weight"],
    )


def test_fake_adapters_do_not_disturb_each_other() -> None:
    trainer = trainer_with_adapter()
    alone = trainer_with_adapter()
    trainer.create_adapter("other", LoraConfig(rank=2, seed=5))
    work = [TrainWork(name, [random_datum(seed)], "cross_entropy") for name, seed in [("other", 1), ("m", 2)]]
    trainer.forward_backward(work)
    trainer.optim_step("other", AdamParams(learning_rate=1.0))
    run(alone, [random_datum(2)])
    for one in (trainer, alone):
        one.optim_step("m", AdamParams())
    assert all(
        np.array_equal(trainer.capture("m", optimizer=False).tensors[name], value)
        for name, value in alone.capture("m", optimizer=False).tensors.items()
    )


def test_fake_model_learns_a_sentence() -> None:
    trainer = FakeTrainer(FakeModel())
    trainer.create_adapter("m", LoraConfig(rank=8, seed=0))
    tokens = np.array(encode("The quick brow fx jmps\0"), np.int32)
    datum = TrainDatum(
        RenderedInput(tokens[:-1]), tokens[1:].astype(np.int64), {"weights": np.ones(len(tokens) - 1, np.float32)}
    )
    losses = []
    for _ in range(30):
        losses.append(run(trainer, [datum]).metrics["loss:sum"] / len(tokens))
        trainer.optim_step("m", AdamParams(learning_rate=0.02))
    assert losses[0] > 5
    assert losses[-1] < 0.3


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_fake_loss_selects_before_it_multiplies(loss_fn: str) -> None:
    """A probability of 0 at a position that is switched off: 0 · -inf would be NaN."""
    loss = LOSSES[loss_fn]
    inputs = {name: np.array([0.0, 1.0], np.float32) for name in loss.inputs}
    terms = evaluate(loss, np.array([-np.inf, -1.0]), inputs, loss.complete_settings({}))
    assert terms.values[0] == 0
    assert terms.derivative[0] == 0
    assert np.isfinite(terms.values).all()
