"""Parameters that requests carry: LoRA, optimizer, sampling."""

import math
from typing import Annotated, Any

from pydantic import Field, field_validator
from tinker_local.types.base import Frozen


class LoraConfig(Frozen):
    """A LoRA adapter: its rank, the matrices it trains, and the seed of its initialisation (None: random)."""

    rank: Annotated[int, Field(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamParams(Frozen):
    """Settings of one AdamW step, with decoupled weight decay; `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @field_validator("*", mode="after")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"must be a finite number, not {value}")
        return value

    @field_validator("beta1", "beta2", mode="after")
    @classmethod
    def _beta(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError(f"must be in [0, 1), not {value}")
        return value

    @field_validator("eps", "weight_decay", "grad_clip_norm", "learning_rate", mode="after")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"must not be negative, not {value}")
        return value


class SamplingParams(Frozen):
    """How to sample.

    `max_tokens` None: up to the context length. `stop`: a text, texts or token ids; None stops at EOS alone, an empty
    list never stops early. `top_k` -1: no limit. `temperature` 0: greedy. `seed`: any integer; None: random.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, stop: Any) -> Any:
        stop = tuple(stop) if isinstance(stop, list) else stop
        if stop is None or (isinstance(stop, str) and stop):
            return stop
        if isinstance(stop, tuple) and (
            all(isinstance(item, str) and item for item in stop) or all(type(item) is int for item in stop)
        ):
            return stop
        raise ValueError(f"must be a text, a list of texts or a list of token ids, none of them empty, not {stop!r}")

    @field_validator("temperature", mode="after")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"must be a finite number >= 0, not {value}")
        return value

    @field_validator("top_k", mode="after")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"must be -1 (no limit) or at least 1, not {value}")
        return value

    @field_validator("top_p", mode="after")
    @classmethod
    def _top_p(cls, value: float) -> float:
        if not 0 < value <= 1:
            raise ValueError(f"must be in (0, 1], not {value}")
        return value
