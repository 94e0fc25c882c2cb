"""Measure the overhead of the server: the same requests over HTTP, in process, and on bare vLLM.

    python benchmarks/control_plane.py [--logs] [--out benchmarks/results]

Runs on a tiny text model, so the work itself takes almost no time: an empty `optim_step`, a one-token sample, and 64
and 512 samples at once. `sdk`: the official SDK against `tinker-local serve` in another process. `in process`:
`InProcessBackend` here. `bare`: vLLM's engine stepped by a plain loop, or the trainer's method called. Latencies in
milliseconds; the client shares the machine's cores with the server.

`--logs`: only what `--access-log` and `--audit-log` cost, on the fakes. Three servers get the same requests in turns,
200 at a time: two without logs, whose difference is that of the measurement, and one with both.
"""

import argparse
import asyncio
import http.client
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
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


@contextmanager
def served(
    data_dir: Path,
    *arguments: str,
    python: str = sys.executable,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
) -> Iterator[str]:
    """The URL of a `tinker-local serve` in another process, which ends with the context. `log`: gets its log. `cores`:
    the only ones that it runs on."""
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    command = [*pinned, python, "-m", "tinker_local.backend.cli.main", "serve", *arguments, "--port", "0"]
    with nullcontext() if log is None else log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"ready: (http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        # Clients that are left open would warn of its end for as long as this process lives.
        logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)
        process.terminate()
        process.wait()


# Logs -----------------------------------------------------------------------------------------------------------------

ROUNDS, REQUESTS = 30, 200


class Client:
    """One connection to a server, with a training run of the fakes."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"))
        session = self.ask("create_session", {})["session_id"]
        self.ask("create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL})
        self._model = f"{session}:train:0"
        self.ask("retrieve_future", {"request_id": f"{self._model}:create"})
        self._steps = 0

    def ask(self, path: str, body: object | None = None) -> dict:
        """The answer to a POST of `body`, or to a GET."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {} if sent is None else {"Content-Type": "application/json"}
        self._connection.request("GET" if sent is None else "POST", f"/api/v1/{path}", sent, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return json.loads(content)

    def capabilities(self) -> None:
        """What costs least of all requests."""
        self.ask("get_server_capabilities")

    def session(self) -> None:
        """What is audited, and written to the database."""
        self.ask("create_session", {})

    def step(self) -> None:
        """Two requests: a step without a gradient, and its result."""
        self._steps += 1
        body = {"model_id": self._model, "seq_id": self._steps, "adam_params": {"learning_rate": 0.1}}
        self.ask("retrieve_future", {"request_id": self.ask("optim_step", body)["request_id"]})


WAYS = ("without", "without, again", "with both logs")
LOGGED = {
    "get_server_capabilities": Client.capabilities,
    "create_session": Client.session,
    "optim_step and its result": Client.step,
}


def latencies_in_turns(clients: list[Client], call: Callable[[Client], None]) -> np.ndarray:
    """Milliseconds of `call`, [clients, rounds, requests]; each round begins with another client."""
    found = np.zeros((len(clients), ROUNDS, REQUESTS))
    for turn in range(-1, ROUNDS):  # the first is not counted
        for at in np.roll(np.arange(len(clients)), turn):
            for number in range(REQUESTS):
                begin = time.perf_counter()
                call(clients[at])
                found[at, turn, number] = 1e3 * (time.perf_counter() - begin)
    return found


def cost_of_logs(root: Path) -> Table:
    """Median and p99 of each request on each server, and how much the medians of a round differ from those without."""
    shown = Table(title=f"logs: ms; {ROUNDS} rounds of {REQUESTS} requests, one after the other")
    for column in ("request", "way", "median", "p99", "median of a round, more: quartiles"):
        shown.add_column(column, justify="left" if column in ("request", "way") else "right")
    with ExitStack() as servers:
        clients = []
        for number, way in enumerate(WAYS):
            folder = root / f"logs-{number}"
            files = ("--access-log", f"{folder}-access", "--audit-log", f"{folder}-audit")
            logs = files if way == "with both logs" else ()
            url = servers.enter_context(served(folder, "--fake", "--model", MODEL, *logs))
            clients.append(Client(url))
        for request, call in LOGGED.items():
            found = latencies_in_turns(clients, call)
            for way, times in zip(WAYS, found, strict=True):
                more = np.percentile(np.median(times, 1) - np.median(found[0], 1), (25, 50, 75))
                shown.add_row(
                    request,
                    way,
                    f"{np.median(times):.3f}",
                    f"{np.percentile(times, 99):.3f}",
                    "" if way == WAYS[0] else " ".join(f"{value:+.3f}" for value in more),
                )
        written = [Path(f"{folder}-{log}").read_bytes().count(b"\n") for log in ("access", "audit")]
    shown.caption = f"lines written: {written[0]} of access, {written[1]} of audit"
    return shown


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


def all_ways(root: Path) -> list[Row]:
    """All rows, with everything below `root`."""
    make_tiny_text_model(root / "model")
    with served(root / "served", "--model", f"{MODEL}={root / 'model'}") as url:
        rows = asyncio.run(through_sdk(url))
    rows += asyncio.run(in_process_rows(root / "model", root / "in_process"))
    return rows + bare(root / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for a dated file of the result")
    parser.add_argument("--logs", action="store_true", help="only the cost of the access and audit logs")
    options = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ["NO_PROXY"] = "127.0.0.1"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shown = cost_of_logs(root) if options.logs else table(all_ways(root))
    console = Console(record=True, width=110)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {resident_mib():.0f} MiB resident here at the end"
    )
    console.print(shown)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{'logs' if options.logs else 'control_plane'}-{datetime.now(UTC):%Y%m%d-%H%M%S}.txt"
        path.write_text(console.export_text())
        print(f"written to {path}")


if __name__ == "__main__":
    main()
