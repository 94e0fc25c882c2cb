"""`HFTrainer` in a separate process gives the same results as inline, to the last bit."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.process_trainer import ProcessTrainer
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import Trainer, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, ApiError, InternalError, InvalidRequestError, LoraConfig, UnsupportedError

pytestmark = pytest.mark.more

Start = Callable[[str], ProcessTrainer]


@pytest.fixture
def in_process(model_path: Callable[[str], Path]) -> Iterator[Start]:
    """`in_process(name)`: the trainer of the fixture `trainer`, in a process."""
    started: list[ProcessTrainer] = []

    def start(name: str) -> ProcessTrainer:
        factory = partial(HFTrainer, TrainerConfig(str(model_path(name)), name=name, dtype="float32", device="cpu"))
        started.append(ProcessTrainer(factory))
        started[-1].load()
        return started[-1]

    yield start
    for trainer in started:
        trainer.close()


def run(trainer: Trainer, make: Any, add_adapter: Any, *, images: bool) -> dict[str, Any]:
    """Train two adapters for three steps, capture one and load it; returns every number by name."""
    first = make.datum(9, [(2, (4, 4))]) if images else make.datum(9)
    data = [first, make.datum(5), make.datum(7, candidates=2)]
    policy = make.work("b", [6], "importance_sampling")
    wrong = TrainWork("a", [make.datum(600)], "cross_entropy")
    seen: dict[str, Any] = {"bytes": np.array([trainer.adapter_bytes(LoraConfig(rank=rank)) for rank in (1, 4, 48)])}
    add_adapter(trainer, "a", rank=4)
    add_adapter(trainer, "b", rank=2, seed=7, train_unembed=False)
    for step in range(3):
        work = [
            TrainWork("a", data, "cross_entropy"),
            policy,
            wrong,
            TrainWork("a", data[:1], "cross_entropy", {}, backward=False),
        ]
        for at, result in enumerate(trainer.forward_backward(work)):
            if isinstance(result, ApiError):
                seen[f"error {step} {at}"] = (type(result), str(result))
                continue
            seen[f"metrics {step} {at}"] = result.metrics
            for index, output in enumerate(result.outputs):
                seen |= {f"{name} {step} {at} {index}": array for name, array in output.items()}
        for adapter in ("a", "b"):
            seen[f"step {step} {adapter}"] = trainer.optim_step(adapter, AdamParams(learning_rate=0.01))
    state = trainer.capture("a", optimizer=True)
    trainer.load_adapter("c", state)
    trainer.forward_backward([TrainWork("c", data, "cross_entropy")])
    trainer.optim_step("c", AdamParams(learning_rate=0.01, weight_decay=0.1))
    layout = trainer.copy_adapter("c", "copy")
    trainer.optim_step("c", AdamParams(learning_rate=0.01))
    last = trainer.capture("c", optimizer=True)
    for vector in ("weights", *layout.states):
        parts = [trainer.read_adapter("copy", vector, start, start + 999) for start in range(0, layout.size, 999)]
        seen[f"copied {vector}"] = np.concatenate(parts)
    seen |= {f"export {key}": array for key, array in trainer.export("a").tensors.items()}
    for name, captured in (("a", state), ("c", last)):
        assert captured.optimizer is not None
        seen |= {f"{name} {key}": array for key, array in {**captured.tensors, **captured.optimizer}.items()}
        seen[f"{name} config"] = (captured.peft_config(), captured.step)
    trainer.remove_adapter("copy")
    trainer.remove_adapter("b")
    seen["logprobs"] = trainer.logprobs("c", first.input)
    seen["base"] = trainer.logprobs(None, data[1].input)
    seen["images"] = trainer.images_encoded
    return seen


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_training_is_the_same_inline_and_in_a_process(
    trainer: Any, in_process: Start, make: Any, add_adapter: Any, name: str
) -> None:
    images = name == "qwen3_vl"
    generator = make.rng.bit_generator.state
    inline = run(trainer(name), make, add_adapter, images=images)
    make.rng.bit_generator.state = generator
    apart = run(in_process(name), make, add_adapter, images=images)
    assert inline.keys() == apart.keys()
    for key, value in inline.items():
        assert type(apart[key]) is type(value), key
        np.testing.assert_array_equal(apart[key], value, err_msg=key)
    assert inline["images"] == int(images)
    assert inline["error 0 2"][0] is InvalidRequestError


def test_an_unsupported_model_is_the_same_error_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(UnsupportedError) as inline:
        HFTrainer(TrainerConfig(str(tmp_path), name="gpt"))
    with pytest.raises(UnsupportedError) as apart:
        ProcessTrainer(partial(HFTrainer, TrainerConfig(str(tmp_path), name="gpt"))).load()
    assert str(apart.value) == str(inline.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fault_on_the_device_ends_the_process(trainers: ModuleType) -> None:
    trainer = ProcessTrainer(trainers.odd)
    trainer.load()
    with pytest.raises(InternalError, match="CUDA error"):
        trainer.discard_gradients("break_cuda")
    with pytest.raises(InternalError, match="exit code 70"):
        trainer.remove_adapter("a")
    trainer.close()
    assert torch.zeros(1, device="cuda").item() == 0
