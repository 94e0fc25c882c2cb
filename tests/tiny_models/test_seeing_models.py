"""Tiny models of architectures that see: transformers loads them with their processors, and pictures count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinker_local.backend.tiny_models.seeing_models import SEEING, make_tiny_seeing_model
from transformers import AutoModelForImageTextToText, AutoProcessor

pytestmark = pytest.mark.more

SHAPES = ((64, 64), (200, 70), (70, 200), (32, 40))
"""Of pictures, in pixels."""

TEXT = "What is in this image?"


def picture(width: int, height: int, seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def loaded(name: str, folder: Path) -> tuple[Any, Any]:
    """A processor and a model, of which transformers neither misses a weight nor leaves one out."""
    make_tiny_seeing_model(folder, name)
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return AutoProcessor.from_pretrained(folder), model.eval()


def asked(processor: Any, pictures: list[Image.Image]) -> Any:
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": TEXT}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    bos = processor.tokenizer.bos_token
    written = {"add_special_tokens": not (bos and text.startswith(bos))}  # as transformers does in chats
    inputs = processor(text=text, images=pictures or None, return_tensors="pt", **written)
    return inputs.to(torch.float32)  # Llama 4's pixels have 16 bits


@pytest.mark.parametrize("name", SEEING)
def test_a_picture_becomes_as_many_positions_as_it_has_features_and_changes_what_follows(
    name: str, tmp_path: Path
) -> None:
    processor, model = loaded(name, tmp_path / "model")
    mark = model.config.image_token_id
    for shape in SHAPES:
        inputs, others = (asked(processor, [picture(*shape, seed)]) for seed in (0, 1))
        assert inputs["input_ids"].max() < model.config.get_text_config().vocab_size
        assert (inputs["input_ids"] == mark).sum() > 0
        assert torch.equal(inputs["input_ids"], others["input_ids"])
        with torch.no_grad():  # transformers compares the number of positions with that of features
            ours, theirs = (model(**each).logits[0, -1].log_softmax(-1) for each in (inputs, others))
        assert (ours - theirs).abs().max() > 0.05, shape


@pytest.mark.parametrize("name", SEEING)
def test_the_same_seed_gives_the_same_bytes_and_another_one_other_weights(name: str, tmp_path: Path) -> None:
    folders = [make_tiny_seeing_model(tmp_path / str(number), name, seed=seed) for number, seed in enumerate((0, 0, 1))]
    first, same, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == same
    assert {file for file in first if first[file] != other[file]} == {"model.safetensors"}


def test_an_occupied_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="exists already"):
        make_tiny_seeing_model(tmp_path, "llava")
