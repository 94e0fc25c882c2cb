"""Real vLLM engines on tiny models, and HF transformers in float64 to compare them with."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.patches import PATCHES
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams

from tests.float64 import InFloat64

ALPHA = 32


differences: list[float] = []
"""Largest difference of logprobs in each comparison of this session, in nats."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if differences:
        versions = ", ".join(f"{name} {sys.modules[name].__version__}" for name in ("vllm", "torch", "transformers"))
        terminalreporter.write_line(
            f"sampler ({versions}) against HF in float64: {len(differences)} comparisons, largest differences: "
            f"median {np.median(differences):.1e}, maximum {max(differences):.1e}"
        )


class Adapter:
    """A random LoRA adapter in PEFT's layout, on disk and as `{module: (A [r, in], B [out, r])}`."""

    def __init__(self, version: AdapterVersion, rank: int, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]):
        self.version = version
        self.rank = rank
        self.weights = weights


def write_adapter(folder: Path, name: str, model: Any, modules: str, rank: int, seed: int) -> Adapter:
    """One for every linear module of the language model whose name matches `modules`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "visual" not in module_name and re.search(modules, module_name):
            a = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
            b = torch.randn(module.out_features, rank, generator=generator) * 0.3 * rank**0.5 / ALPHA
            weights[module_name] = (a, b)
    assert weights
    write_adapter_files(folder, weights, rank)
    return Adapter(AdapterVersion(name, folder), rank, weights)


def write_adapter_files(folder: Path, weights: dict[str, tuple[torch.Tensor, torch.Tensor]], rank: int) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for module_name, (a, b) in weights.items():
        tensors[f"base_model.model.{module_name}.lora_A.weight"] = a
        tensors[f"base_model.model.{module_name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-1] for name in weights}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


class HFReference:
    """A HF model in float64; `RenderedInput`s go in with explicit image positions, ids are never looked for."""

    def __init__(self, folder: Path, model_class: str) -> None:
        import transformers

        self.model = getattr(transformers, model_class).from_pretrained(folder, dtype=torch.float64).eval()

    @torch.no_grad()
    def logits(self, prompt: RenderedInput, continuation: Sequence[int] = ()) -> torch.Tensor:
        """[N + continuation, V]"""
        ids = torch.tensor([[*prompt.token_ids.tolist(), *continuation]])
        if not prompt.images:
            with InFloat64():
                return self.model(input_ids=ids).logits[0]
        images = [(p.offset, p.image) for p in prompt.images]
        is_image = torch.zeros(ids.shape, dtype=torch.bool)
        for offset, image in images:
            is_image[0, offset : offset + image.num_tokens] = True
        inner = self.model.model
        original = inner.get_placeholder_mask
        inner.get_placeholder_mask = lambda *_, **__: (is_image[..., None], torch.zeros_like(is_image[..., None]))
        arguments = {
            "position_ids": self._positions(ids.shape[1], images),
            "pixel_values": torch.cat([torch.from_numpy(image.pixel_values) for _, image in images]),
            "image_grid_thw": torch.tensor([image.grid_thw for _, image in images]),
        }
        try:
            with InFloat64():
                return self.model(input_ids=ids, **arguments).logits[0]
        finally:
            inner.get_placeholder_mask = original

    def _positions(self, length: int, images: Sequence[tuple[int, Any]]) -> torch.Tensor:
        """Time, height and width [3, 1, length] of M-RoPE (arXiv:2409.12191, section 2.1)."""
        merge = self.model.config.vision_config.spatial_merge_size
        columns, position, done = [], 0, 0
        for offset, image in [*images, (length, None)]:
            text = torch.arange(offset - done) + position
            columns.append(text.expand(3, -1))
            position += offset - done
            if image is not None:
                _, rows, cols = image.grid_thw
                rows, cols = rows // merge, cols // merge
                y, x = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
                columns.append(torch.stack([torch.zeros(rows * cols), y.flatten(), x.flatten()]).long() + position)
                position += max(rows, cols)
                done = offset + image.num_tokens
        return torch.cat(columns, dim=1)[:, None]

    def prompt_logprobs(self, prompt: RenderedInput) -> npt.NDArray[np.float32]:
        """[N - 1] at temperature 1"""
        log_p = self.logits(prompt).log_softmax(-1)
        targets = torch.from_numpy(prompt.token_ids[1:].astype(np.int64))
        return log_p[:-1].gather(1, targets[:, None])[:, 0].numpy()

    def logprobs(
        self, prompt: RenderedInput, tokens: npt.NDArray[np.int32], temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """log softmax(logits / temperature) of sampled `tokens`, over the whole vocabulary."""
        logits = self.logits(prompt, tokens.tolist())[prompt.length - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)
        return log_p.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0].numpy()

    @contextlib.contextmanager
    def merged(self, adapter: Adapter | None) -> Iterator[None]:
        """The adapter added to the weights; a tied LM head is untied for the time."""
        modules = dict(self.model.named_modules())
        kept = {}
        for name, (a, b) in ({} if adapter is None else adapter.weights).items():
            kept[name] = modules[name].weight
            delta = ALPHA / adapter.rank * (b @ a) if adapter is not None else 0
            modules[name].weight = torch.nn.Parameter(kept[name].detach() + delta, requires_grad=False)
        try:
            yield
        finally:
            for name, weight in kept.items():
                modules[name].weight = weight


class Served:
    """One tiny model: folder, HF, renderer and sampler.

    `tolerance`: largest difference of logprobs (nats) from HF's float64; on CUDA the engine computes in bfloat16.
    """

    def __init__(self, folder: Path, model_class: str, thread: EngineThread, **options: Any) -> None:
        self.folder = folder
        self.model_class = model_class
        self.tolerance = 1e-4 if runs_on_cpu() else 0.5
        self.hf = HFReference(folder, model_class)
        self.renderer = load_renderer(str(folder))
        self.options = EngineOptions(str(folder), max_rank=8, kv_cache_bytes=256 * 2**20, **options)
        self.sampler = VLLMSampler(self.options, thread)

    def same(self, logprobs: npt.NDArray[Any], expected: npt.NDArray[Any], scale: float = 1.0) -> None:
        """Assert that they agree to `tolerance` times `scale`."""
        assert logprobs.shape == expected.shape
        difference = float(np.abs(logprobs - expected).max(initial=0.0))
        differences.append(difference / scale)
        assert difference < self.tolerance * scale

    def prompt(self, *parts: Sequence[int] | Image.Image) -> RenderedInput:
        """Text chunks of ids and images in order."""
        chunks: list[Any] = []
        for part in parts:
            if isinstance(part, Image.Image):
                chunks.append(ImageChunk(data=png(part), format="png"))
            else:
                chunks.append(EncodedTextChunk(tokens=np.asarray(part, np.int32)))
        return self.renderer.render(ModelInput(chunks=tuple(chunks)), "prompt")

    def adapter(self, folder: Path, modules: str, rank: int, seed: int = 0) -> Adapter:
        """A random adapter written into `folder`, whose name is the version's."""
        return write_adapter(folder, f"{folder.parent.name}/{folder.name}", self.hf.model, modules, rank, seed)

    async def score(self, prompt: RenderedInput, version: AdapterVersion | None = None) -> npt.NDArray[np.float32]:
        """Prompt logprobs without the NaN of position 0."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        output = await self.sampler.sample(SampleWork(prompt, version, params, prompt_logprobs=True))
        assert output.prompt_logprobs is not None
        assert np.isnan(output.prompt_logprobs[0])
        return output.prompt_logprobs[1:]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def noise() -> Callable[..., Image.Image]:
    """(width, height, seed) to an image of random pixels."""
    return noise_image


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


CORE = (
    "test_prompt_logprobs.py::test_text_agrees_with_hf",
    "test_prompt_logprobs.py::test_image_and_text_after_it_agree_with_hf",
    "test_prompt_logprobs.py::test_a_prompt_longer_than_one_step_agrees_with_hf",
    "test_full_context_scores.py::test_scores_of_a_full_context_agree_with_hf",
    "test_sampled_logprobs.py::test_a_batch_that_mixes_all_settings_agrees_with_hf",
    "test_sampled_logprobs.py::test_samples_are_distributed_as_the_model_says",
    "test_seeds.py::test_a_seed_repeats_whatever_runs_beside_it",
    "test_limits.py::test_stop_ids_end_a_sample_and_are_kept_with_their_logprob",
    "test_limits.py::test_stop_strings_end_a_sample_with_the_token_that_completes_them",
    "test_limits.py::test_eos_stops_unless_stop_is_empty_also_beside_other_stops",
    "test_alternative_tokens.py::test_alternatives_are_drawn_at_the_temperature_with_the_models_logprobs",
    "test_engine_sleeps.py::test_after_a_sleep_samples_are_what_they_were",
    "test_engine_sleeps_on_gpu.py::test_sleep_frees_the_kv_cache_and_samples_after_it_are_the_same",
    "test_engine_thread.py::test_an_exception_in_a_step_fails_what_was_in_flight_and_the_engine_comes_back",
    "test_agreement.py::test_a_model_that_the_engines_compute_alike_starts_and_says_how_close_they_are",
    *(test.removeprefix("sampling/") for patch in PATCHES for test in patch.tests),
)
"""What a new version of vLLM has to pass first, `make test-vllm`: what sampling promises, and each patch's tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("[")[0].endswith(CORE):
            item.add_marker("vllm_core")


