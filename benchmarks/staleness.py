"""Asynchronous RL: the return of both RL examples by loss, and by how old the weights are that sample.

    python benchmarks/staleness.py benchmarks/results/staleness-20261124-color_square --examples color_square
    python benchmarks/staleness.py benchmarks/results/staleness-20261124-grid_walk --examples grid_walk \\
        --workers 14 --budget 540                                        # on a GPU; again for what is left
    python benchmarks/staleness.py benchmarks/results/ahead-DATE-grid_walk --examples grid_walk --losses ppo \\
        --staleness 0 --steps-ahead 0 1 --steps 40                       # asynchronous beside synchronous
    python benchmarks/staleness.py /tmp/try/staleness --tiny             # the same code in a minute
    python benchmarks/random_model.py runs/models/grid_walk --shape 2b-vl --mosaic
    python benchmarks/staleness.py benchmarks/results/grid_walk_2b --examples grid_walk --models runs/models \\
        --losses importance_sampling --staleness 0 --seeds 1 --steps 40 --learning-rate 3e-4 --warm-steps 24 \\
        --warm-rate 5e-4 --kv-cache 4                                    # a model in a GPU model's shape

A job is an example with a loss, a staleness and a seed: its environments, warm start, learning rate and test on new
starts with the final weights, by the example's code. With staleness n, step t trains on episodes that the weights of
step max(0, t - n) sampled. With n steps ahead, the loop is `rl.train_asynchronously`, whose weights move under running
samples; beside the same jobs without, the table has the differences of pairs with one seed. All jobs of an example take
as many steps, by default the example's and 64 more, so that with a staleness of 64 the weights of 30 or 40 steps
sample. Nothing is tuned on these seeds.

`--workers` processes have an engine each, which runs `--runs` jobs at once (on a CPU that saves nothing). Each job that
ends appends a line to NAME.jsonl; a job that is there is not run again. After `--budget` seconds no job begins, those
that run stop, and their steps are lost; workers then need some seconds to end. NAME.txt has the table of all lines.
Seeds come one after the other, each with all losses. A job takes about 150 (color_square) and 250 (grid_walk) processor
seconds on a CPU, and the start of a worker 20. On a GPU vLLM starts without CUDA graphs, and a worker takes some GiB.
What engines and examples print is in `--log`, a file for each worker. A model that is in `--models` already, under the
example's name, is trained in place of the tiny one.
"""

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from harness.precision_tables import interval

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

MODELS = {"color_square": "tiny", "grid_walk": "mosaic"}
"""Each example, and the preset of the tiny model that it trains."""
LOSSES = ("stable_reinforce", "importance_sampling", "ppo")
STALENESS = (0, 8, 64)
SEEDS = (0, 1, 2, 3, 4)
LAST = 10
"""Steps at the end whose returns are averaged. These are of the weights that sampled, `staleness` steps ago."""
TINY = {"steps": 4, "groups": 2, "group_size": 2, "warm_steps": 1}


class Job(NamedTuple):
    example: str
    loss: str
    staleness: int
    seed: int
    steps_ahead: int = 0


class Settings(NamedTuple):
    """What all workers have in common. `deadline`: of `time.monotonic`, which all processes share."""

    jobs: Sequence[Job]
    runs: int
    deadline: float
    models: Path
    log: Path
    changes: dict[str, float]
    kv_cache_bytes: int


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def job_of(row: dict[str, Any]) -> Job:
    return Job(row["example"], row["loss"], row["staleness"], row["seed"], row.get("steps_ahead", 0))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean, standard deviation and minimum over the seeds, for each example, staleness and loss."""
    lines = [
        f"{'example':<13}{'staleness':>10}{'ahead':>7}  {'loss':<20}{'mean':>6}{'sd':>7}{'minimum':>9}"
        f"{'last steps':>12}  by seed"
    ]
    jobs = {job_of(row): row for row in rows}
    ordered = sorted(jobs, key=lambda job: (*_cell(job)[:3], LOSSES.index(job.loss), job.seed))
    for (example, staleness, ahead, loss), group in itertools.groupby(ordered, _cell):
        same = [jobs[job] for job in group]
        returns = [row["return"] for row in same]
        spread = f"{stdev(returns):7.3f}" if len(returns) > 1 else f"{'-':>7}"
        lines.append(
            f"{example:<13}{staleness:>10}{ahead:>7}  {loss:<20}{mean(returns):6.3f}{spread}{min(returns):9.3f}"
            f"{mean(row['last_steps'] for row in same):12.3f}  "
            + " ".join(f"{row['seed']}: {row['return']:.3f}" for row in same)
        )
    lines += _differences({job: row["return"] for job, row in jobs.items()})
    for example in sorted({row["example"] for row in rows}):
        same = [row for row in rows if row["example"] == example]
        lines.append(
            f"{example}: {' or '.join(sorted({str(row['steps']) for row in same}))} steps, "
            f"{' or '.join(sorted({row['device'] for row in same}))}, "
            f"{mean(row['processor_s'] for row in same):.0f} processor seconds for a job"
        )
    return "\n".join(lines) + "\n"


def _cell(job: Job) -> tuple[str, int, int, str]:
    return job.example, job.staleness, job.steps_ahead, job.loss


def _differences(returns: dict[Job, float]) -> Iterator[str]:
    """Of the returns of asynchronous jobs and of synchronous ones with the same seed, for each example and loss."""
    for example, _, ahead, loss in sorted({_cell(job) for job in returns if job.steps_ahead}):
        seeds = [job.seed for job in returns if _cell(job) == (example, 0, ahead, loss)]
        pairs = [
            returns[Job(example, loss, 0, seed, ahead)] - synchronous
            for seed in seeds
            if (synchronous := returns.get(Job(example, loss, 0, seed))) is not None
        ]
        if pairs:
            middle, least, most = interval(pairs)
            yield (
                f"{example}, {loss}: {ahead} ahead less synchronous, {len(pairs)} paired seeds: {middle:+.3f}, "
                f"95 % interval of the mean {least:+.3f} to {most:+.3f}"
            )


def options_of(job: Job, changes: dict[str, float]) -> argparse.Namespace:
    """The example's options: its defaults, those of `grpo.run_example`, and `changes`."""
    defaults = {"warm_steps": 6, "warm_rate": 5e-3, **importlib.import_module(job.example).DEFAULTS}
    defaults["steps"] += max(STALENESS)
    named = {"loss": job.loss, "staleness": job.staleness, "steps_ahead": job.steps_ahead}
    named |= {"seed": job.seed, "begin": 0, "save_every": 0}
    return argparse.Namespace(**defaults | named | changes)


