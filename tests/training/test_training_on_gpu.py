"""Behaviour that needs CUDA: variable-length attention in bfloat16, recomputed layers, and running out of memory."""

import itertools
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.training.kernels.flash_attention import RIGHT, flash_attention_4, is_measured
from tinker_local.backend.training.lora.lora import gradient_norm
from tinker_local.backend.training.losses import LOSSES
from tinker_local.backend.training.model.attention import attend, attend_backward
from tinker_local.backend.training.model.attention_rule import AttentionRule
from tinker_local.backend.training.model.decoders.written_out.experts_block import ExpertsPass
from tinker_local.backend.training.model.segments import Segments
from tinker_local.backend.training.optimizers.adamw import ADAMW
from tinker_local.backend.training.optimizers.optimizer import TRIED_AT_ONCE, Limits, OptimizerState
from tinker_local.backend.training.trainer import TrainResult, TrainWork
from tinker_local.types import AdamParams, InvalidRequestError, LoraConfig

from tests.training.kernel_cases import (
    EXPERTS,
    ROWS,
    SHAPES,
    SORTS,
    check_experts,
    check_kernels,
    check_logsumexp,
    check_sort,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ("qwen3", "qwen2_5_vl", "qwen3_vl")


def data_for(family: str, make: Any) -> Any:
    data = [make.datum(n) for n in (40, 7, 200, 7)]
    if family != "qwen3":
        data += [make.datum(60, [(3, (4, 6)), (30, (8, 8))]), make.datum(20, [(0, (4, 4))])]
    return data


def cosine(first: Any, second: Any) -> Any:
    a, b = (np.concatenate([array.ravel() for array in tensors.values()]) for tensors in (first, second))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_norm_of_a_gradient_is_summed_in_float64() -> None:
    """Also over parts, and without a float64 copy of them."""
    gradient = torch.full((2**23 + 5,), 2.0**100, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert gradient_norm(gradient) == pytest.approx(2.0**100 * len(gradient) ** 0.5, rel=1e-12)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    assert not np.isfinite(gradient_norm(torch.tensor([1.0, float("nan")], device="cuda")))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_variable_length_attention_equals_float32(kv_heads: Any) -> None:
    lengths = (5, 1, 64, 64, 130)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), heads, 32) for heads in (4, kv_heads, kv_heads)]
    exact = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    short = [tensor.to(torch.bfloat16) for tensor in exact]
    segments = Segments(lengths, torch.device("cuda"))
    weights = torch.randn(shapes[0], generator=generator, device="cuda")
    outputs, gradients = [], []
    rule = AttentionRule(0.2)
    for q, k, v in (short, exact):
        output, logsumexp = attend(q, k, v, segments, rule)
        assert (logsumexp is not None) == (q is short[0]), "float32 has no flash kernel"
        grad = weights.to(output.dtype)
        gradients.append(attend_backward(grad, q, k, v, output, logsumexp, segments, rule))
        outputs.append(output.float())
    torch.testing.assert_close(*outputs, atol=3e-2, rtol=3e-2)
    for ours, expected in zip(*gradients, strict=True):
        assert float((ours.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize(("rows", "width", "heads", "size"), [*SHAPES, (33, 4096, 32, 128)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_triton_kernels_equal_plain_torch(rows: Any, width: Any, heads: Any, size: Any, has_norm: Any) -> None:
    # With few numbers a single rounding shows.
    check_kernels("cuda", rows, width, heads, size, has_norm=has_norm, relative=5e-3 if rows * width > 200 else 1e-2)


@pytest.mark.parametrize("case", EXPERTS)
def test_fused_experts_equal_plain_torch(case: str) -> None:
    check_experts("cuda", *EXPERTS[case])


@pytest.mark.parametrize("case", SORTS)
def test_pairs_are_sorted_as_torch_sorts_them(case: tuple[int, int, int, int]) -> None:
    check_sort("cuda", *case)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("width", [4, 5000, 151936])
def test_nan_logits_stay_in_the_sum(row: Any, width: Any) -> None:
    check_logsumexp("cuda", row, width)


@pytest.mark.parametrize("heads", [3, 28])
@pytest.mark.parametrize("size", [8, 40, 72, 80, 96, 256, 20])
@pytest.mark.parametrize("kind", ["plain", "window", "sinks", "window and sinks", "softcap"])
def test_attention_takes_head_sizes_and_rules_of_all_kinds(kind: Any, heads: Any, size: Any) -> None:
    """As blocks call it: key and value are parts of one wide row. Flash kernels need a multiple of 8; FlashAttention 4
    alone knows soft caps, of some sizes."""
    capped = is_measured(torch.cuda.get_device_capability()) and flash_attention_4()[0] is not None and size in RIGHT
    lengths = (1, 3, 3, 70)
    rule = AttentionRule(
        size**-0.5,
        window=9 if "window" in kind else None,
        softcap=2.0 if kind == "softcap" else None,
        sinks=torch.linspace(-2, 2, heads, device="cuda") if "sinks" in kind else None,
    )
    generator = torch.Generator("cuda").manual_seed(size)
    qkv = torch.randn(sum(lengths), (heads + 2) * size, generator=generator, device="cuda").to(torch.bfloat16)
    weights = torch.randn(sum(lengths), heads, size, generator=generator, device="cuda")
    seen = []
    for joined in (qkv, qkv.float()):
        parts = joined.split([heads * size, size, size], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
        segments = Segments(lengths, torch.device("cuda"))
        output, logsumexp = attend(query.contiguous(), key.contiguous(), value, segments, rule)
        assert (logsumexp is not None) == (joined is qkv and size % 8 == 0 and (kind != "softcap" or capped))
        grad = weights.to(output.dtype)
        gradients = attend_backward(
            grad, query.contiguous(), key.contiguous(), value, output, logsumexp, segments, rule
        )
        seen.append([output, *gradients])
    for ours, expected in zip(*seen, strict=True):
        assert float((ours.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_the_gpu_is_near_float32_on_the_cpu(
    family: str, decoder: Any, trainer: Any, make: Any, add_adapter: Any, gradients: Any
) -> None:
    data = data_for(family, make)
    seen = []
    for options in ({"dtype": "float32"}, {"dtype": "float32", "device": "cuda"}, {"dtype": None, "device": None}):
        ours = trainer(family, decoder=decoder, **options)
        add_adapter(ours, "a")
        (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        flat = ours._adapters["a"]
        flat.gradient = flat.gradient.cpu()
        seen.append((np.concatenate([output["logprobs"] for output in result.outputs]), gradients(ours, "a")))
        flat.gradient = None
    assert ours._loaded.dtype == torch.bfloat16
    assert ours._loaded.device.type == "cuda"
    (cpu, cpu_gradient), (float32, float32_gradient), (bfloat16, bfloat16_gradient) = seen
    # Convolutions (the vision tower's patches) use TF32 on CUDA by default.
    np.testing.assert_allclose(float32, cpu, atol=1e-3 if family == "qwen3" else 2e-2)
    print(f"{family}: mean |bfloat16 - float32| {np.abs(bfloat16 - cpu).mean():.4f}", end=" ")
    print(f"max {np.abs(bfloat16 - cpu).max():.4f}, cosine of gradients {cosine(bfloat16_gradient, cpu_gradient):.5f}")
    assert np.abs(bfloat16 - cpu).mean() < 0.1
    assert cosine(float32_gradient, cpu_gradient) > 0.9999
    assert cosine(bfloat16_gradient, cpu_gradient) > 0.98


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_gradient_through_a_router_is_that_of_autograd(
    family: str, trainer: Any, make: Any, add_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, up to rounding, which is small beside what comes through the router."""
    ours = trainer(family, dtype="bfloat16", device="cuda")
    for seed, name in enumerate("ab"):
        add_adapter(ours, name, seed=seed)
    works = [make.work(name, [90, 40]) for name in "ab"]
    by_softmax, nothing = ExpertsPass._add_gradient_by_scores, lambda *_: None

    def by_autograd(self: ExpertsPass, *given: torch.Tensor) -> None:
        assert self.block.softmax
        by_softmax(replace(self, block=replace(self.block, softmax=False)), *given)

    seen = []
    for way in (by_autograd, by_softmax, nothing):
        monkeypatch.setattr(ExpertsPass, "_add_gradient_by_scores", way)
        assert all(isinstance(result, TrainResult) for result in ours.forward_backward(works))
        seen.append(torch.cat([ours._adapters[name].gradient.cpu() for name in "ab"]))
        for name in "ab":
            ours.discard_gradients(name)
    autograd, softmax, without = (each.double() for each in seen)
    rounding, through = (softmax - autograd).norm() / autograd.norm(), (without - autograd).norm() / autograd.norm()
    print(f"{family}: {rounding:.5f} of the gradient differs, {through:.4f} comes through routers")
    assert rounding < 0.02
    assert rounding < 0.1 * through


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_each_loss_on_the_gpu_is_near_that_on_the_cpu(
    loss_fn: Any, trainer: Any, make: Any, add_adapter: Any, gradients: Any
) -> None:
    """Several data in one micro-batch, each split over several chunks of logits."""
    works = [make.work("a", [40, 7, 200, 7], loss_fn), make.work("a", [30], "cross_entropy")]
    if loss_fn == "gspo":  # by default most sequences of random data are clipped
        works[0] = replace(works[0], loss_config={"clip_low_threshold": 0.01, "clip_high_threshold": 100.0})
    seen = []
    for device in ("cpu", "cuda"):
        ours = trainer("qwen3", device=device, logit_chunk_elements=5 * 120)
        add_adapter(ours, "a")
        result, _ = ours.forward_backward(works)
        adapter = ours._adapters["a"]
        adapter.gradient = adapter.gradient.cpu()
        seen.append((result.metrics["loss:sum"], gradients(ours, "a")))
    (cpu, cpu_gradient), (cuda, cuda_gradient) = seen
    magnitude = sum(float(np.abs(d.loss_inputs[LOSSES[loss_fn].mask_inputs[0]]).sum()) for d in works[0].data)
    assert cuda == pytest.approx(cpu, abs=1e-3 * magnitude)
    assert cosine(cuda_gradient, cpu_gradient) > 0.9999


@pytest.mark.parametrize("family", FAMILIES)
def test_data_in_one_micro_batch_do_not_see_one_another_in_bfloat16(
    family: str, trainer: Any, make: Any, add_adapter: Any
) -> None:
    ours = trainer(family, dtype=None, device="cuda")
    add_adapter(ours, "a")
    data = data_for(family, make)
    seen = []
    for tokens in (5, 9):
        data[1].input.token_ids[:] = tokens
        (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        seen.append([output["logprobs"] for output in result.outputs])
    assert np.abs(seen[0][1] - seen[1][1]).max() > 0
    for place in [0, *range(2, len(data))]:
        np.testing.assert_array_equal(seen[0][place], seen[1][place])


def test_training_in_bfloat16_lowers_the_loss(trainer: Any, make: Any, add_adapter: Any) -> None:
    ours = trainer("qwen3_vl", dtype=None, device="cuda")
    add_adapter(ours, "a", rank=8)
    data = [
        replace(d, loss_inputs={"weights": np.ones(d.input.length, np.float32)}) for d in data_for("qwen3_vl", make)
    ]
    losses = []
    for _ in range(20):
        (result,) = ours.forward_backward([TrainWork("a", data, "cross_entropy")])
        losses.append(result.metrics["loss:sum"])
        ours.optim_step("a", AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.8 * losses[0]


def test_real_memory_running_out_halves_the_budget(trainer: Any, make: Any, add_adapter: Any) -> None:
    """The process may allocate 64 MiB more than it has."""
    ours = trainer("qwen3", dtype=None, device="cuda", micro_batch_tokens=2**20)
    add_adapter(ours, "a")
    add_adapter(ours, "b", seed=2)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    try:
        results = ours.forward_backward([make.work("a", [500] * 400), make.work("b", [9])])
        assert all(isinstance(result, TrainResult) for result in results), results
        assert ours.micro_batch_tokens < 2**20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


NEIGHBOUR = """
import sys, time, torch
GIB = 2**30
context = torch.zeros(1, device="cuda")
ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - 4 * GIB), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
least, taken, failed = torch.cuda.mem_get_info()[0], 0, 0
import threading
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
while not stop.is_set():
    least = min(least, torch.cuda.mem_get_info()[0])
    try:
        torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        taken += 1
    except torch.OutOfMemoryError:
        failed += 1
    torch.cuda.empty_cache()
print(least, taken, failed)
"""
"""A program that leaves 4 GiB of the GPU, and takes one of them again and again: the least that it saw free, how often
it could, and how often it could not."""


def test_a_program_that_takes_a_gibibyte_at_any_moment_ends_no_training(
    trainer: Any, make: Any, add_adapter: Any
) -> None:
    ours = trainer("qwen3", dtype=None, device="cuda", micro_batch_tokens=2**20)
    add_adapter(ours, "a")
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "ready\n"
    alone = torch.cuda.memory_reserved()
    for _ in range(3):
        (result,) = ours.forward_backward([make.work("a", [500] * 2000)])
        assert isinstance(result, TrainResult), result
        ours.optim_step("a", AdamParams())
    most = torch.cuda.max_memory_reserved() - alone
    out, _ = neighbour.communicate("")
    least, taken, failed = map(int, out.split())
    print(f"trained with {most / 2**30:.2f} GiB, {least / 2**30:.2f} left; a gibibyte was taken {taken} times")
    assert failed == 0
    assert taken > 0
    assert most > 2**30  # or there would have been no need to leave any


def test_a_step_that_would_leave_what_is_not_finite_changes_nothing_on_the_gpu(
    trainer: Any, make: Any, gradients: Any
) -> None:
    """With torch's fused kernel, which divides 0 by 0 as well."""
    ours = trainer("qwen3", dtype=None, device="cuda")
    cases: list[tuple[float, dict[str, float], str]] = [
        (1.0, {"eps": 0.0}, "lora_A.weight and of "),
        (1e21, {}, "base_model.model.model.layers.0."),
        (1.0, {"learning_rate": 1e30, "weight_decay": 3e8}, "base_model.model.model.layers.0."),
    ]
    for size, settings, named in cases:
        ours.create_adapter("a", LoraConfig(rank=4, seed=1))
        (result,) = ours.forward_backward([make.work("a", [9, 4])])
        assert isinstance(result, TrainResult)
        ours._adapters["a"].gradient *= size
        before = ours.capture("a", optimizer=True)
        with pytest.raises(InvalidRequestError, match="the gradient was discarded") as refused:
            ours.optim_step("a", AdamParams(**settings))
        assert named in str(refused.value)
        now = ours.capture("a", optimizer=True)
        assert now.step == 0
        for tensors, expected in ((now.tensors, before.tensors), (now.optimizer, before.optimizer)):
            for key, array in expected.items():
                np.testing.assert_array_equal(tensors[key], array)
        assert not any(array.any() for array in gradients(ours, "a").values())
        ours.forward_backward([make.work("a", [9, 4])])
        assert ours.optim_step("a", AdamParams())["grad_norm"] > 0
        ours.remove_adapter("a")


def test_a_step_on_the_gpu_is_refused_only_if_it_would_leave_what_is_not_finite() -> None:
    """Beside the fused kernel itself, over numbers and settings of all sizes."""
    generator, largest = np.random.default_rng(0), float(torch.finfo(torch.float32).max)
    refused = 0
    for _ in range(500):
        exponents = generator.uniform(-45, 38.4, (4, 1)) + generator.uniform(-3, 0, (4, 1000))
        numbers = generator.choice([-1.0, 0.0, 1.0], (4, 1000)) * 10.0 ** np.clip(exponents, -45, 38.4)
        numbers[2] = np.abs(numbers[2])
        settings = AdamParams(
            learning_rate=10.0 ** generator.uniform(-8, 20),
            eps=float(generator.choice([0.0, 1e-60, 1e-40, 1e-12, 1e-3])),
            weight_decay=float(generator.choice([0.0, 0.1, 1e10])),
        )
        given = torch.tensor(numbers.astype(np.float32), device="cuda")
        norm = gradient_norm(given[3])
        plain, ours = (list(given.clone()) for _ in range(2))
        states = [OptimizerState({"exp_avg": each[1], "exp_avg_sq": each[2]}, 3) for each in (plain, ours)]
        try:
            ADAMW.update(torch, plain[0], plain[3], states[0], settings, norm)
            fine = all(bool(vector.isfinite().all()) for vector in plain)
        except InvalidRequestError:
            fine = False
        tensors, limits = {"first": (0, 400), "second": (400, 1000)}, Limits(largest, largest)
        try:
            ADAMW.step(torch, ours[0], ours[3], states[1], settings, norm, tensors, limits)
        except InvalidRequestError:
            refused += 1
            assert not fine
            assert states[1].step == 3
            assert torch.equal(torch.stack(ours), given)
        else:
            assert fine
            assert torch.equal(torch.stack(ours), torch.stack(plain))
    assert 50 < refused < 450


def test_a_step_on_the_gpu_waits_for_the_device_once_however_many_tensors_there_are() -> None:
    """And once more if it has to be tried first, one part after the other."""
    waits, most = [], []
    size, both = 2**24, (AdamParams(), AdamParams(eps=0.0))
    for number, (count, settings) in enumerate(((1, AdamParams()), *itertools.product((1, 200), both))):
        weights, gradient = torch.ones(2, size, device="cuda")
        state = ADAMW.new_state(torch, weights)
        tensors = {str(at): (at * size // count, (at + 1) * size // count) for at in range(count)}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                ADAMW.step(torch, weights, gradient, state, settings, 2.0**12, tensors, Limits(1e38, 1e38))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if number:  # the first step of a process waits for more
            waits.append(len(seen))
            most.append(torch.cuda.max_memory_allocated() - before)
    print(f"waits {waits}, bytes {most}")
    assert waits == [1, 2, 1, 2]
    assert most[0] < 2**20
    assert most[2] < 2**20
    assert max(most) < 8 * 4 * TRIED_AT_ONCE
