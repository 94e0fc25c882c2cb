"""Compare trainers on several GPUs with one on one GPU, in one run on one machine.

    python benchmarks/scaling.py --out benchmarks/results          # all GPUs of the machine, shapes of 8B models
    python benchmarks/scaling.py --ranks 2 --only text --shape 32b --layouts sharded
    python benchmarks/scaling.py --layouts one,context --tokens 131072        # each micro-batch on all GPUs
    python benchmarks/scaling.py --tiny                            # two processes over gloo, on a CPU

Each layout trains the same data from the same adapter, one layout after the other: `one` rank, several with the weights
`replicated`, several that have a part of them each (`sharded`), and several that compute each micro-batch together
(`context`). Prints tokens/s, the memory of each rank, the shares of a step in which the computation waits for gathers
and for other ranks, and how far gradients are from those of one rank, with how far one rank is from itself: the same
data again, in other micro-batches, and after another first step.
`kill` ends a rank in a step, three times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from harness import machine, processes, report
from harness.lines import Line

TOKENS = {"full": 65536, "tiny": 512}
SECONDS = 400.0
"""Most that a layout may take, its start included."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models; fails if anything does")
    parser.add_argument("--ranks", type=int, help="ranks of a layout with several (default: GPUs; on a CPU 2)")
    parser.add_argument("--only", default="text,images,kill", metavar="text,images,kill", help="what to do")
    parser.add_argument(
        "--layouts",
        default="one,replicated,sharded",
        help="which of one, replicated, sharded and context; the first is the base",
    )
    parser.add_argument("--shape", choices=("8b", "32b"), default="8b", help="of the text model")
    parser.add_argument("--tokens", type=int, help="positions of a step")
    parser.add_argument("--sharded-tokens", type=int, metavar="N", help="micro-batches of the sharded layout")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where random models are kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output of the ranks (default: a temporary one)")
    options = parser.parse_args()
    gpus = machine.gpu_count()
    if not options.tiny and not gpus:
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    options.ranks = options.ranks or (gpus if gpus > 1 else 2)
    if not options.tiny and options.ranks > gpus:
        parser.error(f"--ranks {options.ranks}: there are {gpus} GPUs")
    options.scale = "tiny" if options.tiny else "full"
    return options


