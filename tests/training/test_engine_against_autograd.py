"""The hand-written forward and backward against transformers' own forward with autograd, on random models and data.

Everything runs in float64, so that any error larger than rounding shows: a gradient summed twice, a buffer used too
early, a layer recomputed from the wrong input. transformers computes RMS norms in float32 whatever the dtype; on both
sides, transformers' norms are made float64.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.training.kernels.kernels import TorchKernels
from tinker_local.backend.training.losses import LOSSES, loss_of
from tinker_local.backend.training.model.decoders.written_out.layers import WrittenOutDecoder
from tinker_local.backend.training.model.vision_attention import use_packed_attention
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import LoraConfig

from tests.conftest import few
from tests.training.autograd_reference import Hooked, norms_in_float64

RELATIVE = 1e-9
PAD, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
PATCH = 3 * 2 * 4 * 4
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"train_mlp": False},
    {"train_attn": False},
    {"train_unembed": False},
    {"train_attn": False, "train_mlp": False},
)

bounded = settings(max_examples=few(25), deadline=None, suppress_health_check=list(HealthCheck))


# Random models


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; `family`: transformers' name."""

    family: str
    layers: int
    kv_heads: int
    groups: int
    head_size: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    bias: bool
    deepstack: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    @property
    def sees(self) -> bool:
        return self.family != "qwen3"


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes with head sizes that are not powers of two, prime widths and odd vocabularies."""
    family = draw(st.sampled_from(["qwen3", "qwen3_vl", "qwen2_5_vl"]))
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    # Rotary positions of images need one frequency each for time, height and width.
    head_size = 2 * draw(st.integers(4, 16))
    hidden = kv_heads * groups * head_size if family == "qwen2_5_vl" else draw(st.integers(5, 40))
    return Shape(
        family=family,
        layers=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        groups=groups,
        head_size=head_size,
        hidden=hidden,
        intermediate=draw(st.integers(3, 50)),
        vocabulary=draw(st.integers(94, 160)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        deepstack=draw(st.integers(0, 3)),
    )


def build(shape: Shape, seed: int) -> Any:
    """transformers' model with random weights, including norms and biases."""
    text: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    special = {
        "image_token_id": PAD,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    half = shape.head_size // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    tower = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "out_hidden_size": shape.hidden,
    }
    if shape.family == "qwen3":
        model: Any = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                **text, head_dim=shape.head_size, attention_bias=shape.bias, tie_word_embeddings=shape.tied
            )
        )
    elif shape.family == "qwen3_vl":
        levels = list(range(min(shape.deepstack, shape.layers)))
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(
                text_config={
                    **text,
                    "head_dim": shape.head_size,
                    "attention_bias": shape.bias,
                    "rope_parameters": {**rope, "mrope_interleaved": True},
                },
                vision_config={**tower, "num_position_embeddings": 16, "deepstack_visual_indexes": levels},
                tie_word_embeddings=shape.tied,
                **special,
            )
        )
    else:
        model = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(
                text_config={**text, "rope_parameters": rope},
                vision_config={**tower, "fullatt_block_indexes": [1], "window_size": 16},
                tie_word_embeddings=shape.tied,
                **special,
            )
        )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0, 0.25, generator=generator)
    return model.double()


