"""`PeftAdapter`: a LoRA adapter as PEFT, or an export, has it on disk; and the same adapter as this project's trainers
have theirs. Whatever cannot become exactly that is refused by name."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from tinker_local.backend.adapters.adapter import FACTORS, HEAD, LORA_ALPHA, AdapterState, path_of, tensor_name
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS
from tinker_local.backend.adapters.adapter_tensors import in_float32
from tinker_local.backend.adapters.earlier_names import name_now
from tinker_local.backend.adapters.peft_config import PeftConfig, read_config
from tinker_local.backend.adapters.peft_experts import check_experts_together, from_parameters
from tinker_local.backend.adapters.whole_matrices import EMBEDDING, is_whole_matrix
from tinker_local.backend.families.family import Experts, Family, SplitRows
from tinker_local.backend.weights.joined_names import EXPERTS_DOWN, EXPERTS_GATE_UP
from tinker_local.types import InvalidRequestError, LoraConfig
from tinker_local.types.errors import brief

Tensors = Mapping[str, npt.NDArray[np.float32]]

MAX_HEADER_BYTES = 2**24
"""Of the weights' header: 100,000 tensors. Python parses it in one piece, and nothing else runs meanwhile."""

LONGEST_NAME = 512
"""Characters of a tensor's name, which messages quote."""

