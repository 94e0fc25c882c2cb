"""Mixtures of experts train and sample with adapters of the hosted layout, in which experts share a factor."""

import asyncio
import io
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from PIL import Image
from tinker_local.backend.adapters.adapter import FACTORS, AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.families import FAMILIES as FAMILY_OF
from tinker_local.backend.models.gpu_plan import model_sizes
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.text_families import QWEN3_5_SHAPE
from tinker_local.backend.training.kernels import compat_torch
from tinker_local.backend.training.model.decoders.packed_experts import scores_are_softmax
from tinker_local.backend.training.model.decoders.written_out.experts_block import ExpertsPass
from tinker_local.backend.training.model.experts import chosen_softmax_backward
from tinker_local.backend.training.model.load_model import decoder_of_sizes
from tinker_local.backend.training.run.recompute_policy import Keep
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import (
    AdamParams,
    EncodedTextChunk,
    ImageChunk,
    InvalidRequestError,
    LoraConfig,
    ModelInput,
    SamplingParams,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.float64 import Exact, InFloat64
from tests.training.autograd_reference import model_arguments

_DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
_EXPERTS = ("experts.w1", "experts.w2", "experts.w3")
_SHARED = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
_SHARED_EXPERTS = tuple(name.replace("shared_expert", "shared_experts") for name in _SHARED)
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_CONVOLUTION = ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "conv.in_proj", "conv.out_proj", "lm_head")
_LINEAR_ATTENTION = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj")
TARGETS = {
    "qwen3_moe": (*_DENSE, *_EXPERTS),
    "qwen3_vl_moe": (*_DENSE, *_EXPERTS),
    "qwen3_5_moe": (*_DENSE, *_EXPERTS, *_SHARED, *_LINEAR_ATTENTION),
    "qwen3_5_moe_text": (*_DENSE, *_EXPERTS, *_SHARED, *_LINEAR_ATTENTION),
    "gpt_oss": (*_DENSE, *_EXPERTS),
    "mixtral": (*_DENSE, *_EXPERTS),
    "olmoe": (*_DENSE, *_EXPERTS),
    "qwen2_moe": (*_DENSE, *_EXPERTS, *_SHARED),
    "glm4_moe": (*_DENSE, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
    "ernie4_5_moe": (*_DENSE, *_EXPERTS, *_SHARED_EXPERTS, *_MLP),
    "minimax_m2": (*_DENSE, *_EXPERTS),
    "qwen3_next": (*_DENSE, *_EXPERTS, *_SHARED, "in_proj_qkvz", "out_proj"),
    "lfm2_moe": (*_CONVOLUTION, *_EXPERTS, "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
}
"""What the hosted service trains, by family."""

NOT_TRAINED = {
    "qwen3_5_moe": ("mlp.gate", "mlp.shared_expert_gate"),
    "qwen3_5_moe_text": ("mlp.gate", "mlp.shared_expert_gate"),
    "gpt_oss": ("mlp.router",),
    "qwen2_moe": ("mlp.gate", "mlp.shared_expert_gate"),
    "qwen3_next": ("mlp.gate", "mlp.shared_expert_gate"),
    "lfm2_moe": ("feed_forward.gate",),
}
"""Modules of which vLLM takes adapters, and most of whose models ignore them; of other families `mlp.gate` alone."""

NEWER = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "qwen3_next", "lfm2_moe")
TIED = ("lfm2_moe",)
"""Families whose head vLLM takes for the embedding."""
BY_AUTOGRAD = ("lfm2_moe",)
"""Families whose layers are not written out."""
FAMILIES = tuple(family for family in TARGETS if family != "qwen3_5_moe_text")  # the same layers
DECODERS = ("autograd", "written-out")
CASES = [(family, name) for family in FAMILIES for name in DECODERS if name == "autograd" or family not in BY_AUTOGRAD]
ATTENTION = {"train_mlp": False, "train_unembed": False}
ADAPTERS = {
    "everything": LoraConfig(rank=4, seed=1),
    "experts": LoraConfig(rank=13, seed=2, train_attn=False, train_unembed=False),
    "attention": LoraConfig(rank=1, seed=3, **ATTENTION),
}
LENGTHS = (5, 80, 18)
"""Of texts; a chunk of the delta rule has 64 positions."""

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny model of a family, made once. Its LM head is not the embedding, which adapters leave alone, but in
    families whose head always is."""

    @cache
    def made(family: str) -> Path:
        place, tied = tmp_path_factory.mktemp(family) / "model", family in TIED
        options: dict[str, Any] = {"family": family, "tie_word_embeddings": tied}
        if family.startswith(("qwen3_5_moe", "qwen3_next")):  # with weights that amplify rounding less
            options["text" if family == "qwen3_5_moe" else "shape"] = replace(QWEN3_5_SHAPE, weight_scale=0.6)
        make: Any = make_tiny_text_model if FAMILY_OF[family].vision is None else make_tiny_vl_model
        path: Path = make(place, **options)
        return path

    return made


def tokens(seed: int, length: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(20, 380, length).astype(np.int32)


def with_image(seed: int, pad: int) -> RenderedInput:
    """Text, an image of 2 x 3 features and text."""
    pixels = np.random.default_rng(seed).standard_normal((24, 3 * 2 * 16 * 16)).astype(np.float32)
    image = RenderedImage(str(seed), 6, pixels, (1, 4, 6))
    ids = np.concatenate([tokens(seed, 7), np.full(6, pad, np.int32), tokens(seed + 1, 9)])
    return RenderedInput(ids, (ImagePlacement(7, image),))


def with_pictures(folder: Path, texts: Sequence[RenderedInput]) -> list[RenderedInput]:
    """`texts`, each with a picture in the middle, as the model's renderer makes them."""
    renderer = load_renderer(str(folder))
    found = []
    for seed, text in enumerate(texts):
        pixels, file = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8), io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        before, after = (EncodedTextChunk(tokens=half) for half in np.array_split(text.token_ids, 2))
        picture = ImageChunk(data=file.getvalue(), format="png")
        found.append(renderer.render(ModelInput(chunks=(before, picture, after)), "prompt"))
    return found


