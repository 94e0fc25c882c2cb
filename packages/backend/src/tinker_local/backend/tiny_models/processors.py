"""Image and video processor settings of the vision-language families, as their published checkpoints have them."""

from dataclasses import dataclass, replace
from pathlib import Path

from tinker_local.backend.tiny_models.shapes import VisionShape
from tinker_local.backend.tiny_models.tokenizer import write_json

TEMPORAL_PATCH_SIZE = 2
"""Frames per patch; a still image is shown twice."""


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """`patch_size`: pixels per side. `mean`, `std`: per colour, of pixels in [0, 1]."""

    patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    processor_class: str
    video_processor_class: str


QWEN3_VL = ProcessorSettings(
    patch_size=16,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    processor_class="Qwen3VLProcessor",
    video_processor_class="Qwen3VLVideoProcessor",
)
# CLIP's colour statistics.
QWEN2_VL = ProcessorSettings(
    patch_size=14,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    processor_class="Qwen2VLProcessor",
    video_processor_class="Qwen2VLVideoProcessor",
)
QWEN2_5_VL = replace(QWEN2_VL, processor_class="Qwen2_5_VLProcessor")


def write_processors(out: Path, settings: ProcessorSettings, vision: VisionShape) -> None:
    """Write `preprocessor_config.json` and `video_preprocessor_config.json`."""
    common = {
        "processor_class": settings.processor_class,
        "size": {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
        "patch_size": vision.patch_size or settings.patch_size,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": vision.merge_size,
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
    }
    write_json(out / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"} | common)
    write_json(
        out / "video_preprocessor_config.json",
        {"video_processor_type": settings.video_processor_class} | common,
    )


GEMMA3_PATCH_SIZE = 4
GEMMA3_PATCHES = 16
"""Patches per side of an image, of whatever shape it was."""

GEMMA3_POOLING = 4
"""Patches per side of what becomes one position, as in the published models, whose images have 64 patches per side."""


def write_gemma3_processor(out: Path, vision: VisionShape) -> None:
    """Write `preprocessor_config.json` and `processor_config.json` of Gemma 3."""
    side = GEMMA3_PATCHES * (vision.patch_size or GEMMA3_PATCH_SIZE)
    common = {
        "processor_class": "Gemma3Processor",
        "image_seq_length": (GEMMA3_PATCHES // GEMMA3_POOLING) ** 2,
    }
    write_json(
        out / "preprocessor_config.json",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": side, "width": side},
            **common,
        },
    )
    write_json(out / "processor_config.json", common)
