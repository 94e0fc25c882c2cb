"""Random weights for a model, the same for a seed whatever the versions of torch and transformers."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.tiny_models.marks import Marks

_LOGIT_STD = 2.0
_NORM_JITTER = 0.1
_POSITION_STD = 0.3


def random_weight(name: str, shape: tuple[int, ...], seed: int, scale: float) -> npt.NDArray[np.float32]:
    """Values of the parameter `name`, drawn from a separate random stream.

    A matrix or filter gets N(0, scale^2 / fan_in), so that inputs of RMS 1 come out with RMS `scale`; so do the
    matrices [E, out, in] of experts. Token embeddings get N(0, 4 / hidden): logits of a normalised state then have a
    standard deviation of 2. Norm weights are near 1 and biases near 0 but neither is exactly so: a loader that skips
    one shows.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    noise = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(shape, dtype=np.float32)
    if name.endswith(("dt_bias", "A_log", "sinks")):
        return noise  # states that fade at once, and ones that last for dozens of positions
    if name.endswith("gate_up_proj_bias"):
        return 4 * noise  # now and then beyond the limits of gpt-oss
    if name.endswith("bias"):
        return np.float32(_NORM_JITTER) * noise
    if len(shape) == 1:
        return 1 + np.float32(_NORM_JITTER) * noise
    if "pos_embed" in name or "position_embedding_table" in name:
        return np.float32(_POSITION_STD) * noise
    fan_in = shape[-1] if ".experts." in name else math.prod(shape[1:])
    if "embed_tokens" in name or "lm_head" in name:
        scale = _LOGIT_STD
    return np.float32(scale / math.sqrt(fan_in)) * noise


def _random_buffer(name: str, initial: npt.NDArray[np.float32], seed: int) -> npt.NDArray[np.float32]:
    """Values of what a checkpoint has beside its parameters: scales near 1, and bounds of activations, infinite before,
    which some of RMS 1 cross."""
    jitter = random_weight(name.replace("bias", "offset"), initial.reshape(-1).shape, seed, 1.0).reshape(initial.shape)
    if np.isinf(initial).all():
        return np.asarray(np.copysign(2 * jitter, initial))
    return np.asarray(initial + jitter - 1)


def write_weights(
    model: Any,
    out: Path,
    seed: int,
    marks: Marks,
    *,
    text_scale: float,
    vision_scale: float = 1.0,
    as_held: bool = False,
) -> None:
    """Fill the HF model's parameters and its routers' biases with random values, and write it, with its configs, into
    `out`. `as_held`: its experts as transformers has them in memory."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = vision_scale if "visual" in name or "vision" in name else text_scale
            value = torch.from_numpy(random_weight(name, tuple(parameter.shape), seed, scale))
            if name.endswith("norm.weight") and not parameter.any():  # Gemma's norms multiply by 1 + w
                value -= 1
            parameter.copy_(value)
        kept = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(torch.from_numpy(_random_buffer(name, buffer.numpy(), seed)))
    model.generation_config.bos_token_id = None if marks.bos is None else marks.token_id(marks.bos)
    model.generation_config.eos_token_id = [marks.token_id(name) for name in marks.stops]
    model.generation_config.pad_token_id = marks.token_id(marks.pad)
    model.save_pretrained(out, save_original_format=not as_held)
