"""Reinforcement learning over many turns of images: walk to a goal that hops, one step and one picture at a time.

    tinker-local tiny-model --kind vl --preset mosaic --out models/mosaic-vl
    tinker-local serve --model local/mosaic-vl=models/mosaic-vl
    python examples/grid_walk.py --model local/mosaic-vl

A 5x5 board shows the walker (red) and the goal (blue), both in cells drawn at random. Where they are decides which way
to go, and nothing else does. After each step the goal hops to some cell as far from the walker as before, so each reply
has to read the newest picture. The reward of a step is the share of the way that it saves, so an episode that arrives
returns exactly 1. A few supervised steps on random moves teach the form of an answer, and GRPO (grpo.py) does the rest.
Controls: boards that show nothing, and the first board again and again.
"""

import argparse
from collections.abc import Sequence
from typing import Literal

import grpo
import numpy as np
import tinker_local.client as tinker
from tinker_local.client import rl

CELLS, PIXELS = 5, 6
MOVES = {"N": (-1, 0), "S": (1, 0), "W": (0, -1), "E": (0, 1)}
FLOOR, WALKER, GOAL = (128, 128, 128), (230, 30, 30), (30, 30, 230)
NEAREST, LIMIT = 2, 8
DEFAULTS = {
    "steps": 40,
    "groups": 16,
    "group_size": 4,
    "learning_rate": 1.5e-3,
    "warm_steps": 16,
    "warm_rate": 2e-3,
}

PLACES = np.argwhere(np.ones((CELLS, CELLS)))
"""Row and column of each cell, [25, 2]."""
DISTANCES = np.abs(PLACES[:, None] - PLACES).sum(-1)
"""Steps from cell to cell, [25, 25]."""
NEXT = {name: np.clip(PLACES + move, 0, CELLS - 1) @ (CELLS, 1) for name, move in MOVES.items()}
"""The cell that a move leads to from each cell, [25]."""


class GridWalk:
    """Walker and goal on a board; replies are N, S, W or E. Truncated after LIMIT replies.

    Any other reply moves the goal one step farther away, if the board has room, so silence does not pay.

    `shows`: the pictures show the newest board, always the first one, or a board with nothing on it.
    """

    def __init__(self, shows: Literal["newest", "first", "nothing"] = "newest") -> None:
        self.shows = shows

    def reset(self, *, seed: int | None = None) -> tuple[list, dict]:
        self.rng = np.random.default_rng(seed)
        self.walker, self.goal = self.rng.choice(np.argwhere(DISTANCES >= NEAREST))
        self.start, self.turns = self.distance(), 0
        self.picture = self.board()
        return ["You are the red cell, your goal is the blue one: N, S, W or E?", self.picture], {}

    def step(self, action: str) -> tuple[list, float, bool, bool, dict]:
        before = self.distance()
        if (move := action.strip()) in MOVES:
            self.walker = NEXT[move][self.walker]
        left = self.distance() + (move not in MOVES)
        left = min(left, int(DISTANCES[self.walker].max()))
        self.goal = self.rng.choice(np.flatnonzero(DISTANCES[self.walker] == left))
        self.turns += 1
        if self.shows != "first":
            self.picture = self.board()
        arrived = left == 0
        return [self.picture], (before - left) / self.start, arrived, self.turns == LIMIT and not arrived, {}

    def distance(self) -> int:
        return int(DISTANCES[self.walker, self.goal])

    def board(self) -> np.ndarray:
        """uint8 [30, 30, 3]."""
        cells = np.full((CELLS**2, 3), FLOOR, np.uint8)
        if self.shows != "nothing":
            cells[self.goal] = GOAL
            cells[self.walker] = WALKER
        return cells.reshape(CELLS, CELLS, 3).repeat(PIXELS, 0).repeat(PIXELS, 1)


def demonstration(chat: rl.Chat, seed: int) -> list[tinker.Datum]:
    """A conversation of LIMIT random moves, whatever the pictures show."""
    environment, moves = GridWalk(), np.random.default_rng(seed + 1).choice(list(MOVES), LIMIT)
    observation, _ = environment.reset(seed=seed)
    messages = []
    for move in moves:
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": str(move)}]
        observation, *_ = environment.step(move)
    return rl.conversation_data(chat, messages)


