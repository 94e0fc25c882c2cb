"""The same work in TRL and in tinker-local: `SFTTrainer` and `GRPOTrainer` beside two programs of the SDK, `SFTTrainer`
and `DPOTrainer` beside the command `tinker-local train`.

    python benchmarks/beside_trl.py benchmarks/results/beside_trl-DATE --model .test-files/smollm2
    python benchmarks/beside_trl.py NAME --model models/smollm2 --only sft       # and again for what is left
    python benchmarks/beside_trl.py NAME --model models/smollm2 --device cuda    # one GPU, in bfloat16
    python benchmarks/beside_trl.py NAME … --only grpo.ours.0.forward           # with the trainer's logprobs of samples
    python benchmarks/beside_trl.py NAME --model models/smollm2 --only rows,dpo  # `tinker-local train` alone
    python benchmarks/beside_trl.py /tmp/try --tiny                              # a tiny random model

Both get the same token ids in the same order (their checksums are compared), batches, rank, scale, projections,
learning rate, AdamW, clipping and normalisation of the loss. SFT learns worked sums, with loss on the answers alone.
GRPO learns the sums of `examples/rl_sums.py`: eight samples for each prompt, advantages by TRL's formula, its loss
`dapo` without a KL term. `rows` and `dpo` are sums of `reasoning-gym` as JSON lines for `tinker-local train`: answers,
and pairs that the model itself sampled and the scorer of reasoning-gym ordered.

TRL samples with transformers and pads its batches; both are its defaults. It keeps activations, as ours does while
there is room; `checkpointing` is its default, which does not. On a CPU all is float32.

TRL runs in an environment that this command makes (uv, and some GB once), or in that of --trl-python. Each job is a
process; ours of a task share a server, whose start counts in the time of each. A job appends a line to NAME.jsonl,
and is not run again when it is there. NAME.txt has the table of all lines, and `--plot` draws them. The column
`others` is how many cores other programs had on average: threads of a step wait for each other, so one busy core of
theirs makes steps much longer.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import beside, beside_rows, environments, machine, processes, timing
from harness.beside import Job, Row

ROOT = Path(__file__).parents[1]
TRL = "1.16.0"
SHARED = ("torch", "transformers", "peft", "accelerate", "datasets")
"""Packages of TRL's environment that have the versions of this one."""
FURTHER = ("reasoning-gym==0.1.25",)
"""For the data of `rows` and `dpo`, and their scores."""
QUESTIONS_PER_PAIR = 5
"""Of SmolLM2's sums, 194 of 768 questions got samples of different scores."""
START_SECONDS = 600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--model", type=Path, help="folder of a model; not with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", default="", metavar="NAME,…", help=f"tasks, or jobs of {', '.join(job.name for job in beside.JOBS)}"
    )
    parser.add_argument("--seeds", type=int, default=2, help="of each side and task; --only grpo --seeds 10")
    parser.add_argument("--steps", type=int, help="instead of each task's own")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "beside_trl",
        help="folder for TRL's environment, logs and adapters",
    )
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="of our server, such as '--base-precision int4'")
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    parser.add_argument(
        "--trl-python", type=Path, metavar="PYTHON", help="one that has TRL and reasoning-gym; none is made then"
    )
    options = parser.parse_args()
    if options.tiny == (options.model is not None):
        parser.error("either --model or --tiny")
    try:
        options.chosen = beside.chosen(options.only.split(",") if options.only else [], options.seeds)
    except ValueError as error:
        parser.error(f"--only {error}")
    return options


def make_environment(folder: Path) -> Path:
    """The python of an environment with TRL in `folder`; made by uv where it is not there yet."""
    shared = (f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in SHARED)
    return environments.made(folder, [f"trl=={TRL}", *shared, *FURTHER])


