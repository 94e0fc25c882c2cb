"""The benchmarks' harness, without a model. The measurements themselves run in `make bench-tiny`."""

import io
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_full_step_of_text_has_the_tokens_that_baselines_are_known_for() -> None:
    from harness.scale import FULL
    from harness.workloads import ragged_lengths

    lengths = ragged_lengths(FULL)
    assert len(lengths) == 64
    assert sum(lengths) == 41_989
    assert all(64 <= length <= 2048 for length in lengths)


def test_a_line_survives_printing_and_other_output_is_not_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    from harness.lines import Line, parse

    line = Line("text.ours", 12.5, "tokens/s", 3.0, None, "a note")
    line.emit()
    assert parse(capsys.readouterr().out) == line
    assert parse("Loading weights: 100%") is None


def test_a_ratio_is_over_the_best_baseline_that_was_measured() -> None:
    from harness.lines import Line
    from harness.ratios import Ratio, results

    ratio = Ratio("ours / best", "ours", ("slow", "fast", "failed"), 1.15)
    lines = [Line("ours", 120.0), Line("slow", 50.0), Line("fast", 100.0), Line("failed", error="out of memory")]
    (result,) = results(lines, [ratio])
    assert result.value == pytest.approx(1.2)
    assert result.base == lines[2]
    assert result.met is True


def test_a_limit_is_met_from_below_and_memory_counts_where_it_is_asked_for() -> None:
    from harness.lines import Line
    from harness.ratios import Ratio, results

    lines = [Line("handover", 301.0, "ms"), Line("long", 5.0, peak_gib=79.0)]
    ratios = [
        Ratio("ms", "handover", (), 300, "at most"),
        Ratio("GiB", "long", (), 80, "at most", "peak_gib"),
        Ratio("absent", "nothing", (), 1),
    ]
    assert [(result.value, result.met) for result in results(lines, ratios)] == [(301.0, False), (79.0, True)]


def test_memory_is_compared_with_that_of_the_fastest_baseline() -> None:
    from harness.lines import Line
    from harness.ratios import Ratio, results

    ratio = Ratio("GiB", "ours", ("slow", "fast"), 1, "at most", "peak_gib")
    lines = [Line("ours", 5.0, peak_gib=30.0), Line("slow", 1.0, peak_gib=90.0), Line("fast", 2.0, peak_gib=20.0)]
    (result,) = results(lines, [ratio])
    assert result.value == 1.5
    assert result.met is False
    assert results([lines[0], Line("fast", 2.0)], [ratio]) == []  # a CPU, where no memory is measured


def test_a_measurement_that_this_checkout_cannot_do_is_skipped_with_all_its_lines() -> None:
    from harness.lines import Line, Unavailable, failed
    from harness.ratios import Ratio, unknown

    line = failed("adapters.autograd", Unavailable("no such argument"))
    assert line == Line("adapters.autograd", skipped="no such argument")
    ratio = Ratio("eight / one", "adapters.autograd_co_batched", ("adapters.autograd_one",))
    assert unknown([line], [ratio]) == []
    assert unknown([failed("adapters.autograd", ValueError())], [ratio]) != []


def test_a_ratio_of_lines_that_no_measurement_prints_is_reported() -> None:
    from harness.lines import Line
    from harness.ratios import Ratio, unknown

    ratios = [Ratio("ours / theirs", "ours", ("theirs",)), Ratio("GiB", "long", field="peak_gib")]
    lines = [Line("ours", 1.0), Line("theirs", skipped="not here"), Line("long", 1.0)]
    assert unknown(lines, ratios) == []
    assert unknown(lines[:2], ratios) == ["long"]


def test_a_selection_knows_groups_and_refuses_what_is_not_there() -> None:
    from harness.plan import selected

    assert {measurement.name for measurement in selected(["adapters", "trace"])} == {
        "adapters.autograd",
        "adapters.bare",
        "adapters.ours",
        "trace",
    }
    with pytest.raises(ValueError, match=r"--only txt: no such measurement; there are adapters, adapters\.autograd"):
        selected(["txt"])


def test_measurements_of_one_host_share_a_process_and_others_have_their_own() -> None:
    from harness.plan import MEASUREMENTS, processes

    groups = processes(MEASUREMENTS, tiny=False)
    assert [measurement for group in groups for measurement in group] == list(MEASUREMENTS)
    for group in groups:
        assert len(group) == 1 or len({measurement.host for measurement in group} - {None}) == 1
    shared = [measurement for group in processes(MEASUREMENTS, tiny=True) for measurement in group]
    assert sorted(shared, key=MEASUREMENTS.index) == list(MEASUREMENTS)


