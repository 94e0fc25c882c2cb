"""`tinker-local models` and README's table say what the memory plan says."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tinker_local.backend.cli.main import main
from tinker_local.backend.models import place_engines
from tinker_local.backend.models.fitting import GPUS, SHAPES, Fitting, free_gpu, known_config, row
from tinker_local.backend.models.gpu_plan import USUAL
from tinker_local.backend.models.placement import Layout, shares_weights
from tinker_local.backend.models.plan_layout import GpuMemory
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.vllm_engine.build_engine import EngineOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import models_table


def test_rows_of_readme_are_the_plans() -> None:
    assert models_table.rows(models_table.PAGE.read_text()) == list(map(row, SHAPES)), "run scripts/models_table.py"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "Qwen/Qwen3-0.6B" else pytest.mark.more) for name in SHAPES],
)
def test_the_plan_from_numbers_is_that_of_the_modules_that_torch_makes(name: str) -> None:
    numbers, modules = Fitting.known(name), Fitting.of(known_config(name))
    assert numbers.on([free_gpu(80)]) == modules.on([free_gpu(80)])
    assert numbers.model.sizes == modules.model.sizes
    assert numbers.model.kv_heads == modules.model.kv_heads
    assert numbers.model.memory(8192, 32) == modules.model.memory(8192, 32)


def test_more_memory_fits_more_and_the_defaults_are_those_of_the_sampler() -> None:
    fit = Fitting.known("Qwen/Qwen3-0.6B")
    contexts = [fit.on([free_gpu(gib)]).context for gib in (4, 12, 16, 80)]
    assert contexts == sorted(contexts)
    assert (contexts[0], contexts[-1]) == (0, 40960)
    assert fit.on([free_gpu(80)]).parameters == 596_049_920
    assert "GiB" in fit.on([free_gpu(4)]).least
    defaults = EngineOptions("m")
    assert (defaults.adapters_per_step, defaults.image_cache_bytes) == (USUAL.adapter_slots, USUAL.image_cache)


def test_a_mixture_of_experts_in_fewer_bits_fits_where_it_does_not_in_16() -> None:
    """In the shape of Qwen3-30B-A3B; all numbers of a layer's gate and up are made at once, in the trainer alone."""
    import transformers

    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    others = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes, **experts, **others)
    for precision, gpu, weights, context in (
        (None, "L40S", 56.9, 0),
        ("int8", "L40S", 29.5, 40960),
        ("int4", "RTX 5090", 16.8, 40960),
    ):
        fitting = Fitting.of(config, BackendOptions(base_precision=precision, max_rank=8))  # type: ignore[arg-type]
        planned = fitting.model.sizes
        assert fitting.on([free_gpu(GPUS[gpu], gpu)]).context == context
        assert planned.weight_bytes / 2**30 == pytest.approx(weights, abs=0.05)
        assert planned.unpacked_in_trainer == (0 if precision is None else 2 * 128 * 2 * 768 * 2048)
        assert planned.unpacked_bytes == (0 if precision is None else 3 * 2 * 4096 * 2048)


@pytest.mark.parametrize(("shared", "said"), [("auto", "; --base-precision int8 fits"), ("off", "more GPUs")])
def test_experts_that_vllm_turns_round_are_told_that_they_fit_in_fewer_bits(shared: Any, said: str) -> None:
    """gpt-oss-20b in bfloat16 takes two copies of 39 GiB."""
    import transformers

    config = transformers.AutoConfig.for_model("gpt_oss", num_hidden_layers=24, num_local_experts=32)
    options = BackendOptions(max_context_length=4096, max_rank=8, shared_weights=shared)
    least = Fitting.of(config, options).on([free_gpu(GPUS["L40S"])]).least
    assert "two copies of the weights" in least
    assert ("--base-precision" in least) == (shared == "auto")
    assert said in least


@pytest.mark.more
def test_a_head_that_loading_would_refuse_is_not_advised() -> None:
    """gpt-oss, whose experts vLLM turns round."""
    import transformers

    config = transformers.AutoConfig.for_model("gpt_oss", num_hidden_layers=24, num_local_experts=32)
    for options in (BackendOptions(), BackendOptions(base_precision="int4")):
        for gib in (9, 10, 11, 12, 13, 14):
            least = Fitting.of(config, options).on([free_gpu(gib)]).least
            assert "--head-precision" not in least


def test_well_known_models_and_the_check_of_the_machine_take_no_torch(tmp_path: Path) -> None:
    """Which took a minute for `models`."""
    program = (
        "import sys; from tinker_local.backend.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'fastapi', 'sqlalchemy'} & sys.modules.keys() or 'none')"
    )
    for command in (["models", "--gpu", "H200"], ["check", "--port=0", f"--data-dir={tmp_path}"]):
        done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=280)
        assert done.stdout.splitlines()[-1] == "none", done.stdout + done.stderr
        assert done.stdout.count("fits    ") == (len(SHAPES) if command[0] == "models" else 0)


def planned(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments])


@pytest.mark.parametrize("given", ["H2000", "0", "nan", "-3", "2xH2000"])
def test_an_unknown_gpu_is_named_with_those_that_are_known(given: str) -> None:
    done = planned(f"--gpu={given}")
    assert done.exit_code == 2
    assert f"{given.removeprefix('2x')!r} is neither GiB" in done.output
    assert "H200" in done.output