@contextmanager
def both(shape: Shape, seed: int, **options: Any) -> Iterator[tuple[HFTrainer, Any]]:
    """A trainer, and transformers' model with the same weights."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(seed)
        build(shape, seed).save_pretrained(folder)
        ours = HFTrainer(TrainerConfig(folder, name="m", dtype="float64", device="cpu", **options))
        kind = transformers.AutoModelForImageTextToText if shape.sees else transformers.AutoModelForCausalLM
        theirs = kind.from_pretrained(folder, dtype=torch.float64).eval().requires_grad_(False)
    norms_in_float64(theirs)
    if shape.sees or options.get("decoder") == "autograd":
        norms_in_float64(ours._loaded.model, within="visual" if options.get("decoder") != "autograd" else "")
    if shape.sees:
        use_packed_attention(theirs.model.visual)
    yield ours, theirs


def loss_terms(loss_fn: str, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """The documented formulas for one datum, for autograd, without handling of extreme values."""
    if loss_fn == "cross_entropy":
        return -inputs["weights"] * logprobs
    log_ratio, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
    if loss_fn == "dro":
        penalty = torch.where((advantages == 0) & (inputs["logprobs"] == 0), 0, config["beta"] / 2 * log_ratio**2)
        return penalty - logprobs * advantages
    ratio = torch.exp(log_ratio)
    if loss_fn == "gspo":
        marked = inputs["sequence_ratio_mask"] != 0
        of_sequence = torch.exp(log_ratio[marked].mean()) if marked.any() else torch.ones((), dtype=ratio.dtype)
        ratio = of_sequence.detach() * torch.exp(logprobs - logprobs.detach())
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    if loss_fn == "stable_reinforce":
        return stable_terms(logprobs, log_ratio, inputs, config)
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn in ("ppo", "gspo"):
        return -torch.minimum(ratio * advantages, clipped * advantages)
    return -clipped.detach() * logprobs * advantages


def stable_terms(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, inputs: dict[str, torch.Tensor], config: Any
) -> torch.Tensor:
    sampled, largest = inputs["sampled"] != 0, torch.tensor(config["max_ratio"], dtype=logprobs.dtype)
    drift = log_ratio[sampled].mean() if sampled.any() else torch.zeros((), dtype=logprobs.dtype)
    kept = drift.detach().abs() <= np.log(config["max_sequence_ratio"])
    ratio = log_ratio.exp()
    beyond = largest - 1 - largest.log() + (largest - 1) * (log_ratio - largest.log())
    pull = torch.where(ratio <= largest, ratio - 1 - log_ratio, beyond)
    gain = kept * torch.minimum(ratio, largest).detach() * inputs["advantages"] * logprobs
    return torch.where(sampled, config["kl_coeff"] * pull - gain, 0.0)


def expected(theirs: Hooked, work: TrainWork) -> tuple[list[torch.Tensor], float]:
    """The logprobs of each datum's targets, and the loss. Adds its gradient to the leaves."""
    found, total = [], 0.0
    for datum in work.data:
        rows = theirs.logprobs(work.adapter_id, datum.input)
        targets = torch.from_numpy(datum.target_tokens).reshape(datum.input.length, -1)
        logprobs = rows.gather(1, targets.clamp(0, rows.shape[1] - 1))
        logprobs = torch.where((targets < 0) | (targets >= rows.shape[1]), rows[:, :1], logprobs)
        logprobs = logprobs.reshape(datum.target_tokens.shape)
        inputs = {name: torch.from_numpy(values).double() for name, values in datum.loss_inputs.items()}
        loss = loss_terms(work.loss_fn, logprobs, inputs, work.loss_config).sum()
        if work.backward:
            loss.backward()
        found.append(logprobs.detach())
        total += float(loss.detach())
    return found, total


# Random data


