"""Reinforcement learning with images over two turns: name the colour of a square, then of a second one.

    tinker-local serve --model NAME[=PATH]
    python examples/color_square.py --model NAME

The model sees the second square after its first answer. A few supervised steps teach the form of an answer, which
leaves the return at chance. GRPO (grpo.py) does the rest. Control: on grey images, the trained model is at chance.
"""

import argparse

import grpo
import numpy as np
import tinker_local.client as tinker
from red_square import SIDE, square
from tinker_local.client import rl

COLORS = ("red", "green", "blue", "yellow")
CHANCE = 1 / len(COLORS)
DEFAULTS = {"steps": 30, "groups": 16, "group_size": 8, "learning_rate": 2.5e-3}


class ColorSquares:
    """Shows two squares in turn; each answer that names the colour is worth 0.5."""

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def reset(self, *, seed: int | None = None) -> tuple[list, dict]:
        rng = np.random.default_rng(seed)
        self.colors = [str(color) for color in rng.choice(COLORS, 2)]
        self.images = [np.full((SIDE, SIDE, 3), 128, np.uint8) if self.blank else square(c, rng) for c in self.colors]
        self.turn = 0
        return [self.images[0], "What colour is the square?"], {}

    def step(self, action: str) -> tuple[list | None, float, bool, bool, dict]:
        reward = 0.5 * (action.strip() == self.colors[self.turn])
        self.turn += 1
        if self.turn == 2:
            return None, reward, True, False, {}
        return [self.images[1], "And this one?"], reward, False, False, {}


def demonstration(chat: rl.Chat, seed: int) -> list[tinker.Datum]:
    """A complete conversation with the right answers."""
    environment = ColorSquares()
    first, _ = environment.reset(seed=seed)
    second, *_ = environment.step("")
    said = environment.colors
    contents = [("user", first), ("assistant", said[0]), ("user", second), ("assistant", said[1])]
    return rl.conversation_data(chat, [{"role": role, "content": content} for role, content in contents])


async def run(client: tinker.TrainingClient, options: argparse.Namespace) -> grpo.Outcome:
    chat = rl.Chat.of(client)
    rng = np.random.default_rng(options.seed)

    def seeds(count: int) -> list[int]:
        return [int(seed) for seed in rng.integers(2**31, size=count)]

    batches = [[d for seed in seeds(32) for d in demonstration(chat, seed)] for _ in range(options.warm_steps)]
    await grpo.warm_start(client, batches, options.warm_rate)
    params = tinker.SamplingParams(max_tokens=4)
    history = await grpo.train(
        client,
        chat,
        lambda _: [rl.Group(ColorSquares, options.group_size, seed) for seed in seeds(options.groups)],
        steps=options.steps,
        learning_rate=options.learning_rate,
        params=params,
        loss=options.loss,
        staleness=options.staleness,
        steps_ahead=options.steps_ahead,
        seed=options.seed,
        begin=options.begin,
        save_every=options.save_every,
    )
    sampler = await client.save_weights_and_get_sampling_client()
    new = seeds(128)
    unseen = await rl.rollout([rl.Group(ColorSquares, 1, seed) for seed in new], sampler, chat, params)
    blanks = [rl.Group(lambda: ColorSquares(blank=True), 1, seed) for seed in seeds(128)]
    control = (await rl.rollout(blanks, sampler, chat, params)).mean_reward
    shown = [grpo.pictures_of(unseen.trajectories[i], ColorSquares().reset(seed=new[i])[0][0]) for i in range(3)]
    success = unseen.mean_reward
    return grpo.Outcome(
        history,
        success,
        report=f"return on new squares {success:.3f}, on blank images {control:.3f}, chance {CHANCE}",
        wrong=grpo.verdict(success, success >= 0.9 and control < CHANCE + 0.1),
        title="two coloured squares",
        levels={"chance": CHANCE, "blank images, after": control},
        shown=[picture for episode in shown for picture in episode],
    )


if __name__ == "__main__":
    grpo.run_example(run, "color_square", __doc__.splitlines()[0], DEFAULTS, tinker.PromptLayout("picture-first", SIDE))
