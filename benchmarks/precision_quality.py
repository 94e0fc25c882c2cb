"""What a base in 8 or 4 bits costs in quality: the same model dense, in int8 and in int4, by the project's own codes.

    python benchmarks/precision_quality.py benchmarks/results/precision_quality-DATE --model .test-files/smollm2
    python benchmarks/precision_quality.py NAME --model models/smollm2 --only text     # a part; and again for others
    python benchmarks/precision_quality.py /tmp/try --tiny                             # the code on a tiny model

`text`: perplexity on real texts, KL(dense, packed) of whole distributions, errors of the matrices, all by transformers'
modules. `outliers`: the same with outlier channels put in, by a rescaling that leaves the dense function as it is.
`engines`: a server's engines on each base: SFT with paired seeds, gradients of the adapter, KL(sampler, trainer) of
samples, their speed; an adapter of a packed base moved to the dense one.

Each part is a process; NAME.json has the numbers, NAME.md the tables. On a CPU, in float32. Ten minutes on one core
with the model of `tinker-local small-model`: OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/precision_quality.py …
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import machine, precision_tables, processes

PARTS = ("text", "outliers", "engines")
TINY: dict[str, Any] = {
    "windows": 2,
    "window": 32,
    "outlier_windows": 1,
    "seeds": 2,
    "steps": 2,
    "batch": 2,
    "held_out": 2,
    "prompts": 2,
    "samples": 1,
    "tokens": 4,
    "random_width": 128,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--model", type=Path, help="folder of a model; not with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, a few tokens")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    if options.tiny == (options.model is not None):
        parser.error("either --model or --tiny")
    options.parts = options.only.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return options


def run(part: str, settings: dict[str, Any], work: Path) -> dict[str, Any]:
    """What the process of a part found, with the seconds that it took."""
    print(f"{part} ...", flush=True)
    module, what = part.split(".") if "." in part else ("text", part)
    file = work / f"{part}.json"
    file.write_text(json.dumps(settings))
    began, before = time.monotonic(), processor_seconds()
    command = [sys.executable, "-m", f"measurements.precision_{module}", str(file), what]
    environment = processes.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    log = work / f"{part}.log"
    with log.open("w") as kept:
        status = subprocess.run(command, stdout=kept, stderr=kept, env=environment, cwd=processes.BENCHMARKS).returncode
    if status:
        raise SystemExit(f"error: {part} ended with status {status}:\n{log.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads((work / f"{part}.json").read_text())
    return found | {"seconds": time.monotonic() - began, "processor_seconds": processor_seconds() - before}


def processor_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = arguments()
    results = options.name.with_name(f"{options.name.name}.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(results.read_text())["parts"] if results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = options.model.resolve() if options.model else work / "tiny"
        if options.tiny:
            from tinker_local.backend.tiny_models import make_tiny_text_model

            make_tiny_text_model(model, family="llama")
        settings = precision_tables.SIZES | (TINY if options.tiny else {}) | {"model": str(model), "work": str(work)}
        for part in options.parts:
            # The packed ones before the dense one, which gets their adapters.
            places = [f"engines.{base}" for base in ("int8", "int4", "dense")] if part == "engines" else [part]
            for place in places:
                known[place] = run(place, settings, work)
            if part == "engines":
                known["gradients"] = precision_tables.gradient_distances(work)
            found = {
                "machine": machine.describe(),
                "model": model.name,
                "sizes": {key: value for key, value in settings.items() if key not in ("model", "work")},
                "parts": known,
            }
            results.write_text(json.dumps(found, indent=1) + "\n")
            options.name.with_name(f"{options.name.name}.md").write_text(precision_tables.page(found))
    print(precision_tables.page(found))


if __name__ == "__main__":
    main()
