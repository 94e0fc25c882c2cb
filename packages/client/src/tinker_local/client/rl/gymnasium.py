"""Gymnasium's environments with text as actions. Does not import Gymnasium."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tinker_local.client.rl.environment import Observation, Reset, Step
from tinker_local.types import InvalidRequestError


class GymnasiumEnvironment:
    """Adapts a `gymnasium.Env` to `Environment`.

    Args:
        environment: The environment, e.g. gymnasium.make("FrozenLake-v1", render_mode="rgb_array").
        actions: Maps the model's text to the environment's action, ignoring case and surrounding space. Or a function
            that reads an action from text and raises ValueError if it cannot.
        observe: Maps (observation, info) to what the model sees. Default: what the environment renders, if its render
            mode is "rgb_array" or "ansi"; otherwise the observation, which must be text, a uint8 image [H, W, 3] or
            [H, W], or a number.
        instruction: Shown before the first observation.
        invalid_reward: The reward for text that is not an action. The environment is then not stepped; the model sees
            the list of actions, and `info["invalid_action"]` is True. Combine it with `max_turns`.

    Raises InvalidRequestError at once if `actions` is empty or has entries that differ only in case or space, and at
    the first observation that cannot be shown.
    """

    def __init__(
        self,
        environment: Any,
        actions: Mapping[str, Any] | Callable[[str], Any],
        *,
        observe: Callable[[Any, Mapping[str, Any]], Observation] | None = None,
        instruction: str = "",
        invalid_reward: float = 0.0,
    ) -> None:
        self.environment = environment
        self._actions = {} if callable(actions) else _readable(actions)
        self._read = actions if callable(actions) else self._look_up
        self._observe = observe or self._show
        self._instruction = instruction
        self._invalid_reward = invalid_reward

    def reset(self, *, seed: int | None = None) -> Reset:
        observation, info = self.environment.reset(seed=seed)
        shown: Any = self._observe(observation, info)
        if self._instruction:
            parts = shown if isinstance(shown, (list, tuple)) else [] if shown is None else [shown]
            shown = [self._instruction, *parts]
        return shown, info

    def step(self, action: str) -> Step:
        try:
            chosen = self._read(action)
        except ValueError as error:
            return f"This is not an action: {error}", self._invalid_reward, False, False, {"invalid_action": True}
        observation, reward, terminated, truncated, info = self.environment.step(chosen)
        return self._observe(observation, info), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        self.environment.close()

    def _look_up(self, text: str) -> Any:
        if (plain := _plain(text)) not in self._actions:
            raise ValueError(f"{plain[:80]!r}; the actions are {', '.join(self._actions)}")
        return self._actions[plain]

    def _show(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        match getattr(self.environment, "render_mode", None):
            case "rgb_array":
                return np.asarray(self.environment.render(), np.uint8)
            case "ansi":
                return str(self.environment.render())
        match observation:
            case str():
                return observation
            case np.ndarray() if observation.dtype == np.uint8 and observation.ndim in (2, 3):
                return observation
            case bool() | int() | float() | np.number() | np.bool_():
                return str(observation)
        raise InvalidRequestError(
            f"observe: an observation of type {type(observation).__name__} is neither text nor an image nor a number; "
            'pass observe=, or make the environment with render_mode="rgb_array"'
        )


def _readable(actions: Mapping[str, Any]) -> dict[str, Any]:
    readable = {_plain(text): action for text, action in actions.items()}
    if not actions or len(readable) < len(actions):
        listed = ", ".join(map(repr, actions))
        raise InvalidRequestError(
            f"actions: needs texts that differ in more than case and surrounding space, not {listed}"
        )
    return readable


def _plain(text: str) -> str:
    return text.strip().casefold()