def numbers_of(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Settings of a task that are the same for all data."""
    numbers: dict[str, Any] = beside.COMMON | beside.TASKS[job.task] | (beside.TINY[job.task] if options.tiny else {})
    if options.steps:
        numbers["steps"] = options.steps
    if job.variant == "checkpointing":
        numbers["steps"] = min(numbers["steps"], beside.CHECKPOINTED_STEPS)
    return numbers


def settings_of(job: Job, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """What both sides read: numbers, and the data as token ids."""
    from transformers import AutoTokenizer

    numbers = numbers_of(job, options)
    tokenizer = AutoTokenizer.from_pretrained(model)
    data: dict[str, Any]
    if job.task == "sft":
        data = {"examples": beside.sft_examples(tokenizer, numbers["steps"] * numbers["batch"])}
    elif job.task in beside.TRAINED:
        rows = rows_of(job.task, numbers, options, model, tokenizer)
        data = {**beside_rows.in_order(rows, tokenizer, numbers), "rows": str(rows)}
    else:
        learned = numbers["steps"] * numbers["batch"] // numbers["group"]
        problems = beside.grpo_problems(tokenizer, learned, numbers.pop("held_out"), job.seed)
        data = {**problems, "stop": beside.stop_tokens(tokenizer)}
    return {
        **numbers,
        **data,
        "task": job.task,
        "seed": job.seed,
        "model": str(model),
        "name": model.name,
        "folder": str(folder),
        "device": options.device,
        "checkpointing": job.variant == "checkpointing",
        "ratio_one": job.variant == "forward",
        "state": "",
        "replay": "",
    }


def rows_of(task: str, numbers: dict[str, Any], options: argparse.Namespace, model: Path, tokenizer: Any) -> Path:
    """The JSON lines of a task, made once for each --work: answers, or pairs that the model samples now."""
    count = numbers["steps"] * numbers["batch"] + numbers["held_out"]
    path: Path = options.work / f"{task}-{model.name}-{count}.jsonl"
    if path.exists():
        return path
    if task == "rows":
        beside_rows.write_rows(path, [beside_rows.sft_row(*each) for each in questions(options, count, seed=0)])
        return path
    asked = questions(options, QUESTIONS_PER_PAIR * count, seed=1)
    ids = [tokenizer.encode(beside_rows.prompt(question)) for question, _ in asked]
    wanted = {"prompts": ids, "stop": beside.stop_tokens(tokenizer), "name": model.name, "model": str(model), **numbers}
    file = options.work / "samples.json"
    file.write_text(json.dumps(wanted))
    with served(model, options) as server:
        command = [sys.executable, "-m", "measurements.beside_samples", str(file), server.url]
        [line] = lines_of(command, environment_of(options, ours=True), options.work / "samples.txt", quiet=True)
    samples = line["samples"]
    if options.tiny:  # random weights answer no sum
        samples = [[*texts, f" {answer}", " 0 and 0"] for (_, answer), texts in zip(asked, samples, strict=True)]
    flat = [
        [answer, beside_rows.first_line(text)]
        for (_, answer), texts in zip(asked, samples, strict=True)
        for text in texts
    ]
    scores = iter(scored(options, flat))
    pairs = [
        beside_rows.pair_row(question, answer, texts, [next(scores) for _ in texts])
        for (question, answer), texts in zip(asked, samples, strict=True)
    ]
    good = [pair for pair in pairs if pair is not None]
    print(f"{len(good)} of {len(pairs)} questions have samples of different scores; {count} are needed", flush=True)
    if len(good) < count:
        raise SystemExit(f"error: {len(good)} pairs are too few for {numbers['steps']} steps; ask for fewer --steps")
    beside_rows.write_rows(path, good[:count])
    return path


def gym(options: argparse.Namespace, *arguments: str) -> Any:
    """What `baselines/gym_rows.py` prints, in TRL's environment."""
    python = options.trl_python or make_environment(options.work / "env")
    command = [str(python), "-W", "ignore", str(ROOT / "benchmarks" / "baselines" / "gym_rows.py"), *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def questions(options: argparse.Namespace, count: int, seed: int) -> list[beside_rows.Question]:
    return [(question, answer) for question, answer in gym(options, "rows", str(count), str(seed))]


def scored(options: argparse.Namespace, replies: Sequence[Sequence[str]]) -> list[float]:
    """Of `[answer, reply]` each, by the scorer of the task."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(replies), file)
        file.flush()
        return [float(score) for score in gym(options, "score", file.name)]


class ResidentMemory:
    """While open, watches the resident memory of processes and all that they started; `peak_gib` is the peak of the
    sum. Pages that several of them share count in each."""

    def __init__(self, roots: list[int], pause: float = 0.2) -> None:
        self.peak_gib = 0.0
        self.roots = roots
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="resident-memory")

    def __enter__(self) -> "ResidentMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Measure once."""
        import psutil  # type: ignore[import-untyped]

        total = 0
        for root in list(self.roots):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root)
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        total += each.memory_info().rss
        self.peak_gib = max(self.peak_gib, total / 2**30)

    def _watch(self) -> None:
        while not self._stop.wait(self._pause):
            self.look()


def environment_of(options: argparse.Namespace, *, ours: bool) -> dict[str, str]:
    """One GPU, or none; TRL's processes see nothing of this project."""
    base = processes.environment() if ours else {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if options.device == "cuda" else ""
    return base | {
        "CUDA_VISIBLE_DEVICES": visible,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TINKER_TELEMETRY": "0",
    }


def lines_of(
    command: Sequence[str],
    environment: dict[str, str],
    log: Path,
    memory: ResidentMemory | None = None,
    *,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Run a program to its end; return the JSON objects that it printed, which are shown unless `quiet`. Other output
    goes to `log`."""
    lines = []
    with log.open("a") as kept:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=kept, text=True, env=environment, cwd=ROOT / "benchmarks"
        )
        if memory is not None:
            memory.roots.append(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"'):
                kept.write(line)
                continue
            lines.append(json.loads(line))
            if not quiet:
                print(f"  {line.rstrip()}"[:300], flush=True)
    if process.wait():
        last = "\n".join(log.read_text().splitlines()[-20:])
        raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}; {log} ends with:\n{last}")
    return lines


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. `seconds`: from its start until then."""

    url: str
    pid: int
    seconds: float

    def processor_s(self) -> float:
        """Of it and its processes."""
        import psutil

        process = psutil.Process(self.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))


@contextlib.contextmanager
def served(model: Path, options: argparse.Namespace) -> Iterator[Server]:
    """A server of the model with its defaults, and what `--serve` says."""
    log = options.work / "server.txt"
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--port", "0", "--data-dir", data]
        command += ["--model", f"{model.name}={model}", *(["--kv-cache", "0.25"] if options.tiny else [])]
        command += shlex.split(options.serve)
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment_of(options, ours=True)
        )
        ready, found = threading.Event(), list[Server]()

        def read() -> None:
            assert process.stdout is not None
            with log.open("a") as kept:
                for line in process.stdout:
                    kept.write(line)
                    kept.flush()
                    if told := re.search(r"ready: (http://\S+)", line):
                        found.append(Server(told[1], process.pid, time.monotonic() - began))
                        ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        try:
            if not ready.wait(START_SECONDS) or not found:
                raise SystemExit(f"error: the server did not start, see {log}")
            yield found[0]
        finally:
            process.terminate()
            process.wait()


def processor_s(server: Server | None) -> tuple[float, float]:
    """Processor seconds of all processes of the machine, and of those that belong to this run."""
    import psutil

    all_of_them = psutil.cpu_times()
    mine = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    used = sum(each.ru_utime + each.ru_stime for each in mine) + (server.processor_s() if server else 0.0)
    return all_of_them.user + all_of_them.nice + all_of_them.system, used


def run(job: Job, options: argparse.Namespace, model: Path, server: Server | None) -> Row:
    """One job, as a line of the results. `server`: for a job of ours."""
    folder = options.work / job.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = settings_of(job, options, model, folder)
    file, log = folder / "settings.json", folder / "log.txt"
    if server is None:
        python = options.trl_python or make_environment(options.work / "env")
        command = [str(python), str(ROOT / "benchmarks" / "baselines" / "trl_loop.py"), str(file)]
    else:
        if first := job.first():
            settings |= beginning(options.work / first.name, model.name, server.url, replay=job.variant == "replay")
        program = "beside_train" if job.task in beside.TRAINED else "beside_sdk"
        command = [sys.executable, "-m", f"measurements.{program}", str(file), server.url]
    file.write_text(json.dumps(settings))
    with ResidentMemory([server.pid] if server else []) as memory, timing.DeviceMemory() as device:
        began, before = time.monotonic(), processor_s(server)
        lines = lines_of(command, environment_of(options, ours=server is not None), log, memory)
        seconds, after = time.monotonic() - began, processor_s(server)
    everything, mine = (b - a for a, b in zip(before, after, strict=True))
    return with_scores(gathered(lines), options) | {
        "job": list(job),
        "server_s": server.seconds if server else None,
        "total_s": seconds + (server.seconds if server else 0.0),
        "peak_gib": memory.peak_gib,
        "device_gib": device.peak_gib,
        "others_cores": max(0.0, everything - mine) / seconds,
        "settings": {k: v for k, v in settings.items() if isinstance(v, int | float)},
    }


def with_scores(row: Row, options: argparse.Namespace) -> Row:
    """The row with scores instead of the replies that a program of `beside.TRAINED` printed."""
    for measured in row.get("held_out", []):
        if replies := measured.pop("replies", None):
            scores = scored(options, [[answer, beside_rows.first_line(reply)] for answer, reply in replies])
            measured |= {"right": scores.count(1.0), "of": len(scores), "score": statistics.fmean(scores)}
    return row


def beginning(first: Path, name: str, url: str, *, replay: bool) -> dict[str, str]:
    """Give the server the adapter of a run of TRL in `first`; settings that begin with it."""
    from tinker_local.backend.exporting import import_adapter

    if not (first / "first" / "adapter_config.json").exists():
        raise SystemExit(f"error: {first.name} must have run before, with the same --work")
    state = import_adapter(first / "first", model=name, url=url).path
    return {"state": state, "replay": str(first / "rollouts.json") if replay else ""}


def gathered(lines: Sequence[dict[str, Any]]) -> Row:
    """What a program printed, as part of a row."""
    row: Row = {"steps": [line for line in lines if "step" in line]}
    if measured := [line for line in lines if "held_out" in line]:
        row["held_out"] = measured
    for line in lines:
        row |= {key: line[key] for key in ("start_s", "sha256") if key in line}
    return row


def same_data(rows: Sequence[Row]) -> None:
    """Raises SystemExit if runs of a task with as many steps were not trained on the same tokens."""
    sums: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        if "sha256" in row:
            sums.setdefault((row["job"][0], len(row["steps"])), set()).add(row["sha256"])
    for found in sums.values():
        if len(found) > 1:
            raise SystemExit(f"error: not all jobs trained on the same tokens: {', '.join(sorted(found))}")


def main() -> None:
    options = arguments()
    results, table = (options.name.with_name(options.name.name + suffix) for suffix in (".jsonl", ".txt"))
    results.parent.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.work / "tiny" if options.tiny else options.model.resolve()
    if options.tiny and not (model / "config.json").exists():
        from tinker_local.backend.tiny_models import make_tiny_text_model

        make_tiny_text_model(model)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    missing = [job for job in options.chosen if list(job) not in [row["job"] for row in rows]]
    # A server for each task, and TRL before those that begin with its adapter.
    for _, group in itertools.groupby(missing, key=lambda job: (job.task, job.side)):
        jobs = list(group)
        with served(model, options) if jobs[0].side == "ours" else contextlib.nullcontext() as server:
            for job in jobs:
                print(job.name, flush=True)
                rows.append(run(job, options, model, server) | {"machine": machine.describe(), "trl": TRL})
                same_data(rows)
                with results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    what = f"TRL {TRL}; {model.name}, {options.device} {options.serve}".rstrip()
    table.write_text(beside.text(rows, [*rows[-1]["machine"], what]))
    print(table.read_text())
    if options.plot:
        beside.draw(rows, options.plot)


if __name__ == "__main__":
    main()
