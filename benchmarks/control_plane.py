"""Measure the overhead of the server: the same requests over HTTP, in process, and on bare vLLM.

    python benchmarks/control_plane.py [--out benchmarks/results]

Runs on a tiny text model, so the work itself takes almost no time: an empty `optim_step`, a one-token sample, and 64
and 512 samples at once. `sdk`: the official SDK against `tinker-local serve` in another process. `in process`:
`InProcessBackend` here. `bare`: vLLM's engine stepped by a plain loop, or the trainer's method called. Latencies in
milliseconds; the client shares the machine's cores with the server.
"""

import argparse
import asyncio
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console
from rich.table import Table
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import resident_mib
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
)

MODEL = "tiny/text"
PROMPT = list(range(30, 46))


@dataclass
class Row:
    """Latencies in ms of one kind of request sent one way, and the seconds that all of them took."""

    what: str
    way: str
    latencies: np.ndarray
    seconds: float
    errors: int = 0


async def one_by_one(call: Callable[[], Awaitable[object]], count: int) -> tuple[np.ndarray, float]:
    """Latencies of `count` calls, one after the other."""
    for _ in range(5):
        await call()
    start, found = time.perf_counter(), []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        found.append(1e3 * (time.perf_counter() - begin))
    return np.array(found), time.perf_counter() - start


async def at_once(call: Callable[[], Awaitable[object]], count: int) -> tuple[np.ndarray, float, int]:
    """Latencies of `count` calls that begin together, and how many failed."""
    failed = 0

    async def timed() -> float:
        nonlocal failed
        try:
            await call()
        except Exception as error:
            failed += 1
            print("failed:", error, file=sys.stderr)
        return 1e3 * (time.perf_counter() - start)

    start = time.perf_counter()
    found = await asyncio.gather(*[timed() for _ in range(count)])
    return np.array(found), time.perf_counter() - start, failed


async def measure(
    way: str, step: Callable[[], Awaitable[object]] | None, sample: Callable[[int], Awaitable[object]]
) -> list[Row]:
    """All rows of one way to send requests."""
    rows = []
    if step is not None:
        rows.append(Row("empty optim_step", way, *(await one_by_one(step, 200))))
    rows.append(Row("1-token sample", way, *(await one_by_one(lambda: sample(1), 200))))
    for count, tokens in ((64, 1), (512, 1), (64, 32), (512, 32), (512, 128)):
        rows.append(Row(f"{count} x {tokens}-token samples", way, *(await at_once(lambda n=tokens: sample(n), count))))
    return rows


async def through_sdk(url: str) -> list[Row]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    client = await service.create_lora_training_client(base_model=MODEL, rank=8)
    sampler = await service.create_sampling_client(base_model=MODEL)
    prompt = tinker.ModelInput.from_ints(PROMPT)

    async def step() -> object:
        return await client.optim_step(tinker.AdamParams())

    async def sample(tokens: int) -> object:
        return await sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=tokens, stop=[]))

    return await measure("sdk", step, sample)


async def in_process(backend: InProcessBackend) -> list[Row]:
    session = await backend.sessions.create()
    request = CreateModelRequest(session_id=session, model_seq_id=0, base_model=MODEL, lora_config=LoraConfig(rank=8))
    model_id = (await (await backend.runs.create(request)))["model_id"]
    opening = CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    sampler = await backend.sampling.create_session(opening)
    prompt = ModelInput.from_ints(PROMPT)
    count = {"step": 0, "sample": -1}

    async def step() -> object:
        count["step"] += 1
        request = OptimStepRequest(model_id=model_id, seq_id=count["step"], adam_params=AdamParams())
        return await (await backend.training.optim_step(request))

    async def sample(tokens: int) -> object:
        count["sample"] += 1
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=count["sample"],
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=tokens, stop=()),
        )
        return await (await backend.sampling.sample(request))

    return await measure("in process", step, sample)


def bare(path: Path) -> list[Row]:
    """vLLM's engine, stepped by a plain loop."""
    from tinker_local.backend.vllm_engine import build_engine

    engine = build_engine.build_engine(build_engine.EngineOptions(str(path), max_rank=128))
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    number = 0

    def run(count: int, tokens: int) -> tuple[np.ndarray, float]:
        nonlocal number
        start, found = time.perf_counter(), []
        params = VLLMParams(
            max_tokens=tokens, logprobs=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        for _ in range(count):
            number += 1
            engine.add_request(str(number), {"prompt_token_ids": PROMPT}, params)
        while engine.has_unfinished_requests():
            finished = sum(output.finished for output in engine.step())
            found += [1e3 * (time.perf_counter() - start)] * finished
        return np.array(found), time.perf_counter() - start

    run(4, 2)
    start = time.perf_counter()
    singles = np.concatenate([run(1, 1)[0] for _ in range(200)])
    rows = [Row("1-token sample", "bare", singles, time.perf_counter() - start)]
    for count, tokens in ((64, 1), (512, 1), (64, 32), (512, 32), (512, 128)):
        rows.append(Row(f"{count} x {tokens}-token samples", "bare", *run(count, tokens)))
    return rows


def serve(path: Path, data_dir: Path) -> tuple[subprocess.Popen, str]:
    """`tinker-local serve` in another process, and its URL."""
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--model", f"{MODEL}={path}"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--data-dir", str(data_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"ready: (http://\S+)", line):
            return process, found[1]
    raise SystemExit("the server did not start")


def table(rows: list[Row]) -> Table:
    shown = Table(title="control plane: latencies in ms")
    for column in ("request", "way", "median", "p99", "all, s", "errors", "p99 / bare"):
        shown.add_column(column, justify="left" if column in ("request", "way") else "right")
    base = {row.what: np.percentile(row.latencies, 99) for row in rows if row.way == "bare"}
    for row in sorted(rows, key=lambda r: ([x.what for x in rows].index(r.what), r.way)):
        p99 = np.percentile(row.latencies, 99)
        ratio = f"{p99 / base[row.what]:.2f}" if row.what in base else ""
        shown.add_row(
            row.what,
            row.way,
            f"{np.median(row.latencies):.1f}",
            f"{p99:.1f}",
            f"{row.seconds:.2f}",
            str(row.errors),
            ratio,
        )
    return shown


async def in_process_rows(path: Path, data_dir: Path) -> list[Row]:
    async with InProcessBackend([ModelSource(MODEL, str(path))], BackendOptions(data_dir=data_dir)) as backend:
        return await in_process(backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for a dated file of the result")
    options = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ["NO_PROXY"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_tiny_text_model(root / "model")
        process, url = serve(root / "model", root / "served")
        try:
            rows = asyncio.run(through_sdk(url))
        finally:
            process.terminate()
            process.wait()
        rows += asyncio.run(in_process_rows(root / "model", root / "in_process"))
        rows += bare(root / "model")
    console = Console(record=True, width=110)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {resident_mib():.0f} MiB resident here at the end"
    )
    console.print(table(rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"control_plane-{datetime.now(UTC):%Y%m%d-%H%M%S}.txt"
        path.write_text(console.export_text())
        print(f"written to {path}")


if __name__ == "__main__":
    main()
