"""Every option of `tinker-local serve` refuses what cannot be right, in words that name the option and the value."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.backend_options import Number, WholeNumber
from tinker_local.backend.cli.main import main
from tinker_local.backend.cli.serve import serve as serve_command

from tests.http.test_http_serve_on_fakes import FAKE

WITH_ANY_TEXT = {"models", "host", "access_log", "audit_log", "image_hosts", "tool_parser"}
"""Options whose value may be any word."""


def bad_values(option: click.Parameter) -> dict[str, str]:
    """Values that cannot be right, and what the message says of each."""
    found = {"": "the value is empty"}
    if isinstance(option.type, WholeNumber):
        found |= dict.fromkeys(("x", "nan", "1.5", "1e99"), "is not a whole number")
        found["-1"] = "not -1"
        found[str(10**30)] = f"not {10**30}"
    elif isinstance(option.type, Number):
        found |= {"x": "'x' is not a number", "nan": "'nan' is not a number"}
        found |= {value: f"not {value}" for value in ("-1", "inf", "-inf", "1e99")}
    elif isinstance(option.type, click.Path):
        found |= {"/dev/null/there": "does not exist" if option.type.exists else "/dev/null"}
    elif isinstance(option.type, click.Choice):
        found["x"] = "'x' is not one of" if len(option.type.choices) > 1 else "'x' is not '"
    elif option.name not in WITH_ANY_TEXT:
        found |= dict.fromkeys(("x", "-1", "nan", "1e99"), "")
    return found


TAKES_A_VALUE = [option for option in serve_command.params if isinstance(option, click.Option) and not option.is_flag]


@pytest.mark.parametrize("option", TAKES_A_VALUE, ids=lambda option: option.opts[0])
def test_a_bad_value_of_any_option_is_refused_in_plain_words_on_fakes(
    option: click.Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def went_on(*_: Any) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", went_on)
    flag = max(option.opts, key=len)
    for value, words in bad_values(option).items():
        data = [] if flag == "--data-dir" else ["--data-dir", str(tmp_path)]
        outcome = CliRunner().invoke(main, [*FAKE, *data, f"{flag}={value}"])
        assert outcome.exit_code == 2, (value, outcome.output)
        (line,) = [line for line in outcome.output.splitlines() if line.startswith("Error: ")]
        assert flag in line
        assert words in line
        assert not re.search(r" range|x[<>]=", line.replace("numbers and ranges", "")), "click's words for a number"
        assert ("must be" in line) == line.endswith(f"not {value}.")


@pytest.mark.parametrize("option", TAKES_A_VALUE, ids=lambda option: option.opts[0])
def test_an_option_has_the_name_of_its_flag_in_the_environment_on_fakes(
    option: click.Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TINKER_LOCAL_SERVE_MODEL` and those of ten others changed nothing: they had the names of fields."""
    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", lambda *given: given[-2].close())
    flag = max(option.opts, key=len)
    variable = "TINKER_LOCAL_SERVE_" + flag[2:].replace("-", "_").upper()
    bad = next((value for value in bad_values(option) if value), None)
    if bad is not None:
        data = [] if flag == "--data-dir" else ["--data-dir", str(tmp_path)]
        outcome = CliRunner().invoke(main, [*FAKE, *data], env={variable: bad})
        assert (outcome.exit_code, flag in outcome.output) == (2, True), outcome.output
    elif flag == "--model":
        outcome = CliRunner().invoke(main, ["serve", "--fake", "--data-dir", str(tmp_path)], env={variable: "a/b c/d"})
        assert outcome.exit_code == 0, outcome.output


def test_gpu_memory_without_a_gpu_is_a_warning_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tinker_local.backend.cli.serve._serve", lambda *given: given[-2].close())
    monkeypatch.setattr("tinker_local.backend.heap.memory_of_gpus", dict)
    for given in ([], ["--gpu-memory-utilization", "0.5"]):
        CliRunner().invoke(main, [*FAKE, "--data-dir", str(tmp_path), *given])
        assert ("changes nothing: this machine has no NVIDIA GPU" in caplog.text) == bool(given)
