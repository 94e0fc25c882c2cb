"""Reinforcement learning with answers that a program checks: a real model of 135 million parameters learns to add.

    tinker-local small-model --out models/smollm2
    tinker-local serve --model smollm2=models/smollm2
    python examples/rl_sums.py

GRPO with `importance_sampling`: eight answers to each sum are compared with their mean, and a right one is worth 1.
`--task chain_sum`, or another task of the package reasoning-gym whose answers take one line, has its own score.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tinker_local.client as tinker
from saving import add_options, connect, first_step, save, training_client

HELD_OUT = 200
"""How many problems are kept for measuring; they are the same for every seed."""

SETTINGS = {"chain_sum": {"max_terms": 2, "max_digits": 2}}
"""Of tasks of reasoning-gym, where its own are too hard for a small model: sums and differences of two numbers."""


class Problem(NamedTuple):
    """`start`: the words that the answer begins with, given to the model. `score`: what follows them to 0 to 1."""

    question: str
    start: str
    score: Callable[[str], float]


class Problems(NamedTuple):
    """`learned` and `held_out` have no question in common."""

    learned: list[Problem]
    held_out: list[Problem]


def sum_problem(first: int, second: int) -> Problem:
    def score(answer: str) -> float:
        """1 for the sum, 0.1 for another number, 0 without one."""
        if answer.strip() == str(first + second):
            return 1.0
        return 0.1 if answer.strip().isdecimal() else 0.0

    return Problem(f"What is {first} + {second}?", f"{first} + {second} = ", score)


def sums(count: int, seed: int) -> Problems:
    """Of two numbers from 2 to 49."""
    pairs = [(first, second) for first in range(2, 50) for second in range(2, 50)]
    random.Random(0).shuffle(pairs)
    learned = random.Random(seed).choices(pairs[HELD_OUT:], k=count)
    return Problems([sum_problem(*pair) for pair in learned], [sum_problem(*pair) for pair in pairs[:HELD_OUT]])


def gym_problems(task: str, count: int, seed: int) -> Problems:
    """Of a task of reasoning-gym, by its name."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(f"error: --task {task} needs reasoning-gym ({error}): pip install reasoning-gym") from None

    def made(size: int, seed: int) -> list[Problem]:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **SETTINGS.get(task, {}))

        def problem(entry: dict) -> Problem:
            return Problem(entry["question"], "Answer: ", lambda text: dataset.score_answer(text.strip(), entry))

        return [problem(entry) for entry in dataset]

    held_out = made(HELD_OUT, 0)
    known = {problem.question for problem in held_out}
    # reasoning-gym makes problem i of seed s from s + i: seeds that are close share problems.
    learned = [problem for problem in made(2 * count, (seed + 1) * 1_000_000) if problem.question not in known]
    return Problems(learned[:count], held_out)


def advantages(rewards: list[float]) -> list[float]:
    """Rewards of one group, less their mean, in standard deviations; none if all are equal: nothing can be learned."""
    spread = float(np.std(rewards))
    return [float(reward - np.mean(rewards)) / spread for reward in rewards] if spread > 1e-6 else []


def datum(prompt: list[int], sequence: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """Prompt positions carry advantage 0; sampled ones their advantage and the sampler's logprobs."""
    tokens, before = prompt + list(sequence.tokens), len(prompt) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": np.array([0.0] * before + list(sequence.logprobs), dtype=np.float32),
            "advantages": np.array([0.0] * before + [advantage] * len(sequence.tokens), dtype=np.float32),
        },
    )


