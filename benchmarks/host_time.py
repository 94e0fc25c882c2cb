"""Host time of the smallest calls, of two checkouts in turn: a `forward_backward` of one token, and a sample of one.

What a large step hides shows here: the interpreter's own work between products. Tiny models on a CPU, so that products
take next to nothing. Prints, for each call, the median of all repetitions of each checkout, and their ratio.

    python benchmarks/host_time.py OTHER_CHECKOUT [--rounds 20] [--repeat 30]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]

PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path

import numpy as np
import torch

torch.set_num_threads(1)
folder = Path(sys.argv[1])
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import LoraConfig, SamplingParams


def trainer_of(model):
    settings = {"name": "m", "dtype": "float32", "device": "cpu"}
    try:
        from tinker_local.backend.training.trainer_config import TrainerConfig
    except ImportError:  # before there was one
        return HFTrainer(model, **settings)
    return HFTrainer(TrainerConfig(model, **settings))


trainers = {}
for family in ("qwen3", "qwen3_moe", "qwen3_5_text"):
    trainers[family] = trainer_of(str(folder / family))
    trainers[family].create_adapter("a", LoraConfig(rank=8, seed=1))
one = np.array([7], np.int64)
datum = TrainDatum(RenderedInput(one.astype(np.int32), ()), one, {"weights": np.ones(1, np.float32)})
work = [TrainWork("a", [datum], "cross_entropy")]
sampler = VLLMSampler(EngineOptions(str(folder / "qwen3"), max_rank=8, kv_cache_bytes=2**26), EngineThread())
prompt = RenderedInput(np.arange(5, 9, dtype=np.int32), ())
loop = asyncio.new_event_loop()


def sample():
    loop.run_until_complete(sampler.sample(SampleWork(prompt, None, SamplingParams(max_tokens=1, seed=0, stop=[]))))


calls = {f"forward_backward, {name}": lambda one=one: one.forward_backward(work) for name, one in trainers.items()}
calls["sample"] = sample
for name, call in calls.items():
    for _ in range(20):
        call()
print("ready", flush=True)
for line in sys.stdin:
    found = {}
    for name, call in calls.items():
        found[name] = []
        for _ in range(int(line)):
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    print(json.dumps(found), flush=True)
"""


def started(checkout: Path, models: Path) -> subprocess.Popen[str]:
    """The program with the packages of `checkout`."""
    sources = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "ERROR"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(models)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=models,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line != "ready\n":
        pass
    if not line:
        sys.exit(f"{checkout}: the program ended")
    return process


def asked(process: subprocess.Popen[str], repeat: int) -> dict[str, list[float]]:
    """The seconds of `repeat` repetitions of each call."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(repeat, file=process.stdin, flush=True)
    found: dict[str, list[float]] = json.loads(process.stdout.readline())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    from tinker_local.backend.tiny_models import make_tiny_text_model

    with tempfile.TemporaryDirectory() as folder:
        families: tuple[Any, ...] = ("qwen3", "qwen3_moe", "qwen3_5_text")
        for family in families:
            make_tiny_text_model(Path(folder) / family, family=family)
        both = [started(checkout, Path(folder)) for checkout in (options.other.resolve(), HERE)]
        seen: list[dict[str, list[float]]] = [{}, {}]
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                for name, seconds in asked(both[which], options.repeat).items():
                    seen[which].setdefault(name, []).extend(seconds)
        for process in both:
            process.kill()
    count = options.rounds * options.repeat
    print(f"| median of {count}, ms | {options.other} | here | |\n| --- | ---: | ---: | ---: |")
    for name, before in seen[0].items():
        old, new = (1000 * statistics.median(each) for each in (before, seen[1][name]))
        print(f"| {name} | {old:.3f} | {new:.3f} | {new / old:.3f} |")


if __name__ == "__main__":
    main()