def data(seed: int, pad: int | None = None) -> list[TrainDatum]:
    """Texts, and one with an image if a token `pad` stands for its features."""
    inputs = [RenderedInput(tokens(10 * seed + index, length)) for index, length in enumerate(LENGTHS)]
    if pad is not None:
        inputs.append(with_image(seed, pad))
    found = []
    for each in inputs:
        targets = np.append(each.token_ids[1:], 33).astype(np.int64)
        weights = np.random.default_rng(seed).standard_normal(each.length).astype(np.float32)
        found.append(TrainDatum(each, targets, {"weights": np.where(targets == pad, 0, weights)}))
    return found


def pad_of(trainer: HFTrainer) -> int | None:
    """The token that stands for features of images, if the model reads them."""
    return getattr(trainer._loaded.model.config, "image_token_id", None)


def new_trainer(folder: Path, **options: Any) -> HFTrainer:
    """On the CPU, with `ADAPTERS` whose B is not 0."""
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", device="cpu", **options))
    for name, config in ADAPTERS.items():
        trainer.create_adapter(name, config)
        trainer.load_adapter(name, filled(trainer.capture(name, optimizer=False), ""))
    return trainer


def filled(state: AdapterState, target: str, size: float = 0.03) -> AdapterState:
    """`state` with a random B of the modules whose names contain `target`, and without that of others."""
    tensors = {name: np.array(array) for name, array in state.tensors.items()}
    for seed, (name, array) in enumerate(tensors.items()):
        if ".lora_B." in name:
            noise = np.random.default_rng(seed).standard_normal(array.shape)
            array[...] = size * noise if target in name else 0
    return replace(state, tensors=tensors)