@pytest.fixture(scope="session")
def engine_thread() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory, engine_thread: EngineThread) -> Served:
    """Qwen3 with a tied LM head."""
    folder = make_tiny_text_model(tmp_path_factory.mktemp("text") / "model")
    return Served(folder, "Qwen3ForCausalLM", engine_thread, max_context_length=1024)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory, engine_thread: EngineThread) -> Served:
    """Qwen3 with an LM head that is not tied."""
    folder = make_tiny_text_model(tmp_path_factory.mktemp("untied") / "model", seed=1, tie_word_embeddings=False)
    return Served(folder, "Qwen3ForCausalLM", engine_thread, max_context_length=1024)


@pytest.fixture(scope="session")
def vl(tmp_path_factory: pytest.TempPathFactory, engine_thread: EngineThread) -> Served:
    """Qwen3-VL."""
    folder = make_tiny_vl_model(tmp_path_factory.mktemp("vl") / "model")
    return Served(folder, "Qwen3VLForConditionalGeneration", engine_thread)


@pytest.fixture(scope="session")
def vl25(tmp_path_factory: pytest.TempPathFactory, engine_thread: EngineThread) -> Served:
    """Qwen2.5-VL."""
    folder = make_tiny_vl_model(tmp_path_factory.mktemp("vl25") / "model", family="qwen2_5_vl")
    return Served(folder, "Qwen2_5_VLForConditionalGeneration", engine_thread)


@pytest.fixture(params=["text", "untied", "vl", "vl25"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each of the models in turn."""
    result: Served = request.getfixturevalue(request.param)
    return result


@pytest.fixture(params=["base", "adapter"])
def case(request: pytest.FixtureRequest, served: Any, tmp_path: Path, noise: Callable[..., Any]) -> Any:
    """(served, prompt, adapter or None), text for text models, images and text for the others."""
    from tests.sampling.sampling_answers import EVERYTHING, TEXT

    adapter = served.adapter(tmp_path / "v1", EVERYTHING, 4) if request.param == "adapter" else None
    parts: list[Any] = (
        [TEXT] if served.model_class.endswith("CausalLM") else [[7, 8], noise(70, 70), [9], noise(33, 120, 2), TEXT]
    )
    return served, served.prompt(*parts), adapter
