"""`tinker-local models` and README's table say what the memory plan says."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.models import fitting
from tinker_local.backend.models.fitting import SHAPES, Fitting, known_config, row
from tinker_local.backend.vllm_engine.build_engine import EngineOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import models_table


def test_readme_names_every_model_and_the_first_row_is_the_plans() -> None:
    rows = models_table.rows(models_table.PAGE.read_text())
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == list(SHAPES)
    assert rows[0] == row("Qwen/Qwen3-0.6B"), "run .venv/bin/python scripts/models_table.py"


@pytest.mark.more
def test_all_rows_of_readme_are_the_plans() -> None:
    assert models_table.rows(models_table.PAGE.read_text()) == list(map(row, SHAPES))


def test_parameters_and_memory_are_those_of_the_model_and_more_memory_fits_more() -> None:
    fit = Fitting(known_config("Qwen/Qwen3-0.6B"))
    contexts = [fit.on(gib).context for gib in (4, 12, 16, 80)]
    assert contexts == sorted(contexts)
    assert (contexts[0], contexts[-1]) == (0, 40960)
    assert fit.on(80).parameters == 596_049_920
    assert "GiB" in fit.on(4).least
    defaults = EngineOptions("m")
    assert (defaults.adapters_per_step, defaults.image_cache_bytes) == (fitting.ADAPTER_SLOTS, fitting.IMAGE_CACHE)


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
