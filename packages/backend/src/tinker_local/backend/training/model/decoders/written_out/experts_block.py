"""Routed experts in place of an MLP, forward and backward.

    out = y + Σ_k s_k D_e gated(G_e m, U_e m)        m = norm(y); e and s_k: of the router

`model/experts.py` has the sum. A shared expert, if there is one, adds what `mlp_block.py` has. Legend: T tokens, H
hidden size, K experts of a token, S = T K, I intermediate size of an expert, R columns of adapters.
"""

from collections.abc import Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from tinker_local.backend.training.lora.lora import Target
from tinker_local.backend.training.lora.lora_batch import LowRank
from tinker_local.backend.training.model.decoders.packed_experts import (
    expert_targets,
    is_experts,
    scores_are_softmax,
    weights_of,
)
from tinker_local.backend.training.model.decoders.written_out.block import LayerPart, RowContext, norm_weight, present
from tinker_local.backend.training.model.decoders.written_out.mlp_block import MlpBlock, MlpPass, activation_of
from tinker_local.backend.training.model.experts import (
    ExpertsKept,
    ExpertWeights,
    Routing,
    activate,
    chosen_softmax_backward,
    down,
    experts_backward,
    gate_and_up,
)
from tinker_local.backend.training.model.taken_routes import takes_routes, taking
from tinker_local.backend.training.run.block_memory import BlockMemory, experts_memory
from tinker_local.backend.weights.dense import DenseMatrix
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.types import UnsupportedError


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsBlock:
    """The weights of experts block `index`; `norm` [H]. `router(m, *choice)`: transformers' module,
    which returns logits, scores [T, K] and experts [T, K]; `choice`: the bias of which experts it takes, if it is not
    the router's own; `router_matrix` [E, H]: its weights; `softmax`: whether the scores are the softmax of the chosen
    experts' logits. `shared`: the expert that every position takes, or None. `takes_routes`: whether the router takes
    experts that are given."""

    index: int
    norm: torch.Tensor
    epsilon: float
    router: Any
    choice: tuple[torch.Tensor, ...]
    router_matrix: FrozenMatrix
    softmax: bool
    chosen: int
    weights: ExpertWeights
    shared: MlpBlock | None
    targets: tuple[Target, ...]
    takes_routes: bool

    module: ClassVar[str] = "mlp"
    parameters: ClassVar[Set[str]] = frozenset(
        {"gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert_gate.weight"}
        | {f"{shared}.{name}" for shared in ("shared_expert", "shared_experts") for name in MlpBlock.parameters}
        | {"gate.moe_statics.e_score_correction_bias"}
        | {"router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"}
        | {"experts.gate_up_proj.weight", "experts.down_proj.weight"}  # packed ones
    )
    norm_after: ClassVar[bool] = False

    @classmethod
    def recognises(cls, part: LayerPart) -> bool:
        """See `Block.recognises`."""
        return part.experts is not None and hasattr(part.module, "experts")

    @classmethod
    def take(cls, part: LayerPart) -> "ExpertsBlock":
        """See `Block.take`."""
        mlp, index = part.module, part.index
        assert part.experts is not None, "recognised"
        weights = weights_of(mlp.experts)
        if weights is None or not is_experts(mlp.experts):
            raise UnsupportedError(f"{part.path}: its experts compute something else")
        if hasattr(mlp.experts, "act_fn") and activation_of(mlp.experts, f"{part.path}.experts") != "silu":
            raise UnsupportedError(f"{part.path}.experts: its activation is not silu")
        shared = None
        names = part.experts
        if names.shared and (beside := getattr(mlp, names.shared)) is not None:
            path = f"{part.path}.{names.shared}"
            scale = part.make([getattr(mlp, names.shared_gate)]) if names.shared_gate else None
            shared = MlpBlock.of(
                replace(part, module=beside, path=path), names.shared, scale, activation_of(beside, path)
            )
        router = getattr(mlp, names.router)
        choice = (getattr(mlp, names.bias).detach(),) if names.bias else ()
        alike = router.weight.dtype == weights.down.dtype  # some routers stay in float32
        of_experts = expert_targets(f"{part.path}.experts", "experts", index, mlp.experts, names)
        weight, epsilon = norm_weight(part.before)
        return cls(
            index=index,
            norm=weight,
            epsilon=epsilon,
            router=router,
            choice=choice,
            router_matrix=DenseMatrix(router.weight.detach()),
            softmax=alike and scores_are_softmax(router, *choice),
            chosen=router.top_k,
            weights=weights,
            shared=shared,
            targets=(*of_experts, *(() if shared is None else shared.targets)),
            takes_routes=takes_routes(router, weights.down.outputs, router.top_k, weights.down.count, *choice),
        )

    def start(self, x: torch.Tensor, context: RowContext) -> "ExpertsPass":
        """Create a pass over `x` [T, H]."""
        return ExpertsPass(self, context, x, shared=None if self.shared is None else self.shared.start(x, context))

    def memory(self, tokens: int, columns: int, itemsize: int) -> BlockMemory:
        """See `Block.memory`."""
        down = self.weights.down
        widths = self.weights.gating.widths
        sizes = {"chosen": self.chosen, "hidden": down.outputs, "width": down.inputs, "widths": widths}
        routed = experts_memory(tokens, columns, itemsize, **sizes)
        return routed if self.shared is None else routed.beside(self.shared.memory(tokens, columns, itemsize))


