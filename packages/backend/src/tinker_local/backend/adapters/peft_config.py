"""`PeftConfig`: PEFT's `adapter_config.json`, and which modules it names with which rank and scale. What would make an
adapter more than LoRA is refused by the name of its field."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, WEIGHTS
from tinker_local.types import InvalidRequestError
from tinker_local.types.errors import brief

MAX_CONFIG_BYTES = 2**20
"""Of `adapter_config.json`. PEFT writes the path of every module where last names do not tell them apart."""

MAX_ALPHA = 2**31

MATCHING_SECONDS = 20.0
"""How long the regular expressions of one adapter may take in all."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Fields of PEFT's configuration, and the values that say nothing else than a trainer here computes. (PiSSA, OLoRA and
others change the base model's weights when they begin.)"""

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the base model's matrices too",
    "use_qalora": "QA-LoRA pools what A reads",
    "use_bdlora": "its factors are of blocks",
    "fan_in_fan_out": "its matrices are transposed",
    "lora_bias": "its B has a bias",
    "modules_to_save": "these modules were trained whole",
    "trainable_token_indices": "rows of the embedding were trained",
    "layer_replication": "the base model's layers are used several times",
    "alora_invocation_tokens": "it acts after these tokens only",
    "ensure_weight_tying": "it changes the embedding with the head",
    "megatron_config": "its modules are Megatron's",
}
"""Why a field of PEFT's configuration is refused if it is set."""

