"""Models of random weights that are made in seconds without a network, for tests, the examples and the demo."""

from tinker_local.backend.tiny_models.demo_model import DEMO_FAMILIES, make_demo_vl_model
from tinker_local.backend.tiny_models.drawings_model import make_drawings_vl_model
from tinker_local.backend.tiny_models.make_models import (
    make_experts_alike,
    make_tiny_text_model,
    make_tiny_vl_model,
)
from tinker_local.backend.tiny_models.mosaic_model import make_mosaic_vl_model
from tinker_local.backend.tiny_models.shapes import TextShape, VisionShape
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES
from tinker_local.backend.tiny_models.tokenizer import COLOUR_WORDS, DIGIT_WORDS

__all__ = [
    "COLOUR_WORDS",
    "DEMO_FAMILIES",
    "DIGIT_WORDS",
    "TEXT_FAMILIES",
    "TextShape",
    "VisionShape",
    "make_demo_vl_model",
    "make_drawings_vl_model",
    "make_experts_alike",
    "make_mosaic_vl_model",
    "make_tiny_text_model",
    "make_tiny_vl_model",
]