WEIGHT = ".weight"
"""The end of a parameter of a Linear module, which `target_parameters` may name too."""

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
"""With the adapter's name in state dicts, which `save_pretrained` leaves out: `lora_A.default.weight`."""

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class _Module:
    """An adapted module at `path` of the model: the names in the file of its A and B, and its rank. B A is scaled by
    `alpha` / `divisor`. If `joined`, the adapter joins those of the module's parts, which have this rank each."""

    path: str
    a: str
    b: str
    rank: int
    alpha: float
    divisor: float
    joined: bool = False

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, eq=False)
class PeftAdapter:
    """`rank`: the largest of a module. `modules`: what it has adapters of, by path. `tensors`: A [r, in] and B [out, r]
    in float32 by name. `matrices`: whole ones of the base model by name, which `check_whole_matrices` compares.
    `notes`: what a user should know."""

    peft: PeftConfig
    rank: int
    modules: Mapping[str, _Module]
    tensors: Tensors
    matrices: Mapping[str, npt.NDArray[Any]]
    notes: tuple[str, ...]

    @property
    def base_model(self) -> str:
        """As the adapter names it, maybe empty."""
        return self.peft.base_model

    def config(self, family: Family) -> LoraConfig:
        """What it trains of a model of `family`; InvalidRequestError for a module that adapters do not reach there."""
        trained = {_flag(module, family) for module in self.modules.values()}
        self._check_complete(family)
        return LoraConfig(rank=self.rank, seed=0, **{flag: flag in trained for flag in _FLAGS})

    def state(self, fresh: AdapterState, family: Family) -> tuple[AdapterState, tuple[str, ...]]:
        """The adapter as the trainer that made `fresh`, a new adapter of this `config`, has it; and what a user should
        know of that. Ranks and modules that it lacks are 0 in A and B, so that their gradients are 0 too.

        InvalidRequestError if it has others than the model, of other shapes, or lacks some that it says it trained.
        """
        found: dict[str, npt.NDArray[np.float32]] = {}
        factors: dict[float, list[_Module]] = {}
        notes: list[str] = []
        for module in self.modules.values():
            if (rows := family.lora.split.get(module.last)) is not None:
                own = self._parts(rows, module, fresh)
                if not module.joined:
                    notes.append(
                        f"the parts of {module.last} are trained with an A for each: {', '.join(rows.projections)}"
                    )
            else:
                own = self._whole(module, fresh)
            factor = module.alpha * self.rank / (module.divisor * LORA_ALPHA)
            factors.setdefault(factor, []).append(module)
            found |= {name: self._padded(name, array, factor) for name, array in own.items()}
        notes += self._lacking(found, fresh, family)
        notes += self._ranks()
        notes += [
            self._told_factor(factor, modules, len(factors)) for factor, modules in factors.items() if factor != 1
        ]
        zeros = {name: np.zeros_like(array) for name, array in fresh.tensors.items() if name not in found}
        changed = replace(fresh, tensors={**fresh.tensors, **zeros, **found})
        return changed, (*self.notes, *dict.fromkeys(notes))

    def _whole(self, module: _Module, fresh: AdapterState) -> dict[str, npt.NDArray[np.float32]]:
        """The factors of a module that is one in the trainer, too, of the rank that they have."""
        found = {}
        for factor, name in zip(FACTORS, (module.a, module.b), strict=True):
            own, array = tensor_name(module.path, factor), self.tensors[name]
            if own not in fresh.tensors:
                raise InvalidRequestError(f"{WEIGHTS}: {name}: adapters of this model do not train such a module")
            wanted = list(fresh.tensors[own].shape)
            wanted[-2 if factor == "A" else -1] = module.rank
            if list(array.shape) != wanted:
                raise _another_shape(name, array.shape, wanted)
            found[own] = array
        return found

    def _padded(self, name: str, array: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.float32]:
        """A [..., r, in] or B [..., out, r] with zeros up to the adapter's rank, and B times `factor`."""
        is_b = ".lora_B." in name
        if is_b:
            array = _folded(array, factor)
        missing = self.rank - array.shape[-1 if is_b else -2]
        if not missing:
            return array
        return np.pad(array, [*[(0, 0)] * (array.ndim - 2), (0, 0 if is_b else missing), (0, missing if is_b else 0)])

    def _check_complete(self, family: Family) -> None:
        """InvalidRequestError if the configuration lists, by last names, projections of which the file has none."""
        peft, lora = self.peft, family.lora
        if isinstance(peft.target_modules, str):
            return
        # What no module of transformers has: an export lists it.
        lacking = {*(lora.experts.names if lora.experts else ())}
        lacking.update(*(rows.projections for rows in lora.split.values()))
        if not (lora.experts or peft.exclude_modules or peft.layers):
            lacking |= {HEAD, *lora.attn, *lora.mlp}
        lacking.difference_update(module.last for module in self.modules.values())
        if lost := lacking.intersection(each.rpartition(".")[2] for each in peft.target_modules):
            raise _lost(", ".join(sorted(lost)))

    def _lacking(self, found: Tensors, fresh: AdapterState, family: Family) -> list[str]:
        """What to tell of modules of the model that the adapter does not have; InvalidRequestError if its configuration
        says that it trained one of them."""
        paths = dict.fromkeys(path_of(name) for name in fresh.tensors)
        missing = [path for path in paths if tensor_name(path, "A") not in found]
        there = {path.rpartition(".")[2] for path in paths if tensor_name(path, "A") in found}
        if lost := [path for path in missing if any(map(self.peft.targets, _names_of_peft(path, family)))]:
            whole = sorted({path.rpartition(".")[2] for path in lost} - there)
            raise _lost(", ".join(whole) or lost[0], "" if whole else f" ({len(lost)} modules are missing)")
        counts: dict[str, int] = {}
        for path in missing:
            counts[path.rpartition(".")[2]] = counts.get(path.rpartition(".")[2], 0) + 1
        told = []
        if none := [last for last in counts if last not in there]:
            told.append(f"the adapter has no {', '.join(none)}: A and B of these are 0, and stay 0 in training")
        if some := [f"{last} ({count} missing)" for last, count in counts.items() if last in there]:
            told.append(
                f"the adapter is on some layers only: of {', '.join(some)}, A and B of the others are 0, and stay 0 in "
                "training"
            )
        return told

    def _ranks(self) -> list[str]:
        lower: dict[int, list[str]] = {}
        for module in self.modules.values():
            if module.rank < self.rank:
                lower.setdefault(module.rank, []).append(module.last)
        if not lower:
            return []
        told = "; ".join(f"{rank} in {_lasts(names)}" for rank, names in sorted(lower.items()))
        return [f"modules have ranks below {self.rank}: {told}: the ranks above are 0, and stay 0 in training"]

    def _parts(self, rows: SplitRows, module: _Module, fresh: AdapterState) -> dict[str, npt.NDArray[np.float32]]:
        """The adapters of the parts of a module: each has its rows of B, with the same A, or of one that is joined its
        own A and columns of B."""
        a_name, b_name, joined = module.a, module.b, module.joined
        a, b = self.tensors[a_name], self.tensors[b_name]
        parent = module.path.rpartition(".")[0]
        paths = [f"{parent}.{part}" for part in rows.projections]
        missing = [path for path in paths if tensor_name(path, "B") not in fresh.tensors]
        if missing or a.ndim != 2 or b.ndim != 2:
            raise InvalidRequestError(f"{WEIGHTS}: {b_name}: the model has no module {missing or paths}")
        heights = [fresh.tensors[tensor_name(path, "B")].shape[0] for path in paths]
        rank = module.rank * (len(paths) if joined else 1)
        inputs = fresh.tensors[tensor_name(paths[0], "A")].shape[1]
        for name, array, wanted in ((a_name, a, (rank, inputs)), (b_name, b, (sum(heights), rank))):
            if array.shape != wanted:
                raise _another_shape(name, array.shape, wanted)
        found, begin, left = {}, 0, b.copy()
        for place, (path, height) in enumerate(zip(paths, heights, strict=True)):
            columns = slice(place * module.rank, (place + 1) * module.rank) if joined else slice(None)
            found[tensor_name(path, "A")] = a[columns]
            found[tensor_name(path, "B")] = b[begin : begin + height, columns]
            left[begin : begin + height, columns] = 0
            begin += height
        if left.any():
            raise InvalidRequestError(
                f"{WEIGHTS}: {b_name}: rank {rank} is more than the adapter's {module.rank}, and its blocks beside the "
                f"diagonal are not 0, so that it is not the adapters of {', '.join(rows.projections)} joined"
            )
        return found

    def _told_factor(self, factor: float, modules: Sequence[_Module], groups: int) -> str:
        arrays = [self.tensors[module.b] for module in modules]
        exact = all(np.array_equal(_folded(b, factor).astype(np.float64), b * np.float64(factor)) for b in arrays)
        how = "exactly" if exact else "rounded to float32"
        where = "" if groups == 1 else f" of {_lasts(module.last for module in modules)}"
        scale = modules[0].alpha / modules[0].divisor
        return (
            f"the adapter's scale is {scale:g}, and {LORA_ALPHA} / r = {LORA_ALPHA / self.rank:g} here: B{where} was "
            f"multiplied by {factor:g}, {how}"
        )


