"""transformers' layers of linear attention (Gated DeltaNet) on packed rows. Their own forward lets the sequences of a
row see each other: without `fla` it ignores where they begin."""

from typing import Any

import torch
from tinker_local.backend.training.kernels.delta_rule import DeltaRule, MixInputs, mix, mix_backward
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.weights.packed import dense_name

_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
PARAMETERS = {*(f"{name}.weight" for name in _LINEARS), "conv1d.weight", "A_log", "dt_bias", "norm.weight"}


def is_delta_net(module: Any) -> bool:
    """Whether `module` has the parameters of a Gated DeltaNet as Qwen3.5 has it. What it computes is compared later."""
    return {dense_name(name) for name, _ in module.named_parameters()} == PARAMETERS and module.activation == "silu"


def packed_delta_net(net: Any, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """What the module `net` makes of `hidden` [1, T, H], each of `segments` alone. Calls its Linear modules."""
    inputs = [getattr(net, name)(hidden)[0] for name in _LINEARS[:4]]
    mixed: torch.Tensor = _Mix.apply(segments, DeltaRule.of(net), *inputs)
    output: torch.Tensor = net.out_proj(mixed[None])
    return output


class _Mix(torch.autograd.Function):
    """Connects `mix` and `mix_backward` to autograd; keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, segments: Segments, rule: DeltaRule, *given: torch.Tensor) -> torch.Tensor:
        inputs = MixInputs(*(tensor.detach() for tensor in given))
        ctx.save_for_backward(*inputs)
        ctx.segments, ctx.rule = segments, rule
        return mix(inputs, segments, rule)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *mix_backward(grad, MixInputs(*ctx.saved_tensors), ctx.segments, ctx.rule)
