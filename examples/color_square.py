"""Reinforcement learning with images over two turns: name the colour of a square, then of a second one.

    tinker-local serve --model NAME[=PATH]
    python examples/color_square.py --model NAME

The second square is shown after the first answer. A short supervised start teaches the form of an answer and nothing
of colours (its answers are drawn by lot); the rest is GRPO with `importance_sampling`. The control: trained and
sampled on grey images, the model stays at chance.
"""

import argparse
import asyncio
import os
from pathlib import Path

import numpy as np
import tinker
from tinker_local.client import rl

COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "yellow": (235, 220, 40)}
SIDE = 64


def square(color: str, rng: np.random.Generator) -> np.ndarray:
    """A square of one colour somewhere on grey noise, uint8 [SIDE, SIDE, 3]."""
    image = rng.integers(96, 160, (SIDE, SIDE, 1), dtype=np.uint8).repeat(3, 2)
    size = int(rng.integers(SIDE // 2, SIDE * 3 // 4))
    top, left = rng.integers(0, SIDE - size, 2)
    image[top : top + size, left : left + size] = COLORS[color]
    return image


class ColorSquares:
    """Two squares, one after the other; each answer that names its colour is worth 0.5."""

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def reset(self, *, seed: int | None = None) -> tuple[list, dict]:
        rng = np.random.default_rng(seed)
        self.colors = [str(color) for color in rng.choice(list(COLORS), 2)]
        self.images = [square(color, rng) for color in self.colors]
        if self.blank:
            self.images = [np.full_like(image, 128) for image in self.images]
        self.turn = 0
        return [self.images[0], "What colour is the square?"], {}

    def step(self, action: str) -> tuple[list | None, float, bool, bool, dict]:
        reward = 0.5 * (action.strip() == self.colors[self.turn])
        self.turn += 1
        if self.turn == 2:
            return None, reward, True, False, {}
        return [self.images[1], "And this one?"], reward, False, False, {}


def warm_start(chat: rl.Chat, rng: np.random.Generator) -> list[tinker.Datum]:
    """A conversation whose answers have the right form and a random content."""
    environment = ColorSquares()
    first, _ = environment.reset(seed=int(rng.integers(2**31)))
    second, *_ = environment.step("")
    said = [str(color) for color in rng.choice(list(COLORS), 2)]
    contents = [("user", first), ("assistant", said[0]), ("user", second), ("assistant", said[1])]
    return rl.conversation_data(chat, [{"role": role, "content": content} for role, content in contents])


async def train(client: tinker.TrainingClient, options: argparse.Namespace, blank: bool = False) -> list[float]:
    """Mean return per step."""
    chat = rl.Chat.of(client)
    rng = np.random.default_rng(options.seed)
    for _ in range(options.warm_steps):
        data = [datum for _ in range(32) for datum in warm_start(chat, rng)]
        client.forward_backward(data, "cross_entropy")
        await client.optim_step(tinker.AdamParams(learning_rate=options.warm_rate, grad_clip_norm=1.0))
    params = tinker.SamplingParams(max_tokens=4)
    rewards = []
    for step in range(options.steps):
        sampler = await client.save_weights_and_get_sampling_client()
        seeds = rng.integers(2**31, size=options.groups)
        groups = [rl.Group(lambda: ColorSquares(blank), options.group_size, int(seed)) for seed in seeds]
        rollouts = await rl.rollout(groups, sampler, chat, params)
        rewards.append(rollouts.mean_reward)
        line = f"step {step:3d}   reward {rewards[-1]:.3f}"
        if step == 0:
            everything = [datum for trajectory in rollouts.trajectories for datum in trajectory.data()]
            output = await client.forward(everything, "importance_sampling")
            line += f"   KL(sampler, trainer) {rl.sampler_trainer_kl(everything, output):.1e}"
        print(line, flush=True)
        if data := rollouts.data(rl.normalized_returns):
            gradient = client.forward_backward(data, "importance_sampling")
            update = client.optim_step(
                tinker.AdamParams(
                    learning_rate=options.learning_rate * (1 - step / options.steps),
                    beta2=0.99,
                    eps=1e-8,
                    grad_clip_norm=1.0,
                )
            )
            await gradient
            await update
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-steps", type=int, default=12)
    parser.add_argument("--warm-rate", type=float, default=5e-3)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="2e-5 suits a real model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/color_square"))
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=options.base_url) as service:
        client = service.create_lora_training_client(base_model=options.model, rank=32, seed=0).result()
        rewards = asyncio.run(train(client, options))


if __name__ == "__main__":
    main()
