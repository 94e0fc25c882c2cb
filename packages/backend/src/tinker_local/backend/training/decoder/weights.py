"""A decoder's frozen weights as the forward and backward read them, taken out of transformers' modules.

Legend: H hidden size, Q = heads x head size, K = kv heads x head size, I intermediate size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix: `qkv` [Q + 2 K, H], `gate_up` [2 I, H]; `output`
    [H, Q], `down` [H, I]. `q_norm`, `k_norm` [head size] where the family has them, biases where it has them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All layers, the last norm, and the sizes. `rotary(embeds, position_ids)`: transformers' module for cos, sin."""

    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    epsilon: float
    rotary: Any
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    scaling: float

    @property
    def q_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size


def take_weights(decoder: Any, where: str) -> DecoderWeights:
    """The weights of a transformers decoder whose layers are those of Qwen2 and Qwen3: RMS norms before attention and
    MLP, rotary positions, SiLU. UnsupportedError for others; `where` names the model.

    Matrices that are joined are moved: the modules' own parameters become views of the joined one.
    """
    config = decoder.config
    if config.hidden_act != "silu":
        raise UnsupportedError(f"{where}: hidden_act {config.hidden_act!r} is not supported for training, only 'silu'")
    attention = decoder.layers[0].self_attn
    return DecoderWeights(
        layers=tuple(_layer(layer, where) for layer in decoder.layers),
        norm=decoder.norm.weight.detach(),
        epsilon=decoder.norm.variance_epsilon,
        rotary=decoder.rotary_emb,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=attention.head_dim,
        scaling=attention.scaling,
    )


def _layer(layer: Any, where: str) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    if any(module.bias is not None for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise UnsupportedError(f"{where}: an MLP with biases is not supported for training")
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=_joined(qkv),
        qkv_bias=None if qkv[0].bias is None else torch.cat([module.bias.detach() for module in qkv]),
        q_norm=_norm(attention, "q_norm"),
        k_norm=_norm(attention, "k_norm"),
        output=attention.o_proj.weight.detach(),
        output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach(),
    )


def _norm(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()


def _joined(modules: list[Any]) -> torch.Tensor:
    """The modules' weights one below the other, in memory that the modules share from now on."""
    joined = torch.cat([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        rows = module.weight.shape[0]
        module.weight = torch.nn.Parameter(joined[start : start + rows], requires_grad=False)
        start += rows
    return joined
