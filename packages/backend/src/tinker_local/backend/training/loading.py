"""Loads a base model for training: frozen, with its decoder's weights laid out for the forward and backward here."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tinker_local.backend.families import family_of
from tinker_local.backend.families.interface import Family
from tinker_local.backend.training import attention
from tinker_local.backend.training.decoder.weights import DecoderWeights, take_weights
from tinker_local.backend.training.vision_attention import use_packed_attention
from tinker_local.types import UnsupportedError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`model`: transformers' whole model, of which only embeddings and the vision tower run as modules. `decoder`: the
    weights between embeddings and LM head."""

    model: Any
    decoder: DecoderWeights
    family: Family
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tied_head(self) -> bool:
        """Whether the LM head's matrix is the embedding's."""
        return self.model.lm_head.weight is self.model.get_input_embeddings().weight


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
    model = getattr(transformers, family.auto_class).from_pretrained(path, dtype=chosen, attn_implementation="sdpa")
    model = model.to(place).eval().requires_grad_(False)
    if family.encode_images is not None:
        use_packed_attention(model.model.visual)
    decoder = take_weights(model.get_submodule(family.decoder_path), path)
    return LoadedModel(
        model, decoder, family, model.lm_head.out_features, text_config.max_position_embeddings, chosen, place
    )
