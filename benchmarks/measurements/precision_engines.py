"""What a server's engines do on a base: `python -m measurements.precision_engines SETTINGS BASE`, in one process.

SFT with several seeds, gradients of the adapter, and samples with the logprobs of sampler and trainer. The result goes
into the file of the settings, gradients and adapters into its `work` folder.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import beside
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import read_adapter, write_adapter
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.trainer import TrainDatum, Trainer, TrainWork
from tinker_local.types import AdamParams, ApiError, LoraConfig, SamplingParams

NAME = "measured"
HELD_OUT, OTHER = 1000, 2000
"""Seeds of examples that no run learns from."""


def data_of(tokenizer: Any, count: int, seed: int) -> list[TrainDatum]:
    """Worked sums, with weights of 1 on the tokens of answers."""
    data = []
    for example in beside.sft_examples(tokenizer, count, seed):
        ids = np.array(example["input_ids"], np.int32)
        weights = (np.array(example["labels"][1:]) >= 0).astype(np.float32)
        data.append(TrainDatum(RenderedInput(ids[:-1]), ids[1:].astype(np.int64), {"weights": weights}))
    return data


def loss(trainer: Trainer, adapter: str, data: Sequence[TrainDatum], *, backward: bool = True) -> float:
    """Nats per token of the answers; its gradient is added to the adapter's if `backward`."""
    tokens = sum(float(each.loss_inputs["weights"].sum()) for each in data)
    scaled = [replace(each, loss_inputs={"weights": each.loss_inputs["weights"] / np.float32(tokens)}) for each in data]
    (result,) = trainer.forward_backward([TrainWork(adapter, scaled, "cross_entropy", backward=backward)])
    if isinstance(result, ApiError):
        raise result
    return float(result.metrics["loss:sum"])


def gradient(trainer: Trainer, adapter: str, data: Sequence[TrainDatum]) -> npt.NDArray[np.float32]:
    """Of all tensors, one after the other by name: AdamW's first moment after a step with beta1 = 0."""
    loss(trainer, adapter, data)
    trainer.optim_step(adapter, AdamParams(learning_rate=0.0, beta1=0.0))
    moments = trainer.capture(adapter, optimizer=True).optimizer
    assert moments is not None
    names = sorted(name for name in moments if name.startswith("exp_avg."))
    return np.concatenate([np.asarray(moments[name]).ravel() for name in names])


