"""How long `tinker-local serve` takes to start and to stop: with no compiled kernels, and once more with those kept.

    python benchmarks/start_up.py --out benchmarks/results         # a GPU, the shape of Qwen3-8B; about five minutes
    python benchmarks/start_up.py --shape 8b-vl                    # with pictures
    python benchmarks/start_up.py --tiny                           # the same code on a CPU, two minutes

Random weights, in files that were just written, so that they come from memory. Everything else is the server's default.
`starts` starts in a row share folders for compiled kernels that are empty at first, and the data folder. Seconds from
the command to `ready:`, by the stages that the server names, and from Ctrl-C to the end of the process; the GPU's
memory in use while the server is idle. The log of each start is kept beside the table.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import room_for_models
from harness import machine, processes
from random_model import SHAPES

START_SECONDS, STOP_SECONDS = 600.0, 120.0


@dataclass
class Started:
    """One start and stop. `stages`: seconds by part and stage."""

    ready: float = 0.0
    stop: float = 0.0
    used: str = ""
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name.startswith("8b")], default="8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the table and the logs")
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="options of serve")
    return parser.parse_args()


def start_and_stop(model: Path, data: Path, log: Path, environment: dict[str, str], options: list[str]) -> Started:
    """RuntimeError if the server does not start."""
    found = Started()
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--model", f"bench={model}", "--verbose"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--port", "0", "--data-dir", str(data), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    with log.open("w") as kept:
        for line in process.stdout:
            kept.write(f"{time.monotonic() - began:7.2f} {line}")
            kept.flush()
            if not found.ready and (url := re.search(r"ready: (http://\S+)", line)):
                found.ready = time.monotonic() - began
                try:
                    found.stages, found.used = told(url[1])
                finally:
                    began_to_stop = time.monotonic()
                    process.send_signal(signal.SIGINT)
    if not found.ready:
        raise RuntimeError(f"the server did not start, see {log}")
    process.wait(STOP_SECONDS)
    found.stop = time.monotonic() - began_to_stop
    return found


def told(url: str) -> tuple[dict[str, dict[str, float]], str]:
    """The stages of the start, and the memory of the GPU in use."""
    import httpx

    status: dict[str, Any] = httpx.get(f"{url}/api/v1/status", trust_env=False, timeout=60).json()
    gib = 2**30
    used = ", ".join(f"{each['used_bytes'] / gib:.1f} of {each['bytes'] / gib:.1f} GiB" for each in status["gpus"])
    [model] = status["models"]
    cache = f", KV cache {model['kv_cache_bytes'] / gib:.1f}, trainer's cache {model['trainer_cached_bytes'] / gib:.1f}"
    return model["start"], used + cache if used else "no GPU"


def table(starts: list[Started]) -> str:
    """A row for each stage that took a tenth of a second in any start, in seconds."""
    names = list(dict.fromkeys((part, name) for each in starts for part in each.stages for name in each.stages[part]))
    rows = [
        (f"{part}: {name}", [each.stages.get(part, {}).get(name, 0.0) for each in starts])
        for part, name in names
        if max(each.stages.get(part, {}).get(name, 0.0) for each in starts) >= 0.1
    ]
    rows += [("from the command to ready", [each.ready for each in starts]), ("stop", [each.stop for each in starts])]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'seconds':{width}}" + "".join(f"  start {number + 1}" for number in range(len(starts)))]
    lines += [f"{name:{width}}" + "".join(f"{seconds:9.1f}" for seconds in row) for name, row in rows]
    return "\n".join([*lines, f"memory in use when ready: {'; '.join(each.used for each in starts)}"])


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as room:
        folder = Path(room)
        if options.tiny:
            from tinker_local.backend.tiny_models import make_tiny_text_model

            make_tiny_text_model(folder / "model")
        else:
            # In another process, whose memory of the GPU is given back.
            writer = Path(__file__).with_name("random_model.py")
            subprocess.run([sys.executable, writer, folder / "model", "--shape", options.shape], check=True)
        environment = {
            **processes.environment(),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "VLLM_CACHE_ROOT": str(folder / "vllm"),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        }
        logs = options.out or folder
        logs.mkdir(parents=True, exist_ok=True)
        starts: list[Started] = []
        for number in range(options.starts):
            log = logs / f"start_up-{number + 1}.log"
            starts.append(start_and_stop(folder / "model", folder / "data", log, environment, options.serve))
            print(
                f"start {number + 1}: ready after {starts[-1].ready:.1f} s, stopped in {starts[-1].stop:.1f} s",
                flush=True,
            )
        found = "\n".join([*machine.describe(), table(starts)])
    print(found)
    if options.out:
        (options.out / f"start_up-{time.strftime('%Y%m%d-%H%M%S')}.txt").write_text(found + "\n")


if __name__ == "__main__":
    main()
