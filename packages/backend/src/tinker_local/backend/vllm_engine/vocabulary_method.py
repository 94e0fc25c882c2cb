"""vLLM's embeddings and LM heads in 8 bits: they look up, and multiply by, the rows of codes that the trainer has.

vLLM gives its classes a method for that through the `quant_config` of the layers, and half of its models give them
none. So the method, and the parameters, are put in when the model is made and nothing is loaded. They have a row for
each token, without vLLM's padding to multiples of 64: the trainer's matrix has no such rows.
"""

import functools
from typing import Any

import torch
from tinker_local.backend.weights.codes import FEW, Packed, times
from tinker_local.backend.weights.layout import OWN
from tinker_local.backend.weights.packed import CODES, ORDER, SCALES, ZEROS, tensors_of
from tinker_local.backend.weights.packed_vocabulary import VocabularyMatrix, rows_of
from tinker_local.types import UnsupportedError


@functools.cache
def _method() -> Any:
    """What vLLM calls of a layer's method: an instance, which has no state."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class VocabularyMethod(QuantizeMethodBase):
        def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
            raise NotImplementedError("a layer has its weights when it gets this method")

        def process_weights_after_loading(self, layer: Any) -> None:
            """They stay as they are."""

        def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
            return rows_of(tensors_of(layer), input_, layer.weight.dtype)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            product = _times(x, tensors_of(layer))
            return product if bias is None else product + bias[: product.shape[-1]]

    return VocabularyMethod()


def _times(x: torch.Tensor, stored: Packed) -> torch.Tensor:
    """x W^T for `x` [M, H]: few rows by a kernel that reads the codes where there is one, others by pieces of W."""
    return times(x, stored) if x.is_cuda and len(x) <= FEW else VocabularyMatrix(stored, x.dtype).times(x)


def pack_vocabularies(model: Any, precision: str, device: torch.device, where: str) -> bool:
    """Give each embedding and LM head of vLLM's `model` codes of `precision` and scales in place of its matrix; tied
    ones have the same. They are on `device`, and have no numbers yet. Returns whether there is one matrix alone.
    UnsupportedError if it has other embeddings, or several processes with parts of them. `where`: the model's name."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    if not layers:
        raise UnsupportedError(
            f"{where}: --head-precision {precision}: this model has none of vLLM's embeddings in this vLLM; serve it "
            "without the option"
        )
    made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    kept: list[torch.Tensor] = []  # so that no other gets the number of one of them
    for layer in layers:
        weight = layer.weight
        if layer.tp_size > 1 or layer.num_added_embeddings:
            raise UnsupportedError(
                f"{where}: --head-precision {precision}: vLLM has {layer.num_added_embeddings} more rows than the "
                f"vocabulary and {layer.tp_size} parts of the embedding; only a whole one without others is packed"
            )
        if id(weight) not in made:
            made[id(weight)] = _parameters(layer.org_vocab_size, layer.embedding_dim, precision, device)
            kept.append(weight)
        del layer.weight
        for name, parameter in zip((CODES, SCALES, ZEROS, ORDER), (*made[id(weight)], None, None), strict=True):
            layer.register_parameter(name, parameter)
        # vLLM's adapters ask for its dtype and where it is.
        layer.weight = torch.empty(0, layer.embedding_dim, dtype=weight.dtype, device=device)
        layer.quant_method, layer.curved = _method(), OWN[precision].curved
    return len(made) == 1


def _parameters(
    rows: int, inputs: int, precision: str, device: torch.device
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    layout = OWN[precision]
    codes = torch.empty(rows, inputs, dtype=torch.int8, device=device)
    scales = torch.empty(rows, layout.groups(inputs), dtype=getattr(torch, layout.scales), device=device)
    return torch.nn.Parameter(codes, requires_grad=False), torch.nn.Parameter(scales, requires_grad=False)
