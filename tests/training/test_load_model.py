"""The trainer loads transformers' own classes, whatever other libraries have registered under their names."""

from pathlib import Path

import pytest
import transformers
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.training.model.load_model import config_of, load_model
from tinker_local.backend.training.trainer_config import TrainerConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def test_a_config_class_that_another_library_registers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does so for models that were newer than transformers; its classes lack what transformers' models read."""

    class Registered(transformers.PreTrainedConfig):
        model_type = "qwen3_vl"

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {**CONFIG_MAPPING._extra_content, "qwen3_vl": Registered})
    folder = make_tiny_vl_model(tmp_path / "model", family="qwen3_vl")
    assert type(transformers.AutoConfig.from_pretrained(folder)) is Registered
    assert type(config_of(str(folder))) is transformers.Qwen3VLConfig
    loaded = load_model(TrainerConfig(str(folder), name="m", dtype="float32", device="cpu"))
    assert type(loaded.model) is transformers.Qwen3VLForConditionalGeneration