class Sampler:
    """The SDK's sampling client `snapshot`, except that samples reach the backend without HTTP: with tiny models that
    halves the processor time of a step."""

    def __init__(self, backend: Any, snapshot: Any, recorded: bool) -> None:
        self._backend, self._snapshot, self._recorded = backend, snapshot, recorded  # its weights live as long as it
        self._numbers = itertools.count()

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        from tinker_local.types import SampleRequest

        request = SampleRequest(
            sampling_session_id=self._snapshot._sampling_session_id,
            seq_id=next(self._numbers),
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=sampling_params,
            record_stability_info=self._recorded,
        )
        sampled = asyncio.run_coroutine_threadsafe(self._sampled(request), self._backend.loop)
        return await asyncio.wrap_future(sampled)

    async def _sampled(self, request: Any) -> Any:
        return await (await self._backend.sampling.sample(request))


def sample_without_http(client: Any, backend: Any) -> None:
    """Let the sampling clients of the training client be `Sampler`s."""
    save = client.save_weights_and_get_sampling_client

    async def saved(record_stability_info: bool = False, kind: Any = "snapshot") -> Sampler:
        made = await save(record_stability_info=record_stability_info, kind=kind)
        return Sampler(backend, made, record_stability_info)

    client.save_weights_and_get_sampling_client = saved


async def run(service: Any, backend: Any, job: Job, settings: Settings, device: str) -> dict[str, Any]:
    """A job, as a line of the results."""
    options, start, used = options_of(job, settings.changes), time.monotonic(), time.process_time()
    client = await service.create_lora_training_client_async(base_model=f"local/{job.example}", rank=32, seed=0)
    sample_without_http(client, backend)
    outcome = await importlib.import_module(job.example).run(client, options)
    rewards = outcome.history.rewards
    return {
        **job._asdict(),
        "return": outcome.success,
        "last_steps": mean(rewards[-LAST:]),
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "report": outcome.report,
        "rewards": [round(reward, 4) for reward in rewards],
        **({"sampled_steps_ago": round(mean(outcome.history.staleness), 3)} if job.steps_ahead else {}),
        "device": device,
        "seconds": round(time.monotonic() - start, 1),
        "processor_s": round((time.process_time() - used) / settings.runs, 1),
    }


async def work(settings: Settings, taken: Any, results: Any) -> None:
    """Run jobs on an engine in this process, until there are none left or the time is over."""
    import tinker_local.client as tinker
    import torch
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
    from tinker_local.backend.vllm_engine import build_engine

    class Backend(InProcessBackend):
        async def start(self) -> None:
            self.loop = asyncio.get_running_loop()
            await super().start()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    # To capture CUDA graphs takes longer than they save here.
    build_engine.cuda_graphs_work = lambda *_: False  # type: ignore[attr-defined]
    names = sorted({job.example for job in settings.jobs})
    sources = [ModelSource(f"local/{name}", str(settings.models / name)) for name in names]

    async def some(service: Any) -> None:
        while time.monotonic() < settings.deadline and (job := take(settings.jobs, taken)) is not None:
            results.put(await run(service, backend, job, settings, device))

    with tempfile.TemporaryDirectory() as folder:
        options = BackendOptions(
            data_dir=Path(folder),
            trainer="inline",
            sampler="inline",
            sampler_sleeps=False,
            max_rank=32,
            kv_cache_bytes=settings.kv_cache_bytes,
        )
        backend = Backend(sources, options)
        service = tinker.ServiceClient(backend=backend)
        try:
            async with asyncio.timeout_at(settings.deadline), asyncio.TaskGroup() as tasks:
                for _ in range(settings.runs):
                    tasks.create_task(some(service))
        except TimeoutError:
            print("the time is over")
        await asyncio.to_thread(lambda: service.close("success").result())