class Run:
    """One run: writes the models, lets the ranks of each layout work in turn, gathers `lines`."""

    def __init__(self, options: argparse.Namespace, models: Path, folder: Path, log: TextIO) -> None:
        self._options = options
        self._models = models
        self._folder = folder
        self._log = log
        self.lines: list[Line] = []

    def everything(self) -> None:
        """All layouts of all data; one that fails prints a line with the reason."""
        for data in self._options.only.split(","):
            kind = "vl" if data == "images" else "text"
            if data != "images" and self._options.shape != "8b":
                kind = self._options.shape
            written = processes.run(
                ["measurements.models", self._options.scale, str(self._models), kind], 600, self._log
            )
            print(f"-- random model {kind}: {written.seconds:.0f} s {written.fault}", flush=True)
            if data == "kill":
                self._kill(self._models / kind)
                continue
            base: dict[str, Any] | None = None
            for layout in self._options.layouts.split(","):
                found = self._layout(data, layout, self._models / kind)
                if found is not None:
                    base = base or found
                    self._tell(data, layout, found, base)

    def _kill(self, model: Path) -> None:
        arguments = [
            self._options.scale,
            str(model),
            str(self._options.ranks),
            str(self._tokens * (20 if self._options.tiny else 1)),
        ]
        found = processes.run(["measurements.scaling_kill", *arguments], SECONDS, self._log)
        print(f"-- kill: {found.seconds:.0f} s {found.fault}", flush=True)
        self.lines += found.lines
        if found.fault:
            self._add(Line("kill.error", error=found.fault[:300]))

    @property
    def _tokens(self) -> int:
        """Positions of a step."""
        chosen: int | None = self._options.tokens
        return chosen or TOKENS[self._options.scale]

    def _layout(self, data: str, layout: str, model: Path) -> dict[str, Any] | None:
        """What the ranks saw: `ranks`, and `gradient`, the file of rank 0's. None if they failed."""
        size = 1 if layout == "one" else self._options.ranks
        folder = self._folder / data
        folder.mkdir(exist_ok=True)
        job = {
            "scale": self._options.scale,
            "layout": layout,
            "data": data,
            "model": str(model),
            "folder": str(folder),
            "tokens": self._tokens,
            "steps": self._options.steps,
            "micro_batch_tokens": self._options.sharded_tokens if layout == "sharded" else None,
        }
        file = folder / f"{layout}.job"
        file.write_text(json.dumps(job))
        start = time.monotonic()
        fault = self._ranks(file, size)
        print(f"-- {data}, {layout}: {time.monotonic() - start:.0f} s {fault}", flush=True)
        if fault:
            self._add(Line(f"{data}.{layout}", error=fault))
            return None
        ranks = [json.loads((folder / f"{layout}-{rank}.json").read_text()) for rank in range(size)]
        return {"ranks": ranks, "gradient": folder / f"{layout}.gradient"}

    def _ranks(self, file: Path, size: int) -> str:
        """Run a process for each rank, on the GPU of its number alone; what went wrong, empty if nothing."""
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        running = []
        for rank in range(size):
            gpu = seen[rank] if rank < len(seen) else str(rank)
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "measurements.scaling_rank", str(file), str(rank), str(size)],
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    env={**processes.environment(), "CUDA_VISIBLE_DEVICES": gpu},
                    cwd=processes.BENCHMARKS,
                    start_new_session=True,
                )
            )
        end = time.monotonic() + SECONDS
        try:
            while any(process.poll() is None for process in running):
                if failed := [rank for rank, process in enumerate(running) if process.poll()]:
                    return f"rank {failed[0]} ended with {running[failed[0]].returncode}, see {self._log.name}"
                if time.monotonic() > end:
                    return f"took more than {SECONDS:.0f} s"
                time.sleep(0.05)
            codes = [process.returncode for process in running]
            return f"ranks ended with {codes}, see {self._log.name}" if any(codes) else ""
        finally:
            for process in running:
                process.kill()
                process.wait()

    def _tell(self, data: str, layout: str, found: dict[str, Any], base: dict[str, Any]) -> None:
        ranks, first = found["ranks"], found["ranks"][0]
        seconds = statistics.median(map(max, zip(*(rank["seconds"] for rank in ranks), strict=True)))
        of_base = statistics.median(base["ranks"][0]["seconds"])
        gib = [rank["bytes"] / 2**30 for rank in ranks]
        note = (
            f"{of_base / seconds:.3f} x, {first['positions']} positions in {first['examples']} examples; GiB of ranks: "
        )
        note += ", ".join(
            f"{peak:.1f} ({rank['weights'] / 2**30:.1f} loaded)" for peak, rank in zip(gib, ranks, strict=True)
        )
        note += "; seconds of steps " + ", ".join(f"{took:.2f}" for took in first["seconds"])
        note += f"; loaded in {max(rank['load_seconds'] for rank in ranks):.0f} s; norms "
        note += " ".join(f"{norm:.6g}" for norm in first["norms"][:4])
        self._add(Line(f"{data}.{layout}", first["positions"] / seconds, "tokens/s", seconds, max(gib), note))
        for waits, words in (("gathers", "a gather"), ("others", "another rank")):
            if first[waits]:
                shares = [statistics.median(rank[waits]) / seconds for rank in ranks]
                by_rank = ", ".join(f"{share:.2%}" for share in shares)
                note = f"of a step, in which the computation waits for {words}; by rank {by_rank}"
                self._add(Line(f"{data}.{layout}.{waits}", 100 * max(shares), "%", note=note))
        for name, words in (
            ("again", "one rank, the same data again"),
            ("reordered", "one rank, in other micro-batches"),
            ("repeated", "one rank, a second run, as several ranks are compared"),
        ):
            if first[name] is not None:
                self._agreement(f"{data}.noise_{name}", first[name], words)
        if found is not base:
            self._agreement(
                f"{data}.{layout}.gradient", _deviation(found["gradient"], base["gradient"]), "against one rank"
            )

    def _agreement(self, name: str, found: Sequence[float], words: str) -> None:
        largest, norm = found
        note = (
            f"{words}: norm of the difference over the norm; largest difference over the largest element {largest:.2e}"
        )
        self._add(Line(name, norm, "", note=note))

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        processes.show(line)


def _deviation(found: Path, base: Path) -> tuple[float, float]:
    import torch
    from measurements.scaling_rank import deviation

    return deviation(torch.load(found), torch.load(base))


def main() -> int:
    options = arguments()
    began = time.monotonic()
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-scaling.log"
    shared = "/dev/shm" if not options.tiny and Path("/dev/shm").is_dir() else None  # every start reads the models
    with tempfile.TemporaryDirectory(dir=shared, prefix="scaling-") as folder, log_file.open("w") as log:
        models = options.models.resolve() if options.models else Path(folder) / "models"
        models.mkdir(parents=True, exist_ok=True)
        run = Run(options, models, Path(folder), log)
        run.everything()
    took = time.monotonic() - began
    others = [f"{options.ranks} ranks"]
    report.show("scaling", run.lines, options.out, tiny=options.tiny, seconds=took, others=others)
    print(f"other output of the ranks: {log_file}")
    return 1 if options.tiny and any(line.error for line in run.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
