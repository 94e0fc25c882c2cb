"""What it changes that gradients on samples of a mixture of experts take the experts that the samples took.

    python benchmarks/replayed_routes.py [--out benchmarks/results/replayed_routes-DATE]   # a GPU, or else a tiny model
    python benchmarks/replayed_routes.py --returns 12 --steps 20                           # and RL, in pairs by seed

In bfloat16. On a GPU, a cut Qwen3-30B-A3B (`--layers` of 48) with random weights; on a CPU a tiny mixture. Two
samplers, one that records experts and one that does not, and one trainer, with an adapter of rank 32 that has taken
steps.

`differ`: of the experts that sampler and trainer choose for the same position, the share of positions and layers where
one is another; `KL`: of the sampled tokens, with the estimator of `rl.sampler_trainer_kl`; `clipped`: the share of them
whose ratio is outside 0.8 to 1.25. `gradient`: between that with the experts of the samples and that without, the
difference relative to the norm, and the cosine. Speeds: medians of `--repeats` in turn. `--returns`: that many pairs of
runs, one with and one without, from the same adapter with the same seeds: the reward is 1 for each sampled
token in a quarter of the vocabulary; of each run the mean of the second half of its steps.
"""

import argparse
import asyncio
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.vllm_engine.build_engine import EngineOptions
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import AdamParams, LoraConfig, SampledSequence, SamplingParams

VOCABULARY = 380
"""Ids below it stand in prompts; the tokenizer of tiny models has about as many."""


