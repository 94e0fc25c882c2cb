"""Images as vLLM's renderer makes them, for the sampler."""

import threading
from typing import TYPE_CHECKING

from tinker_local.backend.options import DType
from tinker_local.backend.rendering.decoding import ImageError
from tinker_local.backend.rendering.rendered_input import ImageTokens, SamplerImage
from tinker_local.backend.vllm_engine import packed_method
from tinker_local.backend.vllm_engine.build_engine import model_arguments, prepare_environment, process_state_kept

if TYPE_CHECKING:
    from PIL.Image import Image


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
        self._tokens = tokens
        self._lock = threading.Lock()

    def process(self, image: "Image") -> SamplerImage:
        """vLLM's MultiModalKwargsItem of `image`."""
        tokens = self._tokens
        ids = [tokens.start, tokens.pad, tokens.end] if tokens.around is None else [tokens.start]
        prompt = {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [image]},
        }
        with self._lock:
            try:
                # Its cache gives an item without tensors the second time, for an engine that has them already.
                (rendered,) = self._renderer.render_cmpl([prompt], skip_mm_cache=True)
            except ValueError as error:
                raise ImageError(f"image of {image.width}x{image.height} pixels: {error}") from error
        (place,) = rendered["mm_placeholders"]["image"]
        (item,) = rendered["mm_kwargs"]["image"]
        num_bytes = sum(tensor.nbytes for tensor in item.get_data().values())
        return SamplerImage(item, num_bytes, place.get_num_embeds())