_TOLD = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "base_model_name_or_path"}
_TOLD |= {"target_parameters", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_ELSEWHERE = {
    *("task_type", "auto_mapping", "revision", "inference_mode", "peft_version", "base_model", "runtime_config"),
    *("megatron_core", "qalora_group_size", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
    *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
}
"""Fields that say nothing, or nothing without another field, or (the last, of ms-swift) how it was trained."""


class Expressions:
    """Regular expressions that a client sent. Some take for ever, and Python's `re` lets no other thread run meanwhile:
    they are matched by `regex`, which transformers needs, for `MATCHING_SECONDS` in all."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._left = MATCHING_SECONDS

    def match(self, field: str, expression: str, path: str) -> bool:
        """Whether `expression`, of the field `field`, matches all of `path`; InvalidRequestError if it cannot."""
        import regex

        begun = time.monotonic()
        try:
            if expression not in self._compiled:
                self._compiled[expression] = regex.compile(expression)
            found = self._compiled[expression].fullmatch(path, timeout=max(self._left, 1e-3), concurrent=True)
        except (regex.error, RecursionError) as error:
            raise InvalidRequestError(
                f"{CONFIG}: {field}: {brief(expression)} is not a regular expression: {error}"
            ) from None
        except TimeoutError:
            raise InvalidRequestError(
                f"{CONFIG}: {field}: {brief(expression)}: matching takes more than {MATCHING_SECONDS:g} seconds"
            ) from None
        self._left -= time.monotonic() - begun
        return found is not None


@dataclass(frozen=True, slots=True, eq=False)
class PeftConfig:
    """The fields of PEFT's `LoraConfig` of the same names; `rslora`, `alpha` and `rank` are `use_rslora`, `lora_alpha`
    and `r`, and `base_model` may be empty."""

    rank: int
    alpha: float
    rslora: bool
    dropout: Any
    base_model: str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    _expressions: Expressions = field(default_factory=Expressions)

    def rank_of(self, path: str) -> int:
        """Of the module at `path`."""
        return int(self._of("rank_pattern", self.rank_pattern, path, self.rank))

    def alpha_of(self, path: str) -> float:
        """Of the module at `path`."""
        return self._of("alpha_pattern", self.alpha_pattern, path, self.alpha)

    def divisor(self, rank: int) -> float:
        """What alpha is divided by, for the scale of a module of this rank."""
        return math.sqrt(rank) if self.rslora else rank

    def _of(self, name: str, pattern: Mapping[str, float], path: str, default: float) -> float:
        """By the first key that matches the path or an end of it, as in PEFT's `get_pattern_key`."""
        for key, value in pattern.items():
            if self._expressions.match(name, rf"(.*\.)?({key})", path):
                return value
        return default

    def targets(self, path: str) -> bool:
        """Whether PEFT puts an adapter on the module at `path`, as its `check_target_module_exists` says."""
        if any(path == each or path.endswith(f".{each}") for each in self.target_parameters):
            return True
        if self._named("exclude_modules", self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return path != HEAD
            return self._named("target_modules", self.target_modules, path)
        return self._named("target_modules", self.target_modules, path) and self._in_layers(path)

    def _named(self, name: str, given: str | tuple[str, ...], path: str) -> bool:
        if isinstance(given, str):
            return bool(given) and self._expressions.match(name, given, path)
        return any(path == each or path.endswith(f".{each}") for each in given)

    def _in_layers(self, path: str) -> bool:
        if not self.layers:
            return True
        for pattern in self.layers_pattern or (r"[^.]*",):
            begin = r"(?:.*?\.)?" if self.layers_pattern else r".*?\."
            for layer in self.layers:
                if self._expressions.match("layers_pattern", rf"{begin}(?:{pattern})\.{layer}\..*", path):
                    return True
        return False


def read_config(folder: Path) -> PeftConfig:
    """The configuration of the adapter in `folder`; InvalidRequestError for one that is not LoRA alone, and if a file
    is missing, encrypted or malformed."""
    given = _json(folder)
    _check_fields(given)
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if not _is_rank(rank):
        raise InvalidRequestError(f"{CONFIG}: r: {brief(rank)} is not a rank")
    if not _is_alpha(alpha):
        raise InvalidRequestError(f"{CONFIG}: lora_alpha: {brief(alpha)} is not between 0 and {MAX_ALPHA:,}")
    ranks, alphas = (_pattern(given, name) for name in ("rank_pattern", "alpha_pattern"))
    for key, value in ranks.items():
        if not _is_rank(value):
            raise InvalidRequestError(f"{CONFIG}: rank_pattern: {brief({key: value})}: is not a rank")
    for key, value in alphas.items():
        if not _is_alpha(value):
            raise InvalidRequestError(
                f"{CONFIG}: alpha_pattern: {brief({key: value})}: is not between 0 and {MAX_ALPHA:,}"
            )
    modules, excluded = (_modules(given, name) for name in ("target_modules", "exclude_modules"))
    layers = given.get("layers_to_transform")
    numbers = tuple(layers) if isinstance(layers, list) else () if layers is None else (layers,)
    if not all(isinstance(each, int) for each in numbers):
        raise InvalidRequestError(f"{CONFIG}: layers_to_transform: {brief(layers)} are not numbers of layers")
    return PeftConfig(
        rank=int(rank or 0),
        alpha=float(alpha or 0),
        rslora=bool(given.get("use_rslora")),
        dropout=given.get("lora_dropout"),
        base_model=str(given.get("base_model_name_or_path") or ""),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=modules,
        target_parameters=_texts(given, "target_parameters"),
        exclude_modules=excluded,
        layers=numbers,
        layers_pattern=_texts(given, "layers_pattern"),
    )


def _json(folder: Path) -> dict[str, Any]:
    for file in (CONFIG, WEIGHTS):
        if (folder / f"{file}{AGE}").exists():
            raise InvalidRequestError(f"{file}{AGE} is encrypted: decrypt it with `age -d` first")
        if not (folder / file).is_file():
            raise InvalidRequestError(f"the adapter has no {file}; PEFT's save_pretrained writes it")
    if (size := (folder / CONFIG).stat().st_size) > MAX_CONFIG_BYTES:
        raise InvalidRequestError(f"{CONFIG}: {size} bytes are more than {MAX_CONFIG_BYTES}")
    try:
        given = json.loads((folder / CONFIG).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{CONFIG}: is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{CONFIG}: holds no object")
    return given


def _check_fields(given: Mapping[str, Any]) -> None:
    for name, value in ({"peft_type": None} | dict(given)).items():
        if name in _ONLY:
            if value not in _ONLY[name] and (value is not None or name == "peft_type"):
                raise InvalidRequestError(f"{CONFIG}: {name}: {brief(value)} is not one of {list(_ONLY[name])}")
        elif value and name in _REFUSED:
            raise InvalidRequestError(f"{CONFIG}: {name}: {brief(value)} is not supported: {_REFUSED[name]}")
        elif value and name not in _TOLD | _ELSEWHERE:
            raise InvalidRequestError(f"{CONFIG}: {name}: {brief(value)} is not known here, and may change the result")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_ALPHA


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_ALPHA


def _pattern(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = given.get(name) or {}
    if not isinstance(pattern, dict):
        raise InvalidRequestError(f"{CONFIG}: {name}: {brief(pattern)} is not an object")
    return pattern


def _modules(given: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    modules = given.get(name) or ()
    return modules if isinstance(modules, str) else _texts(given, name)


def _texts(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = given.get(name) or []
    if isinstance(texts, str):
        return (texts,)
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise InvalidRequestError(f"{CONFIG}: {name}: {brief(texts)} is not a list of names")
    return tuple(texts)
