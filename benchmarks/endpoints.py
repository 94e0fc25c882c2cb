"""Compare the OpenAI endpoint with vLLM's own server: streamed tokens per second, and the time to the first token.

    python benchmarks/endpoints.py --out benchmarks/results      # a GPU with 140 GiB, about seven minutes
    python benchmarks/endpoints.py --tiny                        # the same code on a CPU, about two minutes

Random weights in the shape of Qwen3-8B with a LoRA adapter of rank 32, one server after the other. 64 streams of
`completions` at a time, 256 random prompt tokens in and 256 tokens out, each stream followed by the next one, from one
other process. vLLM's server has its own defaults, but for the size of the KV cache, which is the same for both.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from engine import room_for_models
from harness import machine, processes, report
from harness.lines import Line
from harness.ratios import Ratio
from harness.scale import SCALES, Scale

STREAMS = {"full": 64, "tiny": 4}
TOKENS = {"full": (256, 256), "tiny": (8, 8)}
"""Of a prompt, and of its completion."""
ROUNDS = 3
SAVES = 6
START_SECONDS = 400.0
RATIOS = [
    Ratio("streamed tokens/s, ours / vLLM's server", "endpoints.ours", ("endpoints.vllm",), 0.97),
    Ratio(
        "time to the first token, ours / vLLM's server",
        "endpoints.ours_first",
        ("endpoints.vllm_first",),
        1.1,
        "at most",
    ),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; fails if anything does")
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    parser.add_argument("--models", type=Path, help="folder where the random model is kept and found again")
    parser.add_argument("--log", type=Path, help="file for other output (default: a temporary one)")
    parser.add_argument("--client", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and not options.client and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    return options


# The client, a separate process ---------------------------------------------------------------------------------------


async def stream(http: Any, url: str, model: str, prompt: Sequence[int], tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and the tokens of one completion."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 1, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start, first, count = time.perf_counter(), None, 0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            elif first is None:
                first = time.perf_counter() - start
    if first is None:
        raise RuntimeError("a stream without a token")
    return first, count


async def client(job: dict[str, Any]) -> dict[str, list[float]]:
    """Rates and first tokens of all rounds; one before them warms up."""
    import httpx

    rng = np.random.default_rng(0)
    rates, firsts = [], []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as http:

        async def go_on(count: int, tokens: int) -> list[tuple[float, int]]:
            prompts = rng.integers(0, job["vocab"], (count, job["prompt"])).tolist()
            return [await stream(http, job["url"], job["model"], prompt, tokens) for prompt in prompts]

        await asyncio.gather(*(go_on(1, 8) for _ in range(job["streams"])))
        for _ in range(ROUNDS):
            start = time.perf_counter()
            found = await asyncio.gather(*(go_on(2, job["tokens"]) for _ in range(job["streams"])))
            done = [one for several in found for one in several]
            rates.append(sum(count for _, count in done) / (time.perf_counter() - start))
            firsts += [first for first, _ in done]
    return {"rates": rates, "firsts": firsts}


# The servers ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], environment: dict[str, str], url: str, route: str, log: TextIO) -> Iterator[float]:
    """A server, from when it answers `route`; the seconds that took."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=processes.BENCHMARKS
    )
    try:
        import httpx

        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + route, trust_env=False, timeout=10).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() - start > START_SECONDS:
                raise RuntimeError(f"{command[2]} did not start, see {log.name}")
            time.sleep(0.2)
        yield time.monotonic() - start
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        killing = threading.Timer(30, os.killpg, (process.pid, signal.SIGKILL))
        killing.start()
        process.wait()
        killing.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def widen_tokenizer(folder: Path, vocab: int) -> None:
    """Give all ids of the model a text: the tiny tokenizer has the first few hundred."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    pieces: dict[str, int] = tokenizer["model"]["vocab"]
    taken = {*pieces.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    pieces |= {f"\u0120w{number}": number for number in range(vocab) if number not in taken}
    file.write_text(json.dumps(tokenizer))


def of_vllm(scale: Scale, model: Path, folder: Path, url: str) -> tuple[list[str], str]:
    """The command of vLLM's server, and the name of the adapter."""
    from baselines.vllm_alone import write_random_adapter

    adapter = write_random_adapter(folder / "adapter", scale.text, scale.rank)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enable-lora"]
    command += ["--max-lora-rank", str(scale.rank), "--lora-modules", f"bench={adapter}", "--host", "127.0.0.1"]
    command += ["--kv-cache-memory-bytes", str(scale.kv_cache_bytes), "--port", url.rpartition(":")[2]]
    if scale.name == "tiny":
        command += ["--enforce-eager", "--dtype", "float32"]
    return command, "bench"


def of_ours(scale: Scale, model: Path, folder: Path, url: str) -> list[str]:
    command = [sys.executable, "-m", "tinker_local.backend.cli.main", "serve", "--model", f"bench/text={model}"]
    command += ["--max-rank", str(scale.rank), "--kv-cache", str(scale.kv_cache_bytes / 2**30)]
    return [*command, "--port", url.rpartition(":")[2], "--data-dir", str(folder / "data")]


