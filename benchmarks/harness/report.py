"""What a run shows at its end (its machine, lines and ratios) and the files of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness import machine
from harness.lines import Line
from harness.ratios import Ratio, results

if TYPE_CHECKING:
    from rich.table import Table


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def line_table(lines: Sequence[Line]) -> "Table":
    """Everything that was measured, with memory, notes and errors."""
    from rich.table import Table

    shown = Table(title="measured")
    for column, side in (("line", "left"), ("value", "right"), ("", "left"), ("s", "right"), ("peak GiB", "right")):
        shown.add_column(column, justify=side, no_wrap=column == "line")  # type: ignore[arg-type]
    shown.add_column("note", ratio=1)
    for line in lines:
        note = f"ERROR {line.error}" if line.error else f"skipped: {line.skipped}" if line.skipped else line.note
        shown.add_row(
            line.name, _number(line.value), line.unit, _number(line.seconds, 3), _number(line.peak_gib, 3), note
        )
    return shown


def ratio_table(lines: Sequence[Line], ratios: Sequence[Ratio], *, judged: bool) -> "Table":
    """Ours against the baselines of the same run, with targets and the memory of both. `judged`: say whether targets
    are met; they are for models of a real size."""
    from rich.table import Table

    shown = Table(title="ratios")
    for column, side in (
        ("ratio", "left"),
        ("value", "right"),
        ("target", "right"),
        ("", "left"),
        ("over", "left"),
        ("peak GiB", "right"),
        ("its peak", "right"),
    ):
        shown.add_column(column, justify=side)  # type: ignore[arg-type]
    for result in results(lines, ratios):
        ratio, base = result.ratio, result.base
        target = "" if ratio.target is None else f"{'≥' if ratio.sense == 'at least' else '≤'} {ratio.target:g}"
        shown.add_row(
            ratio.title,
            _number(result.value, 3),
            target,
            "" if result.met is None or not judged else "met" if result.met else "MISSED",
            "" if base is None else base.name,
            _number(result.line.peak_gib, 3),
            "" if base is None else _number(base.peak_gib, 3),
        )
    return shown


def show(
    name: str,
    lines: Sequence[Line],
    out: Path | None,
    *,
    tiny: bool,
    seconds: float | None = None,
    ratios: Sequence[Ratio] = (),
    others: Sequence[str] = (),
) -> None:
    """Print the date, the machine, `others` and the tables; keep them as files named `name` in `out`. `seconds`: how
    long the run took."""
    from rich.console import Console

    console = Console(record=True, width=160)
    took = "" if seconds is None else f", {seconds / 60:.1f} min"
    head = [*machine.describe(), *others]
    console.print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {'tiny' if tiny else 'full'}{took}")
    for text in head:
        console.print(text, highlight=False)
    console.print(line_table(lines))
    if ratios:
        console.print(ratio_table(lines, ratios, judged=not tiny))
    if out is not None:
        print(f"written to {keep(out, console.export_text(), lines, head, name)}")


@dataclass(frozen=True, slots=True)
class Kept:
    """A run that `keep` wrote. `head`: its machine, versions and commit."""

    head: list[str]
    lines: list[Line]


def read(path: Path) -> Kept:
    """Read what `keep` wrote to `path`, a file of JSON lines."""
    first, *others = map(json.loads, path.read_text().splitlines())
    return Kept(first["machine"], [Line(**record) for record in others])


def keep(folder: Path, text: str, lines: Sequence[Line], head: Sequence[str], name: str) -> Path:
    """Write `NAME-DATE-TIME.txt`, and the lines as JSON beside it; never overwrite another run."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path = folder / f"{stem}.txt"
    with path.open("x") as file:
        file.write(text)
    with (folder / f"{stem}.jsonl").open("x") as file:
        file.writelines(json.dumps(record) + "\n" for record in [{"machine": list(head)}, *map(asdict, lines)])
    return path
