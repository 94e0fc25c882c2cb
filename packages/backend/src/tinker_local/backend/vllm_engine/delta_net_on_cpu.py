"""Gated DeltaNet in float32 on the CPU, in place of vLLM's kernels, which take bfloat16 alone.

Legend: T positions of a step, C channels of the convolution, W its taps, M value heads, K and V sizes of their heads.
"""

from typing import Any

import torch


def take_float32() -> None:
    """Make vLLM's operator for CPU accept float32. Call it before the first engine with such layers is built."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as module

    original: Any = module.cpu_gdn_attention_core
    if original.__module__ == __name__:
        return

    def core(
        mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: str
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            original(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = module.get_forward_context()
        layer: Any = context.no_compile_layers[module._resolve_layer_name(layer_name)]
        if context.attn_metadata is not None and context.attn_metadata[layer.prefix].num_actual_tokens:
            _run(module, layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    core.__annotations__["layer_name"] = module.LayerNameType  # torch reads the types of an operator's arguments
    module.cpu_gdn_attention_core = core


def _run(
    module: Any,
    layer: Any,
    step: Any,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write what the `layer` makes of `qkv` [T, C], `b` and `a` [T, M] to `out` [T, M, V]; one sequence of the `step`
    after the other. Reads and writes their states."""
    inputs, states = (
        module._conv_buffer_view(layer),
        module._ssm_state_view(layer),
    )  # [slots, C, W - 1], [slots, M, K, V]
    taps = module._unpacked_conv_weight(layer)
    starts, slots = step.non_spec_query_start_loc.tolist(), step.non_spec_state_indices_tensor.tolist()
    count = step.num_decodes + step.num_prefills
    continues = [True] * count
    if step.num_prefills:
        continues[step.num_decodes :] = step.has_initial_state[step.num_decodes : count].tolist()
    g = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias.float())
    beta = b.float().sigmoid()
    for start, stop, slot, continued in zip(starts, starts[1:], slots, continues, strict=False):
        before = inputs[slot] if continued else torch.zeros_like(inputs[slot])
        seen = torch.cat([before, qkv[start:stop].T], dim=-1)
        convolved = torch.nn.functional.conv1d(seen[None], taps[:, None], layer.conv1d.bias, groups=len(taps))[0]
        query, key, value = layer.rearrange_mixed_qkv(torch.nn.functional.silu(convolved).T)
        repeats = value.shape[2] // key.shape[2]
        out[start:stop], states[slot] = _rule(
            query[0].repeat_interleave(repeats, 1),
            key[0].repeat_interleave(repeats, 1),
            value[0],
            g[start:stop],
            beta[start:stop],
            states[slot] if continued else torch.zeros_like(states[slot]),
        )
        inputs[slot] = seen[:, 1 - taps.shape[1] :]


def _rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [T, M, V] and the last state [M, K, V] of a sequence that begins with `state`; by the rule's own
    formula, position by position (arXiv 2412.06464, equation 10). `query`, `key` [T, M, K], `value` [T, M, V]."""
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    outputs = torch.empty_like(value)
    for at, decay in enumerate(g.exp()):
        state = state * decay[:, None, None]
        held = torch.einsum("mk,mkv->mv", key[at], state)
        state = state + key[at][..., None] * (beta[at][:, None] * (value[at] - held))[:, None]
        outputs[at] = torch.einsum("mk,mkv->mv", query[at], state)
    return outputs, state
