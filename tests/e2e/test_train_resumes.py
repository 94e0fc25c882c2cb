"""`tinker_local.client.train` on a real trainer and a real sampler, over HTTP."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker_local.client as tinker
from tinker_local.client.train import TrainReport, train
from tinker_local.client.train.examples import Kind

from tests.conftest import TEXT, Server
from tests.train.rows_of_sums import Sums, TokenNames

SETTINGS: dict[Kind, dict[str, Any]] = {
    "sft": {"learning_rate": 5e-3, "batch_size": 8, "epochs": 4.0, "held_out": 4, "rank": 8, "weight_decay": 0.01},
    "preference": {"learning_rate": 1e-3, "batch_size": 6, "epochs": 3.0, "held_out": 6, "rank": 8},
}
"""Clipped, decayed and warmed up, so that each part of the optimizer's state counts."""


def losses(report: TrainReport, name: str = "loss") -> dict[int, float]:
    return {row["step"]: row[name] for row in report.curve if name in row}


def interrupt(step: int) -> Callable[[str], None]:
    def say(line: str) -> None:
        if line.startswith(f"step {step}/") and "  loss " in line:
            os.kill(os.getpid(), signal.SIGINT)

    return say


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_a_resumed_run_has_the_losses_of_one_that_never_stopped(
    real_server: Server, tmp_path: Path, kind: Kind
) -> None:
    """To 1e-6 in float32, for each step and for the held-out rows, with another client and another training run."""
    rows = Sums(count=24, kind=kind)

    def run(out: Path, **given: Any) -> TrainReport:
        with tinker.ServiceClient(base_url=real_server.url) as service:
            return train(
                rows,
                model=TEXT,
                out=out,
                service=service,
                renderer=lambda client: TokenNames(),
                settings=None if given.get("resume") else {**SETTINGS[kind], "evaluate_every": 3, "samples_shown": 1},
                **{"say": lambda line: None, **given},
            )

    whole = run(tmp_path / "whole")
    part = run(tmp_path / "part", say=interrupt(4))
    assert part.interrupted
    assert part.steps < whole.steps
    resumed = run(tmp_path / "part", resume=True)
    assert not resumed.interrupted
    assert losses(whole).keys() == losses(resumed).keys() == set(range(1, whole.steps + 1))
    for name in ("loss", "held_out_loss", "grad_norm"):
        before, after = losses(whole, name), losses(resumed, name)
        assert {step: after[step] for step in before if step in after} == pytest.approx(before, abs=1e-6)
    assert losses(whole)[whole.steps] < losses(whole)[1]
    if kind == "preference":  # the reference is computed by the trainer itself
        assert losses(whole)[1] == pytest.approx(0.6931471805599453, abs=1e-4)


def test_a_run_learns_what_its_rows_say(real_server: Server, tmp_path: Path) -> None:
    """Learnt by heart, and then sampled from the last checkpoint."""
    with tinker.ServiceClient(base_url=real_server.url) as service:
        report = train(
            Sums(count=24),
            model=TEXT,
            out=tmp_path / "run",
            service=service,
            renderer=lambda client: TokenNames(),
            settings={"learning_rate": 1e-2, "batch_size": 8, "epochs": 12.0, "held_out": 0, "rank": 16},
            say=lambda line: None,
        )
        first, last = losses(report)[1], losses(report)[report.steps]
        assert last < 0.1 * first
        sampler = service.create_sampling_client(model_path=report.saved.sampler).result()
        rows = Sums(count=24)
        greedy = tinker.SamplingParams(max_tokens=1, temperature=0.0)
        said = [sampler.sample(rows.prompt(row)[0], 1, greedy).result().sequences[0].tokens[0] for row in range(8)]
        assert sum(token == rows.answer(row) for row, token in enumerate(said)) >= 7