def drawn(state: AdapterState) -> AdapterState:
    """`state` with random B, as after some training: the same on all bases."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.02, array.shape).astype(np.float32) if ".lora_B." in name else in_float32(array)
        for name, array in sorted(state.tensors.items())
    }
    return replace(state, tensors=tensors)


@dataclass
class Measured:
    """One base. `call`: calls a function of the trainer."""

    base: str
    model: ServedModel
    tokenizer: Any
    settings: dict[str, Any]

    @property
    def work(self) -> Path:
        return Path(self.settings["work"])

    async def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return await self.model.scheduler.call(function, *given, **named)

    async def all(self) -> dict[str, Any]:
        found = await self.sft()
        await self.gradients()
        found["samples"] = await self.samples()
        return found

    async def sft(self) -> dict[str, Any]:
        """Losses of held-out answers before and after; the speed of training. The dense one also tries the adapters
        of the packed ones."""
        settings, trainer = self.settings, self.model.engines.trainer
        held_out = data_of(self.tokenizer, settings["held_out"], HELD_OUT)
        before, after, tokens, seconds = 0.0, [], 0, 0.0
        for seed in range(settings["seeds"]):
            config = LoraConfig(rank=settings["rank"], seed=seed, train_unembed=False)
            await self.call(trainer.create_adapter, NAME, config)
            if seed == 0:
                before = await self.call(loss, trainer, NAME, held_out, backward=False)
            data = data_of(self.tokenizer, settings["steps"] * settings["batch"], seed)
            began = time.monotonic()
            for first in range(0, len(data), settings["batch"]):
                await self.call(loss, trainer, NAME, data[first : first + settings["batch"]])
                params = AdamParams(learning_rate=settings["learning_rate"], beta2=0.999, grad_clip_norm=1.0)
                await self.call(trainer.optim_step, NAME, params)
            seconds += time.monotonic() - began
            tokens += sum(each.input.length for each in data)
            after.append(await self.call(loss, trainer, NAME, held_out, backward=False))
            folder = self.work / f"adapter-{self.base}-{seed}"
            folder.mkdir()
            write_adapter(folder, await self.call(trainer.capture, NAME, optimizer=False))
            await self.call(trainer.remove_adapter, NAME)
        moved = {base: await self.moved(base, held_out) for base in ("int8", "int4")} if self.base == "dense" else {}
        return {"before": before, "after": after, "moved": moved, "training": tokens / seconds}

    async def moved(self, base: str, held_out: Sequence[TrainDatum]) -> list[float]:
        """Losses with the adapters that learned on `base`."""
        found, trainer = [], self.model.engines.trainer
        for seed in range(self.settings["seeds"]):
            await self.call(trainer.load_adapter, NAME, self.adapter(base, seed))
            found.append(await self.call(loss, trainer, NAME, held_out, backward=False))
            await self.call(trainer.remove_adapter, NAME)
        return found

    def adapter(self, base: str, seed: int) -> AdapterState:
        config = LoraConfig(rank=self.settings["rank"], seed=seed, train_unembed=False)
        return read_adapter(self.work / f"adapter-{base}-{seed}", self.model.names[0], config, optimizer=False)

    async def gradients(self) -> None:
        """On two batches, with a new adapter, whose B is 0, and with one as after some training."""
        trainer, kept = self.model.engines.trainer, {}
        config = LoraConfig(rank=self.settings["rank"], seed=0, train_unembed=False)
        batches = [data_of(self.tokenizer, self.settings["batch"], OTHER + number) for number in range(2)]
        for adapter in ("new", "trained"):
            for number in range(2 if self.base == "dense" else 1):
                await self.call(trainer.create_adapter, NAME, config)
                if adapter == "trained":
                    state = drawn(await self.call(trainer.capture, NAME, optimizer=False))
                    await self.call(trainer.remove_adapter, NAME)
                    await self.call(trainer.load_adapter, NAME, state)
                kept[f"{adapter}.{number}"] = await self.call(gradient, trainer, NAME, batches[number])
                await self.call(trainer.remove_adapter, NAME)
        np.savez(self.work / f"gradients-{self.base}.npz", **kept)

    async def samples(self) -> dict[str, float]:
        """With the adapter of the first seed, at temperature 1: how the logprobs of sampler and trainer differ, and
        tokens per second of all prompts at once and of one alone."""
        settings, engines = self.settings, self.model.engines
        state = self.adapter(self.base, 0)
        version = AdapterVersion("samples", Path("samples"), lambda: state)
        examples = beside.sft_examples(self.tokenizer, settings["prompts"] + 1, HELD_OUT)
        prompts = [
            RenderedInput(np.array(each["input_ids"][: each["labels"].count(-100)], np.int32)) for each in examples
        ]
        params = SamplingParams(max_tokens=settings["tokens"], temperature=1.0, seed=0)
        few = SamplingParams(max_tokens=max(2, settings["tokens"] // 2), temperature=1.0, seed=1)
        await engines.sampler.sample(SampleWork(prompts[-1], version, replace_tokens(few, 2), 1))  # loads it
        began = time.monotonic()
        alone = await engines.sampler.sample(SampleWork(prompts[-1], version, few, 1))
        one = sum(len(each.tokens) for each in alone.sequences) / (time.monotonic() - began)
        began = time.monotonic()
        asked = [SampleWork(prompt, version, params, settings["samples"]) for prompt in prompts[:-1]]
        outputs = await asyncio.gather(*(engines.sampler.sample(work) for work in asked))
        seconds = time.monotonic() - began
        await self.call(engines.trainer.load_adapter, NAME, state)
        apart = []
        for prompt, output in zip(prompts, outputs, strict=False):
            for each in output.sequences:
                whole = RenderedInput(np.concatenate([prompt.token_ids, np.asarray(each.tokens, np.int32)]))
                ours = await self.call(engines.trainer.logprobs, NAME, whole)
                apart.append(np.asarray(each.logprobs, np.float64) - ours[prompt.length - 1 :])
        found = np.concatenate(apart)
        return {
            "count": found.size,
            "v1": float(found.mean()),
            "v2": float(np.square(found).mean() / 2),
            "largest": float(np.abs(found).max()),
            "many": found.size / seconds,
            "one": one,
        }


def replace_tokens(params: SamplingParams, tokens: int) -> SamplingParams:
    return params.model_copy(update={"max_tokens": tokens})


async def measure(settings: dict[str, Any], base: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    with_base: Any = {} if base == "dense" else {"base_precision": base}
    options = BackendOptions(
        data_dir=Path(settings["work"]) / f"data-{base}",
        trainer="inline",
        sampler="inline",
        kv_cache_bytes=2**28,
        max_rank=settings["rank"],
        max_context_length=1024,
        compare_seconds=0.0,
        **with_base,
    )
    async with InProcessBackend([ModelSource(NAME, settings["model"])], options) as backend:
        tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        return await Measured(base, backend.models.get(NAME), tokenizer, settings).all()


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(asyncio.run(measure(json.loads(file.read_text()), sys.argv[2]))))
