"""A small real model on a CPU: sampling beside vLLM alone, and training beside a loop written by hand.

    tinker-local small-model --out models/smollm2
    python benchmarks/on_cpu.py models/smollm2 [--out benchmarks/results] [--rounds 5] [--dtype bfloat16]

Tokens per second, each the median of the rounds, which take turns: all ways do one piece of work before any does the
next. Nothing else should run on the machine.

Sampling: temperature 1 and nothing that ends a sample, with prompts of 45 tokens that no round repeats. `alone`: vLLM's
`LLM`, which returns no logprobs here, without compilation. `base`: `tinker-local serve` in another process under the
official SDK, which returns the logprob of each token. `adapter`: the same of a run of rank 16 after a step.

Training: a `forward_backward` and an `optim_step` on 32 sequences of 40 to 260 tokens, LoRA of rank 16 on all linear
modules but the LM head. `by hand`: transformers and PEFT, sequences sorted by length, eight at a time, padded;
`ours`: the SDK against the server.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from control_plane import served
from harness.machine import describe

MODEL = "local/small"
WORK = ((1, 1, 64), (1, 16, 64), (1, 64, 64), (12, 8, 24))
"""Prompts, samples of each, tokens of a sample."""
RANK, SEQUENCES, STEPS = 16, 32, 1
WORDS = 2000
"""Token ids of prompts and sequences lie below it."""


@dataclasses.dataclass(frozen=True)
class Line:
    """`rates`: tokens per second by round."""

    what: str
    way: str
    rates: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(seed).integers(100, WORDS, (count, 45)).tolist()
    return ids


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(100, WORDS, length).tolist() for length in np.linspace(40, 260, SEQUENCES).astype(int)]


# By hand, each in a separate process ----------------------------------------------------------------------------------


@contextmanager
def in_a_process(make: Callable[..., Callable[..., Any]], *settings: str) -> Iterator[Callable[..., Any]]:
    """What `make(*settings)` returns there, called from here."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, make, *settings))
    process.start()
    there.close()  # or the end of the process would not be noticed

    def call(*arguments: Any) -> Any:
        here.send(arguments)
        return here.recv()

    assert here.recv() == "ready"
    try:
        yield call
    finally:
        here.send(None)
        process.join()


def _answer(connection: Connection, make: Callable[..., Callable[..., Any]], *settings: str) -> None:
    work = make(*settings)
    connection.send("ready")
    while (arguments := connection.recv()) is not None:
        connection.send(work(*arguments))


def vllm_alone(model: str, dtype: str) -> Callable[..., float]:
    """Seconds of one piece of work."""
    # A separate process for the engine is slower on two cores.
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=4096, enforce_eager=True, max_num_seqs=256)

    def work(seed: int, prompts: int, samples: int, tokens: int) -> float:
        params = SamplingParams(n=samples, max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts_of(seed, prompts)]
        start = time.perf_counter()
        answers = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert sum(len(each.token_ids) for answer in answers for each in answer.outputs) == prompts * samples * tokens
        return seconds

    return work


def peft_by_hand(model: str, dtype: str) -> Callable[[], float]:
    """Seconds of `STEPS` steps."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    trained = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=targets))
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95))

    def work() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            ordered = sorted(sequences(), key=len)
            for first in range(0, len(ordered), 8):
                part = ordered[first : first + 8]
                ids = torch.zeros(len(part), len(part[-1]), dtype=torch.long)
                mask = torch.zeros_like(ids)
                for row, tokens in enumerate(part):
                    ids[row, : len(tokens)] = torch.tensor(tokens)
                    mask[row, : len(tokens)] = 1
                logits = trained(input_ids=ids, attention_mask=mask).logits[:, :-1]
                labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    return work


# Through the SDK -----------------------------------------------------------------------------------------------------


def sample(client: tinker.SamplingClient, seed: int, prompts: int, samples: int, tokens: int) -> float:
    """Seconds of one piece of work."""
    params = tinker.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
    start = time.perf_counter()
    futures = [client.sample(tinker.ModelInput.from_ints(ids), samples, params) for ids in prompts_of(seed, prompts)]
    drawn = sum(len(each.tokens) for future in futures for each in future.result().sequences)
    seconds = time.perf_counter() - start
    assert drawn == prompts * samples * tokens, drawn
    return seconds


def train(client: tinker.TrainingClient, steps: int = STEPS) -> float:
    """Seconds of `steps` steps."""
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
                "weights": tinker.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
            },
        )
        for tokens in sequences()
    ]
    start = time.perf_counter()
    sent: list[tinker.APIFuture[Any]] = []
    for _ in range(steps):
        sent.append(client.forward_backward(data, "cross_entropy"))
        sent.append(client.optim_step(tinker.AdamParams(learning_rate=1e-4)))
    for future in sent:
        future.result()
    return time.perf_counter() - start


def in_turns(
    ways: Mapping[str, Callable[[int], float]],
    rounds: int,
    tokens: int,
    enough: Callable[[list[list[float]]], bool] = lambda _: False,
) -> Iterator[tuple[str, list[float]]]:
    """Tokens per second of each round by way; a way gets the round's number and returns seconds. The first way of a
    round is the last of the next. `enough` gets each way's seconds after a round, and may end them before `rounds`."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way in ways if turn % 2 == 0 else reversed([*ways]):
            seconds[way].append(ways[way](turn))
        if enough([of_way[1:] for of_way in seconds.values()]):
            break
    for way, of_way in seconds.items():
        yield way, [tokens / each for each in of_way[1:]]  # the first is not counted


