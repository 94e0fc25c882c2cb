"""Several replicas of the sampler against one: `python -m measurements.several_replicas SCALE MODEL REPLICAS TP …`

Each replica is on TP GPUs. The last arguments are parts. `rate` prints output tokens per second at the `Sampler`
protocol, of one replica and of all of them in turns, with as many requests for each replica; `first_token` prints the
time from the save of ephemeral weights to the first token.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.lines import failed
from harness.scale import SCALES, Scale
from harness.timing import DeviceMemory

from measurements.handovers import first_token
from measurements.sampling import WARM_UP_REQUESTS, WARM_UP_TOKENS, at_once, rate_line
from measurements.ways import InProcess

MODEL = "bench/text"


async def measure(scale: Scale, model: Path, replicas: int, tp: int, parts: Sequence[str]) -> None:
    """Start a backend with replicas on the first GPUs and the trainer on the first, and print the lines."""
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource

    with tempfile.TemporaryDirectory() as folder:
        options = BackendOptions(
            data_dir=Path(folder),
            max_rank=scale.rank,
            kv_cache_bytes=scale.kv_cache_bytes,
            micro_batch_tokens=scale.micro_batch_tokens,
            train_gpus=(0,),
            sample_gpus=tuple(range(replicas * tp)),
            sample_tp=tp,
            sampler_sleeps=False,
        )
        async with InProcessBackend([ModelSource(MODEL, str(model))], options) as backend:
            if "rate" in parts:
                await rates(scale, backend.models.get(MODEL).engines.sampler, replicas, tp)
            if "first_token" in parts:
                way = InProcess(backend, await backend.sessions.create(), MODEL)
                await first_token(way, scale, f"replicas.first_token_{label(replicas, tp)}", "the trainer is idle")


def label(replicas: int, tp: int) -> str:
    """Ends the names of lines: `2`, or `2x4` for two replicas on four GPUs each."""
    return f"{replicas}" if tp == 1 else f"{replicas}x{tp}"


async def rates(scale: Scale, sampler: Any, replicas: int, tp: int) -> None:
    """Prints the rate of the first replica while the others have nothing to do, and of all."""
    from baselines.vllm_alone import write_random_adapter
    from tinker_local.backend.adapters.adapter import AdapterVersion
    from tinker_local.backend.rendering.rendered_input import RenderedInput
    from tinker_local.backend.sampling.sampler import SampleWork
    from tinker_local.types import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        version = AdapterVersion("bench-random", write_random_adapter(Path(folder) / "adapter", scale.text, scale.rank))
        await sampler.load_version(version)

        async def sample(prompt: list[int], max_tokens: int, replica: int | None = None) -> int:
            params = SamplingParams(max_tokens=max_tokens, stop=())
            work = SampleWork(RenderedInput(np.array(prompt, np.int32)), version, params, replica=replica)
            (sequence,) = (await sampler.sample(work)).sequences
            return len(sequence.tokens)

        async def sample_first(prompt: list[int], max_tokens: int) -> int:
            return await sample(prompt, max_tokens, 0)

        of_one: list[float] = []
        of_all: list[float] = []
        with DeviceMemory() as memory:
            await at_once(scale, sample, replicas * min(WARM_UP_REQUESTS, scale.requests), WARM_UP_TOKENS)
            for _ in range(scale.repeats):
                if replicas > 1:
                    of_one.append(await at_once(scale, sample_first, scale.requests, scale.output_tokens))
                of_all.append(await at_once(scale, sample, replicas * scale.requests, scale.output_tokens))
        if of_one:
            rate_line(f"replicas.rate_{label(1, tp)}", scale, of_one, memory.peak_gib, "one replica of them").emit()
        note = f"{replicas} times as many requests"
        rate_line(f"replicas.rate_{label(replicas, tp)}", scale, of_all, memory.peak_gib, note).emit()


def main(arguments: Sequence[str]) -> None:
    from tinker_local.backend.hosting.server import event_loop

    scale, model, parts = SCALES[arguments[0]], Path(arguments[1]), arguments[4:]
    replicas, tp = map(int, arguments[2:4])
    try:
        with event_loop() as runner:
            runner.run(measure(scale, model, replicas, tp, parts))
    except Exception as error:
        traceback.print_exc()
        for part in parts:
            failed(f"replicas.{part}_{label(replicas, tp)}", error).emit()
    sys.stdout.flush()
    os._exit(0)  # as in `measurements`


if __name__ == "__main__":
    main(sys.argv[1:])
