"""AdamW equals torch.optim.AdamW with the settings of each step, and clips the norm of all tensors together."""

import itertools
from typing import Any

import pytest
import torch
from tinker_local.backend.training import lora
from tinker_local.backend.training.lora import gradient_norm
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.optimizers.adamw import in_one_pass
from tinker_local.types import AdamParams, InvalidRequestError
from torch.utils._python_dispatch import TorchDispatchMode

ADAMW = OPTIMIZERS["adamw"]

STEPS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=0.0, weight_decay=0.5),
    AdamParams(learning_rate=5e-2, beta1=0.0, beta2=0.5, eps=1e-3, weight_decay=0.01, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-2, grad_clip_norm=1e9),
]


@pytest.mark.mutation("betas-ignored", "adamw.py", "gradient, 1 - settings.beta1,", "gradient, 1 - 0.9,")
@pytest.mark.mutation("eps-ignored", "adamw.py", "denominator += settings.eps", "denominator += 1e-8")
@pytest.mark.mutation(
    "weight-decay-coupled",
    "adamw.py",
    "    weights *= decay\n",
    "    gradient = gradient + settings.weight_decay * weights\n",
)
@pytest.mark.mutation("clip-norm-ignored", "adamw.py", "if 0 < settings.grad_clip_norm < norm:", "if False:")
@pytest.mark.mutation(
    "clip-norm-0-is-1",
    "adamw.py",
    "    if 0 < settings.grad_clip_norm < norm:\n        gradient = gradient * (settings.grad_clip_norm / norm)\n",
    "    if (settings.grad_clip_norm or 1.0) < norm:\n"
    "        gradient = gradient * ((settings.grad_clip_norm or 1.0) / norm)\n",
)
def test_equals_torch_over_steps_with_changing_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, generator=generator, dtype=torch.float64)
    theirs = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs])
    state = ADAMW.new_state(torch, weights)
    for params in STEPS * 3:
        gradient = torch.randn(300, generator=generator, dtype=torch.float64)
        norm = gradient_norm(gradient)
        theirs.grad = gradient.clone()
        if params.grad_clip_norm:
            theirs.grad *= min(1.0, params.grad_clip_norm / float(gradient.norm()))
        optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        optimizer.step()
        before = gradient.clone()
        ADAMW.update(torch, weights, gradient, state, params, norm)
        assert torch.equal(gradient, before)
        torch.testing.assert_close(weights, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.mutation(
    "one-pass-of-another-step", "adamw.py", "torch.full((), step, dtype", "torch.full((), step + 1, dtype"
)
def test_the_pass_that_a_gpu_makes_computes_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, generator=generator, dtype=torch.float64)
    other = weights.clone()
    state, moments = ADAMW.new_state(torch, weights), ADAMW.new_state(torch, other).tensors
    for params in STEPS[:3] * 2:
        gradient = torch.randn(300, generator=generator, dtype=torch.float64)
        in_one_pass(other, gradient, moments["exp_avg"], moments["exp_avg_sq"], state.step + 1, params)
        ADAMW.update(torch, weights, gradient, state, params, gradient_norm(gradient))
        torch.testing.assert_close(weights, other, rtol=1e-12, atol=1e-12)


@pytest.mark.mutation("eps-ignored")
@pytest.mark.mutation("clip-norm-ignored")
@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 2e-2},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1e-1},
        {"weight_decay": 0.3},
        {"grad_clip_norm": 0.1},
    ],
)
def test_every_setting_of_a_step_matters(changed: Any) -> None:
    results = []
    for params in (AdamParams(learning_rate=1e-2), AdamParams(**{"learning_rate": 1e-2, **changed})):
        weights, state = torch.ones(4), ADAMW.new_state(torch, torch.ones(4))
        for scale in (1.0, 3.0):
            gradient = torch.tensor([1.0, -2.0, 0.5, 4.0]) * scale
            ADAMW.update(torch, weights, gradient, state, params, gradient_norm(gradient))
        results.append(weights)
    assert not torch.equal(*results)


def test_the_norm_is_that_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "_NORM_PART", 2)
    assert gradient_norm(torch.tensor([1.0, -4.0, 2.0, 10.0, 2.0])) == pytest.approx(5**0.5 * 5)


def test_the_norm_of_large_finite_gradients_is_finite() -> None:
    assert gradient_norm(torch.full((4,), 1e30)) == pytest.approx(2e30)


@pytest.mark.parametrize("params", [{"learning_rate": 1e38}, {"learning_rate": 1e30, "weight_decay": 1e30}])
def test_a_learning_rate_that_overflows_is_refused_and_changes_nothing(params: Any) -> None:
    weights, state = torch.ones(4), ADAMW.new_state(torch, torch.ones(4))
    with pytest.raises(InvalidRequestError, match="learning_rate"):
        ADAMW.update(torch, weights, torch.ones(4), state, AdamParams(**params), 2.0)
    assert state.step == 0
    assert not state.tensors["exp_avg"].any()
    assert torch.equal(weights, torch.ones(4))


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_memory_that_runs_out_leaves_the_step_undone(clip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every allocation of the step that can fail."""
    params = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=clip)
    for allowed in itertools.count():
        weights, gradient = torch.ones(5), torch.full((5,), 2.0)
        state = ADAMW.new_state(torch, weights)
        with AllocationsUpTo(allowed) as allocations:
            try:
                ADAMW.update(torch, weights, gradient, state, params, 4.0)
            except torch.OutOfMemoryError:
                assert allocations.failed
        if not allocations.failed:
            assert state.step == 1
            assert allowed > (clip > 0), "the test observes no allocation"
            return
        assert state.step == 0
        for tensor, before in ((weights, 1.0), (gradient, 2.0), *((moment, 0.0) for moment in state.tensors.values())):
            assert torch.equal(tensor, torch.full((5,), before))


class AllocationsUpTo(TorchDispatchMode):
    """Raises OutOfMemoryError before every operator that allocates its result, except the first `allowed`."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.left = allowed
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = func._schema.name.endswith("_") or any(a.is_out for a in func._schema.arguments)
        if not in_place:
            if not self.left:
                self.failed = True
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.left -= 1
        return func(*args, **(kwargs or {}))
