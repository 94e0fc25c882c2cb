"""`PeftAdapter`: a LoRA adapter as PEFT, or an export, has it on disk; and the same adapter as this project's trainers
have theirs. Whatever cannot become exactly that is refused by name."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from tinker_local.backend.adapters.adapter import FACTORS, HEAD, LORA_ALPHA, AdapterState, tensor_name
from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, WEIGHTS
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.adapters.peft_experts import check_experts_together, from_parameters
from tinker_local.backend.families.family import Family, SplitRows
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.types import InvalidRequestError, LoraConfig
from tinker_local.types.errors import brief

Tensors = Mapping[str, npt.NDArray[np.float32]]

MAX_CONFIG_BYTES = 2**20
"""Of `adapter_config.json`. PEFT writes the path of every module where last names do not tell them apart."""

MAX_HEADER_BYTES = 2**24
"""Of the weights' header: 100,000 tensors. Python parses it in one piece, and nothing else runs meanwhile."""

LONGEST_NAME = 512
"""Characters of a tensor's name, which messages quote."""

MAX_ALPHA = 2**31

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

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
}
"""Why a field of PEFT's configuration is refused if it is set."""

_TOLD = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "base_model_name_or_path"}
_TOLD |= {"target_parameters"}
_ELSEWHERE = {
    *("task_type", "auto_mapping", "revision", "inference_mode", "peft_version", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config", "base_model"),
}
"""Fields that say nothing which the names of the tensors do not, or nothing without another field."""

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True, eq=False)
class PeftAdapter:
    """`tensors`: A [r, in] and B [out, r] in float32 by the names in the file. `factor`: what B is multiplied by, since
    the scale of an adapter is alpha / r with one alpha here. `joined`: modules whose adapter joins those of its parts,
    as in an export for PEFT. `base_model`: as the adapter names it, maybe empty. `notes`: what a user should know.
    `targets`: the last names of the modules that its configuration says it trains, if it lists them."""

    rank: int
    factor: float
    joined: frozenset[str]
    base_model: str
    tensors: Tensors
    notes: tuple[str, ...]
    targets: frozenset[str] = frozenset()

    def config(self, family: Family) -> LoraConfig:
        """What it trains of a model of `family`; InvalidRequestError for a module that adapters do not reach there."""
        named = self._named(family)
        trained = {self._flag(path, name, family) for (path, _), name in named.items()}
        # Names that no module of transformers has: what lists them is an export.
        of_exports = {*(family.lora.experts.names if family.lora.experts else ())}
        of_exports.update(*(rows.projections for rows in family.lora.split.values()))
        self._check_complete(of_exports.difference(path.rpartition(".")[2] for path, _ in named))
        return LoraConfig(rank=self.rank, seed=0, **{flag: flag in trained for flag in _FLAGS})

    @staticmethod
    def _flag(path: str, name: str, family: Family) -> str:
        parent, _, last = path.rpartition(".")
        if path == HEAD:
            return "train_unembed"
        if family.in_tower(path):
            return "train_vision"
        if last in family.lora.split:
            path = f"{parent}.{family.lora.split[last].projections[0]}"
        if (flag := family.lora.flag(path)) is None:
            raise InvalidRequestError(f"{WEIGHTS}: {name}: adapters of this model do not train the module {path!r}")
        return f"train_{flag}"

    def state(self, fresh: AdapterState, family: Family) -> tuple[AdapterState, tuple[str, ...]]:
        """The adapter as the trainer that made `fresh`, a new adapter of this `config`, has it; and what a user should
        know of that. Projections that it does not have stay as they are in `fresh`: B is 0.

        InvalidRequestError if it has others than the model, of other shapes, or in some layers only.
        """
        named = self._named(family)
        found: dict[str, npt.NDArray[np.float32]] = {}
        notes: list[str] = []
        for path in dict.fromkeys(path for path, _ in named):
            parent, _, last = path.rpartition(".")
            lacking = [factor for factor in FACTORS if (path, factor) not in named]
            if lacking:
                there = next(named[path, factor] for factor in FACTORS if factor not in lacking)
                raise InvalidRequestError(f"{WEIGHTS}: has {there}, and no factor {lacking[0]} of that module")
            a_name, b_name = named[path, "A"], named[path, "B"]
            a, b = self.tensors[a_name], self.tensors[b_name]
            if (rows := family.lora.split.get(last)) is not None:
                found |= self._parts(parent, rows, last in self.joined, (a_name, a), (b_name, b), fresh)
                if last not in self.joined:
                    notes.append(f"the parts of {last} are trained with an A for each: {', '.join(rows.projections)}")
            else:
                for factor, name, array in (("A", a_name, a), ("B", b_name, b)):
                    own = tensor_name(path, factor)
                    _check_shape(name, array.shape, fresh.tensors, own)
                    found[own] = array
        begun = self._begun(found, fresh)
        self._check_complete(begun)
        if begun:
            notes.append(f"the adapter has no {', '.join(begun)}: these begin with B = 0, and training trains them too")
        folded = {name: self._folded(array) if ".lora_B." in name else array for name, array in found.items()}
        changed = replace(fresh, tensors={**fresh.tensors, **folded})
        if self.factor != 1:
            notes.append(self._told_factor([array for name, array in found.items() if ".lora_B." in name]))
        return changed, (*self.notes, *dict.fromkeys(notes))

    def _check_complete(self, lacking: Iterable[str]) -> None:
        """InvalidRequestError if the configuration names one of the projections `lacking`."""
        if left_out := ", ".join(sorted(self.targets.intersection(lacking))):
            raise InvalidRequestError(
                f"{CONFIG}: names {left_out} in target_modules, and {WEIGHTS} has no tensor of it: what was trained "
                "there is lost, as when PEFT loads an adapter of which it knows a part, and saves it again"
            )

    def _named(self, family: Family) -> dict[tuple[str, str], str]:
        """The names in the file by the module's path in the model and the factor."""
        found: dict[tuple[str, str], str] = {}
        for name in self.tensors:
            match = _NAME.fullmatch(name)
            if match is None:
                raise InvalidRequestError(f"{WEIGHTS}: {name}: {_why_not(name)}")
            key = family.own_path(match[1]), match[2]
            if key in found:
                raise InvalidRequestError(f"{WEIGHTS}: {found[key]} and {name} are of the same module")
            found[key] = name
        return found

    def _parts(
        self,
        parent: str,
        rows: SplitRows,
        joined: bool,
        named_a: tuple[str, npt.NDArray[np.float32]],
        named_b: tuple[str, npt.NDArray[np.float32]],
        fresh: AdapterState,
    ) -> dict[str, npt.NDArray[np.float32]]:
        """The adapters of the parts of a module: each has its rows of B, with the same A, or of one that is joined its
        own A and columns of B."""
        (a_name, a), (b_name, b) = named_a, named_b
        paths = [f"{parent}.{part}" for part in rows.projections]
        missing = [path for path in paths if tensor_name(path, "B") not in fresh.tensors]
        if missing or a.ndim != 2 or b.ndim != 2:
            raise InvalidRequestError(f"{WEIGHTS}: {b_name}: the model has no module {missing or paths}")
        heights = [fresh.tensors[tensor_name(path, "B")].shape[0] for path in paths]
        rank = self.rank * (len(paths) if joined else 1)
        inputs = fresh.tensors[tensor_name(paths[0], "A")].shape[1]
        for name, array, wanted in ((a_name, a, (rank, inputs)), (b_name, b, (sum(heights), rank))):
            if array.shape != wanted:
                raise _another_shape(name, array.shape, wanted)
        found, begin, left = {}, 0, b.copy()
        for place, (path, height) in enumerate(zip(paths, heights, strict=True)):
            columns = slice(place * self.rank, (place + 1) * self.rank) if joined else slice(None)
            found[tensor_name(path, "A")] = a[columns]
            found[tensor_name(path, "B")] = b[begin : begin + height, columns]
            left[begin : begin + height, columns] = 0
            begin += height
        if left.any():
            raise InvalidRequestError(
                f"{WEIGHTS}: {b_name}: rank {rank} is more than the adapter's {self.rank}, and its blocks beside the "
                f"diagonal are not 0, so that it is not the adapters of {', '.join(rows.projections)} joined"
            )
        return found

    def _begun(self, found: Tensors, fresh: AdapterState) -> list[str]:
        """The projections that the adapter does not have at all, by their last names; InvalidRequestError for one that
        it has in some layers."""
        missing = [name for name in fresh.tensors if name not in found]
        kinds = {_NUMBER.sub("*", name): name for name in found}
        for name in missing:
            if (other := kinds.get(_NUMBER.sub("*", name))) is not None:
                raise InvalidRequestError(
                    f"{WEIGHTS}: has no {name}, but {other}: an adapter here is on all layers or on none "
                    f"({len(missing)} tensors are missing)"
                )
        return list(dict.fromkeys(name.split(".")[-3] for name in missing))

    def _folded(self, b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):  # an infinite one is refused by the trainer
            return b if self.factor == 1 else (b.astype(np.float64) * self.factor).astype(np.float32)

    def _told_factor(self, factors: Sequence[npt.NDArray[np.float32]]) -> str:
        exact = all(np.array_equal(self._folded(b).astype(np.float64), b * np.float64(self.factor)) for b in factors)
        how = "exactly" if exact else "rounded to float32"
        scale = self.factor * LORA_ALPHA / self.rank
        return (
            f"the adapter's scale is {scale:g}, and {LORA_ALPHA} / r = {LORA_ALPHA / self.rank:g} here: B was "
            f"multiplied by {self.factor:g}, {how}"
        )