def measure(options: argparse.Namespace, root: Path) -> list[Line]:
    """All lines, with the server's data in `root`."""
    lines: list[Line] = []
    settings = options.model, options.dtype
    with served(root, "--model", f"{MODEL}={options.model}", "--dtype", options.dtype) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = service.create_lora_training_client(base_model=MODEL, rank=RANK, seed=0, train_unembed=False).result()
        if "training" in options.only:
            with in_a_process(peft_by_hand, *settings) as by_hand:
                trainers = {"by hand": lambda _: by_hand(), "ours": lambda _: train(run)}
                what, tokens = f"training, {SEQUENCES} sequences", STEPS * sum(map(len, sequences()))
                lines += [Line(what, *found) for found in in_turns(trainers, options.rounds, tokens)]
        if "sampling" in options.only:
            train(run)  # B is 0 before
            base = service.create_sampling_client(base_model=MODEL).result()
            adapter = run.save_weights_and_get_sampling_client().result()
            with in_a_process(vllm_alone, *settings) as alone:
                for number, work in enumerate(WORK):
                    calls: dict[str, Callable[..., float]] = {
                        "alone": alone,
                        "base": partial(sample, base),
                        "adapter": partial(sample, adapter),
                    }
                    ways = {way: partial(_seeded, call, number, work) for way, call in calls.items()}
                    what, tokens = f"sampling, {work[0]} x {work[1]} x {work[2]}", work[0] * work[1] * work[2]
                    lines += [Line(what, *found) for found in in_turns(ways, options.rounds, tokens)]
    return lines


def _seeded(call: Callable[..., float], number: int, work: tuple[int, int, int], turn: int) -> float:
    return call(1000 * number + turn, *work)


def table(lines: list[Line]) -> str:
    """Each way's rate, the least and most of its rounds, and its ratio to the way before it; in brackets, with five
    rounds or more, that ratio's `interval`."""
    rows = [f"{'':26} {'':8} {'tokens/s':>9} {'least':>7} {'most':>7}  ratio"]
    before: Line | None = None
    for line in lines:
        ratio = ""
        if before and before.what == line.what:
            ratio = f"{line.rate / before.rate:.3f} x {before.way}{_interval(line.rates, before.rates)}"
        spread = f"{min(line.rates):7.1f} {max(line.rates):7.1f}"
        rows.append(f"{line.what:26} {line.way:8} {line.rate:9.1f} {spread}  {ratio}")
        before = line
    return "\n".join(rows)


def interval(rates: list[float], before: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of the rounds' ratios, by Student's t of their logarithms."""
    from scipy import stats  # type: ignore[import-untyped]

    found = stats.ttest_1samp(np.log(rates) - np.log(before), 0.0).confidence_interval(0.95)
    return math.exp(found.low), math.exp(found.high)


def _interval(rates: list[float], before: list[float]) -> str:
    if len(rates) < 5:
        return ""
    least, most = interval(rates, before)
    return f" ({least:.3f} to {most:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the folder of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="+", choices=("training", "sampling"), default=("training", "sampling"))
    parser.add_argument("--out", type=Path, help="folder for dated files of the result")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", NO_PROXY="127.0.0.1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(options, Path(folder))
    text = "\n".join([*describe(), options.dtype, "", table(lines)])
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"on_cpu-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        path.with_suffix(".txt").write_text(text + "\n")
        path.with_suffix(".jsonl").write_text("".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
