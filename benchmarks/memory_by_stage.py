"""What each engine takes of a GPU, stage by stage: in use by the driver, kept by torch's allocator, held by tensors.

    python benchmarks/memory_by_stage.py --out benchmarks/results
    python benchmarks/memory_by_stage.py --tiny                 # the same code on a CPU, where all numbers are 0

Each engine is alone in a process, with a copy of the weights: a sampler with the steps, adapter slots and KV cache that
are given, which then samples sixteen times 64 tokens after prompts of half its context, and a trainer that computes
every layer again, with one adapter of rank 32 on eight sequences. `highest`: the most that tensors had until then.
Random weights in the shape of Qwen3-8B.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from engine import room_for_models
from harness import machine, processes
from harness.scale import SCALES

HEADER = f"{'GiB':<46}{'driver':>9}{'torch':>9}{'tensors':>9}{'highest':>9}"
RANK = 32


class Stages:
    """Sends a line for each stage of a process to another one."""

    def __init__(self, who: str, to: Connection) -> None:
        self._who = who
        self._to = to

    def __call__(self, name: str) -> None:
        import torch

        numbers = [0, 0, 0, 0]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            used = [torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
            numbers = [total - free, *used]
        self._to.send(f"{self._who + ': ' + name:<46}" + "".join(f"{each / 2**30:>9.2f}" for each in numbers))

    def after(self, owner: Any, method: str, name: str) -> None:
        """From now on, a line when `method` of the class `owner` has returned."""
        original = getattr(owner, method)

        def told(*positional: Any, **named: Any) -> Any:
            result = original(*positional, **named)
            self(name)
            return result

        setattr(owner, method, told)


def sampler(options: argparse.Namespace, folder: Path, who: str, to: Connection, sequences: int, sleeps: bool) -> None:
    """Start a sampler and sample with it."""
    import torch
    from tinker_local.backend.vllm_engine.build_engine import EngineOptions, import_vllm

    stage = Stages(who, to)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        stage("context")
        import_vllm()
        from vllm.v1.worker.gpu_worker import Worker

        stage.after(Worker, "load_model", "weights and adapter slots")
        stage.after(Worker, "determine_available_memory", "profile")
        stage.after(Worker, "initialize_from_config", "KV cache")
        stage.after(Worker, "compile_or_warm_up_model", "graphs and warm-up")
    context = 256 if options.tiny else 8192
    chosen = EngineOptions(
        str(folder),
        max_context_length=context,
        kv_cache_bytes=2**28 if options.tiny else 1280 * 2**20,
        max_rank=RANK,
        adapters_per_step=1,
        max_sequences=sequences,
        image_cache_bytes=2**27,
        sleeps=sleeps,
    )
    asyncio.run(sampled(chosen, context // 2, stage))


async def sampled(options: Any, length: int, stage: Stages) -> None:
    from tinker_local.backend.rendering.rendered_input import RenderedInput
    from tinker_local.backend.sampling.sampler import SampleWork
    from tinker_local.backend.vllm_engine.engine_thread import EngineThread
    from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
    from tinker_local.types import SamplingParams

    engine = VLLMSampler(options, EngineThread())
    try:
        stage("started")
        for turn in range(2):
            prompt = RenderedInput(np.random.default_rng(turn).integers(0, 100, length).astype(np.int32))
            wanted = SamplingParams(max_tokens=64, temperature=1.0, seed=turn, stop=())
            await engine.sample(SampleWork(prompt, None, wanted, num_samples=16))
        stage("sampled")
    finally:
        await engine.close()


def trainer(options: argparse.Namespace, folder: Path, who: str, to: Connection) -> None:
    """Load a trainer, and train."""
    import torch
    from measurements.training import make_trainer, text_datum, work
    from tinker_local.types import AdamParams, LoraConfig

    stage = Stages(who, to)
    scale = SCALES["tiny" if options.tiny else "full"]
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        stage("context")
    one = make_trainer(
        scale,
        folder,
        micro_batch_tokens=256 if options.tiny else 4096,
        activation_memory_bytes=0,
        logit_chunk_elements=2**27,
        max_rank=RANK,
    )
    stage("weights")
    one.create_adapter("a", LoraConfig(rank=RANK, seed=1, train_unembed=False))
    stage("adapter")
    length = 64 if options.tiny else 2048
    data = [text_datum(ids) for ids in np.random.default_rng(0).integers(0, scale.text.vocab, (8, length))]
    for turn in range(3):
        for result in one.forward_backward([work("a", data)]):
            if isinstance(result, Exception):
                raise result
        stage(f"gradients {turn}")
        one.optim_step("a", AdamParams(learning_rate=1e-4))
        stage(f"update {turn}")
    one.close()


def in_process(work: Callable[..., None], *arguments: Any) -> list[str]:
    """Lines that `work` sends from another process, printed as they come."""
    spawning = multiprocessing.get_context("spawn")
    mine, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=work, args=(*arguments[:3], theirs, *arguments[3:]))
    process.start()
    theirs.close()
    lines = []
    try:
        while True:
            lines.append(mine.recv())
            print(lines[-1], flush=True)
    except EOFError:
        process.join()
    if process.exitcode:
        lines.append(f"{arguments[2]}: ended with {process.exitcode}")
        print(lines[-1], flush=True)
    return lines


def measure(options: argparse.Namespace, folder: Path) -> Sequence[str]:
    scale = SCALES["tiny" if options.tiny else "full"]
    processes.write_text_model(scale.name, folder, folder)
    lines = []
    for sequences, sleeps in ((256, True), (256, False), (64, True), (16, True)):
        who = f"{sequences} sequences{', sleeps' if sleeps else ''}"
        lines += in_process(sampler, options, folder / "text", who, sequences, sleeps)
    return [*lines, *in_process(trainer, options, folder / "text", "trainer")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for a dated file of the result")
    options = parser.parse_args()
    if not options.tiny and not machine.gpu():
        parser.error("no NVIDIA GPU here; --tiny runs the same code on a CPU")
    os.environ.update(processes.environment())
    head = [*machine.describe(), "", HEADER]
    print(*head, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(dir=None if options.tiny else room_for_models()) as folder:
        lines = measure(options, Path(folder))
    if options.out:
        out = options.out / f"memory_by_stage-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        out.write_text("\n".join([*head, *lines]) + "\n")
    return int(any("ended with" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
