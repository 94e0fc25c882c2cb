"""The memory that a decoder takes is known before its model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tinker_local.backend.training.load_model import decoder_of_sizes

FAMILIES = ("llama", "mistral", "qwen2", "gemma2", "gemma3_text", "qwen3", "qwen3_untied", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.mutation(
    "kept-on-meta-counted-once",
    "training/decoders/autograd.py",
    "kept[-1][storage._cdata] = storage.nbytes()",
    "kept[-1][storage.data_ptr()] = storage.nbytes()",
)
@pytest.mark.mutation(
    "plan-of-the-other-decoder",
    "training/load_model.py",
    "found = make_decoder(model, family, kernels, decoder, config.name_or_path)",
    'found = make_decoder(model, family, kernels, "auto", config.name_or_path)',
)
@pytest.mark.parametrize("decoder", ["auto", "autograd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_without_values_tells_the_memory_of_the_loaded_one(
    family: str, decoder: Any, trainer: Any, model_path: Callable[[str], Path]
) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = trainer(family, decoder=decoder, dtype=dtype)._loaded
        config = transformers.AutoConfig.from_pretrained(model_path(family))
        planned, parameters = decoder_of_sizes(config, dtype, decoder)
        assert type(planned) is type(loaded.decoder)
        assert planned.memory(100, 16) == loaded.decoder.memory(100, 16)
        assert parameters == sum(parameter.numel() for parameter in loaded.model.parameters())
