"""`tinker-local models` and README's table say what the memory plan says."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.models.fitting import SHAPES, Fitting, known_config, row
from tinker_local.backend.models.gpu_plan import USUAL
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
    assert numbers.on(80) == modules.on(80)
    assert numbers._sizes == modules._sizes
    assert numbers._memory(8192, 32) == modules._memory(8192, 32)


def test_more_memory_fits_more_and_the_defaults_are_those_of_the_sampler() -> None:
    fit = Fitting.known("Qwen/Qwen3-0.6B")
    contexts = [fit.on(gib).context for gib in (4, 12, 16, 80)]
    assert contexts == sorted(contexts)
    assert (contexts[0], contexts[-1]) == (0, 40960)
    assert fit.on(80).parameters == 596_049_920
    assert "GiB" in fit.on(4).least
    defaults = EngineOptions("m")
    assert (defaults.adapters_per_step, defaults.image_cache_bytes) == (USUAL.adapter_slots, USUAL.image_cache)


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


@pytest.mark.parametrize("given", ["H2000", "0", "nan", "-3"])
def test_an_unknown_gpu_is_named_with_those_that_are_known(given: str) -> None:
    done = CliRunner().invoke(main, ["models", f"--gpu={given}"])
    assert done.exit_code == 2
    assert f"{given!r} is neither GiB" in done.output
    assert "H200" in done.output


def test_the_config_of_a_folder_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_config("Qwen/Qwen3-0.6B").save_pretrained(tmp_path)
    done = CliRunner().invoke(main, ["models", "--gpu", "h100", f"mine={tmp_path}"])
    assert done.exit_code == 0, done.output
    assert "fits    mine, 0.596B parameters: up to 40,960 positions" in done.output