def settings_of(saved: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The config of the cut model, or of the tiny one with `layers` None, from that of a tiny mixture as it is `saved`:
    with another name for the number of experts, which would count for more."""
    from harness.model_shapes import SHAPES

    experts = saved["num_local_experts"]
    kept = {name: value for name, value in saved.items() if name != "num_local_experts"} | {"dtype": "bfloat16"}
    if layers is None:
        return kept | {"num_experts": experts, "num_experts_per_tok": 4}
    return kept | SHAPES["qwen3-30b-a3b"].settings | {"num_hidden_layers": layers, "max_position_embeddings": 8192}


def write_model(out: Path, layers: int | None) -> None:
    """The cut model on a GPU; a tiny one with `layers` None."""
    import transformers
    from random_model import random_model
    from tinker_local.backend.tiny_models import TextShape, make_tiny_text_model

    if layers is None:
        make_tiny_text_model(out, family="qwen3_moe", shape=TextShape(num_layers=4, hidden_size=128))
    else:
        make_tiny_text_model(out, family="qwen3_moe")
    config = settings_of(json.loads((out / "config.json").read_text()), layers)
    for old in out.glob("*.safetensors"):
        old.unlink()
    model = random_model(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**config))
    for layer in model.model.layers:  # `random_model` takes a stack of experts for one matrix
        for stack, gain in ((layer.mlp.experts.gate_up_proj, 1), (layer.mlp.experts.down_proj, 2)):
            stack.data.normal_(0, gain * stack.shape[-1] ** -0.5)
    if layers is None:  # or all tokens are about equally likely
        model.lm_head.weight.data.mul_(2)
    model.save_pretrained(out, max_shard_size="4GB")


class Engines:
    """A trainer, and samplers by whether they record. `sizes`: prompts, samples of each, and tokens of both."""

    def __init__(self, folder: Path, sizes: Sequence[int], *, records: Sequence[bool], gpu: bool) -> None:
        self.prompts, self.samples, self.prompt_length, self.length = sizes
        self.thread = EngineThread()
        self.trainer = HFTrainer(TrainerConfig(str(folder), name="mixture", dtype="bfloat16", max_rank=32))
        options = EngineOptions(
            str(folder),
            dtype="bfloat16",
            max_context_length=self.prompt_length + self.length,
            kv_cache_bytes=2**32 if gpu else 2**27,
            max_sequences=256,
            max_batched_tokens=8192 if gpu else 2048,
        )
        self.samplers = {on: VLLMSampler(replace(options, record_routes=on), self.thread) for on in records}
        assert self.trainer.routed is not None
        self.routed = self.trainer.routed
        self._versions = 0

    def version(self, adapter: str) -> AdapterVersion:
        state: AdapterState = self.trainer.capture(adapter, optimizer=False, dtype="bfloat16")
        self._versions += 1
        name = f"{adapter}-{self._versions}"
        return AdapterVersion(name, Path("/nowhere") / name, unwritten=lambda: state)

    def sample(
        self, version: AdapterVersion, prompts: Sequence[Sequence[int]], seed: int, *, on: bool
    ) -> list[tuple[Sequence[int], SampledSequence]]:
        sampler = self.samplers[on]

        async def run() -> list[Any]:
            params = SamplingParams(max_tokens=self.length, temperature=1.0, seed=seed, stop=())
            works = [
                SampleWork(RenderedInput(np.array(each, np.int32)), version, params, self.samples, routes=on)
                for each in prompts
            ]
            return await asyncio.gather(*(sampler.sample(work) for work in works))

        outputs = asyncio.run(run())
        return [(each, one) for each, output in zip(prompts, outputs, strict=True) for one in output.sequences]

    def prompts_of(self, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        found: list[list[int]] = rng.integers(20, VOCABULARY, (self.prompts, self.prompt_length)).tolist()
        return found

    def data(
        self, samples: Sequence[tuple[Sequence[int], SampledSequence]], advantages: np.ndarray, *, on: bool
    ) -> list[TrainDatum]:
        found = []
        for (prompt, sequence), advantage in zip(samples, advantages, strict=True):
            tokens, before = sequence.tokens, len(prompt) - 1
            assert sequence.logprobs is not None
            ids = np.concatenate([np.array(prompt, np.int32), tokens[:-1]])
            inputs = {
                "logprobs": np.concatenate([np.zeros(before, np.float32), sequence.logprobs]),
                "advantages": np.concatenate([np.zeros(before), advantage]).astype(np.float32),
            }
            targets = np.concatenate([np.array(prompt[1:]), tokens]).astype(np.int64)
            routes = sequence.routes.first(len(ids)) if on else None
            found.append(TrainDatum(RenderedInput(ids), targets, inputs, routes))
        return found

    def run(self, adapter: str, data: Sequence[TrainDatum], *, backward: bool = True) -> TrainResult:
        (result,) = self.trainer.forward_backward([TrainWork(adapter, data, "importance_sampling", backward=backward)])
        if not isinstance(result, TrainResult):
            raise result
        return result

    def gradient(self, adapter: str, data: Sequence[TrainDatum]) -> torch.Tensor:
        self.trainer.discard_gradients(adapter)
        self.run(adapter, data)
        found = self.trainer._adapters[adapter].gradient
        assert found is not None
        self.trainer.discard_gradients(adapter)
        return found.double().cpu()

    def own_experts(self, adapter: str, data: Sequence[TrainDatum]) -> list[np.ndarray]:
        """The experts that the trainer's routers choose, of each datum alone, [N, L, K], sorted."""
        found = []
        routers = [each for each in self.trainer._loaded.model.modules() if "Router" in type(each).__name__]
        for datum in data:
            seen: list[torch.Tensor] = []
            hooks = [router.register_forward_hook(lambda *args, to=seen: to.append(args[2][2])) for router in routers]
            self.run(adapter, [replace(datum, routes=None)], backward=False)
            for hook in hooks:
                hook.remove()
            found.append(np.sort(torch.stack(seen, 1).cpu().numpy(), -1))
        return found

    def close(self) -> None:
        for sampler in self.samplers.values():
            asyncio.run(sampler.close())
        self.thread.stop()


def kl(result: TrainResult, data: Sequence[TrainDatum]) -> tuple[float, float]:
    """Of sampled tokens, and which share of them has a ratio that PPO would clip."""
    ratios = []
    for datum, output in zip(data, result.outputs, strict=True):
        sampled = datum.loss_inputs["advantages"] != 0
        ratios.append((output["logprobs"] - datum.loss_inputs["logprobs"])[sampled])
    log_ratio = np.concatenate(ratios).astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio)), float(np.mean(np.abs(log_ratio) > np.log(1.25)))


