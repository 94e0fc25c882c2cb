"""The work of `baselines/trl_loop.py` as a program of the official SDK, in a process without a model.

`python -m measurements.beside_sdk SETTINGS URL` reads the same file and prints the same lines. `settings["state"]` is a
checkpoint to begin from, "" for a new adapter; `settings["replay"]`: train on what TRL sampled, step by step;
`settings["ratio_one"]`: with the trainer's logprobs of the samples, as TRL does, instead of the sampler's.
"""

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()

PolicyRow = tuple[list[int], list[int], list[float], float]
"""Ids of a prompt, sampled ids, their logprobs, and the advantage."""


def say(**numbers: Any) -> None:
    """Print a line for the process that started this one."""
    print(json.dumps(numbers), flush=True)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Of one group, by TRL's formula: rewards less their mean, over their sample standard deviation and 1e-4."""
    middle, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - middle) / (spread + 1e-4) for reward in rewards]


def sum_reward(text: str, answer: str) -> float:
    """What `examples/rl_sums.py` gives: 1 for the sum, 0.1 for another number, 0 without one."""
    return 1.0 if text.strip() == answer else 0.1 if text.strip().isdecimal() else 0.0


class Program:
    """A user's program: one training client, and its steps."""

    def __init__(self, settings: dict[str, Any], url: str) -> None:
        import tinker

        self.settings = settings
        self.types = tinker.types
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        if settings["state"]:
            self.client = self.service.create_training_client_from_state(settings["state"]).result()
        else:
            self.client = self.service.create_lora_training_client(
                base_model=settings["name"], rank=settings["rank"], seed=settings["seed"], train_unembed=False
            ).result()
        self.adam = tinker.types.AdamParams(
            learning_rate=settings["learning_rate"],
            beta1=settings["beta1"],
            beta2=settings["beta2"],
            eps=settings["eps"],
            grad_clip_norm=settings["clip"],
        )
        say(start_s=time.perf_counter() - BEGAN)

    def datum(self, tokens: list[int], **inputs: list[float]) -> Any:
        """`inputs`: for each token, of which the first is never a target."""
        import numpy as np

        arrays: dict[str, Any] = {name: np.array(values[1:], np.float32) for name, values in inputs.items()}
        arrays["target_tokens"] = np.array(tokens[1:])
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)

    def update(self, data: list[Any], loss: str, config: dict[str, float] | None = None) -> tuple[Any, dict[str, Any]]:
        """One step. Returns the result of `forward_backward`, and what every step says: its loss, and the norm of the
        gradient before clipping."""
        gradient = self.client.forward_backward(data, loss, config)  # type: ignore[arg-type]
        stepped = self.client.optim_step(self.adam)
        norm = float((stepped.result().metrics or {})["grad_norm"])
        return gradient.result(), {"loss": float(gradient.result().metrics["loss:sum"]), "grad_norm": norm}

    def sft(self) -> None:
        seen = hashlib.sha256()
        batch = self.settings["batch"]
        for step in range(self.settings["steps"]):
            begin = time.perf_counter()
            examples = self.settings["examples"][step * batch : (step + 1) * batch]
            answers = sum(label >= 0 for each in examples for label in each["labels"])
            data = []
            for each in examples:
                seen.update(json.dumps([each["input_ids"], each["labels"]]).encode())
                weights = [1 / answers if label >= 0 else 0.0 for label in each["labels"]]
                data.append(self.datum(each["input_ids"], weights=weights))
            _, numbers = self.update(data, "cross_entropy")
            say(step=step + 1, **numbers, s=time.perf_counter() - begin)
        say(sha256=seen.hexdigest(), total_s=time.perf_counter() - BEGAN)

    def grpo(self) -> None:
        self.tokenizer = self.client.get_tokenizer()
        held_out = [each["ids"] for each in self.settings["held_out"]]
        groups = self.settings["batch"] // self.settings["group"]
        self.measure(held_out, 0)
        for step in range(self.settings["steps"]):
            begin = time.perf_counter()
            chosen = self.settings["learned"][step * groups : (step + 1) * groups]
            sampler = self.client.save_weights_and_get_sampling_client().result()
            seed = self.settings["seed"] * 1000 + step
            found = self.sample(sampler, [each["ids"] for each in chosen], self.settings["group"], 1.0, seed)
            rows: list[PolicyRow] = []
            rewards: list[float] = []
            for each, sequences in zip(chosen, found, strict=True):
                texts = [self.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
                rewards += (own := [sum_reward(text, each["answer"]) for text in texts])
                for one, advantage in zip(sequences, group_advantages(own), strict=True):
                    rows.append((each["ids"], list(one.tokens), list(one.logprobs), advantage))
            numbers = self.policy_step(self.scored_again(rows) if self.settings["ratio_one"] else rows)
            numbers |= {"reward": statistics.fmean(rewards), "tokens": statistics.fmean(len(row[1]) for row in rows)}
            say(step=step + 1, **numbers, s=time.perf_counter() - begin)
        self.measure(held_out, self.settings["steps"])
        say(total_s=time.perf_counter() - BEGAN)

    def replay(self) -> None:
        """GRPO on TRL's samples. The ratio is 1, as in TRL: logprobs are those of the trainer before the step."""
        for step, rollout in enumerate(json.loads(Path(self.settings["replay"]).read_text())):
            begin = time.perf_counter()
            names = ("prompts", "sampled", "advantages")
            rows: list[PolicyRow] = [
                (prompt, sampled, [], advantage)
                for prompt, sampled, advantage in zip(*(rollout[name] for name in names), strict=True)
            ]
            say(step=step + 1, **self.policy_step(self.scored_again(rows)), s=time.perf_counter() - begin)
        say(total_s=time.perf_counter() - BEGAN)

    def scored_again(self, rows: list[PolicyRow]) -> list[PolicyRow]:
        """The rows with the logprobs that the trainer has now."""
        data = [self.datum(prompt + sampled, weights=[1.0] * len(prompt + sampled)) for prompt, sampled, _, _ in rows]
        outputs = self.client.forward(data, "cross_entropy").result().loss_fn_outputs
        return [
            (prompt, sampled, output["logprobs"].to_numpy().tolist()[len(prompt) - 1 :], advantage)
            for (prompt, sampled, _, advantage), output in zip(rows, outputs, strict=True)
        ]

    def policy_step(self, rows: list[PolicyRow]) -> dict[str, float]:
        """One step of PPO's loss, over the number of sampled tokens: TRL's `dapo`. What it says has `apart`: the mean
        absolute difference of the logprobs that were given and the trainer's; and `clipped`: the share of sampled
        tokens of which nothing is learnt for that difference."""
        count = sum(len(sampled) for _, sampled, _, _ in rows)
        data = []
        for prompt, sampled, logprobs, advantage in rows:
            before = [0.0] * len(prompt)
            advantages = before + [advantage / count] * len(sampled)
            data.append(self.datum(prompt + sampled, logprobs=before + logprobs, advantages=advantages))
        low, high = 1 - self.settings["epsilon"], 1 + self.settings["epsilon"]
        result, numbers = self.update(data, "ppo", {"clip_low_threshold": low, "clip_high_threshold": high})
        differences, clipped = [], 0
        for (prompt, _, logprobs, advantage), output in zip(rows, result.loss_fn_outputs, strict=True):
            for given, found in zip(logprobs, output["logprobs"].tolist()[len(prompt) - 1 :], strict=True):
                differences.append(abs(found - given))
                ratio = math.exp(found - given)
                clipped += (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        return {**numbers, "apart": statistics.fmean(differences), "clipped": clipped / count}

    def sample(self, sampler: Any, prompts: list[list[int]], size: int, temperature: float, seed: int) -> list[Any]:
        """`size` sequences for each prompt."""
        params = self.types.SamplingParams(
            max_tokens=self.settings["max_tokens"], temperature=temperature, seed=seed, stop=self.settings["stop"]
        )
        futures = [sampler.sample(self.types.ModelInput.from_ints(ids), size, params) for ids in prompts]
        return [future.result().sequences for future in futures]

    def measure(self, prompts: list[list[int]], step: int) -> None:
        """The share of right answers at temperature 0."""
        begin = time.perf_counter()
        sampler = self.client.save_weights_and_get_sampling_client().result()
        found = self.sample(sampler, prompts, 1, 0.0, 0)
        texts = [self.tokenizer.decode(sequences[0].tokens, skip_special_tokens=True) for sequences in found]
        right = [sum_reward(text, each["answer"]) for text, each in zip(texts, self.settings["held_out"], strict=True)]
        say(held_out=step, right=right.count(1.0), of=len(right), s=time.perf_counter() - begin)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    program = Program(settings, sys.argv[2])
    if settings["replay"]:
        program.replay()
    else:
        {"sft": program.sft, "grpo": program.grpo}[settings["task"]]()


if __name__ == "__main__":
    main()
