"""Real Gymnasium environments as environments of rollouts. The sampler reads a script."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import tinker
from gymnasium import spaces
from tinker_local.client import rl
from tinker_local.client.rl.gymnasium import GymnasiumEnvironment
from tinker_local.types import InvalidRequestError

from tests.rl.scripted_sampler import Request, ScriptedSampler, make_chat

PARAMS = tinker.SamplingParams(max_tokens=16)
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


class Corridor(gymnasium.Env):
    """Four cells of 8 x 8 pixels, the own one white; each way costs 0.25, the last cell gives 1 more."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, *, images: bool = True) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (8, 32, 3), np.uint8) if images else spaces.Dict({})
        self.action_space = spaces.Discrete(2)
        self.images = images
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(0, 2))
        return self._see(), {"cell": self.cell}

    def step(self, action: int) -> Any:
        self.cell = max(0, self.cell + (1 if action else -1))
        over = self.cell == 3
        return self._see(), np.float64(0.75 if over else -0.25), np.bool_(over), False, {"cell": self.cell}

    def render(self) -> Any:
        pixels = np.zeros((8, 32, 3), np.uint8)
        pixels[:, 8 * self.cell : 8 * self.cell + 8] = 255
        return pixels

    def close(self) -> None:
        self.closed += 1

    def _see(self) -> Any:
        return self.render() if self.images else {}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    gymnasium.register("tests/Corridor-v0", Corridor, max_episode_steps=4)
    yield
    del gymnasium.registry["tests/Corridor-v0"]


@pytest.fixture
def sampler() -> Iterator[ScriptedSampler]:
    sampler = ScriptedSampler(lambda request: "go")
    yield sampler
    sampler.close()


@pytest.mark.parametrize("render_mode", ["rgb_array", None])
async def test_an_environment_of_images_runs_with_a_start_of_its_own_seed(
    sampler: ScriptedSampler, render_mode: Any
) -> None:
    made: list[Any] = []

    def make() -> GymnasiumEnvironment:
        made.append(gymnasium.make("tests/Corridor-v0", render_mode=render_mode))
        return GymnasiumEnvironment(made[-1], {"Go": 1, "back": 0}, instruction="Go or back?")

    groups = [rl.Group(make, 3, seed=seed) for seed in range(4)]
    rollouts = await rl.rollout(groups, sampler, make_chat(), PARAMS)
    starts = [{len(trajectory.turns) for trajectory in group} for group in rollouts.groups]
    expected = [3 - int(np.random.default_rng(seed).integers(0, 2)) for seed in range(4)]
    assert starts == [{turns} for turns in expected]
    for trajectory in rollouts.trajectories:
        assert trajectory.end == "terminated"
        assert trajectory.reward == pytest.approx(1 - 0.25 * len(trajectory.turns))
        assert trajectory.turns[-1].info == {"cell": 3}
    assert sampler.requests[0].text == "<|im_start|>user\nGo or back?[image]<|im_end|>\n<|im_start|>assistant\n"
    images: list[Any] = [request.prompt.chunks[1] for request in sampler.requests]
    first = {image.data for image in images}
    assert len(first) == len(set(expected))  # equal pixels are equal files
    assert [environment.unwrapped.closed for environment in made] == [1] * 12


async def test_what_is_no_action_costs_a_turn_and_is_explained(sampler: ScriptedSampler) -> None:
    sampler.script = lambda request: " BACK\n" if "This is not an action" in request.text else "jump!"

    def make() -> GymnasiumEnvironment:
        environment = gymnasium.make("tests/Corridor-v0")
        return GymnasiumEnvironment(environment, {"go": 1, "back": 0}, invalid_reward=-2)

    rollouts = await rl.rollout([rl.Group(make, 1, seed=0)], sampler, make_chat(), PARAMS, max_turns=8)
    (trajectory,) = rollouts.trajectories
    assert trajectory.end == "truncated"  # Gymnasium's limit of 4 steps; an invalid action does not count
    assert [turn.reward for turn in trajectory.turns] == [-2, -0.25, -0.25, -0.25, -0.25]
    assert trajectory.turns[0].info == {"invalid_action": True}
    assert "This is not an action: 'jump!'; the actions are go, back" in sampler.requests[1].text


async def test_frozen_lake_is_walked_as_text(sampler: ScriptedSampler) -> None:
    path = iter(["down", "Down", " right ", "RIGHT", "down", "right"])
    sampler.script = lambda request: next(path)

    def make() -> GymnasiumEnvironment:
        return GymnasiumEnvironment(gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi"), MOVES)

    rollouts = await rl.rollout([rl.Group(make, 1, seed=0)], sampler, make_chat(), PARAMS)
    (trajectory,) = rollouts.trajectories
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("terminated", 1.0, 6)
    assert "\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG" in sampler.requests[0].text
    assert "(Right)" in sampler.requests[-1].text
    assert all(turn.info["prob"] == 1.0 for turn in trajectory.turns)


async def test_frozen_lake_shows_its_number_or_what_observe_makes_of_it(sampler: ScriptedSampler) -> None:
    sampler.script = lambda request: "down"

    def seen(**settings: Any) -> Any:
        return lambda: GymnasiumEnvironment(gymnasium.make("FrozenLake-v1", is_slippery=False), MOVES, **settings)

    await rl.rollout([rl.Group(seen())], sampler, make_chat(), PARAMS, max_turns=2)
    assert "user\n0<|im_end|>" in sampler.requests[0].text
    assert sampler.requests[-1].text.count("user\n4<|im_end|>") == 1
    place = seen(observe=lambda cell, info: ["Row ", f"{cell // 4}"], instruction="Walk. ")
    await rl.rollout([rl.Group(place)], sampler, make_chat(), PARAMS, max_turns=2)
    assert "user\nWalk. Row 0<|im_end|>" in sampler.requests[-2].text
    assert "user\nRow 1<|im_end|>" in sampler.requests[-1].text
    blind = seen(observe=lambda cell, info: None, instruction="Walk.")
    await rl.rollout([rl.Group(blind)], sampler, make_chat(), PARAMS, max_turns=1)
    assert "user\nWalk.<|im_end|>" in sampler.requests[-1].text


async def test_a_function_may_read_actions(sampler: ScriptedSampler) -> None:
    def read(text: str) -> int:
        return int(text.rpartition("=")[2])

    def script(request: Request) -> str:
        return "action=x" if "assistant\naction" not in request.text else "action=1"

    sampler.script = script
    rollouts = await rl.rollout(
        [rl.Group(lambda: GymnasiumEnvironment(gymnasium.make("tests/Corridor-v0"), read), 1, seed=0)],
        sampler,
        make_chat(),
        PARAMS,
    )
    (trajectory,) = rollouts.trajectories
    assert trajectory.turns[0].info == {"invalid_action": True}
    assert trajectory.end == "terminated"


async def test_an_observation_that_cannot_be_shown_says_what_to_do(sampler: ScriptedSampler) -> None:
    def make() -> GymnasiumEnvironment:
        return GymnasiumEnvironment(Corridor(images=False), {"go": 1})

    with pytest.raises(rl.AllTrajectoriesFailedError, match=r"an observation of type dict .* pass observe="):
        await rl.rollout([rl.Group(make, 1)], sampler, make_chat(), PARAMS)


@pytest.mark.parametrize("actions", [{"Go": 1, "go ": 0}, {}])
def test_actions_that_cannot_be_told_apart_are_refused(actions: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="actions: needs texts that differ"):
        GymnasiumEnvironment(Corridor(), actions)