_FLAGS = ("train_unembed", "train_mlp", "train_attn", "train_vision")


def read_peft_adapter(folder: Path, family: Family) -> PeftAdapter:
    """The adapter in `folder`. InvalidRequestError for one that is not LoRA alone, as its configuration says, and for
    files that cannot be read or hold values that are not finite."""
    given = _config(folder)
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank < MAX_ALPHA:
        raise InvalidRequestError(f"{CONFIG}: r: {brief(rank)} is not a rank")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < MAX_ALPHA:
        raise InvalidRequestError(f"{CONFIG}: lora_alpha: {brief(alpha)} is not between 0 and {MAX_ALPHA:,}")
    factor = alpha / LORA_ALPHA
    if given.get("use_rslora"):
        if math.isqrt(rank) ** 2 != rank:
            raise InvalidRequestError(
                f"{CONFIG}: use_rslora: the scale is lora_alpha / sqrt(r) = {alpha:g} / sqrt({rank}), which no factor "
                f"turns exactly into {LORA_ALPHA} / {rank}; save it without use_rslora"
            )
        factor *= math.isqrt(rank)
    notes = []
    if dropout := given.get("lora_dropout"):
        notes.append(f"lora_dropout {dropout} is not applied: training here has no dropout")
    parent = _parent_of_experts(given, family)
    joined = _joined(given, family, rank, alpha, experts=parent is not None)
    if joined and given.get("use_rslora"):
        raise InvalidRequestError(
            f"{CONFIG}: use_rslora: with rank_pattern for {', '.join(sorted(joined))}, the adapter has several scales, "
            "lora_alpha over the square root of each rank, and one here has one scale"
        )
    base_model, tensors = given.get("base_model_name_or_path") or "", _tensors(folder / WEIGHTS)
    check_experts_together(tensors, family.lora.experts, WEIGHTS)
    if parent is not None and family.lora.experts is not None:
        tensors = from_parameters(tensors, family.lora.experts, parent, rank, WEIGHTS)
    listed = given.get("target_modules")
    targets = frozenset(str(each).rpartition(".")[2] for each in listed) if isinstance(listed, list) else frozenset()
    return PeftAdapter(rank, factor, joined, str(base_model), tensors, tuple(notes), targets)