def test_a_measurement_that_takes_too_long_is_ended_with_its_children_and_keeps_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import processes

    child = "import time; time.sleep(600)"
    (tmp_path / "endless_measurement.py").write_text(
        "import subprocess, sys\n"
        "from harness.lines import Line\n"
        "Line('first', 1.0).emit()\n"
        f"print(subprocess.run([sys.executable, '-c', {child!r}]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = processes.run(["endless_measurement"], 5, io.StringIO())  # not after the child's ten minutes
    assert outcome.fault == "ended at its limit of 5 s"
    assert [line.name for line in outcome.lines] == ["first"]


def test_a_run_does_not_wait_for_a_child_that_a_measurement_leaves_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import processes

    child = "import time; time.sleep(600)"
    (tmp_path / "leaving_measurement.py").write_text(
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nos._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = processes.run(["leaving_measurement"], 200, io.StringIO())  # not after the child's ten minutes
    assert outcome.fault == ""


def test_results_are_appended_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import report
    from harness.lines import Line

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Clock":
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(report, "datetime", Clock)
    path = report.keep(tmp_path, "table", [Line("ours", 1.0)], ["machine"], "engine")
    assert path.name == "engine-20260102-030405.txt"
    with pytest.raises(FileExistsError):
        report.keep(tmp_path, "other", [], ["machine"], "engine")
    assert path.read_text() == "table"


def test_the_tables_of_the_readme_keep_what_is_slower_than_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import readme_table
    from harness import report
    from harness.lines import Line

    samples = [Line("sampling.sdk", 8000.0, "tokens/s"), Line("sampling.alone", 10_000.0, "tokens/s")]
    path = report.keep(tmp_path, "table", samples, ["a machine", "commit abc"], "engine").with_suffix(".jsonl")
    monkeypatch.setattr("sys.argv", ["readme_table.py", str(path)])
    readme_table.main()
    printed = capsys.readouterr().out
    assert "SDK over HTTP | 8,000 tokens/s | 10,000 tokens/s, vLLM alone | 0.80 |" in printed
    assert "| **tinker-local** | not measured |" in printed
    assert "a machine; commit abc" in printed


def test_the_tables_of_the_readme_are_not_made_from_different_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import readme_table
    from harness import report

    paths = [
        report.keep(tmp_path / commit, "", [], ["a machine", f"commit {commit}"], "engine").with_suffix(".jsonl")
        for commit in ("abc", "def")
    ]
    monkeypatch.setattr("sys.argv", ["readme_table.py", *map(str, paths)])
    with pytest.raises(SystemExit, match="different commits or machines"):
        readme_table.main()


def test_every_row_of_the_readme_names_a_line_that_has_a_measurement() -> None:
    from harness.plan import MEASUREMENTS
    from harness.ratios import RATIOS
    from readme_table import COMPARED, TRAINING, WAITS

    named = {name for ratio in RATIOS for name in (ratio.of, *ratio.over)} | {m.name for m in MEASUREMENTS}
    rows = {name for _, name in (*TRAINING, *WAITS)} | {
        name for _, ours, _, others in COMPARED for name in (ours, *others)
    }
    assert rows <= named


def test_a_trace_splits_time_by_kind_and_counts_overlap_once() -> None:
    from measurements.tracing import IDLE, OTHER, device_events, longest, shares

    def kernel(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}

    events = device_events(
        [
            kernel("nvjet_hsh_gemm", 10, 40),
            kernel("elementwise_kernel", 45, 15),  # 5 of it while the product still runs
            kernel("Memcpy HtoD", 80, 10, "gpu_memcpy"),
            kernel("flash_fwd_kernel", 90, 20),
            kernel("aten::mm", 0, 500, "cpu_op"),
        ],
        on_gpu=True,
    )
    expected = {"attention": 0.2, "matrix products": 0.4, "copies and casts": 0.1, OTHER: 0.1, IDLE: 0.2}
    assert shares(events) == pytest.approx(expected)
    assert longest(events, 1) == [("nvjet_hsh_gemm", 40.0)]


def test_nested_operators_of_the_cpu_count_for_what_they_do_themselves() -> None:
    from measurements.tracing import device_events

    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": thread}
        for name, start, duration, thread in (
            ("linear", 0, 100, 1),
            ("mm", 20, 50, 1),
            ("copy_", 30, 10, 1),
            ("mm", 110, 10, 1),
            ("add", 5, 20, 2),
        )
    ]
    own: dict[str, float] = {}
    for event in device_events(events, on_gpu=False):
        own[event.name] = own.get(event.name, 0) + event.duration
    assert own == {"linear": 50, "mm": 50, "copy_": 10, "add": 20}


def test_a_run_that_sigterm_ends_leaves_no_process_behind() -> None:
    statement = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    waiting = f"processes.run(['timeit', '-n1', '-r1', {statement!r}], 600, sys.stderr)"
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from harness import processes; {waiting}"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        child = int(started.stderr.readline())
        started.terminate()
        assert started.wait() == 143
    while is_running(child):
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status
