"""Whole iterations of reinforcement learning in one layout.

    python -m measurements.rl_layout SCALE MODEL NAME ITERATIONS TRAIN SAMPLE

NAME is that of the line. TRAIN and SAMPLE are GPUs as of `--train-gpus` and `--sample-gpus`, or `-` for the default.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from measurements.ways import ADAM, InProcess

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


class Learner(InProcess):
    """Samples from the weights of a run, and trains it on what it has sampled."""

    async def sequence(self, sampler: str, prompt: list[int], max_tokens: int) -> Datum:
        """One sample as a datum with the sampler's logprobs and a random advantage."""
        request = SampleRequest(
            sampling_session_id=sampler,
            seq_id=self._seq_id(sampler, 0),
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, stop=()),
        )
        (found,) = (await (await self._backend.sampling.sample(request))).sequences
        before, after = len(prompt) - 1, len(found.tokens)
        none = np.zeros(before, np.float32)
        advantage = 1.0 if sum(prompt) % 2 else -1.0
        return Datum(
            model_input=ModelInput.from_ints([*prompt, *list(found.tokens)[:-1]]),
            loss_fn_inputs={
                "target_tokens": np.array([*prompt[1:], *found.tokens], np.int64),
                "logprobs": np.concatenate([none, np.asarray(found.logprobs, np.float32)]),
                "advantages": np.concatenate([none, np.full(after, advantage, np.float32)]),
            },
        )

    async def train(self, run: str, data: Sequence[Datum]) -> None:
        """A gradient of all `data`, in `PARTS` requests that are sent together with the optimizer step."""
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


async def iterate(learner: Learner, run: str, scale: Scale, number: int) -> Iteration:
    """Save, sample from what was saved, train on it."""
    length = max(2, scale.prompt_tokens // 2)
    prompts = np.random.default_rng(number).integers(0, scale.text.vocab, (scale.requests, length)).tolist()
    begin = time.perf_counter()
    sampler = await learner.sampler(run)
    tokens = max(2, scale.output_tokens // 2)
    data = await asyncio.gather(*(learner.sequence(sampler, prompt, tokens) for prompt in prompts))
    sampled = time.perf_counter()
    await learner.train(run, data)
    positions = sum(each.model_input.length for each in data)
    return Iteration(sampled - begin, time.perf_counter() - sampled, positions)


async def measure(scale: Scale, model: Path, name: str, iterations: int, gpus: dict[str, tuple[int, ...]]) -> None:
    """Start a backend and print the line: the median of `iterations` after one that warms up."""
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource

    with tempfile.TemporaryDirectory() as folder:
        # Sizes of the KV cache and of micro-batches are the server's own, as a user of this layout gets them.
        options = BackendOptions(data_dir=Path(folder), max_rank=scale.rank, **gpus)  # type: ignore[arg-type]
        began = time.perf_counter()
        async with InProcessBackend([ModelSource(MODEL, str(model))], options) as backend:
            loaded = time.perf_counter() - began
            learner = Learner(backend, await backend.sessions.create(), MODEL)
            run = await learner.create(scale.rank)
            with DeviceMemory() as memory:
                found = [await iterate(learner, run, scale, number) for number in range(1 + iterations)][1:]
    median = statistics.median
    sampling, training = median(each.sampling for each in found), median(each.training for each in found)
    positions = median(each.positions for each in found)
    outputs = scale.requests * max(2, scale.output_tokens // 2)
    note = (
        f"{sampling:.1f} s from the save to the last of {outputs} sampled tokens, {training:.1f} s to train on "
        f"{positions:.0f} positions; {', '.join(f'{each.seconds:.1f}' for each in found)} s; loaded in {loaded:.0f} s"
    )
    seconds = median(each.seconds for each in found)
    Line(name, outputs / seconds, "tokens/s", seconds, memory.peak_gib, note).emit()


def parsed(gpus: str) -> tuple[int, ...]:
    """`0,1` as numbers; none for `-`."""
    return () if gpus == "-" else tuple(map(int, gpus.split(",")))


def main(arguments: Sequence[str]) -> None:
    from tinker_local.backend.http.server import event_loop

    scale, model, name = SCALES[arguments[0]], Path(arguments[1]), arguments[2]
    gpus: dict[str, Any] = {"train_gpus": parsed(arguments[4]), "sample_gpus": parsed(arguments[5])}
    try:
        with event_loop() as runner:
            runner.run(measure(scale, model, name, int(arguments[3]), {k: v for k, v in gpus.items() if v}))
    except Exception as error:
        traceback.print_exc()
        failed(name, error).emit()
    sys.stdout.flush()
    os._exit(0)  # as in `measurements`


if __name__ == "__main__":
    main(sys.argv[1:])
