"""Whole iterations of reinforcement learning in one layout.

    python -m measurements.rl_layout SCALE MODEL NAME ITERATIONS TRAIN SAMPLE WORK WAY

NAME is that of the line. TRAIN and SAMPLE are GPUs as of `--train-gpus` and `--sample-gpus`, or `-` for the default.
WORK is a `Work` as JSON, and WAY `in-process` or `sdk`: the official SDK against `tinker-local serve` in another
process.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness.lines import Line, failed
from harness.scale import SCALES, Scale
from harness.timing import DeviceMemory
from tinker_local.types import (
    Datum,
    ForwardBackwardRequest,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
)
from tinker_local.types.sdk import to_sdk

from measurements.ways import ADAM, InProcess, Sdk

MODEL = "bench/text"
PARTS = 8
"""Requests of `forward_backward` in which the data of an iteration are sent."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one iteration: of the save and all samples, and of the gradient and the step. `positions`: trained."""

    sampling: float
    training: float
    positions: int

    @property
    def seconds(self) -> float:
        return self.sampling + self.training


@dataclass(frozen=True, slots=True)
class Work:
    """Of an iteration: how many prompts, samples of each, and tokens of a prompt and of a sample."""

    prompts: int
    samples: int
    prompt_tokens: int
    output_tokens: int


class Learner(Protocol):
    """A client that samples from the weights of a run, and trains it on what it has sampled."""

    async def create(self, rank: int) -> Any: ...

    async def sampler(self, run: Any) -> Any: ...

    async def group(self, sampler: Any, prompt: list[int], work: Work) -> list[Any]:
        """The samples of a prompt as data, each with a random advantage."""

    async def train(self, run: Any, data: Sequence[Any]) -> None:
        """A gradient of all `data`, and the optimizer step, which is sent together with it."""


