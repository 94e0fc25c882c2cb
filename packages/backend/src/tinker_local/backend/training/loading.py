"""Loads a base model for training: frozen, without dropout, with segment attention in its decoder."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from tinker_local.backend.training import attention
from tinker_local.backend.training.families import family_of
from tinker_local.backend.training.families.interface import Family
from tinker_local.types import UnsupportedError
from torch.utils.checkpoint import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`model`: transformers' whole model. `decoder`: takes `inputs_embeds` [1, T, H] and gives hidden states."""

    model: Any
    decoder: Any
    family: Family
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device


def load_model(path: str, dtype: str | None, device: str | None) -> LoadedModel:
    """Load the model at `path` (a folder or hub name) by the class that its config names.

    `device` None: CUDA if there is one. `dtype` None: bfloat16 on CUDA, float32 elsewhere. Raises UnsupportedError for
    a family or a kind of layer that is not trained here, before any weight is read.
    """
    config = transformers.AutoConfig.from_pretrained(path)
    family = family_of(config.model_type, path)
    text_config = config.get_text_config()
    if not attention.supported_layers(getattr(text_config, "layer_types", None) or ()):
        raise UnsupportedError(f"{path}: sliding-window attention is not supported for training")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = DTYPES[dtype or ("bfloat16" if place.type == "cuda" else "float32")]
    attention.register()
    model = getattr(transformers, family.auto_class).from_pretrained(
        path, dtype=chosen, attn_implementation=attention.attention_implementations(config)
    )
    model = model.to(place).eval().requires_grad_(False)
    decoder = model.get_submodule(family.decoder_path)
    if place.type == "cuda":
        recompute_layers(decoder)
    return LoadedModel(
        model, decoder, family, model.lm_head.out_features, text_config.max_position_embeddings, chosen, place
    )


def recompute_layers(decoder: Any) -> None:
    """Keep only each layer's input for the backward and compute the layer again: memory for time.

    transformers recomputes layers in training mode only; the mode of the layer alone is set, not of its parts, so
    nothing else changes. Not reentrant: with the reentrant kind adapters get zero gradients, as no input needs one.
    """
    for layer in decoder.layers:
        layer.training = True
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