def rewards(samples: Sequence[tuple[Sequence[int], SampledSequence]]) -> np.ndarray:
    """Of each token, [samples, tokens]: 1 in a quarter of the vocabulary, else 0."""
    return np.stack([sequence.tokens % 4 == 0 for _, sequence in samples]).astype(np.float64)


def advantages_of(found: np.ndarray, samples: int) -> np.ndarray:
    """Rewards less the mean of their group; never 0, which would leave a token out."""
    groups = found.reshape(-1, samples * found.shape[1])
    centred = (groups - groups.mean(1, keepdims=True)).reshape(found.shape)
    return np.where(centred == 0, 1e-9, centred)


def median_s(*ways: Callable[[], Any], repeats: int) -> list[float]:
    """Of each of `ways`, in turn."""
    spent: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats + 1):
        for way, times in zip(ways, spent, strict=True):
            begin = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in spent]


def warmed(engines: Engines, name: str, seed: int) -> None:
    """An adapter that has taken two steps on random tokens, so that it changes something."""
    engines.trainer.create_adapter(name, LoraConfig(rank=32, seed=seed))
    rng = np.random.default_rng(seed)
    for _ in range(2):
        ids = rng.integers(20, VOCABULARY, 65)
        given = RenderedInput(ids[:-1].astype(np.int32))
        datum = TrainDatum(given, ids[1:].astype(np.int64), {"weights": np.ones(64, np.float32)})
        engines.trainer.forward_backward([TrainWork(name, [datum], "cross_entropy")])
        engines.trainer.optim_step(name, AdamParams(learning_rate=1e-4))


def measure(engines: Engines, repeats: int) -> dict[str, float]:
    """All but the returns."""
    warmed(engines, "one", 0)
    version, prompts = engines.version("one"), engines.prompts_of(0)
    samples = engines.sample(version, prompts, 1, on=True)
    advantages = advantages_of(rewards(samples), engines.samples)
    on, off = (engines.data(samples, advantages, on=each) for each in (True, False))
    with_it, without = (engines.run("one", each, backward=False) for each in (on, off))
    few = on[: min(len(on), 64)]
    chosen = engines.own_experts("one", few)
    differ = []
    for datum, experts in zip(few, chosen, strict=True):
        assert datum.routes is not None
        assert datum.routes.known.all()
        taken = np.sort(datum.routes.read(0, datum.input.length), -1)
        differ.append((taken != experts).any(-1).mean())
    gradients = [engines.gradient("one", each) for each in (on, off)]
    found = {
        "differ": float(np.mean(differ)),
        "kl on": kl(with_it, on)[0],
        "kl off": kl(without, off)[0],
        "clipped on": kl(with_it, on)[1],
        "clipped off": kl(without, off)[1],
        "gradient": float((gradients[0] - gradients[1]).norm() / gradients[0].norm()),
        "cosine": float(torch.nn.functional.cosine_similarity(*gradients, dim=0)),
        "bytes a position": float(engines.routed.position_bytes),
    }
    positions, tokens = sum(datum.input.length for datum in on), sum(len(sequence.tokens) for _, sequence in samples)
    trained = median_s(*(lambda each=each: engines.gradient("one", each) for each in (on, off)), repeats=repeats)
    seeds = iter(range(10**6))
    sampled = median_s(
        *(
            lambda each=each: engines.sample(version, engines.prompts_of(100 + next(seeds)), 1, on=each)
            for each in (True, False)
        ),
        repeats=repeats,
    )
    for name, count, (one, other) in (("trained", positions, trained), ("sampled", tokens, sampled)):
        found |= {f"{name} on": count / one, f"{name} off": count / other}
    return found


