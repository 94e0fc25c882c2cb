"""Tiny models of each family with adapters trained on them, and logprobs as users of the libraries compute them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from PIL import Image
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.families import family_of
from tinker_local.backend.rendering.hf_images import HFImages
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, LoraConfig

from tests.float64 import Exact, assert_near

PICTURE = Image.fromarray(np.random.default_rng(5).integers(0, 256, (96, 160, 3), dtype=np.uint8))
QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Tuned:
    """`checkpoint`: a folder as the server writes it; `exported`: the same with the hosted service's names. `expected`:
    the trainer's logprobs of the conversation; `base`: those of the base model. `exact`: what is expected, computed in
    float64, and how far rounding moves it."""

    model: Path
    checkpoint: Path
    exported: Path
    rank: int
    expected: npt.NDArray[np.float32]
    base: npt.NDArray[np.float32]
    exact: tuple[npt.NDArray[np.float32], float]

    def assert_near(self, logprobs: npt.NDArray[np.float32]) -> None:
        """That these are the logprobs of what was trained, in float32."""
        assert_near(logprobs, *self.exact)


def asked(folder: Path) -> Any:
    """The conversation as a user of transformers prepares it: with an image if the model reads images."""
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answer: dict[str, Any] = {"role": "assistant", "content": "Random noise, I think."}
    if family_of(config.model_type, "").vision is None:
        conversation: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}, answer]
        ids = tokenizer(tokenizer.apply_chat_template(conversation, tokenize=False))["input_ids"]
        return {"input_ids": torch.tensor([ids])}
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": QUESTION}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}, answer], tokenize=False)
    return processor(text=[text], images=[PICTURE], return_tensors="pt")


def hf_logprobs(model: Any, inputs: Any) -> npt.NDArray[np.float32]:
    """Of the last 12 tokens: the end of the question and the answer."""
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1].float()
    found: npt.NDArray[np.float32] = logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[-12:, 0].numpy()
    return found


def load(folder: Path | str) -> Any:
    """The whole model, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, family_of(config.model_type, "").auto_class)
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def rendered(folder: Path, inputs: Any) -> RenderedInput:
    ids = inputs["input_ids"][0].numpy().astype(np.int32)
    config = transformers.AutoConfig.from_pretrained(folder)
    vision = family_of(config.model_type, "").vision
    if vision is None:
        return RenderedInput(ids)
    read = HFImages(str(folder), vision.read_image).process(PICTURE)
    offset = int(np.argmax(ids == vision.tokens(config).pad))
    return RenderedInput(
        ids, (ImagePlacement(offset, RenderedImage("p", read.num_tokens, read.pixel_values, read.grid_thw)),)
    )


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tuned]:
    """(family, tied, head, vision): a tiny model with an adapter of rank 4 on the decoder, and if asked on LM head and
    vision tower."""

    @cache
    def make(family: str, tied: bool = True, head: bool = True, vision: bool = False) -> Tuned:
        root = tmp_path_factory.mktemp(family)
        if "_vl" in family or family in ("qwen3_5", "qwen3_5_moe", "gemma3"):
            model = make_tiny_vl_model(root / "model", family=family, tie_word_embeddings=tied)  # type: ignore[arg-type]
        else:
            model = make_tiny_text_model(root / "model", family=family, tie_word_embeddings=tied)  # type: ignore[arg-type]
        trainer = HFTrainer(TrainerConfig(str(model), name="tiny/served", dtype="float32", device="cpu"))
        trainer.create_adapter("a", LoraConfig(rank=4, seed=1, train_unembed=head, train_vision=vision))
        prompt = rendered(model, asked(model))
        targets = np.append(prompt.token_ids[1:], 0).astype(np.int64)
        datum = TrainDatum(prompt, targets, {"weights": np.ones(prompt.length, np.float32)})
        for _ in range(3):
            trainer.forward_backward([TrainWork("a", [datum], "cross_entropy")])
            trainer.optim_step("a", AdamParams(learning_rate=0.01))
        for name, state in (("checkpoint", trainer.capture("a", optimizer=True)), ("exported", trainer.export("a"))):
            (root / name).mkdir()
            write_adapter(root / name, state)
        expected, base = (trainer.logprobs(which, prompt)[-12:] for which in ("a", None))
        assert np.abs(expected - base).max() > 0.5
        exact, moved = Exact(trainer).logprobs("a", prompt)
        return Tuned(model, root / "checkpoint", root / "exported", 4, expected, base, (exact[-12:], moved))

    return make