class Chat:
    """Asks problems in the model's chat format."""

    def __init__(self, client: tinker.TrainingClient, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = client.get_tokenizer(), max_tokens

    def prompt(self, problem: Problem) -> list[int]:
        """The system message is empty, since the one in SmolLM2's template is longer than the question."""
        asked = [{"role": "system", "content": ""}, {"role": "user", "content": problem.question}]
        text = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text + problem.start, add_special_tokens=False)

    def groups(
        self, sampler: tinker.SamplingClient, problems: list[Problem], size: int, temperature: float, seed: int
    ) -> list[tuple[list[tinker.SampledSequence], list[float]]]:
        """`size` answers to each problem and what each is worth."""
        stop = [self.tokenizer.eos_token, "\n"]
        params = tinker.SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed, stop=stop)
        prompts = [tinker.ModelInput.from_ints(self.prompt(problem)) for problem in problems]
        futures = [sampler.sample(prompt, size, params) for prompt in prompts]
        groups = []
        for problem, future in zip(problems, futures, strict=True):
            sequences = future.result().sequences
            texts = [self.tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
            groups.append((sequences, [problem.score(text) for text in texts]))
        return groups

    def measured(self, sampler: tinker.SamplingClient, problems: list[Problem]) -> dict[str, float]:
        """`accuracy`: the share of right answers at temperature 0. `of`: the number of problems."""
        right = [rewards[0] >= 1 for _, rewards in self.groups(sampler, problems, 1, 0.0, 0)]
        return {"accuracy": float(np.mean(right)), "of": len(right)}


def draw(curve: list[dict], path: Path) -> None:
    """Plot reward and accuracy as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for name, label, style in (("reward", "reward while training", "-"), ("accuracy", "right, held out", "o")):
        points = [(line["step"], line[name]) for line in curve if name in line]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", default="sums", help="sums, or the name of a task of reasoning-gym")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=12, help="problems per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers per problem")
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--eval-every", type=int, default=4, metavar="N", help="measure on 50 held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the curve here, as JSON lines")
    parser.add_argument("--plot", type=Path, help="draw the curve here")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    count = options.steps * options.prompts
    problems = sums(count, options.seed) if options.task == "sums" else gym_problems(options.task, count, options.seed)
    started = time.monotonic()
    curve: list[dict] = []

    def note(step: int, **numbers: float) -> None:
        curve.append({"step": step, **numbers, "seconds": round(time.monotonic() - started, 1)})
        said = "   ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        if options.out:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in curve))
        print(f"step {step:3d}   {said}   {curve[-1]['seconds']:.0f} s", flush=True)

    with connect(options) as service:
        client = training_client(service, options, rank=16, seed=options.seed)
        chat = Chat(client, options.max_tokens)
        sampler = client.save_weights_and_get_sampling_client().result()
        first = first_step(options)
        note(first, **chat.measured(sampler, problems.held_out))
        for step in range(first, options.steps):
            chosen = problems.learned[step * options.prompts : (step + 1) * options.prompts]
            groups = chat.groups(sampler, chosen, options.group_size, 1.0, options.seed * 1000 + step)
            data = [
                datum(chat.prompt(problem), sequence, advantage)
                for problem, (sequences, rewards) in zip(chosen, groups, strict=True)
                for sequence, advantage in zip(sequences, advantages(rewards), strict=False)
            ]
            if data:
                gradient = client.forward_backward(data, "importance_sampling")
                update = client.optim_step(tinker.AdamParams(learning_rate=options.learning_rate, beta2=0.95, eps=1e-8))
                gradient.result()
                update.result()
            sampler = client.save_weights_and_get_sampling_client().result()
            numbers = {"reward": float(np.mean([rewards for _, rewards in groups]))}
            if step + 1 == options.steps:
                numbers |= chat.measured(sampler, problems.held_out)
            elif options.eval_every and (step + 1) % options.eval_every == 0:
                numbers |= chat.measured(sampler, problems.held_out[:50])
            note(step + 1, **numbers)
            if options.save_every and (step + 1) % options.save_every == 0 and step + 1 < options.steps:
                save(client, "rl-sums", step + 1)
        saved = save(client, "rl-sums")
        print(f"saved as {saved.state} and {saved.sampler}")
    if options.plot:
        draw(curve, options.plot)
    print(f"held out: {curve[0]['accuracy']:.1%} right before, {curve[-1]['accuracy']:.1%} after {options.steps} steps")


if __name__ == "__main__":
    main()
