"""Embeddings of tokens that each layer reads beside its hidden states, as those of Gemma 3n and Gemma 4 (E2B, E4B).

A second table has P numbers of each token for each layer. To them a projection of the decoder's input is added, which
adapters do not train. Legend: T tokens, H hidden size, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

ProjectPerLayer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What layers read, [T, L, P], from the decoder's input [T, H] and the embeddings of `per_layer_embeddings`."""


def reads_per_layer(modules: Any) -> bool:
    """Whether the layers of transformers' decoder `modules` read such embeddings."""
    return getattr(modules, "embed_tokens_per_layer", None) is not None


def per_layer_embeddings(modules: Any, token_ids: torch.Tensor) -> torch.Tensor | None:
    """Those of `token_ids` [T], float [T, L, P]; None if layers read none."""
    if not reads_per_layer(modules):
        return None
    found: torch.Tensor = modules.get_per_layer_inputs(token_ids[None], None)[0]
    return found


def project_per_layer(modules: Any) -> ProjectPerLayer | None:
    """How transformers' decoder `modules` adds what its input gives; None if layers read nothing."""
    return functools.partial(_projected, modules) if reads_per_layer(modules) else None


def _projected(modules: Any, embeds: torch.Tensor, per_layer: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = modules.project_per_layer_inputs(embeds[None], per_layer[None])[0]
    return found


def per_layer_arguments(modules: Any, tokens: int, per_layer: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What the forward of transformers' decoder `modules` takes for `tokens` beside their embeddings: `per_layer`
    [T, L, P], or zeros. It would look for the ids otherwise."""
    if not reads_per_layer(modules):
        return {}
    if per_layer is None:
        config, weight = modules.config, modules.per_layer_model_projection.weight
        sizes = tokens, config.num_hidden_layers, config.hidden_size_per_layer_input
        per_layer = torch.zeros(sizes, dtype=weight.dtype, device=weight.device)
    return {"per_layer_inputs": per_layer[None]}
