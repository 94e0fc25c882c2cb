"""Tiny random models of every family, and data for them. Nothing here needs a tokenizer or a processor."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.tiny_models.make_models import make_tiny_text_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig

VOCAB = 120
IMAGE_PAD = 111
PATCH_DIM = 3 * 2 * 4 * 4

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SPECIAL = {"image_token_id": IMAGE_PAD, "video_token_id": 112, "vision_start_token_id": 113, "vision_end_token_id": 114}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4}


def _qwen3(tied: bool, layers: int = 2, kv_heads: int = 2) -> Any:
    sizes = {**TEXT, "num_hidden_layers": layers, "num_attention_heads": 2 * kv_heads, "num_key_value_heads": kv_heads}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=tied))


def _qwen3_vl(tied: bool, kv_heads: int = 2) -> Any:
    sizes = {**TEXT, "num_attention_heads": 2 * kv_heads, "num_key_value_heads": kv_heads}
    rope = {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            text_config=dict(**sizes, head_dim=16, rope_parameters=rope),
            vision_config=dict(
                **VISION, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]
            ),
            tie_word_embeddings=tied,
            **SPECIAL,
        )
    )


def _qwen2_5_vl(tied: bool) -> Any:
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=dict(**TEXT, rope_parameters={**MROPE, "mrope_section": [2, 1, 1]}),
            vision_config=dict(**VISION, out_hidden_size=32, fullatt_block_indexes=[1], window_size=16),
            tie_word_embeddings=tied,
            **SPECIAL,
        )
    )


SMALL = TextShape(
    num_layers=3,
    hidden_size=64,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position_embeddings=512,
)
"""The other families' models: three layers, so that two are of the same kind."""

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: _qwen3(True),
    "qwen3_untied": lambda: _qwen3(False),
    "qwen3_deep": lambda: _qwen3(False, layers=10),
    "qwen2_5_vl": lambda: _qwen2_5_vl(False),
    "qwen2_5_vl_tied": lambda: _qwen2_5_vl(True),
    "qwen3_vl": lambda: _qwen3_vl(True),
    "qwen3_vl_untied": lambda: _qwen3_vl(False),
    "qwen3_untied_kv4": lambda: _qwen3(False, kv_heads=4),
    "qwen3_vl_kv4": lambda: _qwen3_vl(True, kv_heads=4),
}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `MODELS`, or of the project's tiny models by family, written on first use."""
    root = tmp_path_factory.mktemp("training-models")

    def path(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                if name not in MODELS:
                    # transformers multiplies experts on the CPU if their rows are multiples of 16 bytes.
                    shape = replace(SMALL, intermediate_size=64) if name in ("gpt_oss", "qwen3_moe") else SMALL
                    make_tiny_text_model(folder, family=name, shape=shape)
                    return folder
                model = MODELS[name]()
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        torch.nn.init.normal_(parameter, std=0.25)
                model.save_pretrained(folder)
        return folder

    return path


@pytest.fixture
def trainer(model_path: Callable[[str], Path]) -> Callable[..., HFTrainer]:
    """`trainer(name, **options)` in float32 on the CPU."""

    def make(name: str = "qwen3", **options: Any) -> HFTrainer:
        return HFTrainer(
            TrainerConfig(str(model_path(name)), name=name, **{"dtype": "float32", "device": "cpu", **options})
        )

    return make


@dataclass
class Maker:
    """Makes random inputs, data and requests of any loss."""

    rng: np.random.Generator

    def image(self, rows: int, columns: int) -> RenderedImage:
        pixels = self.rng.standard_normal((rows * columns, PATCH_DIM)).astype(np.float32)
        return RenderedImage(str(self.rng.integers(2**60)), rows * columns // 4, pixels, (1, rows, columns))

    def input(self, length: int, images: Sequence[tuple[int, tuple[int, int] | RenderedImage]] = ()) -> RenderedInput:
        """`images`: (offset, patches or image)."""
        token_ids = self.rng.integers(3, 100, length).astype(np.int32)
        placements = []
        for offset, image in images:
            rendered = image if isinstance(image, RenderedImage) else self.image(*image)
            token_ids[offset : offset + rendered.num_tokens] = IMAGE_PAD
            placements.append(ImagePlacement(offset, rendered))
        return RenderedInput(token_ids, tuple(placements))

    def datum(
        self, length: int, images: Sequence[Any] = (), loss_fn: str = "cross_entropy", candidates: int | None = None
    ) -> TrainDatum:
        shape = (length,) if candidates is None else (length, candidates)
        values = {
            name: self.rng.standard_normal(shape).astype(np.float32) - (4 if name == "logprobs" else 0)
            for name in LOSSES[loss_fn].inputs
        }
        if loss_fn == "gspo":
            values["sequence_ratio_mask"] = (self.rng.random(shape) < 0.8).astype(np.float32)
        return TrainDatum(self.input(length, images), self.rng.integers(0, VOCAB, shape), values)

    def group(self, prompt: RenderedInput, lengths: Sequence[int], **options: Any) -> list[TrainDatum]:
        """Data that go on from `prompt` by so many positions each. Every position has a target."""
        found = []
        for length in lengths:
            datum = self.datum(prompt.length + length, **options)
            datum.input.token_ids[: prompt.length] = prompt.token_ids
            found.append(replace(datum, input=replace(datum.input, images=prompt.images)))
        return found

    def work(
        self, adapter_id: str, lengths: Sequence[int], loss_fn: str = "cross_entropy", **options: Any
    ) -> TrainWork:
        data = [self.datum(length, loss_fn=loss_fn) for length in lengths]
        return TrainWork(adapter_id, data, loss_fn, loss_of(loss_fn).complete_settings({}), **options)


@pytest.fixture
def make() -> Maker:
    return Maker(np.random.default_rng(0))


@pytest.fixture
def add_adapter() -> Callable[..., AdapterState]:
    """`add_adapter(trainer, id, rank=…)`: an adapter whose B is not 0, so that A has a gradient; returns its state."""

    def add(trainer: HFTrainer, adapter_id: str, **config: Any) -> AdapterState:
        lora_config = LoraConfig(**{"rank": 4, "seed": 1, **config})
        trainer.create_adapter(adapter_id, lora_config)
        state = trainer.capture(adapter_id, optimizer=False)
        rng = np.random.default_rng(lora_config.seed)
        tensors = {
            name: (rng.standard_normal(array.shape) * 0.03).astype(np.float32) if "lora_B" in name else array
            for name, array in state.tensors.items()
        }
        state = replace(state, tensors=copy.deepcopy(tensors))
        trainer.load_adapter(adapter_id, state)
        return state

    return add


@pytest.fixture
def gradients() -> Callable[[HFTrainer, str], dict[str, np.ndarray]]:
    """The accumulated gradient of an adapter, by PEFT name, in the trainer's precision."""

    def read(trainer: HFTrainer, adapter_id: str) -> dict[str, np.ndarray]:
        adapter = trainer._adapters[adapter_id]
        flat = torch.zeros_like(adapter.weights) if adapter.gradient is None else adapter.gradient
        return {spec.name: spec.view(flat).clone().cpu().numpy() for spec in adapter.specs}

    return read


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Check that all arrays of two mappings agree, relative to the largest value of the second."""

    def check(first: Any, second: Any, tolerance: float) -> None:
        assert first.keys() == second.keys()
        scale = max(float(np.abs(array).max()) for array in second.values())
        assert scale > 0
        for name in second:
            np.testing.assert_allclose(first[name], second[name], rtol=0, atol=tolerance * scale, err_msg=name)

    return check


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `process_trainers`, as the processes import it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import process_trainers  # type: ignore[import-not-found]

    return process_trainers
