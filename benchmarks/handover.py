"""Time a save of ephemeral weights and the first token sampled from them, stage by stage.

    python benchmarks/handover.py [--layers 12] [--rank 128] [--hidden 1024] [--saves 10] [--sampler process]

Runs in process, on a small random Qwen3 that it makes. With 36 layers and the other defaults, an adapter has as many
matrices (504) and parameters (87 million) as one of rank 32 for an 8B model. On a GPU the engines compute in bfloat16,
else in float32. Prints each stage in milliseconds and what it is part of, with the minimum, which says more on a busy
machine. Stages of different threads overlap. Samples of other clients wait for `between two steps`.
"""

import argparse
import asyncio
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.options import EnginePlace
from tinker_local.backend.sampling.process_sampler import ProcessSampler
from tinker_local.backend.storage import versions
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.vllm_engine import vllm_adapters
from tinker_local.types import (
    CreateModelRequest,
    LoraConfig,
    ModelInput,
    SampleRequest,
    SamplingParams,
    SaveWeightsForSamplerRequest,
)

MODEL = "random/model"
PROMPT = ModelInput.from_ints(list(range(30, 46)))


class Stages:
    """Milliseconds of each stage, in the order in which the stages were added."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.parts: dict[str, str] = {}

    def watch(self, owner: Any, name: str, stage: str, part_of: str) -> None:
        """Time every call of a function or method."""
        times = self.times.setdefault(stage, [])
        self.parts[stage] = part_of
        original: Callable[..., Any] = getattr(owner, name)

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return await original(*args, **kwargs)
            finally:
                times.append(1e3 * (time.perf_counter() - start))

        def called(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                times.append(1e3 * (time.perf_counter() - start))

        timed = awaited if asyncio.iscoroutinefunction(original) else called
        setattr(owner, name, functools.wraps(original)(timed))

    def forget(self) -> None:
        """Forget what was measured."""
        for times in self.times.values():
            times.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--sampler", choices=("inline", "process"), help="where vLLM runs; default: the server's")
    parser.add_argument("--model", type=Path, help="a folder to use or make; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch) / "model"
        if not folder.exists():
            make_tiny_text_model(folder, shape=shape(options.layers, options.hidden))
        asyncio.run(measure(folder, Path(scratch) / "data", options.rank, options.saves, options.sampler))


def shape(layers: int, hidden: int) -> TextShape:
    """Qwen3-8B's proportions: grouped queries, an MLP three times as wide."""
    return TextShape(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 256,
        head_dim=64,
        weight_scale=1.0,
    )


async def measure(folder: Path, data_dir: Path, rank: int, saves: int, sampler: EnginePlace | None) -> None:
    """Print the table."""
    options = BackendOptions(data_dir=data_dir, max_rank=rank, max_context_length=256, sampler=sampler)
    stages = Stages()
    async with InProcessBackend([ModelSource(MODEL, str(folder))], options) as backend:
        watch(stages, backend)
        session = await backend.sessions.create()
        created = await backend.runs.create(
            CreateModelRequest(
                session_id=session, model_seq_id=0, base_model=MODEL, lora_config=LoraConfig(rank=rank, seed=0)
            )
        )
        model_id = (await created)["model_id"]
        state = backend.models.get(MODEL).engines.trainer.capture(model_id, optimizer=False)
        numbers = sum(tensor.size for tensor in state.tensors.values())
        saved, sampled = [], []
        for number in range(saves + 2):
            if number == 2:  # the first ones allocate memory and compile
                stages.forget()
            start = time.perf_counter()
            saving = await backend.training.save_weights_for_sampler(
                SaveWeightsForSamplerRequest(model_id=model_id, seq_id=number + 1, sampling_session_seq_id=number)
            )
            version = (await saving)["sampling_session_id"]
            saved.append(1e3 * (time.perf_counter() - start))
            params = SamplingParams(max_tokens=1)
            asked = SampleRequest(sampling_session_id=version, seq_id=0, prompt=PROMPT, sampling_params=params)
            await (await backend.sampling.sample(asked))
            sampled.append(1e3 * (time.perf_counter() - start))
            await asyncio.sleep(1.5)  # let background work end
    title = f"{len(state.tensors)} matrices, {numbers / 1e6:.1f} million numbers, medians of {saves} saves"
    table = Table("stage", "part of", "median ms", "least ms", title=title)
    for stage, times in (stages.times | {"save": saved[2:], "save and first token": sampled[2:]}).items():
        found = (f"{statistics.median(times):.1f}", f"{min(times):.1f}") if times else ("-", "-")
        table.add_row(stage, stages.parts.get(stage, ""), *found)
    Console(width=110).print(table)


def watch(stages: Stages, backend: InProcessBackend) -> None:
    """Every stage, in order."""
    engines = backend.models.get(MODEL).engines
    sampler: Any = engines.sampler._sampler  # inside WakingSampler
    stages.watch(engines.trainer, "capture", "capture", "trainer's thread")
    stages.watch(engines.trainer, "logprobs", "probe, trainer", "trainer's thread")
    if isinstance(sampler, ProcessSampler):
        stages.watch(sampler._calls, "_send_values", "send to the process", "load")
    else:
        stages.watch(sampler._adapters, "_make", "make ready", "a thread, beside the trainer's probe")
        stages.watch(vllm_adapters, "host_adapter", "check names and shapes", "make ready")
        stages.watch(sampler._adapters, "_copy", "copy and convert", "make ready")
        stages.watch(vllm_adapters, "build_lora_model", "vLLM's objects, scaling", "make ready")
        stages.watch(vllm_adapters, "check_adapter_taken", "all taken, all finite", "make ready")
        stages.watch(sampler._engine.live(), "add_lora", "register and fill a slot", "between two steps")
    stages.watch(sampler, "load_version", "load", "save")
    stages.watch(sampler, "sample", "a request of one token (probe, sample)", "save, sample")
    stages.watch(backend.store, "add_sampling_session", "record the session", "save")
    stages.watch(versions, "write_adapter", "write the folder", "behind")


if __name__ == "__main__":
    main()
