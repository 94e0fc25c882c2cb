"""Commands that take long say so within seconds, and again while they last."""

import asyncio
import importlib.util
import io
import os
import pty
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.cli import working
from tinker_local.backend.cli.main import main
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models import load_engines
from tinker_local.backend.models.served_models import Engines
from tqdm import tqdm


def test_a_stage_is_said_as_it_begins_and_again_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(working, "SECONDS", 0.01)
    said = ""
    with working.working("reading") as now:
        assert capsys.readouterr().err.startswith("reading ...\n")
        while not re.search(r"reading \.\.\. \d+ s\n", said):
            said += capsys.readouterr().err
        now("writing")
        while not re.search(r"writing \.\.\. \d+ s\n", said):
            said += capsys.readouterr().err
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with working.working("reading /models/[/old] and [y]"):
        pass
    assert "/models/[/old] and [y]" in capsys.readouterr().err


def test_a_terminal_has_one_bar_while_tqdm_shows_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(working, "REDRAW", 0.01)
    with working.working("reading"):
        with tqdm(total=2, file=io.StringIO()):
            capsys.readouterr()
            time.sleep(0.1)
            during = capsys.readouterr().err
        said = ""
        while "reading" not in said:
            said += capsys.readouterr().err
    assert during.count("reading") <= 1  # what was being drawn


def test_a_closed_terminal_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := os.fdopen(theirs, "w"))
    with working.working("reading") as now:
        os.close(ours)
        now("writing")
    assert now.ended
    with pytest.raises(OSError, match="Input/output error"):  # what was not written
        stream.close()


def test_a_stage_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no disk"), working.working("reading") as now:
        raise ValueError("no disk")
    assert now.ended


async def test_a_start_is_told_again_while_it_lasts_on_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        while not any("still starting" in line for line in said):
            time.sleep(0.01)
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), FakeTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)

    monkeypatch.setattr(load_engines, "LASTING", 0.05)
    options = BackendOptions(data_dir=tmp_path)
    async with InProcessBackend([ModelSource.parse("fake/bigram")], options, load=load, progress=said.append):
        told = [line for line in said if "still starting" in line]
        assert re.fullmatch(r"fake/bigram: still starting, \d+ s so far", told[0])
        await asyncio.sleep(0.2)
        assert [line for line in said if "still starting" in line] == told


@pytest.mark.parametrize(
    "arguments",
    [
        ("tiny-model", "--kind", "text", "--out", "new"),
        ("small-model", "--out", "new"),
        ("export", "tinker://s:train:0/weights/a", "new", "--to", "peft"),
        ("models", "--gpu", "H100", "org/unknown"),
    ],
)
def test_without_torch_a_command_says_what_installs_it(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr("tinker_local.backend.heap.memory_of_gpus", dict)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "torch, which is not installed; run `tinker-local install-engine cpu`" in " ".join(done.output.split())
