"""Renderers of tiny models, one of each family, and HF's processors to compare them with."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.renderer import ModelRenderer
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.types import ImageChunk


class Rendering:
    """A renderer and HF's processor of the same model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self.folder = folder
        self.renderer = load_renderer(str(folder))
        self.processor: Any = AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return Rendering(make_tiny_vl_model(tmp_path_factory.mktemp("qwen3_vl") / "model"))


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return Rendering(make_tiny_vl_model(tmp_path_factory.mktemp("qwen2_5_vl") / "model", family="qwen2_5_vl"))


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def rendering(request: pytest.FixtureRequest) -> Rendering:
    """Each vision family in turn."""
    result: Rendering = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="session")
def text_renderer(tmp_path_factory: pytest.TempPathFactory) -> ModelRenderer:
    return load_renderer(str(make_tiny_text_model(tmp_path_factory.mktemp("text") / "model")))


class Pictures:
    """Random images and their files."""

    def noise(self, width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
        """Random pixels; alpha and palette are random too."""
        random = np.random.RandomState(seed)
        if mode == "P":
            image = Image.fromarray(random.randint(0, 256, (height, width), dtype=np.uint8), "P")
            image.putpalette(random.randint(0, 256, 768, dtype=np.uint8).tobytes())
            return image
        channels = len(Image.new(mode, (1, 1)).getbands())
        pixels = random.randint(0, 256, (height, width, channels), dtype=np.uint8)
        return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode)

    def file(self, image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, format, **options)
        return buffer.getvalue()

    def chunk(self, image: Image.Image, expected_tokens: int | None = None) -> ImageChunk:
        return ImageChunk(data=self.file(image), format="png", expected_tokens=expected_tokens)


@pytest.fixture(scope="session")
def pictures() -> Pictures:
    return Pictures()
