"""Compare servers on several GPUs with one on one GPU, as two programs that use the official SDK at once see them.

    python benchmarks/whole_servers.py --out benchmarks/results             # all GPUs of the machine, eight minutes
    python benchmarks/whole_servers.py --layouts one,divided                # of one, whole and divided
    python benchmarks/whole_servers.py --tiny                               # the same code on a CPU, some minutes

`one` serves with the first GPU, `whole` with the defaults on all (whole weights on each, trainer and sampler), and
`divided` with `--shard N --sample-tp N` (each engine has a part of its weights on each of N GPUs). Random weights in
the shape of Qwen3-8B, LoRA of rank 32, everything else the server's default, one server after the other. In each, two
processes have a run each: they train some steps, save and sample together, and then compare the logprobs of what they
have sampled with the trainer's, for the same tokens.
"""

import argparse
import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from endpoints import free_port, serving
from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio
from harness.scale import SCALES, Scale
from harness.timing import DeviceMemory

PROGRAMS = 2
LAYOUTS = ("one", "whole", "divided")
MODEL = "bench/text"
CALLS = 4
"""Requests of `forward_backward` that a step is sent in."""


class Work(NamedTuple):
    """What each program does. `sequences` of `length` tokens make a step; `requests` of `prompt` tokens in and `output`
    out make a round of samples. `compared`: how many of the samples the trainer scores."""

    sequences: int
    length: int
    requests: int
    prompt: int
    output: int
    rounds: int
    compared: int


