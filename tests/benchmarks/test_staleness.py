"""The benchmark of stale samplers: which jobs it runs, and what its table says."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.http.supervised_apps import children
from tests.training.test_ranks_elsewhere_on_fakes import gone

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "staleness.py"


def row(loss: str, seed: int, found: float) -> dict[str, Any]:
    named = {"example": "grid_walk", "loss": loss, "staleness": 8, "seed": seed}
    return {**named, "return": found, "last_steps": 0.5, "steps": 104, "device": "CPU", "processor_s": 250.0}


def test_the_table_has_mean_deviation_and_minimum_of_the_seeds_that_have_ended() -> None:
    from staleness import table

    text = table([row("ppo", 0, 0.5), row("ppo", 1, 0.7), row("stable_reinforce", 0, 0.9)])
    _, ours, ppo, settings = text.splitlines()
    assert ours.split()[1:8] == ["8", "0", "stable_reinforce", "0.900", "-", "0.900", "0.500"]
    assert ppo.split()[3:] == ["ppo", "0.600", "0.141", "0.500", "0.500", "0:", "0.500", "1:", "0.700"]
    assert settings.startswith("grid_walk: 104 steps, CPU")


def test_asynchronous_jobs_are_compared_with_the_synchronous_ones_of_their_seeds() -> None:
    from staleness import job_of, table

    synchronous = [row("ppo", seed, found) | {"staleness": 0} for seed, found in ((0, 0.5), (1, 0.7), (2, 0.9))]
    ahead = [row("ppo", seed, found) | {"staleness": 0, "steps_ahead": 1} for seed, found in ((0, 0.6), (1, 0.6))]
    assert [job_of(each).steps_ahead for each in (*synchronous, *ahead)] == [0, 0, 0, 1, 1]
    (said,) = (line for line in table([*ahead, *synchronous]).splitlines() if "less synchronous" in line)
    # The differences are 0.1 and -0.1: Student's t of one degree of freedom is 12.706, the error of their mean 0.1.
    assert said == (
        "grid_walk, ppo: 1 ahead less synchronous, 2 paired seeds: +0.000, 95 % interval of the mean -1.271 to +1.271"
    )


def test_each_job_is_taken_once() -> None:
    from staleness import Job, take

    jobs = [Job("grid_walk", "ppo", 0, seed) for seed in range(2)]
    taken = multiprocessing.get_context("spawn").Value("i", 0)
    assert [take(jobs, taken) for _ in range(3)] == [*jobs, None]


def test_all_losses_and_stalenesses_take_the_same_steps_at_the_examples_rates() -> None:
    from staleness import LOSSES, STALENESS, Job, options_of

    found = [options_of(Job("color_square", loss, n, 1), {}) for loss in LOSSES for n in STALENESS]
    assert {(options.steps, options.learning_rate) for options in found} == {(94, 2.5e-3)}
    assert {(options.loss, options.staleness) for options in found} == {(a, b) for a in LOSSES for b in STALENESS}


@pytest.mark.rotated(3)
@pytest.mark.more
@pytest.mark.timeout(600)
def test_jobs_run_once_and_a_budget_stops_those_that_run(tmp_path: Path) -> None:
    name, models = tmp_path / "results", str(tmp_path / "models")
    command = [sys.executable, "-W", "ignore", str(BENCHMARK), str(name), "--tiny", "--examples", "color_square"]
    command += ["--models", models, "--log", str(tmp_path), "--learning-rate", "0.001", "--kv-cache", "0.125"]
    stopped = subprocess.run([*command, "--budget", "0"], capture_output=True, text=True, timeout=280)
    assert stopped.returncode == 0, stopped.stderr
    assert "1 of 1 jobs are missing" in stopped.stdout
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "0.log").read_text()
    (found,) = map(json.loads, name.with_suffix(".jsonl").read_text().splitlines())
    assert (found["loss"], found["staleness"], len(found["rewards"])) == ("stable_reinforce", 2, 4)
    assert found["learning_rate"] == 0.001
    assert "color_square" in name.with_suffix(".txt").read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "0 jobs, 1 done before" in again.stdout


@pytest.mark.more
def test_workers_end_with_the_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARK), str(tmp_path / "results"), "--tiny"]
    benchmark = subprocess.Popen([*command, "--examples", "color_square"], start_new_session=True)

    def workers() -> list[int]:
        found = children(benchmark.pid)
        return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    try:
        until = time.monotonic() + 200
        while not workers() and time.monotonic() < until:
            time.sleep(0.1)
        (worker,) = workers()
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
        assert gone([worker])
    finally:
        benchmark.kill()
