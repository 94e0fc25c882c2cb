"""What it costs a step to measure how far the sampler is from the trainer: steps with and without it, in pairs.

    python benchmarks/mismatch_cost.py --model .test-files/smollm2 [--pairs 30] [--data 8] [--tokens 256]
    python benchmarks/mismatch_cost.py --model MODEL --device cuda --dtype bfloat16 --data 64 --tokens 1024 --pairs 100

A step is a `forward_backward` of `ppo` over `--data` data of `--tokens` positions, half of them sampled in two turns,
and an `optim_step`, through `InProcessBackend` with the trainer in a thread of the same process: nowhere do the two
compete more. In each pair one step measures and the other does not, in an order that is drawn. Prints the median step
without it, the median of the paired differences with its 95 % interval (bootstrap over pairs), and how long a
measurement takes: in time that passes, and in processor time of the process, which other programs on the machine hardly
change.
"""

import argparse
import asyncio
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.control import mismatch, training_commands
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import (
    AdamParams,
    CreateModelRequest,
    Datum,
    ForwardBackwardRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
)

NAME = "measured/model"
IDS = 500
"""Token ids that data have: fewer than any model's vocabulary."""


def made(data: int, tokens: int) -> tuple[Datum, ...]:
    """Conversations of two turns, a quarter of the positions each."""
    rng, found = np.random.default_rng(0), []
    sampled = (np.arange(tokens) // max(1, tokens // 4) % 2).astype(np.float32)
    for _ in range(data):
        ids = rng.integers(3, IDS, tokens + 1)
        inputs = {
            "target_tokens": ids[1:].tolist(),
            "logprobs": (rng.normal(-8, 1, tokens) * sampled).tolist(),
            "advantages": (rng.choice([-1.0, 1.0]) * sampled).tolist(),
        }
        found.append(Datum(model_input=ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    return tuple(found)


class Measuring:
    """In place of `measure`: does it if `on`, and keeps the seconds that it took."""

    def __init__(self) -> None:
        self.on = True
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        if not self.on:
            return {mismatch.ALL: mismatch.Distance()}
        start = time.perf_counter()
        found = mismatch.measure(*args)
        self.seconds.append(time.perf_counter() - start)
        return found


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The seconds of each step, and what follows from them."""
    measuring = Measuring()
    training_commands.measure = measuring  # type: ignore[attr-defined, assignment]

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        config = TrainerConfig(args.model, name=NAME, dtype=args.dtype, device=args.device)
        fake = FakeModel(source.name, vocab_size=IDS + 12)
        anything: Any = {"tolerance": float("inf"), "least_rounding": float("inf")}
        trainer = HFTrainer(config)
        trainer.vocab_size = fake.vocab_size  # of what is asked of both; the model keeps its own
        return Engines(_TextRenderer(fake), trainer, FakeSampler(fake), arch="fake", **anything)

    data = made(args.data, args.tokens)
    rng, seconds = np.random.default_rng(1), []
    with tempfile.TemporaryDirectory() as folder:
        options = BackendOptions(data_dir=Path(folder))
        async with InProcessBackend([ModelSource(NAME, NAME)], options, load=load) as backend:
            session = await backend.sessions.create()
            lora = LoraConfig(rank=args.rank)
            creation = CreateModelRequest(session_id=session, model_seq_id=0, base_model=NAME, lora_config=lora)
            model = (await (await backend.runs.create(creation)))["model_id"]
            adam, seq_id = AdamParams(learning_rate=1e-6), 1

            async def step(*, on: bool) -> tuple[float, float]:
                nonlocal seq_id
                measuring.on = on
                gradient = ForwardBackwardRequest(model_id=model, seq_id=seq_id, data=data, loss_fn="ppo")
                stepping = OptimStepRequest(model_id=model, seq_id=seq_id + 1, adam_params=adam)
                seq_id += 2
                start = time.perf_counter(), time.process_time()
                promised = (
                    await backend.training.forward_backward(gradient),
                    await backend.training.optim_step(stepping),
                )
                for promise in promised:
                    await promise
                return time.perf_counter() - start[0], time.process_time() - start[1]

            for _ in range(3):
                await step(on=True)
            measuring.seconds.clear()
            for _ in range(args.pairs):
                first = bool(rng.integers(2))
                pair = {on: await step(on=on) for on in (first, not first)}
                seconds.append((pair[True], pair[False]))
    both = np.array(seconds)  # [pairs, with and without, time and processor time]
    found: dict[str, Any] = {
        "model": args.model,
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "dtype": args.dtype,
        "positions": args.data * args.tokens,
        "pairs": args.pairs,
    }
    for at, kind in enumerate(("", "processor_")):
        with_it, without = both[:, 0, at], both[:, 1, at]
        step_ms = 1e3 * float(np.median(without))
        differences = 1e3 * (with_it - without)
        drawn = np.median(rng.choice(differences, (10_000, len(differences))), 1)
        middle = np.median(differences), *np.percentile(drawn, (2.5, 97.5))
        found[f"{kind}step_ms"] = step_ms
        found[f"{kind}difference_percent"] = [round(100 * float(each) / step_ms, 3) for each in middle]
    found["measurement_ms"] = 1e3 * float(np.median(measuring.seconds))
    found["measurement_percent"] = 100 * found["measurement_ms"] / found["step_ms"]
    return found


class _TextRenderer(FakeRenderer):
    takes_images = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=30)
    found = asyncio.run(measured(parser.parse_args()))
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
