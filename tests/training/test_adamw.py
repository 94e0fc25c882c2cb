"""AdamW equals torch.optim.AdamW with the settings of each step, and clips the norm of all tensors together."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.fakes import numpy_as_torch
from tinker_local.backend.training.lora import lora
from tinker_local.backend.training.lora.lora import gradient_norm
from tinker_local.backend.training.optimizers import OPTIMIZERS, optimizer
from tinker_local.backend.training.optimizers.adamw import in_one_pass
from tinker_local.backend.training.optimizers.optimizer import Limits, Optimizer, OptimizerState
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


@pytest.mark.mutation("eps-ignored", "update", "denominator += settings.eps", "denominator += 1e-8")
@pytest.mark.mutation(
    "weight-decay-coupled",
    "update",
    "    weights *= decay\n",
    "    gradient = gradient + settings.weight_decay * weights\n",
)
@pytest.mark.mutation("clip-norm-ignored", "update", "if 0 < settings.grad_clip_norm < norm:", "if False:")
def test_equals_torch_over_steps_with_changing_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(300, generator=generator, dtype=torch.float64)
    theirs = weights.clone().requires_grad_()
    reference = torch.optim.AdamW([theirs])
    state = ADAMW.new_state(torch, weights)
    for params in STEPS * 3:
        gradient = torch.randn(300, generator=generator, dtype=torch.float64)
        norm = gradient_norm(gradient)
        theirs.grad = gradient.clone()
        if params.grad_clip_norm:
            theirs.grad *= min(1.0, params.grad_clip_norm / float(gradient.norm()))
        reference.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        reference.step()
        before = gradient.clone()
        ADAMW.update(torch, weights, gradient, state, params, norm)
        assert torch.equal(gradient, before)
        torch.testing.assert_close(weights, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.mutation(
    "one-pass-of-another-step", "adamw.in_one_pass", "torch.full((), step, dtype", "torch.full((), step + 1, dtype"
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


# A step that would leave what is not finite --------------------------------------------------------------------------

LIMITS = Limits(weights=1e38, state=float(torch.finfo(torch.float32).max))

TENSORS = {"first": (0, 3), "second": (3, 8)}

STEP_OF_USUAL_SIZE = {"learning_rate": 1e-2, "weight_decay": 0.1}


@dataclass
class Run:
    """Vectors of eight numbers in two tensors."""

    device: str = "cpu"
    weights: list[float] = field(default_factory=lambda: [1.0] * 8)
    gradient: list[float] = field(default_factory=lambda: [0.5] * 8)
    m: list[float] = field(default_factory=lambda: [0.25] * 8)
    v: list[float] = field(default_factory=lambda: [0.5] * 8)

    def step(self, xp: Any = torch, **settings: Any) -> list[bytes]:
        """What the vectors hold after the step; their first element is the number of steps."""
        made = [torch.tensor(numbers, device=self.device) for numbers in (self.weights, self.m, self.v, self.gradient)]
        norm = gradient_norm(made[3])
        vectors: list[Any] = made if xp is torch else [each.double().numpy() for each in made]
        state = OptimizerState({"exp_avg": vectors[1], "exp_avg_sq": vectors[2]}, 3)
        before = [bytes_of(vector) for vector in vectors]
        params = AdamParams(**{**STEP_OF_USUAL_SIZE, **settings})
        try:
            ADAMW.step(xp, vectors[0], vectors[3], state, params, norm, TENSORS, LIMITS)
        except InvalidRequestError:
            assert [state.step, *map(bytes_of, vectors)] == [3, *before]
            raise
        assert state.step == 4
        found = [np.asarray(vector.cpu() if xp is torch else vector) for vector in vectors]
        assert all(np.isfinite(vector).all() for vector in found)
        return [vector.tobytes() for vector in found]


def bytes_of(vector: Any) -> bytes:
    return np.asarray(vector.cpu() if isinstance(vector, torch.Tensor) else vector).tobytes()


def with_one(place: int, number: float, others: float) -> list[float]:
    return [number if at == place else others for at in range(8)]


FATAL: dict[str, tuple[Run, dict[str, float], str]] = {
    "0 / 0": (Run(gradient=with_one(5, 0.0, 0.5), m=with_one(5, 0.0, 0.5), v=with_one(5, 0.0, 0.5)), {"eps": 0.0}, ""),
    "an eps that float32 lacks": (
        Run(gradient=with_one(5, 0.0, 0.5), m=with_one(5, 0.0, 0.5), v=with_one(5, 0.0, 0.5)),
        {"eps": 1e-60},
        "",
    ),
    "m / 0": (Run(gradient=with_one(5, 0.0, 0.5), v=with_one(5, 0.0, 0.5)), {"eps": 0.0}, ""),
    "a square that overflows": (Run(gradient=with_one(5, 1e20, 0.5)), {}, "exp_avg_sq of "),
    "a weight that overflows": (
        Run(weights=with_one(5, 3e38, 1.0)), {"learning_rate": 1.0, "weight_decay": 1e6}, "",
    ),
    "a weight that is too large to compute with": (
        Run(weights=with_one(5, 0.9e38, 1.0)), {"learning_rate": 1.0, "weight_decay": 2.2}, "",
    ),
    "an update that overflows": (
        Run(m=with_one(5, 1e30, 0.0), v=[0.0] * 8, gradient=[0.0] * 8), {"eps": 1e-12, "beta2": 0.0}, "",
    ),
    "a second moment below 0": (Run(v=with_one(5, -1.0, 0.5)), {}, ""),
}  # fmt: skip


@pytest.mark.mutation("moments-that-overflow-pass", "surely_stays_within", "and v < at_most and", "and")
@pytest.mark.parametrize(
    ("case", "xp"),
    [
        *((case, torch) for case in FATAL),
        *((case, numpy_as_torch) for case in FATAL if case != "an eps that float32 lacks"),
    ],
)
def test_a_step_that_would_leave_what_is_not_finite_changes_nothing_and_names_the_tensor(case: str, xp: Any) -> None:
    run, settings, of = FATAL[case]
    with np.errstate(all="ignore"), pytest.raises(InvalidRequestError) as refused:
        run.step(xp, **settings)
    assert f"values of {of}second would not be finite" in str(refused.value)
    assert "the step was not taken and the gradient was discarded" in str(refused.value)
    assert "learning_rate=" in str(refused.value)


@pytest.mark.parametrize("xp", [torch, numpy_as_torch], ids=["torch", "numpy"])
def test_a_gradient_whose_norm_is_not_finite_changes_nothing(xp: Any) -> None:
    for number in (float("inf"), float("nan")):
        with np.errstate(all="ignore"), pytest.raises(InvalidRequestError, match="norm of the accumulated gradient"):
            Run(gradient=with_one(5, number, 0.5)).step(xp, grad_clip_norm=1.0)


def test_a_step_is_refused_only_if_it_would_leave_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the update itself, over numbers and settings of all sizes, in one part and in several."""
    generator = np.random.default_rng(0)

    def sizes(*, signs: bool = True) -> list[float]:
        exponents = generator.uniform(-45, 38.4) + generator.uniform(-3, 0, 8)
        sign = generator.choice([-1.0, 0.0, 1.0], 8) if signs else 1.0
        numbers = np.asarray(sign * 10.0 ** np.clip(exponents, -45, 38.4), np.float32)
        return [float(number) for number in numbers]

    refused = 0
    for at in range(500):
        monkeypatch.setattr(optimizer, "TRIED_AT_ONCE", 2 if at % 2 else 2**22)
        run = Run(weights=sizes(), gradient=sizes(), m=sizes(), v=sizes(signs=False))
        settings = {
            "learning_rate": 10.0 ** generator.uniform(-8, 20),
            "eps": float(generator.choice([0.0, 1e-60, 1e-40, 1e-12, 1e-3])),
            "weight_decay": float(generator.choice([0.0, 0.1, 1e10])),
            "grad_clip_norm": float(generator.choice([0.0, 1.0])),
        }
        weights, m, v, gradient = map(torch.tensor, (run.weights, run.m, run.v, run.gradient))
        state = OptimizerState({"exp_avg": m, "exp_avg_sq": v}, 3)
        try:
            ADAMW.update(torch, weights, gradient, state, AdamParams(**settings), gradient_norm(gradient))
        except InvalidRequestError:
            fine = False
        else:
            fine = bool(weights.abs().max() <= LIMITS.weights and m.isfinite().all() and v.isfinite().all())
        try:
            found = run.step(**settings)
        except InvalidRequestError:
            assert not fine, (run, settings)
            refused += 1
        else:
            assert fine, (run, settings)
            assert found[:3] == [vector.numpy().tobytes() for vector in (weights, m, v)]
    assert 50 < refused < 450


def test_steps_of_usual_sizes_are_not_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "_try", None)
    for learning_rate, eps, size in itertools.product((1e-6, 1e-2, 1.0), (1e-12, 1e-8), (1e-9, 1.0, 1e6)):
        Run(gradient=[size] * 8).step(learning_rate=learning_rate, eps=eps)


def test_an_optimizer_without_a_bound_tries_every_step() -> None:
    plain = replace(ADAMW, surely_stays_within=None)
    weights = torch.ones(8)
    state = plain.new_state(torch, weights)
    plain.step(torch, weights, torch.ones(8), state, AdamParams(learning_rate=0.5), 8**0.5, TENSORS, LIMITS)
    assert state.step == 1
    torch.testing.assert_close(weights, torch.full((8,), 0.5))
    with pytest.raises(InvalidRequestError, match="exp_avg_sq of first and of 1 more"):
        plain.step(torch, weights, torch.full((8,), 1e20), state, AdamParams(), 1e21, TENSORS, LIMITS)
    assert state.step == 1