class Merged:
    """transformers' model in float64 with the adapters of a trainer added to its weights, as leaves with gradients."""

    def __init__(self, trainer: HFTrainer) -> None:
        path = trainer._loaded.model.name_or_path
        self.model = (
            getattr(transformers, trainer._loaded.family.auto_class)
            .from_pretrained(path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
            .eval()
        )
        self.model.requires_grad_(False)
        self.split, self.vision = trainer._loaded.family.lora.split, trainer._loaded.family.vision
        self.leaves = {
            name: {spec.name: spec.view(adapter.weights).clone().requires_grad_() for spec in adapter.specs}
            for name, adapter in trainer._adapters.items()
        }

    def logprobs(self, name: str, input: RenderedInput) -> torch.Tensor:
        """[N, V]."""
        weights = {key: parameter.clone() for key, parameter in self.model.named_parameters(remove_duplicate=False)}
        for key, b in self.leaves[name].items():
            if ".lora_B." not in key:
                continue
            path = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            change = 32 / b.shape[-1] * b @ self.leaves[name][key.replace("lora_B", "lora_A")]
            module, _, last = path.rpartition(".")
            half = change.shape[-2]
            whole, rows = self.rows(module, last)
            if rows is not None:
                weights[f"{module}.{whole}.weight"][rows] += change
            elif last in ("w1", "w3") and module.endswith(".experts"):
                gate_up = weights[f"{module}.gate_up_proj"]
                if self.model.config.model_type == "gpt_oss":
                    gate_up[:, :, (last == "w3") :: 2] += change.transpose(1, 2)
                else:
                    gate_up[:, slice(half) if last == "w1" else slice(half, None)] += change
            elif last == "w2" and module.endswith(".experts"):
                down = weights[f"{module}.down_proj"]
                down += change.transpose(1, 2) if self.model.config.model_type == "gpt_oss" else change
            else:
                weights[f"{path}.weight"] += change
        arguments = model_arguments(input, self.vision)
        output = torch.func.functional_call(self.model, weights, (), arguments, tie_weights=False)  # an adapted head
        return output.logits[0].log_softmax(-1)

    def rows(self, module: str, part: str) -> tuple[str, slice | None]:
        """The module at `module`, and its rows, that adapters call `part`."""
        for whole, split in self.split.items():
            if part in split.projections:
                heights = split.heights(self.model.get_submodule(module))
                stop = sum(heights[: split.projections.index(part) + 1])
                return whole, slice(stop - heights[split.projections.index(part)], stop)
        return part, None


@pytest.mark.rotated(3)
@pytest.mark.mutation(
    "scores-of-experts-detached", "_Experts.backward", "return grad_x, grad_scores,", "return grad_x, None,"
)
@pytest.mark.mutation(
    "gradient-beyond-the-limits-of-gpt-oss",
    "ClampedGating.backward",
    ".masked_fill_(raw_up.abs() > self.limit, 0)",
    "",
    cases=("gpt_oss-autograd", "gpt_oss-written-out"),
)
@pytest.mark.mutation(
    "router-without-gradient-written-out",
    "ExpertsPass._add_gradient_by_scores",
    "block.router_matrix.add_back(grad_m, grad_logits.to(grad_m.dtype))",
    "grad_m.add_(0)",
    cases=("qwen3_moe-written-out", "gpt_oss-written-out"),
)
@pytest.mark.parametrize(("family", "decoder"), CASES)
def test_several_adapters_in_one_row_equal_transformers_with_each_merged(
    family: str, decoder: Any, folder: Folder
) -> None:
    """Logprobs, which are reported in float32, and gradients of every matrix relative to the largest of its kind, also
    through the router and the gate of a shared expert, in float64. With images, if the family reads them."""
    with InFloat64():
        trainer = new_trainer(folder(family), decoder=decoder, dtype="float64")
        theirs, pad = Merged(trainer), pad_of(trainer)
        works = [TrainWork(name, data(seed, pad), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
        for work, result in zip(works, trainer.forward_backward(works), strict=True):
            for datum, output in zip(work.data, result.outputs, strict=True):  # type: ignore[union-attr]
                rows = theirs.logprobs(work.adapter_id, datum.input)
                wanted = rows.gather(1, torch.from_numpy(datum.target_tokens)[:, None])[:, 0]
                np.testing.assert_allclose(output["logprobs"], wanted.detach(), rtol=1e-7, atol=1e-7)
                (-(torch.from_numpy(datum.loss_inputs["weights"]) * wanted).sum()).backward()
    for name, adapter in trainer._adapters.items():
        assert adapter.gradient is not None
        for spec in adapter.specs:
            grad = theirs.leaves[name][spec.name].grad
            assert grad is not None
            scale = float(grad.abs().max())
            assert scale > 0, spec.name
            difference = float((spec.view(adapter.gradient) - grad).abs().max())
            assert difference <= 1e-9 * scale, f"{name} {spec.name}: {difference:.2g} of {scale:.2g}"


@pytest.mark.parametrize(
    ("family", "decoder"),
    [*(("qwen3_moe", decoder) for decoder in DECODERS), ("qwen3_5_moe", "written-out"), ("gpt_oss", "written-out")],
)
def test_recomputed_layers_with_experts_have_the_same_gradients(
    family: str, decoder: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InFloat64():
        trainer, seen = new_trainer(folder(family), decoder=decoder, dtype="float64"), {}
    layers = len(trainer._loaded.model.get_submodule(trainer._loaded.family.decoder_path).layers)
    for keep in Keep:
        monkeypatch.setattr(trainer._runner, "_policy", lambda *_, keep=keep: [keep] * layers)
        for name in ADAPTERS:
            trainer.discard_gradients(name)
        works = [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
        with InFloat64():
            trainer.forward_backward(works)
        seen[keep] = {name: adapter.gradient for name, adapter in trainer._adapters.items()}
    for keep, gradients in seen.items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, seen[Keep.ALL][name], rtol=1e-9, atol=1e-12, msg=f"{keep} {name}")


def test_scores_that_are_a_share_of_all_experts_have_their_own_gradient(folder: Folder, tmp_path: Path) -> None:
    """Qwen3-MoE can leave them as the softmax of all experts' logits; written out, transformers' router gives the
    gradient then. The autograd decoder always asks it."""
    path = shutil.copytree(folder("qwen3_moe"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "norm_topk_prob": False}))
    seen = []
    for decoder in DECODERS:
        works = [TrainWork(name, data(seed), "cross_entropy") for seed, name in enumerate(ADAPTERS)]
        with InFloat64():
            trainer = new_trainer(path, decoder=decoder, dtype="float64")
            trainer.forward_backward(works)
        seen.append({name: adapter.gradient for name, adapter in trainer._adapters.items()})
    for name, gradient in seen[0].items():
        assert gradient is not None
        torch.testing.assert_close(seen[1][name], gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_a_router_is_known_by_its_scores(size: float, normalised: bool) -> None:
    """Whatever the size of its weights: with large ones, nearly all of a softmax is in one expert."""
    settings = {"num_experts": 64, "num_experts_per_tok": 4, "hidden_size": 32, "norm_topk_prob": normalised}
    router = Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**settings))
    torch.nn.init.normal_(router.weight, std=size, generator=torch.Generator().manual_seed(0))
    assert scores_are_softmax(router) is normalised

    class Sigmoid(Qwen3MoeTopKRouter):
        def forward(self, hidden_states: Any) -> Any:
            logits = hidden_states @ self.weight.T
            scores, experts = logits.sigmoid().topk(self.top_k)
            return logits, scores / scores.sum(-1, keepdim=True), experts

    router.__class__ = Sigmoid
    assert not scores_are_softmax(router)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "gpt_oss"])
