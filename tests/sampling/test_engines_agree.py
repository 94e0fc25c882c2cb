"""No model starts whose trainer and sampler compute it differently; real engines on tiny models."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.agreement import Comparison
from tinker_local.backend.models.load_engines import TOLERANCE
from tinker_local.backend.options import DType, EnginePlace
from tinker_local.backend.tiny_models import make_tiny_text_model, make_tiny_vl_model
from tinker_local.backend.tiny_models.text_families import TEXT_FAMILIES
from tinker_local.backend.training.model import load_model
from tinker_local.backend.vllm_engine.compat_vllm import default_dtype, runs_on_cpu
from tinker_local.backend.vllm_engine.triton_on_cpu import INTERPRETER

from tests.families.test_other_families import tiny
from tests.training.test_rotations import scaled_queries

pytestmark = pytest.mark.more

NAME = "tiny/probed"


async def start(
    folder: Path,
    data_dir: Path,
    max_context_length: int | None = 256,
    dtype: DType | None = None,
    compare_seconds: float = 0.0,
    trainer: EnginePlace | None = None,
) -> list[str]:
    """Start a server of the model and end it; what it said meanwhile."""
    said: list[str] = []
    options = BackendOptions(
        data_dir=data_dir,
        kv_cache_bytes=2**26,
        max_context_length=max_context_length,
        dtype=dtype,
        compare_seconds=compare_seconds,
        max_rank=8,
        trainer=trainer,
        sampler_sleeps=False,  # leaves sleep mode to other tests of this process
    )
    backend = InProcessBackend([ModelSource(NAME, str(folder))], options, progress=said.append)
    await backend.start()
    await backend.close()
    return said


async def compared(folder: Path, data_dir: Path, dtype: DType) -> Comparison:
    """How trainer and sampler of the model differ when a server starts."""
    options = BackendOptions(
        data_dir=data_dir, kv_cache_bytes=2**26, max_context_length=256, dtype=dtype, max_rank=8, sampler_sleeps=False
    )
    async with InProcessBackend([ModelSource(NAME, str(folder))], options) as backend:
        comparison = backend.models.get(NAME).comparison
    assert comparison is not None
    return comparison


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the text part of a model's config."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config.get("text_config", config))
    file.write_text(json.dumps(config))


def with_attention_bias(folder: Path) -> None:
    """vLLM's Qwen3 has no bias on o_proj and ignores that of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.attention_bias = True
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)