def step_advantages(trajectories: Sequence[rl.Trajectory]) -> list[list[float]]:
    """Each step's reward minus the mean over the group's steps: later steps do not change what a step saves."""
    mean = np.mean([turn.reward for trajectory in trajectories for turn in trajectory.turns])
    return [[turn.reward - float(mean) for turn in trajectory.turns] for trajectory in trajectories]


async def run(client: tinker.TrainingClient, options: argparse.Namespace) -> grpo.Outcome:
    chat = rl.Chat.of(client)
    rng = np.random.default_rng(options.seed)
    params = tinker.SamplingParams(max_tokens=3)

    def seeds(count: int) -> list[int]:
        return [int(seed) for seed in rng.integers(2**31, size=count)]

    async def walk(shows: Literal["newest", "first", "nothing"]) -> rl.Rollouts:
        """One episode on each of the new boards."""
        sampler = await client.save_weights_and_get_sampling_client()
        return await rl.rollout([rl.Group(lambda: GridWalk(shows), 1, seed) for seed in new], sampler, chat, params)

    new = seeds(128)
    batches = [[d for seed in seeds(16) for d in demonstration(chat, seed)] for _ in range(options.warm_steps)]
    await grpo.warm_start(client, batches, options.warm_rate)
    before = (await walk("newest")).mean_reward
    history = await grpo.train(
        client,
        chat,
        lambda _: [rl.Group(GridWalk, options.group_size, seed) for seed in seeds(options.groups)],
        steps=options.steps,
        learning_rate=options.learning_rate,
        params=params,
        loss=options.loss,
        staleness=options.staleness,
        steps_ahead=options.steps_ahead,
        seed=options.seed,
        begin=options.begin,
        save_every=options.save_every,
        advantages=step_advantages,
    )
    after = await walk("newest")
    stale, control = (await walk("first")).mean_reward, (await walk("nothing")).mean_reward
    random, blind = blind_returns()
    arrived = float(np.mean([trajectory.end == "terminated" for trajectory in after.trajectories]))
    success = after.mean_reward
    return grpo.Outcome(
        history,
        success,
        report=f"return on new boards {before:.3f} before RL, {success:.3f} after ({arrived:.0%} arrived)\n"
        f"with the first board only {stale:.3f}, on blank boards {control:.3f}, "
        f"random policy {random:.3f}, best blind policy {blind:.3f}",
        wrong=grpo.verdict(arrived, success >= 0.8 and control < blind + 0.1 and stale < success - 0.2),
        title="a walk to a goal that hops",
        levels={"first board only, after": stale, "best blind policy": blind, "blank boards, after": control},
        shown=grpo.pictures_of(after.trajectories[0], GridWalk().reset(seed=new[0])[0][1]),
    )


def blind_returns() -> tuple[float, float]:
    """The mean return over all boards of random moves, and of the best policy that sees nothing. Both are exact.

    What a policy can do without pictures is to choose a sequence of moves: this follows all of them.
    """
    starts = DISTANCES >= NEAREST
    states = (starts / np.maximum(DISTANCES, 1) / starts.sum()).reshape(1, -1)  # probability / distance at the start
    hops = (DISTANCES[:, :, None] == DISTANCES[:, None]) * (DISTANCES > 0)[:, :, None]  # [walker, goal, next goal]
    hops = hops / np.maximum(hops.sum(2, keepdims=True), 1)
    saved, follow = [], []
    for cells in NEXT.values():
        saved.append((DISTANCES - DISTANCES[cells]).reshape(-1))
        after = np.zeros((CELLS**2,) * 4)  # [walker, goal, next walker, next goal]
        after[np.arange(CELLS**2), :, cells] = hops[cells]
        follow.append(after.reshape(CELLS**4, CELLS**4))
    returns, best = np.zeros(1), 0.0
    for turn in range(LIMIT):
        returns = np.concatenate([returns + states @ save for save in saved])
        best = max(best, float(returns.max()))
        if turn + 1 < LIMIT:
            states = np.concatenate([states @ matrix for matrix in follow])
    return float(returns.mean()), best


if __name__ == "__main__":
    grpo.run_example(
        run, "grid_walk", __doc__.splitlines()[0], DEFAULTS, tinker.PromptLayout("text-first", CELLS * PIXELS)
    )