WORK = {"full": Work(64, 512, 128, 256, 256, 3, 32), "tiny": Work(4, 16, 4, 8, 8, 2, 4)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two processes; fails if anything does")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="which, the first is the base")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where the random model is kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    parser.add_argument("--program", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.gpus = machine.gpu_count()
    if unknown := set(options.layouts.split(",")) - set(LAYOUTS):
        parser.error(f"--layouts {options.layouts}: {', '.join(sorted(unknown))}; there are {', '.join(LAYOUTS)}")
    if not options.tiny and not options.program and options.gpus < 2:
        parser.error(f"there are {options.gpus} GPUs, and this needs two; --tiny runs the same code on a CPU")
    return options


# A program, a separate process ----------------------------------------------------------------------------------------


class Program:
    """A user's program: the official SDK against `url`. Each of its methods is a phase that all programs begin at
    once."""

    def __init__(self, url: str, seed: int, vocab: int, rank: int, work: Work) -> None:
        import tinker

        self._tinker, self._work, self._vocab = tinker, work, vocab
        self._rng = np.random.default_rng(seed)
        self._service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        self._run = self._service.create_lora_training_client(MODEL, rank=rank, train_unembed=False).result()

    def _tokens(self, length: int) -> list[int]:
        found: list[int] = self._rng.integers(0, self._vocab, length).tolist()
        return found

    def _datum(self, tokens: Sequence[int]) -> Any:
        inputs = {"target_tokens": self._tinker.TensorData.from_numpy(np.array(tokens[1:]))}
        return self._tinker.Datum(
            model_input=self._tinker.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs
        )

    def train(self) -> int:
        """A step, of so many positions."""
        work = self._work
        data = [self._datum(self._tokens(work.length + 1)) for _ in range(work.sequences)]
        size = -(-len(data) // CALLS)
        sent = [self._run.forward_backward(data[at : at + size], "cross_entropy") for at in range(0, len(data), size)]
        update = self._run.optim_step(self._tinker.AdamParams(learning_rate=1e-4))
        for result in [*sent, update]:
            result.result()
        return work.sequences * work.length

    def save(self) -> int:
        """Save the weights, and sample one token from them."""
        self._sampler = self._run.save_weights_and_get_sampling_client().result()
        self._sample(self._tokens(4), 1).result()
        return 1

    def _sample(self, prompt: Sequence[int], tokens: int) -> Any:
        params = self._tinker.SamplingParams(max_tokens=tokens, stop=())
        return self._sampler.sample(self._tinker.ModelInput.from_ints(list(prompt)), 1, params)

    def sample(self) -> int:
        """A round, of so many output tokens."""
        prompts = [self._tokens(self._work.prompt) for _ in range(self._work.requests)]
        sent = [self._sample(prompt, self._work.output) for prompt in prompts]
        self._sampled = [(prompt, future.result().sequences[0]) for prompt, future in zip(prompts, sent, strict=True)]
        return sum(len(sequence.tokens) for _, sequence in self._sampled)

    def compare(self) -> list[float]:
        """Differences of the trainer's and the sampler's logprobs of sampled tokens, one for each token."""
        chosen = self._sampled[: self._work.compared]
        data = [self._datum([*prompt, *sequence.tokens]) for prompt, sequence in chosen]
        outputs = self._run.forward(data, "cross_entropy").result().loss_fn_outputs
        found: list[float] = []
        for (prompt, sequence), output in zip(chosen, outputs, strict=True):
            scored = output["logprobs"].to_numpy()[len(prompt) - 1 :]
            found += (np.asarray(sequence.logprobs) - scored).tolist()
        return found


def program(job: dict[str, Any]) -> None:
    """Do the phase that each line of the standard input names, and answer with a line: begin and end by the clock that
    all processes share, and what it returned."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the SDK prints
    running = Program(job["url"], job["seed"], job["vocab"], job["rank"], Work(*job["work"]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        begin = time.monotonic()
        found = getattr(running, line.strip())()
        print(json.dumps([begin, time.monotonic(), found]), file=answers, flush=True)


# The servers ----------------------------------------------------------------------------------------------------------


def command_of(layout: str, gpus: int, scale: Scale, model: Path, folder: Path, url: str) -> list[str]:
    """`tinker-local serve` in a layout. On a CPU, naming GPUs starts as many processes."""
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--model", f"{MODEL}={model}"]
    command += ["--max-rank", str(scale.rank), "--port", url.rpartition(":")[2], "--data-dir", str(folder / "data")]
    if scale.name == "tiny":
        command += ["--kv-cache", "0.0625"]
    if layout == "divided":
        command += ["--shard", str(gpus), "--sample-tp", str(gpus)]
    if layout != "one" and scale.name == "tiny":
        numbers = ",".join(map(str, range(gpus)))
        command += ["--train-gpus", numbers, "--sample-gpus", numbers]
    return command


class Programs:
    """All programs, which begin each phase together."""

    def __init__(self, url: str, scale: Scale, log: TextIO) -> None:
        self._running = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--program", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**processes.environment(), "CUDA_VISIBLE_DEVICES": ""},
            )
            for job in (
                {"url": url, "seed": seed, "vocab": scale.text.vocab, "rank": scale.rank, "work": WORK[scale.name]}
                for seed in range(PROGRAMS)
            )
        ]
        self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for process in self._running:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a program ended with {process.wait()}")
            found.append(json.loads(line))
        return found

    def begin(self, phase: str) -> tuple[float, list[Any]]:
        """Seconds from the first begin to the last end of the phase, and what each program returned."""
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write(f"{phase}\n")
            process.stdin.flush()
        answers = self._answers()
        return max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers), [
            found for _, _, found in answers
        ]

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


def measure(layout: str, programs: Programs, work: Work, note: str) -> Iterator[Line]:
    """Lines of one server, each as soon as it is measured."""
    each = f"{PROGRAMS} programs of"

    def rate(phase: str, words: str) -> Line:
        rates = [sum(counts) / seconds for seconds, counts in (programs.begin(phase) for _ in range(work.rounds))]
        note = f"{each} {words}; {min(rates):,.0f} to {max(rates):,.0f}"
        return Line(f"served.{layout}.{phase}", statistics.median(rates), "tokens/s", note=note)

    programs.begin("train")
    with DeviceMemory() as memory:
        trained = rate("train", f"{work.sequences} x {work.length}")
    yield dataclasses.replace(trained, peak_gib=memory.peak_gib, note=f"{trained.note}; {note}")
    saves = [programs.begin("save")[0] for _ in range(1 + work.rounds)][1:]
    yield Line(
        f"served.{layout}.save",
        1000 * statistics.median(saves),
        "ms",
        note=f"{each} a save and a token; {', '.join(f'{1000 * seconds:.0f}' for seconds in saves)}",
    )
    programs.begin("sample")
    with DeviceMemory() as memory:
        sampled = rate("sample", f"{work.requests} requests, {work.prompt} in, {work.output} out")
    yield dataclasses.replace(sampled, peak_gib=memory.peak_gib)
    differences = np.abs(np.concatenate(programs.begin("compare")[1]))
    yield Line(
        f"served.{layout}.difference",
        float(differences.mean()),
        note=f"of logprobs, sampler and trainer, mean of {len(differences)} sampled tokens; "
        f"99 % below {np.quantile(differences, 0.99):.3g}, largest {differences.max():.3g}",
    )


def run(options: argparse.Namespace, models: Path, folder: Path, log: TextIO) -> list[Line]:
    scale, gpus = SCALES["tiny" if options.tiny else "full"], max(2, options.gpus)
    written = processes.run(["measurements.models", scale.name, str(models), "text"], 300, log)
    if written.fault:
        return [Line("models", error=written.fault)]
    environment = {**processes.environment(), "VLLM_NO_USAGE_STATS": "1"}
    visible = environment.get("CUDA_VISIBLE_DEVICES") or "0"
    lines: list[Line] = []
    for layout in options.layouts.split(","):
        url = f"http://127.0.0.1:{free_port()}"
        command = command_of(layout, gpus, scale, models / "text", folder / layout, url)
        seen = {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]} if layout == "one" and options.gpus else {}
        try:
            with serving(command, environment | seen, url, "/api/v1/healthz", log) as seconds:
                programs = Programs(url, scale, log)
                try:
                    for line in measure(layout, programs, WORK[scale.name], f"up in {seconds:.0f} s"):
                        processes.show(line)
                        lines.append(line)
                finally:
                    programs.end()
        except RuntimeError as error:
            lines.append(Line(f"served.{layout}", error=re.sub(r"\s+", " ", str(error))[:300]))
            processes.show(lines[-1])
    return lines


def ratios(layouts: Sequence[str]) -> list[Ratio]:
    """Each layout against the first one."""
    base, *others = layouts
    return [
        Ratio(f"{what}, {layout} / {base}", f"served.{layout}.{line}", (f"served.{base}.{line}",))
        for line, what in (
            ("train", "trained tokens/s"),
            ("sample", "output tokens/s"),
            ("save", "save to first token"),
            ("difference", "sampler and trainer differ"),
        )
        for layout in others
    ]


def main() -> int:
    options = arguments()
    if options.program:
        program(json.loads(options.program))
        return 0
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-whole-servers.log"
    place = None if options.tiny else room_for_models()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=place, prefix="served-") as temporary, log_file.open("w") as log:
        folder = Path(temporary)
        models = options.models.resolve() if options.models else folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        lines = run(options, models, folder, log)
    took = time.monotonic() - began
    layouts = options.layouts.split(",")
    report.show("whole_servers", lines, options.out, tiny=options.tiny, seconds=took, ratios=ratios(layouts))
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