_FLAGS = ("train_unembed", "train_mlp", "train_attn", "train_vision")


def read_peft_adapter(folder: Path, family: Family) -> PeftAdapter:
    """The adapter of a model of `family` in `folder`. InvalidRequestError for one that is not LoRA alone, as its
    configuration says, and for files that cannot be read or hold values that are not finite."""
    config = read_config(folder)
    given, matrices = _tensors(folder / WEIGHTS)
    tensors = _without_adapter_name(given)
    check_experts_together(tensors, family.lora.experts, WEIGHTS)
    parent = _parent_of_experts(config, family)
    experts = family.lora.experts if parent is not None else None
    if parent is not None and experts is not None:
        tensors = from_parameters(tensors, experts, parent, config.rank, WEIGHTS)
    modules = {}
    for path, names in _named(tensors, family).items():
        if experts is not None and experts.has(path):
            modules[path] = _experts(path, names, config, experts)
        else:
            modules[path] = _module(path, names, config, family)
    if not modules:
        raise InvalidRequestError(f"{WEIGHTS}: holds no tensor of an adapter")
    notes = (f"lora_dropout {config.dropout} is not applied: training here has no dropout",) if config.dropout else ()
    return PeftAdapter(config, max(each.rank for each in modules.values()), modules, tensors, matrices, notes)