def test_a_seed_gives_the_same_weights_under_both_decoders(family: str, tmp_path: Path) -> None:
    make_tiny_text_model(tmp_path / "model", family=family)
    seen = []
    for decoder in DECODERS:
        trainer = HFTrainer(
            TrainerConfig(str(tmp_path / "model"), name="tiny", dtype="float32", device="cpu", decoder=decoder)
        )
        trainer.create_adapter("a", LoraConfig(rank=4, seed=1))
        seen.append(trainer.capture("a", optimizer=False).tensors)
    assert seen[0].keys() == seen[1].keys()
    for name, array in seen[0].items():
        np.testing.assert_array_equal(seen[1][name], array, err_msg=name)


def test_what_gradients_of_scores_have_in_common_adds_nothing() -> None:
    """Also where scores are rounded to bfloat16, so that their sum is not quite 1."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(logits.softmax(-1), logits, grad)
    scores, experts = logits.detach().softmax(-1).bfloat16(), torch.arange(8).expand(200, 8)
    for common in (0, 30):
        found = chosen_softmax_backward((grad + common).float(), scores, experts, 8)
        assert float((found - wanted).norm() / wanted.norm()) < 0.01, common


class Waits(TorchDispatchMode):
    """Counts what reads a number of a tensor, or as many numbers as its values say: on a GPU, the host waits for it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.count += name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_no_layer_with_experts_waits_for_the_device(
    family: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's grouped products, as on a GPU."""
    monkeypatch.setattr(compat_torch, "grouped_mm_works", lambda x: True)
    trainer = HFTrainer(
        TrainerConfig(str(folder(family)), name="tiny", dtype="bfloat16", device="cpu", decoder="written-out")
    )
    waits, ran = Waits(), []

    def counted(do: Any) -> Any:
        def run(*args: Any) -> Any:
            with waits:
                ran.append(do)
                return do(*args)

        return run

    for step in ("forward", "restore", "backward"):
        monkeypatch.setattr(ExpertsPass, step, counted(getattr(ExpertsPass, step)))
    for name, rank in (("a", 4), ("b", 8)):
        trainer.create_adapter(name, LoraConfig(rank=rank, seed=1))
    trainer.forward_backward([TrainWork(name, data(3), "cross_entropy") for name in ("a", "b")])
    assert len(ran) >= 3
    assert waits.count == 0


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_a_bfloat16_model_with_experts_trains(family: str, decoder: Any, folder: Folder) -> None:
    """Where gradients are float32 and activations are not."""
    trainer = HFTrainer(
        TrainerConfig(str(folder(family)), name="tiny", dtype="bfloat16", device="cpu", decoder=decoder)
    )
    trainer.create_adapter("a", ADAPTERS["everything"])
    losses = []
    for _ in range(4):
        (result,) = trainer.forward_backward([TrainWork("a", data(6), "cross_entropy")])
        losses.append(result.metrics["loss:sum"])  # type: ignore[union-attr]
        trainer.optim_step("a", AdamParams(learning_rate=0.01))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "gpt_oss"])
