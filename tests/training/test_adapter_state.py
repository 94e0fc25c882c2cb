"""Adapters: how they start, what trains, and that a captured one continues exactly where it was."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig, NotFoundError

PARAMS = AdamParams(learning_rate=1e-2, weight_decay=0.1)


def step(trainer: Any, adapter_id: Any, work: Any) -> Any:
    (result,) = trainer.forward_backward([replace(work, adapter_id=adapter_id)])
    return result.metrics["loss:sum"], trainer.optim_step(adapter_id, PARAMS)["grad_norm"]


def tensors_equal(first: Any, second: Any) -> Any:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.mutation(
    "b-not-0-at-the-start",
    "initial_weights",
    '        if spec.factor == "A":\n            bound',
    "        if True:\n            bound",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_a_new_adapter_is_the_base_model(name: Any, dtype: Any, trainer: Any, make: Any) -> None:
    ours = trainer(name, dtype=dtype)
    ours.create_adapter("a", LoraConfig(rank=8))
    rendered = make.input(20)
    np.testing.assert_array_equal(ours.logprobs("a", rendered), ours.logprobs(None, rendered))


@pytest.mark.mutation(
    "seed-of-lora-ignored", "initial_weights", "if seed is None else seed) % 2**64", "if seed is None else 0) % 2**64"
)
def test_the_seed_alone_decides_the_first_weights(trainer: Any) -> None:
    ours = trainer()
    state = {}
    for name, seed in {"one": 7, "again": 7, "other": 8, "negative": -1, "huge": 2**100 + 3, "none": None}.items():
        ours.create_adapter(name, LoraConfig(rank=4, seed=seed))
        state[name] = ours.capture(name, optimizer=False).tensors
    assert tensors_equal(state["one"], state["again"])
    names = list(state)[1:]
    assert not any(tensors_equal(state[a], state[b]) for i, a in enumerate(names) for b in names[i + 1 :])
    for name, array in state["one"].items():
        if "lora_A" in name:  # PEFT's Kaiming-uniform with a = sqrt(5)
            bound = 1 / np.sqrt(array.shape[1])
            assert 0.8 * bound < np.abs(array).max() <= bound
        else:
            assert not array.any()


def test_the_global_random_state_is_left_alone(trainer: Any, make: Any) -> None:
    ours = trainer()
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    ours.create_adapter("a", LoraConfig(rank=4))
    step(ours, "a", make.work("a", [9, 4]))
    assert torch.equal(torch_state, torch.random.get_rng_state())
    np.testing.assert_array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]


def test_training_lowers_the_loss(trainer: Any, make: Any) -> None:
    ours = trainer("qwen3_vl")
    ours.create_adapter("a", LoraConfig(rank=8, seed=0))
    work = make.work("a", [9, 4])
    for datum in work.data:
        datum.loss_inputs["weights"][:] = 1
    losses = [step(ours, "a", work)[0] for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.mutation("flags-of-lora-ignored", "Target.is_trained", '"attn": config.train_attn', '"attn": True')
@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed"])
def test_flags_decide_what_trains(flag: Any, trainer: Any, make: Any) -> None:
    ours = trainer()
    flags = dict.fromkeys(["train_attn", "train_mlp", "train_unembed"], False) | {flag: True}
    ours.create_adapter("a", LoraConfig(rank=4, seed=0, **flags))
    modules = {"train_attn": "self_attn", "train_mlp": "mlp", "train_unembed": "lm_head"}
    assert all(modules[flag] in name for name in ours.capture("a", optimizer=False).tensors)
    before = ours.logprobs("a", make.input(5))
    step(ours, "a", make.work("a", [9]))
    assert all(array.any() for array in ours.capture("a", optimizer=False).tensors.values())
    assert before.shape == (4,)


def test_the_embedding_of_a_tied_model_is_never_trained(trainer: Any, make: Any) -> None:
    ours = trainer("qwen3")
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    before = {name: p.clone() for name, p in ours._loaded.model.named_parameters()}
    for _ in range(3):
        step(ours, "a", make.work("a", [9]))
    assert all(torch.equal(before[name], p) for name, p in ours._loaded.model.named_parameters())


@pytest.mark.mutation(
    "optimizer-state-not-restored",
    "HFTrainer._loaded_adapter",
    "        if state.optimizer is not None:\n",
    "        if False:\n",
)
def test_a_restored_adapter_continues_bit_for_bit(trainer: Any, make: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    works = [make.work("a", [9, 4, 12]) for _ in range(6)]
    for work in works[:3]:
        step(ours, "a", work)
    state = ours.capture("a", optimizer=True)
    fresh = trainer()
    fresh.load_adapter("b", state)
    assert [step(ours, "a", work) for work in works[3:]] == [step(fresh, "b", work) for work in works[3:]]
    first, second = ours.capture("a", optimizer=True), fresh.capture("b", optimizer=True)
    assert tensors_equal(first.tensors, second.tensors)
    assert tensors_equal(first.optimizer, second.optimizer)
    assert first.step == second.step == 6


def test_without_optimizer_state_the_optimizer_starts_afresh(trainer: Any, make: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    for _ in range(3):
        step(ours, "a", make.work("a", [9]))
    state = ours.capture("a", optimizer=False)
    assert state.optimizer is None
    assert state.step == 0
    ours.load_adapter("b", state)
    loaded = ours.capture("b", optimizer=True)
    assert tensors_equal(loaded.tensors, state.tensors)
    assert not any(moment.any() for moment in loaded.optimizer.values())


@pytest.mark.mutation(
    "captured-weights-shared", "to_host", 'tensor.to("cpu", dtype, copy=True)', 'tensor.to("cpu", dtype)'
)
def test_later_steps_do_not_change_what_was_captured(trainer: Any, make: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    step(ours, "a", make.work("a", [9]))
    state = ours.capture("a", optimizer=True)
    kept = {**state.tensors, **state.optimizer}
    copies = {name: array.copy() for name, array in kept.items()}
    step(ours, "a", make.work("a", [9]))
    assert tensors_equal(kept, copies)
    assert not tensors_equal(ours.capture("a", optimizer=False).tensors, state.tensors)


def test_loading_replaces_and_forgets_the_gradient(trainer: Any, make: Any, gradients: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    state = ours.capture("a", optimizer=True)
    step(ours, "a", make.work("a", [9]))
    ours.forward_backward([make.work("a", [9])])
    ours.load_adapter("a", state)
    assert tensors_equal(ours.capture("a", optimizer=True).tensors, state.tensors)
    assert not any(array.any() for array in gradients(ours, "a").values())


def test_tensors_that_do_not_fit_are_refused(trainer: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    state = ours.capture("a", optimizer=True)
    name = next(iter(state.tensors))
    wrong_shape = {**state.tensors, name: state.tensors[name][:, :-1]}
    not_finite = {**state.tensors, name: np.full_like(state.tensors[name], np.nan)}
    missing = {key: array for key, array in state.tensors.items() if key != name}
    unknown = {**state.tensors, "base_model.model.other.lora_A.weight": state.tensors[name]}
    for tensors, word in ((wrong_shape, name), (not_finite, "finite"), (missing, name), (unknown, "other")):
        with pytest.raises(InvalidRequestError, match=word.replace(".", r"\.")):
            ours.load_adapter("b", replace(state, tensors=tensors))
    with pytest.raises(InvalidRequestError, match="exp_avg_sq"):
        ours.load_adapter("b", replace(state, optimizer={k: v for k, v in state.optimizer.items() if "_sq" not in k}))
    with pytest.raises(NotFoundError):
        ours.capture("b", optimizer=False)


@pytest.mark.parametrize("rank", [129, 4096])
def test_ranks_above_the_maximum_are_refused_with_the_limits(rank: Any, trainer: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"rank: must be from 1 to 128, not {rank}"):
        trainer().create_adapter("a", LoraConfig(rank=rank))


def test_an_adapter_that_trains_nothing_is_refused(trainer: Any) -> None:
    config = LoraConfig(train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(InvalidRequestError, match="all false"):
        trainer().create_adapter("a", config)


def test_adapter_bytes_count_weights_gradient_and_two_moments(trainer: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4))
    weights = sum(array.nbytes for array in ours.capture("a", optimizer=False).tensors.values())
    assert ours.adapter_bytes(LoraConfig(rank=4)) == 4 * weights
    assert ours.adapter_bytes(LoraConfig(rank=8)) == 8 * weights


def test_gradients_add_up_until_a_step_and_are_gone_after_it(trainer: Any, make: Any, gradients: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    work = make.work("a", [9])
    ours.forward_backward([work])
    once = gradients(ours, "a")
    ours.forward_backward([work])
    for name, array in gradients(ours, "a").items():
        np.testing.assert_allclose(array, 2 * once[name], rtol=1e-6)
    norm = ours.optim_step("a", AdamParams(learning_rate=0.0, grad_clip_norm=1e-3))["grad_norm"]
    assert norm == pytest.approx(2 * np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in once.values())))
    assert ours.optim_step("a", PARAMS)["grad_norm"] == 0


def test_a_step_without_a_gradient_takes_a_zero_gradient(trainer: Any, make: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4, seed=0))
    step(ours, "a", make.work("a", [9]))
    before = ours.capture("a", optimizer=True)
    ours.optim_step("a", AdamParams(learning_rate=0.0, beta1=0.5))
    after = ours.capture("a", optimizer=True)
    assert after.step == before.step + 1
    assert tensors_equal(after.tensors, before.tensors)
    name = f"exp_avg.{next(iter(before.tensors))}"
    np.testing.assert_allclose(after.optimizer[name], before.optimizer[name] / 2, rtol=1e-6)


def test_a_removed_adapter_is_gone_and_its_name_is_free(trainer: Any) -> None:
    ours = trainer()
    ours.create_adapter("a", LoraConfig(rank=4))
    ours.remove_adapter("a")
    ours.remove_adapter("a")
    with pytest.raises(NotFoundError):
        ours.optim_step("a", PARAMS)
    ours.create_adapter("a", LoraConfig(rank=2))


@pytest.mark.mutation(
    "copy-shares-its-numbers",
    "HFTrainer.copy_adapter",
    "copied = adapter.copied(torch.clone)",
    "copied = adapter.copied(lambda flat: flat)",
)
@pytest.mark.parametrize(("model", "memory_is_short"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)])
def test_a_copy_keeps_the_numbers_of_its_moment_also_where_the_device_has_no_room(
    trainer: Any, make: Any, add_adapter: Any, monkeypatch: pytest.MonkeyPatch, model: str, memory_is_short: bool
) -> None:
    """The server's own saves are made from it, of experts' tensors too."""
    ours, work = trainer(model), make.work("a", [9, 5])
    add_adapter(ours, "a", rank=4)
    step(ours, "a", work)
    before = ours.capture("a", optimizer=True)
    with monkeypatch.context() as patched:
        if memory_is_short:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise torch.OutOfMemoryError

            patched.setattr(torch, "clone", refuse)
        layout = ours.copy_adapter("a", "copy")
    step(ours, "a", work)
    read = {
        name: np.concatenate([ours.read_adapter("copy", name, at, at + 500) for at in range(0, layout.size, 500)])
        for name in ("weights", *layout.states)
    }
    copied = layout.filled(read.pop("weights"), read)
    assert tensors_equal(copied.tensors, before.tensors)
    assert tensors_equal(copied.optimizer, before.optimizer)
    assert (copied.step, copied.peft_config()) == (before.step, before.peft_config())
    assert not tensors_equal(copied.tensors, ours.capture("a", optimizer=False).tensors)