@dataclass(slots=True, eq=False)
class RoutedPass:
    """What passes over routed experts have in common. `scores` [T, K]; `gate_up` [S, 2 I]; `h` [T, 2, R], of gate and
    up, and `mid` [T, 1, R]: of the adapters."""

    block: Any
    context: RowContext
    x: torch.Tensor
    routing: Routing | None = None
    scores: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    h: torch.Tensor | None = None
    mid: torch.Tensor | None = None

    def chosen(self, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts, [T, K] each; `m` [T, H]: what the experts read."""
        raise NotImplementedError

    def routed(self) -> tuple[Routing, torch.Tensor, torch.Tensor]:
        """Compute gate and up; return the routing, the scores and both."""
        block, c = self.block, self.context
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        low_rank, _ = self.low_ranks()
        if self.routing is None or self.scores is None:
            self.scores, experts = self.chosen(m)
            owners = None if low_rank is None else low_rank.owners
            self.routing = Routing.of(experts, block.weights.down.count, owners, c.kernels)
        self.h, self.gate_up = gate_and_up(m, self.routing, block.weights, low_rank, c.kernels)
        return self.routing, self.scores, self.gate_up

    def restore_routed(self) -> None:
        """Compute again what the backward needs and is gone."""
        if self.gate_up is None:
            self.routed()
        low_ranks = self.low_ranks()
        if self.mid is None and low_ranks[1] is not None:
            given = present(self.gate_up), self.h, present(self.scores), present(self.routing), self.block.weights
            _, self.mid = activate(*given, *low_ranks, self.context.kernels)

    def taking(self) -> AbstractContextManager[None]:
        """A context in which the router takes the experts that the row names."""
        return taking(self.context.routes.get(self.block))

    def low_ranks(self) -> tuple[LowRank | None, LowRank | None]:
        """Of gate and up, and of down."""
        lora, index = self.context.lora, self.block.index
        return lora.group("experts.gate_up", index), lora.group("experts.down", index)


@dataclass(slots=True, eq=False)
class ExpertsPass(RoutedPass):
    """`shared`: the pass of the shared expert."""

    block: ExpertsBlock
    shared: MlpPass | None = None

    def forward(self) -> torch.Tensor:
        block, c = self.block, self.context
        routing, scores, gate_up = self.routed()
        self.mid, output = down(gate_up, self.h, scores, routing, block.weights, *self.low_ranks(), c.kernels)
        output.add_(self.x)
        return output if self.shared is None else self.shared.forward(output)

    def drop_large(self) -> None:
        self.gate_up = None
        if self.shared is not None:
            self.shared.drop_large()

    def restore(self) -> None:
        self.restore_routed()
        if self.shared is not None:
            self.shared.restore()

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        block, c = self.block, self.context
        m = c.kernels.rms_norm(self.x, block.norm, block.epsilon)
        scores, routing = present(self.scores), present(self.routing)
        kept, self.gate_up = ExpertsKept(present(self.gate_up), self.h, self.mid), None
        grad_m, grad_scores = experts_backward(
            grad, m, scores, routing, block.weights, kept, *self.low_ranks(), c.kernels
        )
        self._add_gradient_by_scores(grad_scores, m, grad_m)
        grad_x = c.kernels.rms_norm_backward(grad_m, self.x, block.norm, block.epsilon, grad)
        return grad_x if self.shared is None else self.shared.backward(grad, grad_x)

    def _add_gradient_by_scores(self, grad_scores: torch.Tensor, m: torch.Tensor, grad_m: torch.Tensor) -> None:
        """Add to `grad_m` [T, H] what reaches `m` through the router, from the gradient of its scores [T, K]."""
        block = self.block
        if block.softmax:
            experts, count = present(self.routing).of_tokens, block.weights.down.count
            grad_logits = chosen_softmax_backward(grad_scores, present(self.scores), experts, count)
            block.router_matrix.add_back(grad_m, grad_logits.to(grad_m.dtype))
            return
        with torch.enable_grad(), self.taking():
            leaf = m.detach().requires_grad_()
            scores = block.router(leaf, *block.choice)[1]
        grad_m += torch.autograd.grad(scores, leaf, grad_scores)[0]

    def chosen(self, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.taking():
            _, scores, experts = self.block.router(m, *self.block.choice)
        return scores, experts