def datum(prompt: list[int], tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> Datum:
    """A sample with the sampler's logprobs."""
    none, count = np.zeros(len(prompt) - 1, np.float32), len(tokens)
    return Datum(
        model_input=ModelInput.from_ints([*prompt, *list(tokens)[:-1]]),
        loss_fn_inputs={
            "target_tokens": np.array([*prompt[1:], *tokens], np.int64),
            "logprobs": np.concatenate([none, np.asarray(logprobs, np.float32)]),
            "advantages": np.concatenate([none, np.full(count, advantage, np.float32)]),
        },
    )


def group_of(prompt: list[int], sequences: Sequence[Any]) -> list[Datum]:
    """Data with advantages of mean 0, if there are several."""
    signs = [1.0 if (sum(prompt) + number) % 2 else -1.0 for number in range(len(sequences))]
    pairs = zip(sequences, signs, strict=True)
    return [datum(prompt, list(each.tokens), list(each.logprobs), sign) for each, sign in pairs]


class InProcessLearner(InProcess):
    async def group(self, sampler: str, prompt: list[int], work: Work) -> list[Datum]:
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=self._seq_id(sampler, 0),
            num_samples=work.samples,
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=work.output_tokens, stop=()),
        )
        return group_of(prompt, (await (await self._backend.sampling.sample(request))).sequences)

    async def train(self, run: str, data: Sequence[Datum]) -> None:
        """In `PARTS` requests."""
        size = -(-len(data) // PARTS)
        sent = [
            await self._backend.training.forward_backward(
                ForwardBackwardRequest(
                    model_id=run,
                    seq_id=self._seq_id(run, 1),
                    data=tuple(data[at : at + size]),
                    loss_fn="importance_sampling",
                )
            )
            for at in range(0, len(data), size)
        ]
        sent.append(
            await self._backend.training.optim_step(
                OptimStepRequest(model_id=run, seq_id=self._seq_id(run, 1), adam_params=ADAM)
            )
        )
        for result in sent:
            await result


class SdkLearner(Sdk):
    """The SDK cuts data into requests itself."""

    async def group(self, sampler: Any, prompt: list[int], work: Work) -> list[Any]:
        params = to_sdk(SamplingParams(max_tokens=work.output_tokens, stop=()))
        sampled = await sampler.sample(to_sdk(ModelInput.from_ints(prompt)), work.samples, params)
        return [to_sdk(each) for each in group_of(prompt, sampled.sequences)]

    async def train(self, run: Any, data: Sequence[Any]) -> None:
        gradient = run.forward_backward(list(data), "importance_sampling")
        update = run.optim_step(to_sdk(ADAM))
        await gradient
        await update


async def iterate(learner: Learner, run: Any, scale: Scale, work: Work, number: int) -> Iteration:
    """Save, sample from what was saved, train on it."""
    shape = (work.prompts, work.prompt_tokens)
    prompts = np.random.default_rng(number).integers(0, scale.text.vocab, shape).tolist()
    begin = time.perf_counter()
    sampler = await learner.sampler(run)
    groups = await asyncio.gather(*(learner.group(sampler, prompt, work) for prompt in prompts))
    data = [each for group in groups for each in group]
    sampled = time.perf_counter()
    await learner.train(run, data)
    positions = work.prompts * work.samples * (work.prompt_tokens + work.output_tokens - 1)
    return Iteration(sampled - begin, time.perf_counter() - sampled, positions)


@asynccontextmanager
async def in_process(scale: Scale, model: Path, folder: Path, gpus: dict[str, str]) -> AsyncIterator[Learner]:
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource

    chosen: Any = {f"{side}_gpus": tuple(map(int, numbers.split(","))) for side, numbers in gpus.items()}
    options = BackendOptions(data_dir=folder, max_rank=scale.rank, **chosen)
    async with InProcessBackend([ModelSource(MODEL, str(model))], options) as backend:
        yield InProcessLearner(backend, await backend.sessions.create(), MODEL)


@asynccontextmanager
async def by_sdk(scale: Scale, model: Path, folder: Path, gpus: dict[str, str]) -> AsyncIterator[Learner]:
    from control_plane import served

    chosen = [part for side, numbers in gpus.items() for part in (f"--{side}-gpus", numbers)]
    arguments = ["--model", f"{MODEL}={model}", "--max-rank", str(scale.rank), *chosen]
    with served(folder / "data", *arguments, log=folder / "serve.log") as url:
        yield SdkLearner(url, MODEL)


WAYS = {"in-process": in_process, "sdk": by_sdk}
"""Sizes of the KV cache and of micro-batches are the server's own, as a user of a layout gets them."""


async def measure(
    scale: Scale, model: Path, name: str, iterations: int, gpus: dict[str, str], work: Work, way: str
) -> None:
    """Start a backend and print the line: the median of `iterations` after one that warms up."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        began = time.perf_counter()
        learner = await stack.enter_async_context(WAYS[way](scale, model, folder, gpus))
        loaded = time.perf_counter() - began
        run = await learner.create(scale.rank)
        with DeviceMemory() as memory:
            found = [await iterate(learner, run, scale, work, number) for number in range(1 + iterations)][1:]
    median = statistics.median
    sampling, training = median(each.sampling for each in found), median(each.training for each in found)
    positions = median(each.positions for each in found)
    outputs = work.prompts * work.samples * work.output_tokens
    note = (
        f"{sampling:.1f} s from the save to the last of {outputs} sampled tokens, {training:.1f} s to train on "
        f"{positions:.0f} positions; {', '.join(f'{each.seconds:.1f}' for each in found)} s; loaded in {loaded:.0f} s"
    )
    seconds = median(each.seconds for each in found)
    Line(name, outputs / seconds, "tokens/s", seconds, memory.peak_gib, note).emit()


def main(arguments: Sequence[str]) -> None:
    from tinker_local.backend.hosting.server import event_loop

    size, model, name, iterations, train, sample, work, way = arguments
    gpus = {side: numbers for side, numbers in (("train", train), ("sample", sample)) if numbers != "-"}
    try:
        with event_loop() as runner:
            of = SCALES[size], Path(model), name, int(iterations), gpus, Work(**json.loads(work)), way
            runner.run(measure(*of))
    except Exception as error:
        traceback.print_exc()
        failed(name, error).emit()
    sys.stdout.flush()
    os._exit(0)  # as in `measurements`


if __name__ == "__main__":
    main(sys.argv[1:])
