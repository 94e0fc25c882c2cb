"""Prints results of the same tasks for two models in one table, from what lm-eval and inspect wrote.

    python examples/judge/before_and_after.py BEFORE AFTER

BEFORE and AFTER are folders: lm-eval's `--output_path`, inspect's `--log-dir` with `--log-format json`, or one that has
both. Of each task, the newest result counts. Needs Python alone.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple


class Score(NamedTuple):
    """`value` and `error` (its standard error, or None) of one metric over `rows` rows."""

    value: float
    error: float | None
    rows: int
    model: str


Key = tuple[str, str]
"""A task and its metric."""


def of_lm_eval(told: dict[str, Any]) -> dict[Key, Score]:
    """`results_*.json`: metrics are named `acc,none`, their errors `acc_stderr,none`."""
    found = {}
    for task, values in told["results"].items():
        rows = int(told["n-samples"][task]["effective"])
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            error = error if isinstance(error, int | float) else None
            called = metric if kind == "none" else f"{metric} ({kind})"
            found[f"{task} (lm-eval)", called] = Score(value, error, rows, str(told["model_name"]))
    return found


def of_inspect(told: dict[str, Any]) -> dict[Key, Score]:
    """A log of one evaluation: scores of each scorer."""
    if told["status"] != "success":
        raise SystemExit(f"error: {told['eval']['task']} of {told['eval']['model']} ended with {told['status']}")
    found = {}
    for scorer in told["results"]["scores"]:
        metrics = {name: float(metric["value"]) for name, metric in scorer["metrics"].items()}
        error, rows, model = metrics.pop("stderr", None), int(scorer["scored_samples"]), told["eval"]["model"]
        for name, value in metrics.items():
            found[f"{told['eval']['task']} (inspect)", f"{name} ({scorer['name']})"] = Score(value, error, rows, model)
    return found


def scores(folder: Path) -> dict[Key, Score]:
    """All results below `folder`, a newer one in place of an older."""
    if not folder.exists():
        raise SystemExit(f"error: there is no {folder}")
    found: dict[Key, Score] = {}
    for file in sorted(folder.rglob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        told = json.loads(file.read_text())
        if isinstance(told, dict) and "n-samples" in told:
            found |= of_lm_eval(told)
        elif isinstance(told, dict) and "eval" in told:
            found |= of_inspect(told)
    if not found:
        raise SystemExit(f"error: {folder} has neither lm-eval's results_*.json nor a log of inspect in JSON")
    return found


def table(before: dict[Key, Score], after: dict[Key, Score]) -> str:
    """As Markdown. Ends the program if both judged by other rows, or have no task in common."""
    lines = ["| task | metric | rows | before | after | change |", "| --- | --- | --- | --- | --- | --- |"]
    if not before.keys() & after.keys():
        raise SystemExit(f"error: no task in common: {tasks(before)} before, {tasks(after)} after")
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            raise SystemExit(f"error: {key[0]}, {key[1]} is only {'after' if old is None else 'before'}")
        if old.rows != new.rows:
            raise SystemExit(f"error: {key[0]} has {old.rows} rows before and {new.rows} after: judge both by the same")
        lines.append(
            f"| {key[0]} | {key[1]} | {old.rows} | {shown(old)} | {shown(new)} | {new.value - old.value:+.3f} |"
        )
    for name, given in (("before", before), ("after", after)):
        lines += ["", f"{name}: {', '.join(sorted({score.model for score in given.values()}))}"]
    return "\n".join(lines)


def tasks(given: dict[Key, Score]) -> str:
    return ", ".join(sorted({task for task, _ in given}))


def shown(score: Score) -> str:
    known = score.error is not None and not math.isnan(score.error)
    return f"{score.value:.3f} ± {score.error:.3f}" if known else f"{score.value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args()
    print(table(scores(given.before), scores(given.after)))


if __name__ == "__main__":
    main()
