"""What a run is trained with. Every field is checked when the settings are made."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from tinker_local.types import InvalidRequestError
from tinker_local.types.errors import brief

Shape: TypeAlias = Literal["cosine", "linear", "constant"]

HOUR, TEN_YEARS = 3600, 10 * 365 * 86400
"""Seconds: the bounds of a checkpoint's lifetime, here and at the hosted service."""

FREE_TO_CHANGE = ("evaluate_every", "save_every", "keep_days", "answer_tokens", "answer_rows", "samples_shown")
"""Fields that another value may have when a run is resumed: they do not change what is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a run. InvalidRequestError, whose message names the field and its value, for one that cannot be.

    Args:
        learning_rate: The peak, which the first step after the warm-up has.
        batch_size: Rows (pairs, with preferences) of one step.
        rank: Of the LoRA adapter.
        epochs: Passes over the rows; may be a fraction.
        steps: Ends the run after so many steps if that is earlier; the schedule then ends there, too.
        seed: Of the adapter's first weights, of the order of rows, and of which rows are held out.
        warmup: The share of all steps in which the learning rate rises to its peak.
        shape: How it falls afterwards, towards zero: "cosine", "linear", or "constant" for not at all.
        weight_decay: Of AdamW.
        clip: The gradient is scaled down to this norm; 0: never.
        beta1: Of AdamW.
        beta2: Of AdamW.
        eps: Of AdamW.
        dpo_beta: With preferences: how dear it is to differ from the reference.
        held_out: Rows that are not trained on and measure the run: a share below 1, or a number of rows; 0: none.
        evaluate_every: Steps from one evaluation to the next; 0: before the first step and after the last.
        save_every: Steps from one checkpoint to the next; 0: at the end alone.
        keep_days: Days after which a checkpoint that is not the last expires; None: never. The last stays.
        answer_tokens: The longest answer that an evaluation samples; None: by the longest of the held-out answers.
        answer_rows: Held-out rows at most that an evaluation samples an answer to.
        samples_shown: Answers that each evaluation shows.
    """

    learning_rate: float
    batch_size: int
    rank: int = 32
    epochs: float = 1.0
    steps: int | None = None
    seed: int = 0
    warmup: float = 0.05
    shape: Shape = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    dpo_beta: float = 0.1
    held_out: float = 0.05
    evaluate_every: int = 0
    save_every: int = 0
    keep_days: float | None = 7.0
    answer_tokens: int | None = None
    answer_rows: int = 100
    samples_shown: int = 2

    def __post_init__(self) -> None:
        self._number("learning_rate", above=0, most=1)
        self._whole("batch_size", least=1)
        self._whole("rank", least=1)
        self._number("epochs", above=0)
        self._whole("steps", least=1, optional=True)
        self._whole("seed", least=0, most=2**31 - 1)
        self._number("warmup", least=0, most=1)
        if self.shape not in get_args(Shape):
            raise InvalidRequestError(f"shape: must be cosine, linear or constant, not {brief(self.shape)}")
        self._number("weight_decay", least=0)
        self._number("clip", least=0)
        self._number("beta1", least=0, below=1)
        self._number("beta2", least=0, below=1)
        self._number("eps", above=0)
        self._number("dpo_beta", above=0)
        self._number("held_out", least=0)
        if self.held_out >= 1 and self.held_out != int(self.held_out):
            raise InvalidRequestError(
                f"held_out: must be a share below 1 or a whole number of rows, not {self.held_out:g}"
            )
        self._whole("evaluate_every", least=0)
        self._whole("save_every", least=0)
        if self.keep_days is not None:
            self._number("keep_days", least=HOUR / 86400, most=TEN_YEARS / 86400)
        self._whole("answer_tokens", least=1, optional=True)
        self._whole("answer_rows", least=1)
        self._whole("samples_shown", least=0)

    @property
    def ttl_seconds(self) -> int | None:
        """`keep_days` as the SDK has it."""
        return None if self.keep_days is None else round(self.keep_days * 86400)

    def as_json(self) -> dict[str, Any]:
        """For `run.json`."""
        return asdict(self)

    def _number(
        self,
        name: str,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        below: float | None = None,
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequestError(f"{name}: must be a number, not {brief(value)}")
        if least is not None and value < least:
            raise InvalidRequestError(f"{name}: must be at least {least:.4g}, not {value:g}")
        if above is not None and value <= above:
            raise InvalidRequestError(f"{name}: must be more than {above:g}, not {value:g}")
        if most is not None and value > most:
            raise InvalidRequestError(f"{name}: must be at most {most:g}, not {value:g}")
        if below is not None and value >= below:
            raise InvalidRequestError(f"{name}: must be less than {below:g}, not {value:g}")

    def _whole(self, name: str, *, least: int, most: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{name}: must be a whole number, not {brief(value)}")
        self._number(name, least=least, most=most)


def made_of(values: Mapping[str, Any]) -> TrainSettings:
    """`TrainSettings` of values by their names; InvalidRequestError names one that is not a setting, or is missing."""
    known = {each.name for each in fields(TrainSettings)}
    if strange := sorted(set(values) - known):
        raise InvalidRequestError(f"{strange[0]}: is not a setting; they are {', '.join(sorted(known))}")
    for name in ("learning_rate", "batch_size"):
        if name not in values:
            raise InvalidRequestError(f"{name}: is missing")
    return TrainSettings(**values)


def check_unchanged(began: TrainSettings, asked: Mapping[str, Any], folder: object) -> TrainSettings:
    """The settings to resume with: those that the run of `folder` began with, and of `asked` what may change.

    InvalidRequestError for a value that would change what is learnt.
    """
    for name, value in asked.items():
        if name not in FREE_TO_CHANGE and getattr(began, name, None) != value:
            raise InvalidRequestError(
                f"{name}: the run in {folder} began with {getattr(began, name, None)} and cannot go on with {value}; "
                "leave it out, or begin in another folder"
            )
    return made_of({**began.as_json(), **asked})