@pytest.mark.parametrize(
    ("given", "gib"), [("A100", 39.4), ("4060 Ti", 15.6), ("H100 80GB", 79.2), ("80 GiB", 80), ("24", 24)]
)
def test_a_name_may_be_short_and_memory_may_have_its_unit(given: str, gib: float) -> None:
    assert f"of {gib:.1f} GiB," in planned("--gpu", given, "Qwen/Qwen3-0.6B").output


@pytest.mark.more
def test_a_plan_is_that_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`place_engines` takes the context that `models` finds, and not one step more."""
    import torch

    gpus: list[GpuMemory] = []
    monkeypatch.setattr(place_engines, "free_on_gpu", lambda gpu: (gpus[gpu].free, gpus[gpu].total))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: gpus[gpu].name)
    config = known_config("Qwen/Qwen3-8B")
    for there, options in (
        ([free_gpu(23.5, "RTX 4090")], BackendOptions()),
        ([free_gpu(23.5, "RTX 4090")], BackendOptions(max_rank=32)),
        ([free_gpu(40, "A100 40GB")], BackendOptions(shared_weights="off", max_rank=32)),
        ([free_gpu(15.6, "RTX 4060 Ti")], BackendOptions(base_precision="int4")),
        ([free_gpu(11.6, "RTX 3060")], BackendOptions(base_precision="int4", head_precision="int8", max_rank=16)),
        ([free_gpu(23.5, "RTX 4090")] * 2, BackendOptions()),
        ([free_gpu(23.5, "RTX 4090")] * 2, BackendOptions(train_gpus=(1,))),
        ([free_gpu(44, "L40S"), GpuMemory(2**30, 44 * 2**30, "L40S")], BackendOptions()),
    ):
        gpus[:] = there
        fit = Fitting.of(config, options).on(there)
        holder = "holder" if shares_weights(options, len(there)) else None
        engine = EngineOptions("m", dtype="bfloat16", max_rank=options.max_rank, shared_weights=holder)

        def placed(context: int, options: BackendOptions = options, engine: EngineOptions = engine) -> Layout:
            chosen = replace(options, max_context_length=context)
            return place_engines.place_engines(config, engine, chosen, len(gpus)).layout

        assert 0 < fit.context < 40960
        assert placed(fit.context) == fit.layout
        with pytest.raises(ValueError, match="GiB of GPU memory are free"):
            placed(fit.context + 1024)


@pytest.mark.parametrize("given", ["RTX 4090", "RTX4090", "rtx-4090", "4090", "NVIDIA GeForce RTX 4090"])
def test_a_gpu_has_the_names_that_people_write(given: str) -> None:
    done = planned("--gpu", given, "Qwen/Qwen3-8B")
    assert done.output.startswith("one RTX 4090 of 23.5 GiB"), done.output


def test_the_plan_takes_the_options_that_a_refusal_advises() -> None:
    """`--max-rank` and others, and GPUs."""

    def fit(*options: str) -> int:
        output = planned("Qwen/Qwen3-8B", *options).output
        found = re.search(r"up to ([\d,]+) positions", output)
        return int(found[1].replace(",", "")) if found else 0

    usual = fit("--gpu=4090")
    assert 0 < usual < fit("--gpu=4090", "--max-rank=32") < 40960
    assert fit("--gpu=4090", "--max-context-length=1024") == 1024
    assert fit("--gpu=4090", "--micro-batch-tokens=1024") > usual
    fewer = ("--gpu=4060 Ti", "--base-precision=int4")
    assert 0 < fit(*fewer) < fit(*fewer, "--head-precision=int8")
    kept = "trainer and sampler in bfloat16, layers in int4, embedding and LM head in int8\n"
    assert kept in planned("Qwen/Qwen3-8B", *fewer, "--head-precision=int8").output
    assert fit("--gpu=4090", "--dtype=float32") == fit("--gpu=4090", "--shared-weights=off") == 0
    assert fit("--gpu=2x4090") > usual, "one trains and one samples"
    apart = planned("Qwen/Qwen3-8B", "--gpu=2xRTX 5090", "--sample-gpus=1").output
    assert apart.splitlines()[1].endswith("up to 40,960 positions; trains on GPU 0 and samples on GPU 1")
    assert planned("--gpu=4090", "Qwen/Qwen3-8B").output.endswith(f"; serve it with --max-context-length {usual}\n")
    assert "there is no GPU 2" in planned("Qwen/Qwen3-8B", "--gpu=2xH100", "--sample-gpus=2").output


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for path, words in (
        (
            f"{tmp_path}/none",
            f"there is no folder {tmp_path}/none (the name of a model on a hub has the form ORG/NAME)",
        ),
        ("models", "there is no folder models (the name of a model on a hub has the form ORG/NAME)"),
        (
            "models/none",
            "there is no folder models/none, and no model of that name in the hub's cache; 127.0.0.1:9 does not answer",
        ),
    ):
        done = planned("--gpu=H200", path)
        assert done.exit_code == 2
        assert words in done.output.replace("\n", " ")


def test_the_config_of_a_folder_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_config("Qwen/Qwen3-0.6B").save_pretrained(tmp_path)
    done = CliRunner().invoke(main, ["models", "--gpu", "h100", f"mine={tmp_path}"])
    assert done.exit_code == 0, done.output
    assert "fits    mine, 0.596B parameters: up to 40,960 positions" in done.output
