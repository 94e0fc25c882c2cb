"""Reinforcement learning over many turns of images: walk a grid to its goal, one step and one picture at a time.

    tinker-local serve --model NAME[=PATH]
    python examples/grid_walk.py --model NAME

A 5x5 board shows the walker (white), its home (grey, a corner at least five steps away) and a sign: the colour of the
floor tells which way to go from here. The sign changes with every step, so each reply has to read the newest picture.
The reward of a step is the share of the way that it saves, so an episode that reaches home returns exactly 1. A few
supervised steps teach the form of an answer, and GRPO (grpo.py) does the rest. Control: boards that show nothing.
"""

import argparse
from collections.abc import Sequence

import grpo
import numpy as np
import tinker_local.client as tinker
from tinker_local.client import rl

CELLS, PIXELS = 5, 6
MOVES = {"N": (-1, 0), "S": (1, 0), "W": (0, -1), "E": (0, 1)}
SIGNS = {"N": (40, 60, 230), "S": (240, 220, 30), "W": (30, 200, 40), "E": (230, 30, 30)}
LIMIT = 8


class GridWalk:
    """Walker and goal on a board; replies are N, S, W or E. Truncated after LIMIT replies."""

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def reset(self, *, seed: int | None = None) -> tuple[list, dict]:
        rng = np.random.default_rng(seed)
        self.home = rng.choice([0, CELLS - 1], 2)
        while True:
            self.walker = rng.integers(0, CELLS, 2)
            if self.distance() >= 5:
                break
        self.start, self.turns = self.distance(), 0
        self.prefers = rng.random((CELLS, CELLS))  # which of two possible ways a cell's sign shows
        return ["Walk home: N, S, W or E?", self.image()], {}

    def step(self, action: str) -> tuple[list, float, bool, bool, dict]:
        before = self.distance()
        if (move := MOVES.get(action.strip())) is not None:
            self.walker = np.clip(self.walker + move, 0, CELLS - 1)
        self.turns += 1
        reward = (before - self.distance()) / self.start
        arrived = self.distance() == 0
        return [self.image()], reward, arrived, self.turns == LIMIT and not arrived, {"arrived": arrived}

    def distance(self) -> int:
        return int(np.abs(self.walker - self.home).sum())

    def sign(self) -> str:
        """A direction that leads home from here."""
        away = self.home - self.walker
        ways = [name for name, move in MOVES.items() if np.dot(move, away) > 0]
        return ways[int(self.prefers[tuple(self.walker)] * len(ways))]

    def image(self) -> np.ndarray:
        """The board, uint8 [30, 30, 3]."""
        cells = np.full((CELLS, CELLS, 3), 128, np.uint8)
        if not self.blank and self.distance():
            cells[:] = SIGNS[self.sign()]
            cells[tuple(self.home)] = (128, 128, 128)
            cells[tuple(self.walker)] = (250, 250, 250)
        return cells.repeat(PIXELS, 0).repeat(PIXELS, 1)


def demonstration(chat: rl.Chat, seed: int) -> list[tinker.Datum]:
    """A conversation that follows the signs."""
    environment = GridWalk()
    observation, _ = environment.reset(seed=seed)
    messages = [{"role": "user", "content": observation}]
    arrived = False
    while not arrived:
        move = environment.sign()
        observation, _, arrived, _, _ = environment.step(move)
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": observation}]
    return rl.conversation_data(chat, messages[:-1])


def step_advantages(trajectories: Sequence[rl.Trajectory]) -> list[list[float]]:
    """Each step's reward minus the mean over the group's steps: later steps do not change what a step saves."""
    mean = np.mean([turn.reward for trajectory in trajectories for turn in trajectory.turns])
    return [[turn.reward - float(mean) for turn in trajectory.turns] for trajectory in trajectories]


async def run(client: tinker.TrainingClient, options: argparse.Namespace) -> str:
    chat = rl.Chat.of(client)
    rng = np.random.default_rng(options.seed)

    def seeds(count: int) -> list[int]:
        return [int(seed) for seed in rng.integers(2**31, size=count)]

    batches = [[d for seed in seeds(16) for d in demonstration(chat, seed)] for _ in range(options.warm_steps)]
    await grpo.warm_start(client, batches, options.warm_rate)
    params = tinker.SamplingParams(max_tokens=3)
    history = await grpo.train(
        client,
        chat,
        lambda _: [rl.Group(GridWalk, options.group_size, seed) for seed in seeds(options.groups)],
        steps=options.steps,
        learning_rate=options.learning_rate,
        params=params,
        seed=options.seed,
        begin=options.begin,
        save_every=options.save_every,
        advantages=step_advantages,
    )
    sampler = await client.save_weights_and_get_sampling_client()
    new = seeds(64)
    unseen = await rl.rollout([rl.Group(GridWalk, 1, seed) for seed in new], sampler, chat, params)
    blanks = [rl.Group(lambda: GridWalk(blank=True), 1, seed) for seed in seeds(128)]
    control = (await rl.rollout(blanks, sampler, chat, params)).mean_reward
    boards = seeds(256)
    random = blind_return(boards, "NSWE")
    blind = max(blind_return(boards, moves) for moves in ("N", "S", "W", "E", "NW", "NE", "SW", "SE"))
    path = options.out / "grid_walk.png"
    levels = {"random policy": random, "best blind policy": blind, "blank images, after": control}
    shown = grpo.pictures_of(unseen.trajectories[0], GridWalk().reset(seed=new[0])[0][1])
    grpo.draw(history, path, "a walk on a grid", levels, shown)
    arrived = float(np.mean([trajectory.end == "terminated" for trajectory in unseen.trajectories]))
    print(
        f"return on new boards {unseen.mean_reward:.3f} ({arrived:.0%} arrived), on blank ones {control:.3f}, ", end=""
    )
    print(f"random policy {random:.3f}, best blind one {blind:.3f}; {path}")
    return grpo.verdict(arrived, unseen.mean_reward >= random + 0.4 and control < blind + 0.1)


def blind_return(seeds: list[int], moves: str) -> float:
    """Mean return of random steps from `moves`."""
    total = 0.0
    for seed in seeds:
        environment, rng = GridWalk(), np.random.default_rng(seed)
        environment.reset(seed=seed)
        done = False
        while not done:
            _, reward, terminated, truncated, _ = environment.step(str(rng.choice(list(moves))))
            total, done = total + reward, terminated or truncated
    return total / len(seeds)


if __name__ == "__main__":
    grpo.run_example(run, __doc__.splitlines()[0], steps=25, groups=20, group_size=4, learning_rate=2e-3)
