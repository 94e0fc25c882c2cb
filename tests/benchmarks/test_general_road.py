"""The benchmark of models that see and have no family here: the loop beside it learns the same, from the same data."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.more

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


PUBLISHED = {"internvl3.5-8b": 8.53, "mistral-small-3.2-24b": 24.01, "gemma-4-e4b": 7.63}
"""Billions of parameters; those of Gemma-4-E4B without its tower for sounds."""


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_a_shape_has_as_many_parameters_as_the_published_model(name: str, billions: float) -> None:
    import transformers
    from harness.seeing_shapes import SEEING_SHAPES
    from measurements.seeing_ways import full_config
    from tinker_local.backend.tiny_models.seeing_models import SEEING

    shape = SEEING_SHAPES[name]
    kind = SEEING[shape.architecture]
    model_class: Any = getattr(transformers, kind.model_class)
    tiny = model_class.config_class(**kind.config(kind.marks)).to_dict()
    with torch.device("meta"):
        model = model_class(model_class.config_class(**full_config(shape, tiny, layers=0)))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_fewer_layers_share_keys_in_the_same_part_of_them() -> None:
    from harness.seeing_shapes import SEEING_SHAPES
    from measurements.seeing_ways import full_config

    tiny = {"text_config": {"layer_types": ["full_attention"], "per_layer_config": {"0": {}}}, "vision_config": {}}
    text = full_config(SEEING_SHAPES["gemma-4-e4b"], tiny, layers=14)["text_config"]
    assert (text["num_hidden_layers"], text["num_kv_shared_layers"]) == (14, 6)
    assert "layer_types" not in text
    assert "per_layer_config" not in text


def test_settings_of_a_part_change_alone() -> None:
    from measurements.seeing_ways import changed

    tiny = {"part": {"most": 70, "patch": 16}, "length": 70, "size": 3}
    given = {"part": {"most": 280}, "length": 280}
    assert changed(tiny, given) == {"part": {"most": 280, "patch": 16}, "length": 280, "size": 3}


def test_heads_beyond_those_of_flash_attention_are_given_to_torch(tmp_path: Path) -> None:
    from baselines.padded_loop import attentions
    from measurements.seeing_ways import largest_head

    text = {"head_dim": 256, "per_layer_config": {"5": {"head_dim": 512}}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert largest_head(tmp_path) == 512
    assert attentions(512) == ["sdpa"]


def test_a_loop_that_runs_out_of_memory_takes_smaller_batches() -> None:
    from measurements.seeing_ways import first_step

    class Loop:
        def __init__(self) -> None:
            self.tried: list[int] = []

        def take_batches_of(self, batch: int) -> None:
            self.tried.append(batch)

        def step(self) -> torch.Tensor:
            if self.tried[-1] > 2:
                raise torch.OutOfMemoryError("too large")
            return torch.tensor(1.5)

        def forget(self) -> None:
            self.tried.append(0)

    loop: Any = Loop()
    assert first_step(loop) == 1.5
    assert loop.tried == [8, 0, 4, 0, 2]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_loop_learns_what_the_trainer_learns_whatever_computes_attention(name: str, tmp_path: Path) -> None:
    """In two batches, with padding. The gradient of B is compared; that of A is 0 at first."""
    from baselines.padded_loop import TORCH_FLASH, PaddedLoop, attentions
    from harness.scale import TINY
    from harness.seeing_shapes import SEEING_SHAPES
    from measurements.seeing_ways import examples, largest_head, rendered, write_model
    from measurements.training import make_trainer, work
    from tinker_local.backend.rendering.hf_images import processor_of
    from tinker_local.types import LoraConfig

    folder, shape = tmp_path / "model", SEEING_SHAPES[name]
    write_model(TINY, shape, 0, folder)
    shown = examples(TINY, shape, processor_of(str(folder)).image_token)
    data = rendered(folder, shown)
    assert attentions(largest_head(folder)) == [TORCH_FLASH, "sdpa"]
    gradients = {}
    for attention in attentions(largest_head(folder)):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of the adapter's A
            loop = PaddedLoop(TINY, folder, shown, attention)
        loop.take_batches_of(4)
        assert loop.padding > 0.04
        assert [ids.tolist() for ids in loop.tokens] == [datum.input.token_ids.tolist() for datum in data]
        gradients[attention] = gradient_of_b(loop)
    trainer = make_trainer(TINY, folder)
    trainer.create_adapter("a", LoraConfig(rank=TINY.rank, train_unembed=False))
    (result,) = trainer.forward_backward([work("a", data)])
    predicted = sum(int(datum.loss_inputs["weights"].sum()) for datum in data)
    for loss, norm in gradients.values():
        assert loss == pytest.approx(result.metrics["loss:sum"] / predicted, abs=1e-5)
        assert norm == pytest.approx(gradients["sdpa"][1], rel=1e-4)
    assert gradients["sdpa"][1] > 1e-3


def gradient_of_b(loop: Any) -> tuple[float, float]:
    """The mean loss, and the norm of the gradient of the last step."""
    norms: list[float] = []
    forget: Callable[[], None] = loop.forget
    parameters = [parameter for parameter in loop._wrapped.parameters() if parameter.requires_grad]

    def keep() -> None:
        found = torch.stack([each.grad.norm() for each in parameters if each.grad is not None])
        norms.append(float(found.norm()))
        forget()

    loop.forget = keep
    return float(loop.step()), norms[0]


def test_the_command_measures_a_shape_with_both_decoders() -> None:
    command = [sys.executable, "general_road.py", "--tiny", "--shapes", "mistral-small-3.2-24b", "--autograd"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
    assert "trained by the autograd decoder, new pictures in each step, 8 encoded in one" in done.stdout
    assert "the same pictures in each step, 0 encoded in one" in done.stdout