def test_the_files_have_the_hosted_names_and_shapes_and_training_goes_on_from_them(family: str, folder: Folder) -> None:
    """And the router has no adapter."""
    trainer = new_trainer(folder(family))
    config = trainer._loaded.model.config.get_text_config()
    count, hidden = config.num_experts, config.hidden_size
    width = config.intermediate_size if family == "gpt_oss" else config.moe_intermediate_size
    exported = trainer.export("everything")
    shapes = {name: array.shape for name, array in exported.tensors.items() if "layers.1.mlp" in name}
    start, shared = (f"base_model.model.model.layers.1.mlp.{kind}" for kind in ("experts", "shared_expert"))
    wide = getattr(config, "shared_expert_intermediate_size", 0)
    of_shared = {
        f"{shared}.gate_proj.lora_A.weight": (4, hidden),
        f"{shared}.gate_proj.lora_B.weight": (wide, 4),
        f"{shared}.up_proj.lora_A.weight": (4, hidden),
        f"{shared}.up_proj.lora_B.weight": (wide, 4),
        f"{shared}.down_proj.lora_A.weight": (4, wide),
        f"{shared}.down_proj.lora_B.weight": (hidden, 4),
    }
    layer, attention = 3 if family == "qwen3_5_moe" else 1, "attn" if family == "gpt_oss" else "self_attn"
    assert f"base_model.model.model.layers.{layer}.{attention}.q_proj.lora_A.weight" in exported.tensors
    assert shapes == (of_shared if wide else {}) | {
        f"{start}.w1.lora_A.weight": (1, 4, hidden),
        f"{start}.w1.lora_B.weight": (count, width, 4),
        f"{start}.w3.lora_A.weight": (1, 4, hidden),
        f"{start}.w3.lora_B.weight": (count, width, 4),
        f"{start}.w2.lora_A.weight": (count, 4, width),
        f"{start}.w2.lora_B.weight": (1, hidden, 4),
    }
    trainer.forward_backward([TrainWork("everything", data(3), "cross_entropy")])
    trainer.optim_step("everything", AdamParams(learning_rate=1e-3))
    trainer.load_adapter("again", trainer.capture("everything", optimizer=True))
    for name in ("everything", "again"):
        trainer.forward_backward([TrainWork(name, data(4), "cross_entropy")])
        trainer.optim_step(name, AdamParams(learning_rate=1e-3))
    assert torch.equal(trainer._adapters["again"].weights, trainer._adapters["everything"].weights)


