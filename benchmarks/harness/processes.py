"""Run measurements in separate processes and gather their lines."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from harness.lines import Line, parse

BENCHMARKS = Path(__file__).parents[1]
MODEL_SECONDS = 300
"""Most that the weights of a model may take to write."""


def environment(checkout: Path = BENCHMARKS.parent) -> dict[str, str]:
    """The environment of a measurement's process: no hub, no telemetry, no proxy, the project from `checkout`."""
    packages = checkout / "packages"
    sources = [str(packages / name / "src") for name in ("types", "client", "backend")]
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sources, *known]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a process. `fault` is empty if it ended well."""

    lines: list[Line]
    fault: str
    seconds: float


def run(arguments: Sequence[str], limit: float, log: TextIO, checkout: Path = BENCHMARKS.parent) -> Outcome:
    """Run `python -m …` on the project from `checkout` with a time limit; return its lines and write its other output
    to `log`. At the limit, kill it and everything that it started, also when SIGTERM ends this process: what goes
    on running would hold the GPU's memory."""
    start = time.monotonic()
    stopped, running = threading.Event(), list[subprocess.Popen[str]]()

    def stop(*_: object) -> None:
        stopped.set()
        for each in running:
            _end(each)
        sys.exit(128 + signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(checkout),
        cwd=BENCHMARKS,
        start_new_session=True,
    )
    running.append(process)
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _end(process)

    def end_children() -> None:
        process.wait()  # a remaining child would hold the pipe open, and the loop below would wait for it
        _end(process)

    timer = threading.Timer(limit, expire)
    timer.start()
    threading.Thread(target=end_children, daemon=True).start()
    lines: list[Line] = []
    last = ""
    try:
        assert process.stdout is not None
        for text in process.stdout:
            line = parse(text)
            if line is None:
                log.write(text)
                log.flush()
                last = text.strip() or last
            else:
                lines.append(line)
                show(line)
        status = process.wait()
    finally:
        timer.cancel()
        _end(process)
    if stopped.is_set():  # the handler's exception was lost on its way, as was seen once
        sys.exit(128 + signal.SIGTERM)
    fault = f"ended at its limit of {limit:.0f} s" if expired.is_set() else f"status {status}: {last}" if status else ""
    return Outcome(lines, fault, time.monotonic() - start)


def write_text_model(scale: str, folder: Path, logs: Path) -> None:
    """Write the random model of `scale` into the folder `text` of `folder`, in a process whose memory is free
    afterwards and whose output goes to `logs`. RuntimeError if that fails."""
    with (logs / "model.log").open("w") as log:
        if fault := run(["measurements.models", scale, str(folder), "text"], MODEL_SECONDS, log).fault:
            raise RuntimeError(f"the model was not written: {fault}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children, if any remain."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def show(line: Line) -> None:
    """Print a line as soon as it arrives."""
    text = f"ERROR {line.error}" if line.error else f"skipped: {line.skipped}" if line.skipped else line.note
    value = "" if line.value is None else f"{line.value:,.4g} {line.unit}"
    memory = "" if line.peak_gib is None else f", peak {line.peak_gib:.1f} GiB"
    print(f"{line.name}: {value}{memory}{f' ({text})' if text else ''}", flush=True)
