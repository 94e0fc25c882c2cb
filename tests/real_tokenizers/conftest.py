"""Published tokenizers and chat templates, and tiny models of random weights that have them."""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.text import ChatMessage
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES, TextFamilyName, text_settings
from tinker_local.backend.tiny_models.weights import random_weight

FILES = Path(__file__).parents[2] / ".test-files"
SHAPE = TextShape(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, max_position_embeddings=2048)


@dataclass(frozen=True)
class Real:
    """A published tokenizer, in the folder `folder` of `.test-files/`, for models of `family` with `vocab_size` rows in
    their embedding. `stops`: what ends their replies. `structure`: tokens that a template writes, or a model."""

    folder: str
    family: TextFamilyName
    vocab_size: int
    stops: tuple[str, ...]
    structure: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FILES / self.folder

    @cached_property
    def tokenizer(self) -> Any:
        """Hugging Face's, to compare with."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @cached_property
    def text(self) -> HFText:
        """As a server loads it."""
        return HFText(self.tokenizer)

    def ids(self, *messages: ChatMessage, go_on: bool = False, **asked: Any) -> list[int]:
        """A conversation as the server renders it."""
        variables = asked.pop("variables", {})
        return [int(token) for token in self.text.chat(messages, variables, go_on=go_on, **asked).to_tokens()]

    def hf_ids(self, messages: list[dict[str, Any]], **asked: Any) -> list[int]:
        """A conversation as Hugging Face's template and tokenizer render it."""
        asked = {"add_generation_prompt": True, **asked}
        found: list[int] = self.tokenizer.apply_chat_template(messages, return_dict=False, **asked)
        return found

    def text_ids(self, text: str) -> list[int]:
        """A text alone."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


REAL = {
    "qwen3": Real(
        "tokenizer-qwen3",
        "qwen3",
        151936,
        ("<|im_end|>", "<|endoftext|>"),
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_response>", "<think>", "</think>"),
    ),
    "gemma3": Real(
        "tokenizer-gemma3",
        "gemma3_text",
        262144,
        ("<eos>", "<end_of_turn>"),
        ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<start_of_image>", "<image_soft_token>"),
    ),
    "llama3": Real(
        "tokenizer-llama3_1",
        "llama",
        128256,
        ("<|eot_id|>", "<|end_of_text|>"),
        ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|reserved_special_token_5|>"),
    ),
    "gpt_oss": Real(
        "tokenizer-gptoss",
        "gpt_oss",
        201088,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|return|>", "<|constrain|>"),
    ),
}
"""By short names. Vocabulary sizes are those of the published models' configs."""


def real_one(name: str) -> Real:
    """A tokenizer by its short name; skips the test if its files are missing."""
    one = REAL[name]
    if missing := [file for file in ("tokenizer.json", "tokenizer_config.json") if not (one.path / file).exists()]:
        pytest.skip(f"no {one.folder}/{missing[0]} in .test-files; run scripts/fetch_test_files.py")
    return one


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Real:
    """Each of them in turn."""
    return real_one(request.param)


@pytest.fixture(params=["qwen3", "gemma3", "llama3"])
def chatting(request: pytest.FixtureRequest) -> Real:
    """Each that has a chat template in turn."""
    return real_one(request.param)


@pytest.fixture
def qwen3() -> Real:
    return real_one("qwen3")


def make_model(real: Real, out: Path) -> Path:
    """Write a tiny model of random float32 weights with this tokenizer into `out` and return it."""
    import torch
    import transformers

    family = TEXT_FAMILIES[real.family]
    model_class = getattr(transformers, family.model_class)
    ids = [real.tokenizer.convert_tokens_to_ids(stop) for stop in real.stops]
    own = {"vocab_size": real.vocab_size, "tie_word_embeddings": family.tied, "eos_token_id": ids}
    own |= {"bos_token_id": real.tokenizer.bos_token_id, "pad_token_id": real.tokenizer.pad_token_id}
    config = model_class.config_class(**{**text_settings(SHAPE, family.marks), **family.settings(SHAPE), **own})
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = random_weight(name, tuple(parameter.shape), 0, SHAPE.weight_scale)
            parameter.copy_(torch.from_numpy(value))
    model.generation_config.eos_token_id = ids
    model.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real.path / file, out)
    return out