def some_image(rng: np.random.Generator) -> RenderedImage:
    rows, columns = 2 * rng.integers(1, 4, 2)
    pixels = rng.standard_normal((rows * columns, PATCH)).astype(np.float32)
    return RenderedImage(str(rng.integers(2**60)), int(rows * columns // 4), pixels, (1, int(rows), int(columns)))


def some_input(rng: np.random.Generator, images: Sequence[RenderedImage]) -> RenderedInput:
    """1 to 40 text tokens, with `images` anywhere: first, last, adjacent."""
    length = int(rng.integers(0 if images else 1, 41))
    parts: list[RenderedImage | int] = [*images, *(int(token) for token in rng.integers(3, 90, length))]
    order = rng.permutation(len(parts))
    token_ids: list[int] = []
    placements = []
    for part in (parts[place] for place in order):
        if isinstance(part, RenderedImage):
            placements.append(ImagePlacement(len(token_ids), part))
            token_ids += [PAD] * part.num_tokens
        else:
            token_ids.append(part)
    return RenderedInput(np.array(token_ids, np.int32), tuple(placements))


def some_datum(rng: np.random.Generator, loss_fn: str, vocabulary: int, images: Sequence[RenderedImage]) -> TrainDatum:
    """Coefficients of either sign, many of them 0; where that switches a position off its target may be outside the
    vocabulary. Candidates repeat ids, and some repeat them with weights that cancel."""
    rendered = some_input(rng, images)
    n, candidates = rendered.length, int(rng.integers(1, 5))
    many = LOSSES[loss_fn].candidates and rng.random() < 0.5
    shape = (n, candidates) if many else (n,)
    targets = rng.integers(0, vocabulary, shape)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name in LOSSES[loss_fn].inputs}
    if "logprobs" in values:
        values["logprobs"] -= 4
    if loss_fn == "gspo":
        values["sequence_ratio_mask"] = (rng.random(shape) < rng.choice([0.1, 0.7])).astype(np.float32)
    coefficient = values[LOSSES[loss_fn].mask_inputs[0]]
    for name in LOSSES[loss_fn].mask_inputs:
        values[name][rng.random(shape) < 2 / 3 / len(LOSSES[loss_fn].mask_inputs)] = 0
    if many and candidates > 1:
        rows = rng.random(n) < 0.5
        targets[rows, 1] = targets[rows, 0]
        opposite = rows & (rng.random(n) < 0.5)
        coefficient[opposite, 1:] = 0
        coefficient[opposite, 1] = -coefficient[opposite, 0]
    if rng.random() < 0.1:
        coefficient[:] = 0
    unread = np.all([values[name] == 0 for name in LOSSES[loss_fn].target_inputs], axis=0)
    targets = np.where(unread & (rng.random(shape) < 0.3), rng.choice([-1, vocabulary, 10**9]), targets)
    return TrainDatum(rendered, targets, values)


def some_works(rng: np.random.Generator, adapters: Sequence[str], vocabulary: int, sees: bool) -> list[TrainWork]:
    """Up to two requests per adapter, with any loss, some without a gradient."""
    images = [some_image(rng) for _ in range(2)]
    works = []
    for adapter_id in [*adapters, *rng.choice(adapters, int(rng.integers(0, 3)))]:
        loss_fn = list(LOSSES)[rng.integers(len(LOSSES))]
        data = []
        for _ in range(int(rng.integers(1, 4))):
            shown = [some_image(rng) if rng.random() < 0.5 else images[rng.integers(2)] for _ in range(rng.integers(3))]
            data.append(some_datum(rng, loss_fn, vocabulary, shown if sees else ()))
        config = loss_of(loss_fn).complete_settings({})
        if loss_fn == "gspo" and rng.random() < 0.7:
            config = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}
        if loss_fn == "stable_reinforce" and rng.random() < 0.7:
            config = {"kl_coeff": 0.5, "max_ratio": 1.5, "max_sequence_ratio": 1e3}
        works.append(TrainWork(str(adapter_id), data, loss_fn, config, backward=bool(rng.random() < 0.85)))
    rng.shuffle(works)  # type: ignore[arg-type]
    return works


# Differences between machines


class Overwriting(TorchKernels):
    """`Kernels` that overwrite their inputs wherever the interface permits it, as those in Triton do."""

    def rms_norm_backward(self, grad: Any, x: Any, weight: Any, epsilon: Any, residual: Any) -> Any:
        found = super().rms_norm_backward(grad, x, weight, epsilon, residual)
        return found if residual is None else grad.copy_(found)

    def glu_backward(self, grad: Any, gate_up: Any, activation: Any) -> Any:
        by_gate_up, value = super().glu_backward(grad, gate_up, activation)
        return gate_up.copy_(by_gate_up), grad.copy_(value)


def overwrite(ours: HFTrainer) -> None:
    runner = ours._runner
    if isinstance(runner._decoder, WrittenOutDecoder):
        runner._decoder.kernels = Overwriting()
    runner._head = replace(runner._head, kernels=Overwriting())


def keep_at_random(ours: HFTrainer, rng: np.random.Generator) -> None:
    """Choose a random recompute policy, also ones that `ActivationMemory.policy` never chooses."""
    layers = len(ours._loaded.decoder.memory(1, 0).layers)
    runner: Any = ours._runner
    runner._policy = lambda *_: [tuple(Keep)[rng.integers(len(Keep))] for _ in range(layers)]


