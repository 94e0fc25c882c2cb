"""Compare vLLM's experts with packed stacks (`PackedExpertsInTriton`) with plain torch, on a GPU or with Triton's
interpreter on a CPU. Run as a program, this file checks all cases on the CPU, where vLLM lacks two operators."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tinker_local.backend.vllm_engine import packed_experts_method
from tinker_local.backend.weights.precision import BITS, Bits

from tests.training.codes_cases import own_matrix, plain
from tests.training.expert_codes_cases import aligned

MARKS = ("pairs", "experts", "filled", "mapping")
"""Stand for what vLLM's operator of adapters for gate and up gives to that for down."""


class Layer:
    """A layer's experts with random codes, adapters that all experts share, and a `batch` of tokens."""

    def __init__(self, device: str, shape: tuple[int, int, int, int, int], bits: Bits, *, bias: bool) -> None:
        """`shape`: tokens, experts of each, experts, hidden and intermediate size."""
        tokens, self.chosen, self.count, self.hidden, self.width = shape
        self.device, self.dtype = device, torch.float32 if device == "cpu" else torch.bfloat16
        self.generator = torch.Generator().manual_seed(tokens)
        self.stacks = {}
        for name, outputs, inputs in (("w13", 2 * self.width, self.hidden), ("w2", self.hidden, self.width)):
            codes, scales, _, self.curved = own_matrix(self.count * outputs, inputs, bits, device)
            scales.fill_(2.0 ** (-6))  # rows of one size, so that activations stay small
            self.stacks[name] = tuple(each.view(self.count, outputs, -1) for each in (codes, scales))
        self.biases = {name: self.some(*stack[0].shape[:2]) if bias else None for name, stack in self.stacks.items()}
        self.low = {
            "w13": (self.some(4, self.hidden), self.some(2 * self.width, 4)),
            "w2": (self.some(4, self.width), self.some(self.hidden, 4)),
        }
        self.x = self.some(tokens, self.hidden)
        self.experts = torch.empty(tokens, self.chosen, dtype=torch.int64, device=device)
        self.scores = torch.empty(tokens, self.chosen, device=device)
        self.draw()

    def some(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.generator).to(self.device, self.dtype)

    def draw(self) -> None:
        """Other experts, scores and inputs."""
        rows = [torch.randperm(self.count, generator=self.generator)[: self.chosen] for _ in range(len(self.x))]
        self.experts.copy_(torch.stack(rows))
        self.scores.copy_(torch.rand(self.scores.shape, generator=self.generator))
        self.x.copy_(self.some(*self.x.shape))

    def plain(self, dtype: torch.dtype, *, adapters: bool) -> torch.Tensor:
        """[T, H], computed in `dtype`."""

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            codes, scales = (each.flatten(0, 1) for each in self.stacks[name])
            weight = (
                plain(codes, scales, self.dtype, None, curved=self.curved).to(dtype).view(self.count, -1, x.shape[-1])
            )
            found = torch.einsum("tki,tkoi->tko", x, weight[self.experts])
            bias = self.biases[name]
            if bias is not None:
                found = found + bias.to(dtype)[self.experts]
            a, b = (each.to(dtype) for each in self.low[name])
            return found + x @ a.T @ b.T if adapters else found

        gate, up = product("w13", self.x.to(dtype)[:, None].expand(-1, self.chosen, -1)).chunk(2, -1)
        found = product("w2", torch.nn.functional.silu(gate) * up)
        return (found * self.scores.to(dtype)[:, :, None]).sum(1)

    def made(self, *, adapters: bool) -> Callable[[], torch.Tensor]:
        """What computes the same with vLLM's experts."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, biased_moe_quant_config

        settings = (
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "activation_situ_beta",
            "activation_situ_linear_beta",
        )
        config = SimpleNamespace(activation=MoEActivation.SILU, **dict.fromkeys(settings))
        biases = self.biases["w13"], self.biases["w2"]
        quantised = FusedMoEQuantConfig.make() if biases[0] is None else biased_moe_quant_config(*biases)
        experts: Any = packed_experts_method.experts_in_triton()(config, quantised)
        experts.process_weights_after_loading(
            SimpleNamespace(curved=self.curved, **{f"{name}_scales": stack[1] for name, stack in self.stacks.items()})
        )
        if adapters:
            experts.set_lora_context(object())
            experts.apply_w13_lora, experts.apply_w2_lora = self.add_w13, self.add_w2
        if self.device == "cpu":
            experts.moe_sum = lambda found, output: output.copy_(found.sum(1))
        shapes = experts.workspace_shapes(
            len(self.x), 2 * self.width, self.hidden, self.chosen, self.count, self.count, None, MoEActivation.SILU
        )
        spaces = [self.x.new_full(shape, torch.nan) for shape in shapes]

        def run() -> torch.Tensor:
            experts.apply(
                output=spaces[2],
                hidden_states=self.x,
                w1=self.stacks["w13"][0],
                w2=self.stacks["w2"][0],
                topk_weights=self.scores,
                topk_ids=self.experts.int(),
                activation=MoEActivation.SILU,
                global_num_experts=self.count,
                expert_map=None,
                a1q_scale=None,
                a2_scale=None,
                workspace13=spaces[0],
                workspace2=spaces[1],
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )
            return spaces[2]

        return run

    def add_w13(self, context: Any, *, y: torch.Tensor, x: torch.Tensor, **_: Any) -> tuple[str, ...]:
        a, b = self.low["w13"]
        y.add_((x @ a.T @ b.T)[:, None])
        return MARKS

    def add_w2(
        self, context: Any, *, y: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, **given: Any
    ) -> None:
        """vLLM's operator multiplies by the scores."""
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
        assert tuple(given[name] for name in names) == MARKS
        a, b = self.low["w2"]
        y.add_((x @ a.T @ b.T).view(y.shape) * topk_weights[:, :, None].to(y.dtype))


def check_near(layer: Layer, found: torch.Tensor, *, adapters: bool) -> None:
    """That `found` is as near to float64 as plain torch in the dtype, but for a factor."""
    exact = layer.plain(torch.float64, adapters=adapters)
    allowed = 4 * float((layer.plain(layer.dtype, adapters=adapters).double() - exact).norm())
    assert float((found.double() - exact).norm()) <= allowed


def check_all(device: str, shapes: tuple[tuple[int, int, int, int, int], ...]) -> None:
    """Eagerly and, on a GPU, in a CUDA graph, whose next tokens go to other experts."""
    for shape, bits, bias, adapters in itertools.product(shapes, BITS.values(), (False, True), (False, True)):
        layer = Layer(device, shape, bits, bias=bias)
        run = layer.made(adapters=adapters)
        check_near(layer, run(), adapters=adapters)
        if device == "cpu":
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        for _ in range(2):
            layer.draw()
            output.fill_(torch.nan)
            graph.replay()
            check_near(layer, output, adapters=adapters)


def main() -> None:
    import vllm.model_executor.layers.fused_moe.moe_align_block_size as of_vllm

    of_vllm.moe_align_block_size = aligned  # vLLM's own is for GPUs
    check_all("cpu", ((1, 2, 8, 64, 32), (5, 3, 4, 128, 96), (20, 2, 3, 32, 64)))


if __name__ == "__main__":
    main()
