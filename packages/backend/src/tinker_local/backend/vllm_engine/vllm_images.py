"""Images as vLLM's renderer makes them, for the sampler."""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from tinker_local.backend.options import DType
from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.rendered_input import ImagePositions, ImageTokens, SamplerImage
from tinker_local.backend.vllm_engine import packed_method
from tinker_local.backend.vllm_engine.build_engine import model_arguments, prepare_environment, process_state_kept
from tinker_local.types import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image


UNREADABLE = (ValueError, IndexError, ZeroDivisionError)
"""What processors raise for shapes that they cannot read, or cut into tiles."""


class VLLMImages:
    """vLLM's renderer of one model, without an engine, weights or a device.

    Implements `ImageProcessor[SamplerImage]`. It renders single images, never prompts: in a prompt, vLLM would take
    pad ids that came as text for images. Its processor is not thread-safe, so it renders one image at a time.
    """

    def __init__(self, model: str, dtype: DType | None, tokens: ImageTokens) -> None:
        prepare_environment()
        with process_state_kept():
            from vllm.config import VllmConfig
            from vllm.engine.arg_utils import EngineArgs
            from vllm.renderers import renderer_from_config

            arguments = model_arguments(model, dtype)
            if "hf_overrides" in arguments:
                packed_method.register()
            config = VllmConfig(model_config=EngineArgs(**arguments).create_model_config())
            self._renderer = renderer_from_config(config)
        if getattr(self._renderer, "mm_processor", self) is None:  # as for LLaVA-NeXT-Video, which takes videos alone
            raise UnsupportedError(f"{model}: vLLM's {config.model_config.architecture} takes no images")
        self._tokens = tokens
        self._lock = threading.Lock()

    def process(self, image: "Image") -> SamplerImage:
        """vLLM's MultiModalKwargsItem of `image`."""
        tokens = self._tokens
        if tokens.alone:
            ids: list[int | None] = [tokens.pad]
        else:
            ids = [tokens.start, tokens.pad, tokens.end] if tokens.around is None else [tokens.start]
        prompt = {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [image]},
        }
        with self._lock:
            try:
                # Its cache gives an item without tensors the second time, for an engine that has them already.
                (rendered,) = self._renderer.render_cmpl([prompt], skip_mm_cache=True)
            except UNREADABLE as error:
                raise ImageError(f"image of {image.width}x{image.height} pixels: {error}") from error
        (place,) = rendered["mm_placeholders"]["image"]
        (item,) = rendered["mm_kwargs"]["image"]
        num_bytes = sum(_bytes(value) for value in item.get_data().values())
        if not tokens.alone:
            return SamplerImage(item, num_bytes, place.get_num_embeds())
        found = np.array(rendered["prompt_token_ids"][place.offset : place.offset + place.length], np.int32)
        holds = np.ones(place.length, np.bool_) if place.is_embed is None else place.is_embed.cpu().numpy()
        return SamplerImage(item, num_bytes, place.length, ImagePositions(found, holds))


def _bytes(value: Any) -> int:
    """Of a tensor, or of tensors in lists."""
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return int(getattr(value, "nbytes", 0))
