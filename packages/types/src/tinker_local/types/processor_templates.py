"""What the processor of a model that sees says: its chat template, the positions of an image. Needs transformers."""

from collections.abc import Mapping
from typing import Any

SAME_FOR_EVERY_IMAGE = ("Gemma3Processor",)
"""Classes of processors with one number of positions for every image."""


def processor_template(model: str) -> str | None:
    """The chat template of a folder's or hub name's processor; None if it has none.

    It comes before the tokenizer's, as in transformers and vLLM: Qwen2.5-VL as published has one with images in
    `chat_template.json`, and its language model's, which only joins texts, in `tokenizer_config.json`. Where both are
    in `chat_template.jinja` they are the same.
    """
    found = _processor(model).get("chat_template")
    return found.get("default") if isinstance(found, Mapping) else found


def processor_positions(model: str) -> int | None:
    """The positions that the processor of a folder or hub name has for every image, as Gemma 3's; None if it has no
    such number. What others call so is that of a tile (InternVL), or the most of an image (Gemma 4)."""
    processor = _processor(model)
    found = processor.get("image_seq_length")
    return found if isinstance(found, int) and processor.get("processor_class") in SAME_FOR_EVERY_IMAGE else None


def _processor(model: str) -> Mapping[str, Any]:
    from transformers import ProcessorMixin

    try:
        return dict(ProcessorMixin.get_processor_dict(model)[0])
    except OSError:  # the model does not exist, or its files cannot be fetched
        return {}