def with_yarn(folder: Path) -> None:
    """As the cards of Qwen models recommend for long texts."""
    edit(
        folder,
        lambda text: text["rope_parameters"].update(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    )


def with_sections_in_a_row(folder: Path) -> None:
    """transformers interleaves the sections of Qwen3-VL's positions, whatever the config says."""
    edit(folder, lambda text: text["rope_parameters"].update(mrope_interleaved=False))


ON_TEXT = "on a text its modules agree up to the LM head$"

not_interpreted = pytest.mark.skipif(
    os.environ.get(INTERPRETER) == "1", reason="Triton's interpreter makes NaN of the tower of Qwen3-VL in bfloat16"
)


@pytest.mark.parametrize(
    ("make", "change", "where", "dtype", "first"),
    [
        (
            *(make_tiny_text_model, with_attention_bias, "positions of text", default_dtype()),
            "the first module to differ on a text is model.layers.0.self_attn.o_proj, by ",
        ),
        pytest.param(
            *(make_tiny_vl_model, with_sections_in_a_row, "positions with an image", "float32", ON_TEXT),
            marks=pytest.mark.skipif(not runs_on_cpu(), reason="vLLM's LoRA kernels on CUDA take 16 bits alone"),
        ),
        pytest.param(
            *(make_tiny_vl_model, with_sections_in_a_row, "positions with an image", "bfloat16", ON_TEXT),
            marks=not_interpreted,
        ),
    ],
    ids=[
        "qwen3-attention-bias",
        "qwen3-vl-not-interleaved",
        "qwen3-vl-not-interleaved-in-bfloat16",
    ],
)
async def test_a_model_that_the_engines_compute_differently_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], Path], change: Callable[[Path], None], where: str, dtype: DType, first: str
) -> None:
    folder = make(tmp_path / "model")
    change(folder)
    with pytest.raises(ValueError, match=rf"^{NAME}: trainer and sampler compute this model differently: ") as refused:
        await start(folder, tmp_path / "data", dtype=dtype)
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(rf"the logprob at position \d+ of \d+ {where}", message)
    normal = re.search(rf"\(at most (\S+) is normal\); {first}", message)
    assert normal is not None
    assert float(normal[1]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
async def test_yarn_agrees_also_on_positions_of_images(tmp_path: Path, family: Any) -> None:
    make = make_tiny_text_model if family in TEXT_FAMILIES else make_tiny_vl_model
    folder = make(tmp_path / "model", family=family)
    with_yarn(folder)
    *_, said = await start(folder, tmp_path / "data")
    assert said.startswith(f"{NAME}: trainer and sampler agree to ")


@pytest.mark.parametrize(("family", "end"), [("qwen3", 128), ("qwen2_5_vl", 512)])
async def test_positions_beyond_a_table_of_the_sampler_are_refused_with_a_way_out(
    tmp_path: Path, family: Any, end: int
) -> None:
    """YaRN that stretches 64 positions to 128, with 4 times as many rows for pictures."""
    make = make_tiny_text_model if family in TEXT_FAMILIES else make_tiny_vl_model
    folder = make(tmp_path / "model", family=family)
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit(folder, lambda text: text["rope_parameters"].update(rope))
    with pytest.raises(
        ValueError, match=rf"^{NAME}: trainer and sampler compute position {end}, of 1024 that are"
    ) as no:
        await start(folder, tmp_path / "data", 1024)
    assert str(no.value).endswith(
        f"the sampler's table of rotary embeddings ends there; --max-context-length {end} serves the positions before "
        "it"
    )
    *_, said = await start(folder, tmp_path / "data", end)
    assert said.endswith(f"rotary positions compared at all {end}")


async def test_queries_that_grow_with_their_position_do_so_in_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scaled_queries(tmp_path / "model")
    *_, trains, said = await start(folder, tmp_path / "data", compare_seconds=60.0)
    assert "trained by the written-out decoder" in trains
    agreed = re.search(r"agree to (\S+) nats .*: logprobs of up to 255 positions; rotary positions compared at", said)
    assert agreed is not None
    assert float(agreed[1]) < 1e-4
    monkeypatch.setattr("tinker_local.backend.vllm_engine.build_engine.query_scaling", lambda model: {})
    with pytest.raises(ValueError, match=r"compute position 64, of 256 .*: the query or key of layer 0 differs by"):
        await start(folder, tmp_path / "data")
    *_, said = await start(folder, tmp_path / "data", 64)
    assert said.endswith("rotary positions compared at all 64")


async def test_a_model_leaves_the_rotary_embeddings_of_another_in_the_same_process_alone(tmp_path: Path) -> None:
    """vLLM's Ernie 4.5 changes a module that it would share with a model of the same settings."""
    settings = {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    sources = []
    for model_type in ("mistral", "ernie4_5"):
        folder = tiny(model_type, tmp_path / model_type)
        edit(folder, lambda text: text.update(settings))
        sources.append(ModelSource(f"tiny/{model_type}", str(folder)))
    options = BackendOptions(data_dir=tmp_path / "data", kv_cache_bytes=2**26, max_rank=8, dtype="float32")
    said: list[str] = []
    async with InProcessBackend(sources, options, progress=said.append):
        assert sum("rotary positions compared at all 256" in line for line in said) == 2


async def test_a_model_that_the_engines_compute_alike_starts_and_says_how_close_they_are(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    shutil.copytree(tiny_models["tiny/vision"], tmp_path / "model")
    *_, said = await start(tmp_path / "model", tmp_path / "data")
    assert said.startswith(f"{NAME}: trainer and sampler agree to ")


IN_BFLOAT16 = [
    family for family in TEXT_FAMILIES if not family.startswith(("qwen3_5", "qwen3_next")) or not runs_on_cpu()
]
"""vLLM's kernels of linear attention on CPUs refuse small heads in bfloat16."""


@pytest.mark.parametrize(
    "family", [*IN_BFLOAT16, pytest.param("qwen3_vl", marks=not_interpreted), "qwen2_vl", "qwen2_5_vl", "gemma3"]
)
async def test_rounding_of_bfloat16_takes_three_quarters_of_what_is_normal_at_most(tmp_path: Path, family: Any) -> None:
    make = make_tiny_text_model if family in TEXT_FAMILIES else make_tiny_vl_model
    make(tmp_path / "model", family=family)
    found = await compared(tmp_path / "model", tmp_path / "data", "bfloat16")
    assert found.typical < 0.75 * found.typical_limit
    assert found.worst.difference < 0.75 * found.mean_limit
    assert found.worst.difference > found.rounding.mean / 10  # measured, and not made up


async def test_an_adapter_that_the_trainer_alone_has_is_refused_in_16_bits(
    tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All probes differ by about 0.1 nats, which bfloat16 alone can make in other models."""
    load = load_model._load

    def with_adapter(*args: Any) -> Any:
        model, weights, shared = load(*args)
        random = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")):
                a = torch.rand(8, parameter.shape[1], generator=random) * 2 - 1
                b = torch.randn(parameter.shape[0], 8, generator=random) * 0.012
                change = (2 * b @ a / parameter.shape[1] ** 0.5).to(parameter.device, parameter.dtype)
                parameter.data = parameter.data + change  # not in place: shared weights cannot be written
        return model, weights, shared

    monkeypatch.setattr(load_model, "_load", with_adapter)
    with pytest.raises(ValueError, match="trainer and sampler compute this model differently") as refused:
        await start(tiny_models["tiny/text"], tmp_path / "data", dtype="bfloat16", trainer="inline")
    by = re.search(r"they differ by (\S+) .*\(at most (\S+) is normal\)", str(refused.value))
    assert by is not None
    assert float(by[1]) < 0.15


@pytest.mark.mutation(
    "frequencies-by-the-row", "_fix_frequencies", "    if rotary is None or kinds is None:", "    if True:"
)
@pytest.mark.parametrize("max_context_length", [None, 64, 256])
async def test_longrope_has_the_frequencies_of_the_context_length_in_both_engines(
    tmp_path: Path, max_context_length: int | None
) -> None:
    """Of the model's first 64 positions alone unless more are asked for."""
    folder = make_tiny_text_model(tmp_path / "model", family="llama")
    head = json.loads((folder / "config.json").read_text())["head_dim"]
    factors = {"short_factor": [1.5] * (head // 2), "long_factor": [9.0] * (head // 2)}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    edit(
        folder, lambda text: text.update(rope_parameters={"rope_theta": text["rope_parameters"]["rope_theta"], **rope})
    )
    *_, said = await start(folder, tmp_path / "data", max_context_length)
    agreed = re.search(r"trainer and sampler agree to (\S+) nats", said)
    assert agreed is not None
    assert float(agreed[1]) < (1e-4 if runs_on_cpu() else TOLERANCE["bfloat16"])
