"""An MLP and routed experts side by side, as large models of Gemma 4 have them, forward and backward.

    out = x + norm'(norm_1(MLP(norm x)) + norm_2(Σ_k s_k D_e (gelu(G_e m) * U_e m)))        m = norm_m(x)

e and s_k are of the router, which reads x. `mlp_block.py` has the MLP, and `model/experts.py` the sum. Legend: T
tokens, H hidden size, K experts of a token, S = T K, I intermediate size of an expert, R columns of adapters.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.model.decoders.packed_experts import expert_targets, is_experts, weights_of
from tinker_local.backend.training.model.decoders.written_out.block import (
    LayerPart,
    NormAfter,
    RowContext,
    norm_weight,
    present,
)
from tinker_local.backend.training.model.decoders.written_out.experts_block import RoutedPass
from tinker_local.backend.training.model.decoders.written_out.mlp_block import MlpBlock, MlpPass
from tinker_local.backend.training.model.experts import (
    ExpertsKept,
    ExpertWeights,
    down,
    experts_backward,
)
from tinker_local.backend.training.model.taken_routes import takes_routes
from tinker_local.backend.training.run.block_memory import BlockMemory, experts_memory
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class BesideExpertsBlock:
    """The weights of block `index`. `mlp`: with norm_1 after it, and the norm before; `norm` [H]: norm_m;
    `after_experts` and `after`: norm_2 and norm'. `router(x)`: transformers' module, which returns scores [T, K] and
    experts [T, K] behind the shares of all experts. Adapters do not train it. `takes_routes`: whether it takes experts
    that are given."""

    index: int
    mlp: MlpBlock
    norm: torch.Tensor
    epsilon: float
    router: Any
    chosen: int
    weights: ExpertWeights
    after_experts: NormAfter
    after: NormAfter
    targets: tuple[Target, ...]
    takes_routes: bool

    module: ClassVar[str] = "mlp"
    parameters: ClassVar[Set[str]] = frozenset(
        {"router.proj.weight", "router.scale", "router.per_expert_scale"}
        | {"experts.gate_up_proj", "experts.down_proj"}
        | {f"mlp.{name}" for name in MlpBlock.parameters}
    )
    norm_after: ClassVar[bool] = True

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`. The part is the whole layer."""
        return all(hasattr(part.module, name) for name in ("router", "experts", "mlp"))

    @classmethod
    def take(cls, part: LayerPart) -> "BesideExpertsBlock":
        """See `Block.take`."""
        layer, after = part.module, NormAfter.take(part)
        assert after is not None, "such a layer has seven norms"
        path = f"{part.path}.experts"
        weights = weights_of(layer.experts)
        if part.experts is None or weights is None or not is_experts(layer.experts):
            raise UnsupportedError(f"{path}: its experts compute something else")
        mlp = MlpBlock.take(
            replace(part, path=f"{part.path}.mlp", module=layer.mlp, after=layer.post_feedforward_layernorm_1)
        )
        norm, epsilon = norm_weight(layer.pre_feedforward_layernorm_2)
        chosen, down = layer.router.config.top_k_experts, weights.down
        of_experts = expert_targets(path, "experts", part.index, layer.experts, part.experts)
        return cls(
            index=part.index,
            mlp=mlp,
            norm=norm,
            epsilon=epsilon,
            router=layer.router,
            chosen=chosen,
            weights=weights,
            after_experts=NormAfter(*norm_weight(layer.post_feedforward_layernorm_2)),
            after=after,
            targets=(*mlp.targets, *of_experts),
            takes_routes=takes_routes(layer.router, down.outputs, chosen, down.count),
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "BesideExpertsPass":
        """Create a pass over `x` [T, H]."""
        return BesideExpertsPass(self, context, x, mlp=self.mlp.start(x, context))

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`. Kept besides: what norm_2 and norm' read."""
        down = self.weights.down
        widths = self.weights.gating.widths
        sizes = {"chosen": self.chosen, "hidden": down.outputs, "width": down.inputs, "widths": widths}
        found = experts_memory(tokens, columns, itemsize, **sizes).beside(self.mlp.memory(tokens, columns, itemsize))
        outputs = tokens * down.outputs * itemsize
        return BlockMemory(found.lean + 2 * outputs, found.large, found.transient + 3 * outputs)


@dataclass(slots=True, eq=False)
class BesideExpertsPass(RoutedPass):
    """`mlp`: the pass of the MLP. `experts` and `both` [T, H]: before norm_2 and before norm'."""

    block: BesideExpertsBlock
    mlp: MlpPass = field(kw_only=True)
    experts: torch.Tensor | None = None
    both: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        block, c = self.block, self.context
        beside = self.mlp.forward(torch.zeros_like(self.x))
        routing, scores, gate_up = self.routed()
        self.mid, self.experts = down(gate_up, self.h, scores, routing, block.weights, *self.low_ranks(), c.kernels)
        self.both = block.after_experts.add(c.kernels, beside, self.experts)
        return block.after.add(c.kernels, self.x, self.both)

    def drop_large(self) -> None:
        self.gate_up = None
        self.mlp.drop_large()

    def restore(self) -> None:
        if self.both is None:
            self.forward()
        self.restore_routed()
        self.mlp.restore()

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        block, c = self.block, self.context
        grad_both = block.after.backward(c.kernels, grad, present(self.both))
        grad_experts = block.after_experts.backward(c.kernels, grad_both, present(self.experts))
        self.both = self.experts = None
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        kept, self.gate_up = ExpertsKept(present(self.gate_up), self.h, self.mid), None
        scores, routing = present(self.scores), present(self.routing)
        grad_m, grad_scores = experts_backward(
            grad_experts, m, scores, routing, block.weights, kept, *self.low_ranks(), c.kernels
        )
        del grad_experts
        with torch.enable_grad(), self.taking():
            leaf = self.x.detach().requires_grad_()
            again = block.router(leaf)[1]
        (by_scores,) = torch.autograd.grad(again, leaf, grad_scores)
        grad_x = c.kernels.rms_norm_backward(grad_m, self.x, block.norm, block.epsilon, by_scores.add_(grad))
        return self.mlp.backward(grad_both, grad_x)

    def chosen(self, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.taking():
            _, scores, experts = self.block.router(self.x)
        return scores, experts