def _without_adapter_name(tensors: Tensors) -> dict[str, npt.NDArray[np.float32]]:
    """`tensors` by the names that `save_pretrained` writes; InvalidRequestError if they are of several adapters, or not
    factors of LoRA."""
    found = {}
    adapters = set()
    for name, array in tensors.items():
        if (match := _NAME.fullmatch(name)) is None:
            raise InvalidRequestError(f"{WEIGHTS}: {name}: {_why_not(name)}")
        adapters.add(match[3])
        found[tensor_name(match[1], match[2])] = array
    if len(adapters) > 1:
        raise InvalidRequestError(f"{WEIGHTS}: holds several adapters: {', '.join(sorted(map(str, adapters)))}")
    return found


def _named(tensors: Tensors, family: Family) -> dict[str, dict[str, str]]:
    """The names of A and B by factor, by the module's path in the model."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        factors = found.setdefault(_own_path(path_of(name), family), {})
        factor = name.rpartition(".lora_")[2][0]
        if factor in factors:
            raise InvalidRequestError(f"{WEIGHTS}: {factors[factor]} and {name} are of the same module")
        factors[factor] = name
    for factors in found.values():
        for lacking in (factor for factor in FACTORS if factor not in factors):
            there = next(iter(factors.values()))
            raise InvalidRequestError(f"{WEIGHTS}: has {there}, and no factor {lacking} of that module")
    return found


def _own_path(path: str, family: Family) -> str:
    """What the module is in the model that a file's names, an export's or those of earlier versions call `path`."""
    own = family.own_path(path)
    known = own == HEAD or own.startswith(f"{family.decoder_path}.layers.") or family.in_tower(own)
    return own if known else family.own_path(name_now(path, family))


def _module(path: str, names: Mapping[str, str], config: PeftConfig, family: Family) -> _Module:
    """The module at `path`, with the factors `names`, as the configuration's patterns say."""
    rank, alpha, earlier = config.rank_of(path), config.alpha_of(path), path_of(names["A"])
    if config.alpha_pattern and (other := config.alpha_of(earlier)) != alpha:
        raise InvalidRequestError(
            f"{CONFIG}: alpha_pattern: says {other:g} of {earlier}, and {alpha:g} of {path}, the same module "
            "in newer transformers, so that PEFT applies another scale now than when it was trained"
        )
    rows = family.lora.split.get(path.rpartition(".")[2])
    parts = 1 if rows is None else len(rows.projections)
    joined = parts > 1 and (rank, alpha) == (config.rank * parts, config.alpha * parts)
    return _Module(path, names["A"], names["B"], rank // parts if joined else rank, alpha, config.divisor(rank), joined)


def _experts(path: str, names: Mapping[str, str], config: PeftConfig, experts: Experts) -> _Module:
    """A projection of experts of which PEFT trains parameters: gate and up are one, with twice the rank."""
    parent, _, last = path.rpartition(".")
    parameter, parts = (EXPERTS_DOWN, 1) if last == experts.down else (EXPERTS_GATE_UP, 2)
    by_peft = f"{parent}.{parameter}"
    rank, alpha = config.rank_of(by_peft), config.alpha_of(by_peft)
    if rank != config.rank * parts:
        raise InvalidRequestError(
            f"{CONFIG}: rank_pattern: rank {rank} of {by_peft} is not supported: of experts, {EXPERTS_GATE_UP} has "
            f"twice the rank r, for gate and up, and {EXPERTS_DOWN} has r, which is {config.rank}"
        )
    return _Module(path, names["A"], names["B"], config.rank, alpha, config.divisor(rank))


def _flag(module: _Module, family: Family) -> str:
    path, (parent, _, last) = module.path, module.path.rpartition(".")
    if path == HEAD:
        return "train_unembed"
    if family.in_tower(path):
        return "train_vision"
    if last in family.lora.split:
        path = f"{parent}.{family.lora.split[last].projections[0]}"
    if (flag := family.lora.flag(path)) is None:
        raise InvalidRequestError(f"{WEIGHTS}: {module.a}: adapters of this model do not train the module {path!r}")
    return f"train_{flag}"


def _names_of_peft(path: str, family: Family) -> list[str]:
    """What PEFT may call the module at `path`, a part of it or an expert's projection."""
    parent, _, last = path.rpartition(".")
    names = [path, *(f"{parent}.{name}" for name, rows in family.lora.split.items() if last in rows.projections)]
    if family.lora.experts is not None and family.lora.experts.has(path) and last in family.lora.mlp:
        names = []  # PEFT knows an MLP by this name, and experts by their parameters alone
    if family.lora.experts is not None and family.lora.experts.peft_fuses:
        names.append(f"{path}{WEIGHT}")
    if family.lora.experts is not None and family.lora.experts.has(path):
        names.append(f"{parent}.{EXPERTS_DOWN if last == family.lora.experts.down else EXPERTS_GATE_UP}")
    return names


def _lasts(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _folded(b: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # an infinite one is refused by the trainer
        return b if factor == 1 else (b.astype(np.float64) * factor).astype(np.float32)


def _lost(what: str, more: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"{CONFIG}: names {what} in target_modules, and {WEIGHTS} has no tensor of it{more}: what was trained "
        "there is lost, as when PEFT loads an adapter of which it knows a part, and saves it again"
    )


def _parent_of_experts(config: PeftConfig, family: Family) -> str | None:
    """The last name of the modules whose experts are trained as `target_parameters`; None without these.
    InvalidRequestError for other parameters, but weights of modules as exports name them."""
    fused = family.lora.experts is not None and family.lora.experts.peft_fuses
    parameters = [each for each in config.target_parameters if not (fused and each.endswith(WEIGHT))]
    if not parameters:
        return None
    parents, lasts = set[str](), list[str]()
    for each in parameters:
        path, _, last = each.rpartition(".")
        parents.add(path.rpartition(".")[2])
        lasts.append(last)
    whole = set(lasts) == {EXPERTS_GATE_UP, EXPERTS_DOWN}
    if family.lora.experts is None or not whole or len(parents) != 1 or "" in parents:
        raise InvalidRequestError(
            f"{CONFIG}: target_parameters: {brief(list(config.target_parameters))} is not supported: adapters here "
            f"train parameters of routed experts alone, {EXPERTS_GATE_UP} and {EXPERTS_DOWN} together, of models that "
            "have them"
        )
    return parents.pop()


def _tensors(path: Path) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, npt.NDArray[Any]]]:
    """The tensors of a file: of the adapter in float32, and whole matrices of the base model as they are stored."""
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
    found, matrices = {}, {}
    for name, place in header.items():
        if len(name) > LONGEST_NAME:
            raise InvalidRequestError(f"{WEIGHTS}: {brief(name)}: {len(name)} characters are more than {LONGEST_NAME}")
        if (dtype := _DTYPES.get(place["dtype"])) is None:
            raise InvalidRequestError(f"{WEIGHTS}: {name}: {place['dtype']} is not one of {', '.join(_DTYPES)}")
        try:
            array = content[slice(*place["data_offsets"])].view(dtype).reshape(place["shape"])
        except ValueError as error:  # numpy has at most 64 dimensions, and bounds even those of no values
            raise InvalidRequestError(f"{WEIGHTS}: {name}: shape {brief(place['shape'])}: {error}") from None
        if is_whole_matrix(name):
            matrices[name] = array
            continue
        found[name] = in_float32(array)
        if not np.isfinite(found[name]).all():
            count = int((~np.isfinite(found[name])).sum())
            raise InvalidRequestError(f"{WEIGHTS}: {name}: {count} of {array.size} values are not finite")
    return found, matrices


def _another_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> InvalidRequestError:
    return InvalidRequestError(
        f"{WEIGHTS}: {name}: has shape {list(shape)}, and the base model and the adapter's r want {list(wanted)}"
    )


def _why_not(name: str) -> str:
    """Why a tensor is not a factor of LoRA."""
    if "lora_embedding" in name or f".{EMBEDDING}.lora" in name or "trainable_tokens" in name:
        return "is an adapter of the embedding, which adapters here do not train"
    if "lora_magnitude_vector" in name:
        return "is a magnitude of DoRA"
    if name.endswith(".bias"):
        return "is a bias, which adapters here do not train"
    if name.endswith("base_layer.weight"):
        return "is a whole matrix of the base model; only those of the LM head and the embedding are taken"
    return "is not lora_A.weight or lora_B.weight of a module base_model.model.…"