def take(jobs: Sequence[Job], taken: Any) -> Job | None:
    """The next job that no worker has taken."""
    with taken.get_lock():
        taken.value += 1
        return jobs[taken.value - 1] if taken.value <= len(jobs) else None


def worker(index: int, settings: Settings, taken: Any, results: Any) -> None:
    """A process of `--workers`, which prints to a file."""
    log = os.open(settings.log / f"{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = False  # as in the Makefile: imports would take 20 s more in each worker
    asyncio.run(work(settings, taken, results))


def make_models(examples: Sequence[str], folder: Path) -> None:
    from tinker_local.backend.tiny_models import make_mosaic_vl_model, make_tiny_vl_model

    for example in examples:
        if not (folder / example / "config.json").exists():
            {"tiny": make_tiny_vl_model, "mosaic": make_mosaic_vl_model}[MODELS[example]](folder / example)


def rows_of(processes: Sequence[Any], results: Any) -> Iterator[dict[str, Any]]:
    """What the workers find, until all of them have ended."""
    while True:
        running = any(process.is_alive() for process in processes)
        with contextlib.suppress(queue.Empty):
            while True:
                yield results.get(timeout=1)
        if not running:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", type=Path, help="of the result, without suffix")
    parser.add_argument("--examples", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--staleness", nargs="+", type=int, default=STALENESS, metavar="N")
    parser.add_argument("--steps-ahead", nargs="+", type=int, default=(0,), metavar="N", help="0: synchronous")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--steps", type=int, help=f"default: the example's and {max(STALENESS)} more")
    parser.add_argument("--learning-rate", type=float, help="of the steps (default: the example's)")
    parser.add_argument("--warm-steps", type=int, help="of the warm start (default: the example's)")
    parser.add_argument("--warm-rate", type=float, help="learning rate of the warm start (default: the example's)")
    parser.add_argument("--kv-cache", type=float, default=0.25, metavar="GIB", help="of each worker (0.25)")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--runs", type=int, default=1, help="jobs at once in each of them (1)")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after so long")
    parser.add_argument("--models", type=Path, help="folder for the models (default: a temporary one)")
    parser.add_argument("--log", type=Path, help="folder for the workers' output (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="a few small steps of each example, with one seed")
    options = parser.parse_args()
    if any(options.steps_ahead) and (any(options.staleness) or "stable_reinforce" in options.losses):
        parser.error("--steps-ahead goes with --staleness 0, and not with stable_reinforce")
    deadline = time.monotonic() + options.budget
    os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", PYTHONUNBUFFERED="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny
    changes: dict[str, float] = dict(TINY) if options.tiny else {}
    chosen = {name: getattr(options, name) for name in ("steps", "learning_rate", "warm_steps", "warm_rate")}
    changes |= {name: value for name, value in chosen.items() if value is not None}
    if options.tiny:
        options.losses, options.seeds = options.losses[:1], (0,)
        options.staleness = (0,) if any(options.steps_ahead) else (2,)
    options.name.parent.mkdir(parents=True, exist_ok=True)
    lines, text = (options.name.with_name(options.name.name + suffix) for suffix in (".jsonl", ".txt"))
    done = {job_of(row) for row in read(lines)}
    cells = itertools.product(options.seeds, options.examples, options.staleness, options.losses, options.steps_ahead)
    wanted = [Job(example, loss, staleness, seed, ahead) for seed, example, staleness, loss, ahead in cells]
    jobs = [job for job in wanted if job not in done]
    log = options.log or Path(tempfile.mkdtemp(prefix="log-"))
    log.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} jobs, {len(done)} done before; output of the workers: {log}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or Path(folder)
        make_models(options.examples, models)
        settings = Settings(jobs, options.runs, deadline, models, log, changes, int(options.kv_cache * 2**30))
        spawn = multiprocessing.get_context("spawn")
        taken, results = spawn.Value("i", 0), spawn.Queue()
        count = min(options.workers, -(-len(jobs) // options.runs))
        processes = [spawn.Process(target=worker, args=(index, settings, taken, results)) for index in range(count)]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for process in processes:
            process.start()
        try:
            for row in rows_of(processes, results):
                with lines.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{' '.join(map(str, job_of(row)))}: {row['return']:.3f} after {row['seconds']:.0f} s", flush=True
                )
        finally:
            for process in processes:
                process.kill()
    rows = read(lines)
    if rows:
        text.write_text(table(rows))
        print(table(rows))
    failed = [process.exitcode for process in processes if process.exitcode]
    missing = len(jobs) - len({job_of(row) for row in rows} & set(jobs))
    print(
        f"{missing} of {len(jobs)} jobs are missing" + (f"; workers ended with {failed}: see {log}" if failed else "")
    )
    return 1 if failed or (missing and options.budget == float("inf")) else 0


if __name__ == "__main__":
    sys.exit(main())
