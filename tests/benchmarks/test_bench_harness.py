"""What the benchmarks' numbers rest on, without a model. The measurements themselves run in `make bench-tiny`."""

import io
from pathlib import Path

import pytest


def test_a_full_step_of_text_has_the_tokens_that_baselines_are_known_for() -> None:
    from harness.scale import FULL
    from harness.workloads import ragged_lengths

    lengths = ragged_lengths(FULL)
    assert len(lengths) == 64
    assert sum(lengths) == 41_989
    assert all(64 <= length <= 2048 for length in lengths)


def test_a_line_survives_printing_and_talk_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_ratio_whose_lines_nobody_printed_is_told() -> None:
    from harness.lines import Line
    from harness.ratios import Ratio, unknown

    ratios = [Ratio("ours / theirs", "ours", ("theirs",)), Ratio("GiB", "long", field="peak_gib")]
    lines = [Line("ours", 1.0), Line("theirs", skipped="not here"), Line("long", 1.0)]
    assert unknown(lines, ratios) == []
    assert unknown(lines[:2], ratios) == ["long"]


def test_a_selection_knows_groups_and_refuses_what_is_not_there() -> None:
    from harness.plan import selected

    assert {measurement.name for measurement in selected(["adapters", "trace"])} == {
        "adapters.bare",
        "adapters.ours",
        "trace",
    }
    with pytest.raises(ValueError, match=r"--only txt: no such measurement; there are adapters, adapters\.bare"):
        selected(["txt"])


def test_measurements_of_one_host_share_its_process_and_others_have_their_own() -> None:
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

    child = "import time; time.sleep(60)"
    (tmp_path / "endless_measurement.py").write_text(
        "import subprocess, sys\n"
        "from harness.lines import Line\n"
        "Line('first', 1.0).emit()\n"
        f"print(subprocess.run([sys.executable, '-c', {child!r}]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = processes.run(["endless_measurement"], 3, io.StringIO())
    assert outcome.fault == "ended at its limit of 3 s"
    assert [line.name for line in outcome.lines] == ["first"]
    assert outcome.seconds < 30  # the child holds the pipe open for a minute


def test_a_child_that_a_measurement_leaves_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import processes

    child = "import time; time.sleep(60)"
    (tmp_path / "leaving_measurement.py").write_text(
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nos._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = processes.run(["leaving_measurement"], 40, io.StringIO())
    assert outcome.fault == ""
    assert outcome.seconds < 30


def test_results_are_appended_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import report
    from harness.lines import Line

    class Clock(report.datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Clock":
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(report, "datetime", Clock)
    path = report.keep(tmp_path, "table", [Line("ours", 1.0)], ["machine"])
    assert path.name == "engine-20260102-030405.txt"
    with pytest.raises(FileExistsError):
        report.keep(tmp_path, "other", [], ["machine"])
    assert path.read_text() == "table"


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
    own = {}
    for event in device_events(events, on_gpu=False):
        own[event.name] = own.get(event.name, 0) + event.duration
    assert own == {"linear": 50, "mm": 50, "copy_": 10, "add": 20}