def checkpoints(url: str, rank: int) -> tuple[str, list[tuple[float, float]]]:
    """The path of a sampler version, and for each of some: seconds of the call that saves it, after a step of
    training, and from then to the first token of its first answer."""
    import httpx
    import tinker

    seconds = []
    with contextlib.redirect_stdout(sys.stderr), httpx.Client(timeout=60, trust_env=False) as http:
        service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        run = service.create_lora_training_client("bench/text", rank=rank, train_unembed=False).result()
        tokens = tinker.ModelInput.from_ints([5, 6, 7])
        inputs = {"target_tokens": tinker.TensorData.from_numpy(np.array([6, 7, 8]))}
        for number in range(SAVES):
            run.forward_backward([tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)], "cross_entropy").result()
            run.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            start = time.perf_counter()
            path = run.save_weights_for_sampler(f"bench{number}").result().path
            saved = time.perf_counter()
            body = {"model": path, "prompt": [5, 6, 7], "max_tokens": 1}
            http.post(f"{url}/v1/completions", json=body).raise_for_status()
            seconds.append((saved - start, time.perf_counter() - saved))
        return path, seconds


def of_saves(seconds: Sequence[tuple[float, float]]) -> Line:
    first, *others = (f"{1000 * save:.0f} + {1000 * answer:.0f}" for save, answer in seconds)
    note = f"over HTTP, save + one token; the first, which warms up: {first}; then {', '.join(others)}"
    return Line("endpoints.save_to_answer", 1000 * statistics.median(sum(one) for one in seconds[1:]), "ms", note=note)


def measure(scale: Scale, name: str, url: str, model: str, log: TextIO, note: str) -> list[Line]:
    prompt, tokens = TOKENS[scale.name]
    job = {"url": url, "model": model, "vocab": scale.text.vocab, "prompt": prompt, "tokens": tokens}
    job["streams"] = STREAMS[scale.name]
    found = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--client", json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**processes.environment(), "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    result = json.loads(found.stdout)
    rates, firsts = result["rates"], result["firsts"]
    words = f"{job['streams']} streams, {prompt} in, {tokens} out; {min(rates):,.0f} to {max(rates):,.0f}; {note}"
    quantile = sorted(firsts)[int(0.99 * (len(firsts) - 1))]
    return [
        Line(f"endpoints.{name}", statistics.median(rates), "tokens/s", note=words),
        Line(
            f"endpoints.{name}_first", 1000 * statistics.median(firsts), "ms", note=f"median; p99 {1000 * quantile:.0f}"
        ),
    ]


def run(options: argparse.Namespace, models: Path, folder: Path, log: TextIO) -> list[Line]:
    scale = SCALES["tiny" if options.tiny else "full"]
    written = processes.run(["measurements.models", scale.name, str(models), "text"], 300, log)
    if written.fault:
        return [Line("models", error=written.fault)]
    model = folder / "model"
    model.mkdir()
    for file in (models / "text").iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text((models / "text" / "tokenizer.json").read_text())
    widen_tokenizer(model, scale.text.vocab)
    lines: list[Line] = []
    environment = {**processes.environment(), "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for name in ("vllm", "ours"):
        url = f"http://127.0.0.1:{free_port()}"
        try:
            if name == "vllm":
                command, served = of_vllm(scale, model, folder, url)
                with serving(command, environment, url, "/health", log) as seconds:
                    lines += measure(scale, name, url, served, log, f"up in {seconds:.0f} s")
            else:
                command = of_ours(scale, model, folder, url)
                with serving(command, environment, url, "/api/v1/healthz", log) as seconds:
                    served, saves = checkpoints(url, scale.rank)
                    lines.append(of_saves(saves))
                    lines += measure(scale, name, url, served, log, f"up in {seconds:.0f} s")
        except (RuntimeError, subprocess.CalledProcessError) as error:
            lines.append(Line(f"endpoints.{name}", error=re.sub(r"\s+", " ", str(error))[:300]))
    return lines


def main() -> int:
    options = arguments()
    if options.client:
        print(json.dumps(asyncio.run(client(json.loads(options.client)))))
        return 0
    log_file = options.log or Path(tempfile.gettempdir()) / "tinker-local-endpoints.log"
    place = None if options.tiny else room_for_models()
    with tempfile.TemporaryDirectory(dir=place, prefix="endpoints-") as temporary, log_file.open("w") as log:
        folder = Path(temporary)
        models = options.models.resolve() if options.models else folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        lines = run(options, models, folder, log)
    for line in lines:
        processes.show(line)
    report.show("endpoints", lines, options.out, tiny=options.tiny, ratios=RATIOS)
    print(f"other output: {log_file}")
    return 1 if options.tiny and any(line.error for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