def _config(folder: Path) -> dict[str, Any]:
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
    for field, value in ({"peft_type": None} | given).items():
        if field in _ONLY:
            if value not in _ONLY[field] and (value is not None or field == "peft_type"):
                raise InvalidRequestError(f"{CONFIG}: {field}: {brief(value)} is not one of {list(_ONLY[field])}")
        elif value and field in _REFUSED:
            raise InvalidRequestError(f"{CONFIG}: {field}: {brief(value)} is not supported: {_REFUSED[field]}")
        elif value and field not in _TOLD | _ELSEWHERE:
            raise InvalidRequestError(f"{CONFIG}: {field}: {brief(value)} is not known here, and may change the result")
    return given


def _parent_of_experts(given: Mapping[str, Any], family: Family) -> str | None:
    """The last name of the modules whose experts are trained as `target_parameters`; None without these.
    InvalidRequestError for other parameters."""
    parameters = given.get("target_parameters")
    if not parameters:
        return None
    parents, lasts = set[str](), list[str]()
    for each in parameters if isinstance(parameters, list) else [parameters]:
        path, _, last = str(each).rpartition(".")
        parents.add(path.rpartition(".")[2])
        lasts.append(last)
    whole = set(lasts) == {EXPERTS_GATE_UP, EXPERTS_DOWN}
    if family.lora.experts is None or not whole or len(parents) != 1 or "" in parents:
        raise InvalidRequestError(
            f"{CONFIG}: target_parameters: {brief(parameters)} is not supported: adapters here train parameters of "
            f"routed experts alone, {EXPERTS_GATE_UP} and {EXPERTS_DOWN} together, of models that have them"
        )
    return parents.pop()