def returns(engines: Engines, seed: int, steps: int, rate: float, *, on: bool) -> list[float]:
    """The mean reward of each step of a run."""
    name, found = f"run-{seed}-{on}", []
    warmed(engines, name, seed)
    for step in range(steps):
        samples = engines.sample(engines.version(name), engines.prompts_of(1000 * seed + step), step, on=True)
        found.append(float((of_samples := rewards(samples)).mean()))
        engines.run(name, engines.data(samples, advantages_of(of_samples, engines.samples), on=on))
        engines.trainer.optim_step(name, AdamParams(learning_rate=rate))
    engines.trainer.remove_adapter(name)
    return found


def interval(differences: Sequence[float]) -> str:
    """Mean and a 95 % interval of it, by Student's t."""
    quantiles = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764, 6: 2.5706, 8: 2.3646, 10: 2.2622, 12: 2.2010, 16: 2.1314}
    count = len(differences)
    if count < 2:
        return f"{differences[0]:+.4f}"
    quantile = quantiles[max(each for each in quantiles if each <= count)]
    half = quantile * statistics.stdev(differences) / count**0.5
    mean = statistics.mean(differences)
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def table(found: dict[str, float], pairs: Sequence[tuple[float, float]]) -> str:
    rows = [
        ("KL(sampler, trainer), nats a token", "kl", "{:.3e}"),
        ("tokens with a ratio outside 0.8 to 1.25", "clipped", "{:.4f}"),
        ("trained, positions/s", "trained", "{:,.0f}"),
        ("sampled, tokens/s", "sampled", "{:,.0f}"),
    ]
    lines = [f"{'':<44}{'experts replayed':>18}{'not':>14}{'ratio':>9}"]
    for words, name, form in rows:
        on, off = found[f"{name} on"], found[f"{name} off"]
        ratio = f"{on / off:9.3f}" if off else f"{'-':>9}"
        lines.append(f"{words:<44}{form.format(on):>18}{form.format(off):>14}{ratio}")
    if pairs:
        on, off = (statistics.mean(each) for each in zip(*pairs, strict=True))
        lines.append(f"{f'return, mean of {len(pairs)} seeds':<44}{on:>18.4f}{off:>14.4f}")
        lines.append(f"return, difference of pairs and 95 % of its mean: {interval([a - b for a, b in pairs])}")
    lines += [
        f"positions and layers at which the engines choose other experts: {found['differ']:.4f}",
        f"gradients with and without: differ by {found['gradient']:.4f} of the norm, cosine {found['cosine']:.5f}",
        f"memory: {found['bytes a position']:.0f} bytes a position",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also append to OUT.jsonl, and write OUT.txt")
    parser.add_argument("--layers", type=int, default=4, help="of the cut model, on a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--returns", type=int, default=0, help="pairs of RL runs")
    parser.add_argument("--steps", type=int, default=20, help="of each RL run")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of RL runs")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    gpu = torch.cuda.is_available()
    sizes = (32, 16, 128, 128) if gpu else (8, 8, 16, 16)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if gpu else None))
    try:
        write_model(folder / "model", options.layers if gpu else None)
        engines = Engines(folder / "model", sizes, records=(True, False), gpu=gpu)
        found = measure(engines, options.repeats)
        pairs = []
        for seed in range(options.returns):
            runs = [returns(engines, seed, options.steps, options.rate, on=on) for on in (True, False)]
            last = -(-options.steps // 2)
            pairs.append((statistics.mean(runs[0][-last:]), statistics.mean(runs[1][-last:])))
            print(
                f"seed {seed}: return from {runs[0][0]:.3f} to {pairs[-1][0]:.4f} on, {pairs[-1][1]:.4f} off",
                flush=True,
            )
        engines.close()
    finally:
        shutil.rmtree(folder)
    text = "\n".join([*machine.describe(), table(found, pairs)])
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{options.out}.txt").write_text(text + "\n")
        with Path(f"{options.out}.jsonl").open("a") as lines:
            lines.write(json.dumps({**found, "pairs": pairs}) + "\n")
    print(text)


if __name__ == "__main__":
    main()
