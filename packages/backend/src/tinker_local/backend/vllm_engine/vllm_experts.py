"""Adapters of routed experts in vLLM: in the hosted layout, and computed on CPU, which vLLM has no operators for."""

import functools
import importlib
import inspect
from itertools import pairwise
from typing import Any

import torch
from tinker_local.backend.families import family_of
from tinker_local.backend.training.kernels.kernels import TorchKernels
from tinker_local.backend.training.model.experts import GELU, SILU, ClampedGating
from tinker_local.backend.vllm_engine.compat_vllm import class_of_model, version
from tinker_local.backend.vllm_engine.lora_operators import Factors

_KERNELS = TorchKernels()


def share_factors(config: Any, _: int) -> None:
    """Have an engine of a model with experts, of vLLM's `config`, take adapters in which experts share factors."""
    model = config.model_config
    if family_of(model.hf_config.model_type, model.model).lora.experts is None:
        return
    config.lora_config.enable_moe_shared_loras = True
    if version() < (0, 32):  # it would take gate and up of some models as one projection
        is_3d = getattr(class_of_model(config), "is_3d_moe_weight", False)
        config.lora_config.enable_mixed_moe_lora_format = is_3d


def make_group_of_experts(config: Any, _: int) -> None:
    """Have vLLM know which ranks share the experts of a model of vLLM's `config`: it makes its groups with the first
    engine of a process, and this one only for a model with experts."""
    from vllm.distributed import parallel_state

    if not config.model_config.is_moe or not parallel_state.model_parallel_is_initialized():
        return
    if parallel_state._EP is None:
        world = parallel_state.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        # Engines have no data parallelism, so all ranks of one are in one group.
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [world.ranks], world.local_rank, backend, group_name="ep"
        )


def interleave_gate_and_up(config: Any, _: int) -> None:
    """Have vLLM's kernels add adapters of gate and up to the numbers where a model of vLLM's `config` has them: older
    ones have gate first."""
    experts = family_of(config.model_config.hf_config.model_type, config.model_config.model).lora.experts
    if experts is None or not experts.interleaved:
        return
    mixin: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin")
    original = mixin.LoRAExpertsMixin.apply_w13_lora
    if not hasattr(original, "__wrapped__") and "interleave" not in inspect.getsource(original):
        mixin.LoRAExpertsMixin.apply_w13_lora = interleaving(original)


def interleaving(add: Any) -> Any:
    """vLLM's method `add`, which writes to `y` [..., 2 I], gate first, for activations that want the two in turns."""

    @functools.wraps(add)
    def interleaved(self: Any, context: Any, *, y: torch.Tensor, add_inputs: bool = True, **given: Any) -> Any:
        if context.w13_num_slices != 2 or self.moe_config.activation.value != "swigluoai":
            return add(self, context, y=y, add_inputs=add_inputs, **given)
        found = torch.zeros_like(y)
        result = add(self, context, y=found, add_inputs=True, **given)
        found = found.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        y.copy_(y + found if add_inputs else found)
        return result

    return interleaved


def take_adapters_on_cpu() -> None:
    """Have vLLM compute experts that take adapters in plain torch; otherwise it chooses Triton, which has no CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    oracle: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    method: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    original = method.select_unquantized_moe_backend
    if hasattr(original, "in_torch"):
        return

    _route_with_bias()

    def select(moe_config: Any) -> Any:
        if moe_config.is_lora_enabled:
            return oracle.UnquantizedMoeBackend.CPU, experts_in_torch()
        return original(moe_config)

    select.in_torch = True  # type: ignore[attr-defined]
    oracle.select_unquantized_moe_backend = method.select_unquantized_moe_backend = select


def _route_with_bias() -> None:
    """Have vLLM's router for CPUs choose experts by sigmoids and with a bias also where they have no groups, as its
    routers for GPUs do: it knows both for groups alone, and leaves a bias out silently otherwise."""
    try:
        module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.router.cpu_router")
    except ImportError:  # before 0.32
        return
    original = module.CPURouter.__init__

    @functools.wraps(original)
    def with_one_group(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        scored = self.scoring_func == "sigmoid" or self.e_score_correction_bias is not None
        known = self.use_grouped_topk or self.custom_routing_function is not None
        if scored and not known and self.scoring_func in ("sigmoid", "softmax"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    module.CPURouter.__init__ = with_one_group


@functools.cache
def experts_in_torch() -> Any:
    """vLLM's class of experts that take adapters on a CPU."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    # Its limit and slope are those of gpt-oss, as in vLLM's own kernels, whatever a config says.
    gatings: Any = {
        MoEActivation.SILU: SILU,
        MoEActivation.SWIGLUOAI: ClampedGating(1.702, 7.0),
        MoEActivation.GELU_TANH: GELU,
    }

    class ExpertsInTorch(LoRAExpertsMixin, CPUUnquantizedExperts):
        """Expert by expert, with the adapters of the rows of each."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Leave the weights as they were loaded, not packed for vLLM's own kernel."""

        def matrix(self, place: int, stack: torch.Tensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
            """W_e [out, in] in `dtype`, of `stack`: gate and up (`place` 0) or down (1)."""
            return stack[expert]

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            **_: Any,
        ) -> None:
            """`hidden_states` [T, H], `w1` [E, 2 I, H], `w2` [E, H, I]; writes `output` [T, H]."""
            if activation not in gatings:
                raise NotImplementedError(f"experts with the activation {activation} take no adapters on CPU")
            gating = gatings[activation]
            context = self._lora_context
            slots = None if context is None else context.punica_wrapper.token_lora_indices  # -1 for the base model
            output.zero_()
            for expert in topk_ids.unique().tolist():
                tokens, nth = torch.nonzero(topk_ids == expert, as_tuple=True)
                x = hidden_states[tokens]
                gate_up = x @ self.matrix(0, w1, expert, x.dtype).T
                if self.w1_bias is not None:
                    gate_up += self.w1_bias[expert]
                halves = gating.halves(gate_up)
                if slots is not None:
                    stacked = context.w13_lora_a_stacked, context.w13_lora_b_stacked
                    for half, a, b in zip(halves, *stacked, strict=True):
                        _add_adapters(half, x, a, b, slots[tokens], expert)
                activated = gating.forward(gate_up, _KERNELS)
                found = activated @ self.matrix(1, w2, expert, x.dtype).T
                if self.w2_bias is not None:
                    found += self.w2_bias[expert]
                if slots is not None:
                    a, b = context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]
                    _add_adapters(found, activated, a, b, slots[tokens], expert)
                output.index_add_(0, tokens, (found * topk_weights[tokens, nth, None]).to(output.dtype))

    return ExpertsInTorch


def _add_adapters(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, expert: int
) -> None:
    """Add B A x of each row's adapter to `y` [N, out]. `a`, `b` [slots, E or 1, ...]: 1 where experts share it."""
    runs = torch.nonzero(slots.diff()).flatten() + 1
    edges = [0, *runs.tolist(), len(slots)]
    of_a, of_b = (m[:, expert if m.shape[1] > 1 else 0] for m in (a, b))
    for start, stop in pairwise(edges):
        slot = int(slots[start]) if stop > start else -1
        if slot >= 0:
            Factors.of([of_a[slot]], [of_b[slot]], [y.shape[1]]).add(y[start:stop], x[start:stop])