def _joined(given: Mapping[str, Any], family: Family, rank: int, alpha: float, *, experts: bool) -> frozenset[str]:
    """The modules whose patterns are those of an export; InvalidRequestError for other patterns."""
    ranks, alphas = (given.get(field) or {} for field in ("rank_pattern", "alpha_pattern"))
    for field, pattern, one in (("rank_pattern", ranks, rank), ("alpha_pattern", alphas, alpha)):
        if not isinstance(pattern, dict):
            raise InvalidRequestError(f"{CONFIG}: {field}: {brief(pattern)} is not an object")
        for module, value in pattern.items():
            rows = family.lora.split.get(module)
            parts = 2 if experts and module == EXPERTS_GATE_UP else 0 if rows is None else len(rows.projections)
            if not parts or value != one * parts or module not in ranks or module not in alphas:
                raise InvalidRequestError(
                    f"{CONFIG}: {field}: {brief({module: value})} is not supported: an adapter here has one rank and "
                    f"one scale; these are r {rank} and lora_alpha {alpha:g}"
                )
    return frozenset(ranks)


def _tensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors of a file in float32."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if MAX_HEADER_BYTES < length <= path.stat().st_size:
        raise InvalidRequestError(f"{WEIGHTS}: a header of {length} bytes is more than {MAX_HEADER_BYTES}")
    try:
        with safe_open(path, framework="numpy"):
            pass  # it has checked the header and all places
    except SafetensorError as error:
        raise InvalidRequestError(f"{WEIGHTS}: is not a whole safetensors file: {error}") from None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        content = np.fromfile(file, np.uint8)
    header.pop("__metadata__", None)
    if not header:
        raise InvalidRequestError(f"{WEIGHTS}: holds no tensor")
    found = {}
    for name, place in header.items():
        if len(name) > LONGEST_NAME:
            raise InvalidRequestError(f"{WEIGHTS}: {brief(name)}: {len(name)} characters are more than {LONGEST_NAME}")
        if (dtype := _DTYPES.get(place["dtype"])) is None:
            raise InvalidRequestError(f"{WEIGHTS}: {name}: {place['dtype']} is not one of {', '.join(_DTYPES)}")
        try:
            array = content[slice(*place["data_offsets"])].view(dtype).reshape(place["shape"])
        except ValueError as error:  # numpy has at most 64 dimensions, and bounds even those of no values
            raise InvalidRequestError(f"{WEIGHTS}: {name}: shape {brief(place['shape'])}: {error}") from None
        found[name] = in_float32(array)
        if not np.isfinite(found[name]).all():
            count = int((~np.isfinite(found[name])).sum())
            raise InvalidRequestError(f"{WEIGHTS}: {name}: {count} of {array.size} values are not finite")
    return found


def _check_shape(name: str, shape: tuple[int, ...], tensors: Mapping[str, npt.NDArray[Any]], own: str) -> None:
    if own not in tensors:
        raise InvalidRequestError(f"{WEIGHTS}: {name}: adapters of this model do not train such a module")
    if shape != tensors[own].shape:
        raise _another_shape(name, shape, tensors[own].shape)


def _another_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{WEIGHTS}: {name}: has shape {list(shape)}, and the base model and the adapter's r want {list(wanted)}"
    )


def _why_not(name: str) -> str:
    """Why a tensor is not a factor of LoRA."""
    if name.endswith("base_layer.weight") or "embed_tokens" in name:
        return "is a whole matrix of the base model; save the adapter with save_embedding_layers=False"
    if "lora_magnitude_vector" in name:
        return "is a magnitude of DoRA"
    return "is not lora_A.weight or lora_B.weight of a module base_model.model.…"