def add_adapter(ours: HFTrainer, adapter_id: str, config: LoraConfig, rng: np.random.Generator) -> None:
    ours.create_adapter(adapter_id, config)
    adapter = ours._adapters[adapter_id]
    for spec in adapter.specs:
        if spec.factor == "B":
            spec.view(adapter.weights).copy_(torch.from_numpy(rng.standard_normal(spec.shape) * 0.1 / config.rank))


def assert_near(ours: Any, theirs: Any, scale: float, what: str) -> None:
    difference = float((torch.as_tensor(ours, dtype=torch.float64) - theirs).abs().max())
    assert difference <= RELATIVE * scale, f"{what}: differs by {difference:.3g}, scale {scale:.3g}"


def assert_gradients_near(ours: HFTrainer, theirs: Hooked, adapter_id: str) -> None:
    """Compare relative to the largest value among matrices of the same kind, so that small factors count as much."""
    adapter = ours._adapters[adapter_id]
    wanted = theirs.gradients(adapter_id)
    # Values that cancel exactly on one side may leave rounding errors on the other, in proportion to all gradients.
    smallest = 1e-6 * max(1.0, *(float(gradient.abs().max()) for gradient in wanted.values()))
    for spec in adapter.specs:
        kind = [
            wanted[s.name]
            for s in adapter.specs
            if (s.target.group, s.target.projection, s.factor)
            == (spec.target.group, spec.target.projection, spec.factor)
        ]
        scale = max(float(gradient.abs().max()) for gradient in kind)
        gradient = torch.zeros_like(adapter.weights) if adapter.gradient is None else adapter.gradient
        assert_near(spec.view(gradient), wanted[spec.name], max(scale, smallest), f"{adapter_id} {spec.name}")


@pytest.mark.rotated(2)
@pytest.mark.mutation(
    "gspo-ratio-of-a-chunk",
    "LmHead.logprobs_and_gradient",
    "np.union1d(np.setdiff1d(targets.rows, active_rows), targets.rows[targets.prepass])",
    "np.setdiff1d(targets.rows, active_rows)",
)
@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
@bounded
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1), ranks=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_values_and_gradients_equal_transformers_with_autograd(decoder: Any, shape: Any, seed: Any, ranks: Any) -> None:
    rng = np.random.default_rng(seed)
    options = {
        "decoder": decoder,
        "micro_batch_tokens": int(rng.choice([1, 17, 40, 90, 8192])),
        "logit_chunk_elements": int(rng.choice([1, 2 * shape.vocabulary - 1, 7 * shape.vocabulary, 2**24])),
        "image_cache_bytes": int(rng.choice([0, 4096, 2**28])),
    }
    with both(shape, seed % 2**31, **options) as (ours, model):
        for place, rank in enumerate(ranks):
            add_adapter(ours, f"{place}", LoraConfig(rank=rank, seed=place, **FLAGS[rng.integers(len(FLAGS))]), rng)
        if rng.random() < 0.7:
            overwrite(ours)
        if rng.random() < 0.8:
            keep_at_random(ours, rng)
        theirs = Hooked(ours, model)
        works = some_works(rng, list(ours._adapters), shape.vocabulary, shape.sees)
        base = works[0].data[0].input
        wanted_base = theirs.logprobs(None, base)
        for _ in range(2):  # gradients accumulate
            results = ours.forward_backward(works)
            for work, result in zip(works, results, strict=True):
                assert isinstance(result, TrainResult), result
                logprobs, loss = expected(theirs, work)
                magnitude = sum(float(np.abs(v).sum()) for d in work.data for v in d.loss_inputs.values())
                assert_near(result.metrics["loss:sum"], loss, max(1.0, magnitude, abs(loss)), "loss:sum")
                for output, of_datum in zip(result.outputs, logprobs, strict=True):
                    np.testing.assert_allclose(output["logprobs"], of_datum, rtol=1e-6, atol=1e-6)
        for adapter_id in ours._adapters:
            assert_gradients_near(ours, theirs, adapter_id)
        next_tokens = torch.from_numpy(base.token_ids[1:].astype(np.int64))
        wanted = wanted_base[:-1].gather(1, next_tokens[:, None])[:, 0].detach()
        np.testing.assert_allclose(ours.logprobs(None, base), wanted, rtol=1e-6, atol=1e-6)