@pytest.mark.parametrize(
    ("name", "model_type", "sizes"),
    [
        ("openai/gpt-oss-20b", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
        ("openai/gpt-oss-120b", "gpt_oss", {}),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", {}),
    ],
)
def test_published_models_have_as_many_trained_parameters_as_on_the_hosted_service(
    name: str, model_type: str, sizes: dict[str, int]
) -> None:
    """By the cookbook's table; and the memory plan counts them, to a few per cent."""
    from tinker_cookbook.hyperparam_utils import get_lora_param_count  # other tests of this file run without it

    config = transformers.AutoConfig.for_model(model_type, **sizes)
    decoder, parameters = decoder_of_sizes(config, "bfloat16", "written-out")
    flags = ("attn", "mlp")
    for flag in flags:
        trained = [target.shape(factor, 1) for target in decoder.targets if target.flag == flag for factor in FACTORS]
        only = {f"train_{each}": each == flag for each in (*flags, "unembed")}
        assert sum(map(math.prod, trained)) == get_lora_param_count(name, lora_rank=1, **only)
    planned = model_sizes(config.get_text_config().to_dict(), parameters, 2).adapter_parameters(1)
    assert planned == pytest.approx(get_lora_param_count(name, lora_rank=1), rel=0.05)


def write(path: Path, state: AdapterState) -> AdapterVersion:
    path.mkdir()
    write_adapter(path, state)
    return AdapterVersion(str(path), path)


@pytest.mark.more
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "qwen3_5_moe", *NEWER),
        *(pytest.param(family, marks=pytest.mark.more) for family in ("qwen3_vl_moe", "qwen3_5_moe_text")),
    ],
)
def test_each_target_alone_reaches_the_sampler(family: str, folder: Folder, tmp_path: Path) -> None:
    """Sampled and prompt logprobs of the base, of each target alone, and of adapters before and after training, all in
    the same steps; half of the prompts have an image, if the family reads them. An adapter that names the router or
    the gate of a shared expert is refused, since vLLM ignores it."""
    trainer = new_trainer(folder(family))
    full, decoder = trainer.capture("everything", optimizer=False), trainer._loaded.family.decoder_path
    versions: dict[str, AdapterVersion | None] = {"base": None}
    for target in TARGETS[family]:
        trainer.load_adapter(target, filled(full, target, 0.3))
        versions[target] = write(tmp_path / target, trainer.capture(target, optimizer=False))
    for name in ADAPTERS:
        versions[name] = write(tmp_path / f"{name}-new", trainer.capture(name, optimizer=False))
        copy = f"{name} trained"
        trainer.load_adapter(copy, trainer.capture(name, optimizer=False))
        trainer.forward_backward([TrainWork(copy, data(5), "cross_entropy")])
        trainer.optim_step(copy, AdamParams(learning_rate=0.02))
        versions[copy] = write(tmp_path / copy, trainer.capture(copy, optimizer=False))
    refused = {}
    for module in NOT_TRAINED.get(family, ("mlp.gate",)):
        height = len(trainer._loaded.model.get_submodule(f"{decoder}.layers.1.{module}").weight)
        extra = {
            f"base_model.model.{decoder}.layers.1.{module}.lora_{factor}.weight": np.ones(shape, np.float32)
            for factor, shape in (("A", (4, 64)), ("B", (height, 4)))
        }
        refused[module] = write(tmp_path / module, replace(full, tensors={**full.tensors, **extra}))
    pad = pad_of(trainer)
    prompts = [RenderedInput(tokens(seed, 21)) for seed in range(len(versions))]
    if pad is not None:
        prompts[::2] = with_pictures(folder(family), prompts[::2])

    async def sample() -> tuple[Sequence[Any], Mapping[str, str]]:
        sampler = VLLMSampler(
            EngineOptions(str(folder(family)), max_rank=16, kv_cache_bytes=2**26, adapters_per_step=4), EngineThread()
        )

        def asked(seed: int, version: AdapterVersion | None) -> SampleWork:
            params = SamplingParams(max_tokens=6, seed=seed, stop=[])
            return SampleWork(prompts[seed], version, params, prompt_logprobs=True)

        try:
            outputs = await asyncio.gather(
                *(sampler.sample(asked(seed, version)) for seed, version in enumerate(versions.values()))
            )
            messages = {}
            for module, version in refused.items():
                with pytest.raises(InvalidRequestError) as refusal:
                    await sampler.sample(asked(0, version))
                messages[module] = str(refusal.value)
            return outputs, messages
        finally:
            await sampler.close()

    outputs, messages = asyncio.run(sample())
    exact = Exact(trainer)
    for module, message in messages.items():
        assert "vLLM does not use the tensors of" in message
        assert f"model.layers.1.{module}" in message
    for name, prompt, output in zip(versions, prompts, outputs, strict=True):
        (sequence,) = output.sequences
        ids = np.concatenate([prompt.token_ids, sequence.tokens.astype(np.int32)])
        whole = replace(prompt, token_ids=ids)
        sampled = np.concatenate([output.prompt_logprobs[1:], sequence.logprobs])
        adapter, is_text = None if name == "base" else name, ids[1:] != pad
        ours = trainer.logprobs(adapter, whole)
        exact.assert_near(adapter, [whole], ours[is_text], sampled[is_text], at=is_text)
        if name != "base":
            effect = float(np.abs(ours - trainer.logprobs(None, whole))[is_text].max())
            assert effect > 0.02, f"{name} changes logprobs by {effect:.2g}"


@pytest.mark.more
def test_a_model_with_experts_may_come_after_one_without(
    folder: Folder, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its groups of ranks with the first engine of a process, here or in an earlier test."""
    from vllm.distributed import parallel_state

    async def sampled(model: Path) -> Any:
        options = EngineOptions(str(model), max_rank=16, kv_cache_bytes=2**26)
        sampler = VLLMSampler(options, EngineThread())
        try:
            return await sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=3, seed=0, stop=[])))
        finally:
            await sampler.close()

    prompt = RenderedInput(tokens(0, 9))
    asyncio.run(sampled(tiny_models["tiny/text"]))
    monkeypatch.setattr(parallel_state, "_EP", None)
    (sequence,) = asyncio.run(sampled(folder("qwen3_moe"))).sequences
    whole = replace(prompt, token_ids=np.concatenate([prompt.token_ids, sequence.tokens.astype(np.int32)]))
    exact = Exact(new_trainer(folder("qwen3_moe")))
    exact.assert_near(None, [whole], sequence.logprobs, at=slice(len(prompt.token_ids) - 1, None))
