"""`Trained`: an adapter to export, read from a checkpoint of a data folder or from any folder of an adapter."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from tinker_local.backend.adapters.adapter import HEAD, LORA_ALPHA, AdapterState, path_of, tensor_name
from tinker_local.backend.adapters.adapter_files import AGE, CONFIG, WEIGHTS, read_adapter
from tinker_local.backend.adapters.checksums import DESCRIPTION, check_files
from tinker_local.backend.adapters.joined_parts import joined_parts
from tinker_local.backend.adapters.peft_experts import check_experts_together, target_parameters
from tinker_local.backend.exporting.base_model import BaseModel
from tinker_local.backend.families.family import Experts
from tinker_local.backend.storage.checkpoint_folders import REMOVING, UNFINISHED, precision_in
from tinker_local.backend.storage.model_paths import model_paths
from tinker_local.backend.storage.names import parse_tinker_path, safe_segment
from tinker_local.backend.storage.records import BEGAN_ON
from tinker_local.backend.weights.joined_names import EXPERTS_GATE_UP
from tinker_local.types import InvalidRequestError, LoraConfig, NotFoundError, PromptLayout


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The files of an adapter. `name`: its tinker path if it is known, else the folder. `base_name`: of the base model
    as clients call it, maybe empty. `base_path`: the folder or hub name that a server served under it, if recorded.
    `layout`: how its program put pictures into prompts, if it said so for the checkpoint or for its run.
    `base_precision`: in what the base was that it was trained on, as a checkpoint's record says.
    `began_on`: the same of its first weights, if they were trained on another."""

    folder: Path
    name: str
    base_name: str
    base_path: str | None
    layout: PromptLayout
    base_precision: str | None = None
    began_on: str | None = None


def find_checkpoint(checkpoint: str, data_dir: Path) -> CheckpointFolder:
    """The checkpoint at a `tinker://` path in `data_dir`, or in the folder `checkpoint`. A server may run meanwhile.

    NotFoundError if it does not exist; InvalidRequestError if it is not an adapter, or one that is encrypted.
    """
    folder = _folder_of(checkpoint, data_dir) if checkpoint.startswith("tinker://") else Path(checkpoint)
    if not folder.is_dir():
        raise NotFoundError(f"{checkpoint}: there is no such folder; a checkpoint is a tinker:// path or a folder")
    if (folder / f"{WEIGHTS}{AGE}").exists():
        raise InvalidRequestError(f"{checkpoint} is encrypted: decrypt its files with `age -d`, and give their folder")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise InvalidRequestError(f"{checkpoint} is not an adapter: {folder} has no {file}")
    described = _json(folder / DESCRIPTION) if (folder / DESCRIPTION).exists() else {}
    check_files(folder, (WEIGHTS, CONFIG), checkpoint)
    base_name = str(described.get("base_model") or _json(folder / CONFIG).get("base_model_name_or_path") or "")
    # DATA/checkpoints/RUN/KIND/NAME@TIME
    absolute = folder.absolute()
    its_data = absolute.parents[3] if len(absolute.parents) > 3 else data_dir
    known = model_paths(its_data) if described else model_paths(data_dir)
    name = str(described.get("tinker_path") or folder)
    began = _metadata(described).get(BEGAN_ON)
    return CheckpointFolder(
        folder,
        name,
        base_name,
        known.get(base_name),
        PromptLayout.of({**_metadata(described.get("training_run")), **_metadata(described)}),
        base_precision=_precision(described, folder),
        began_on=None if began is None else str(began),
    )


def _metadata(described: Any) -> Mapping[str, Any]:
    """The `user_metadata` in a description of a checkpoint or run; empty if it has none."""
    found = described.get("user_metadata") if isinstance(described, dict) else None
    return found if isinstance(found, dict) else {}


def _precision(described: Mapping[str, Any], folder: Path) -> str | None:
    try:
        return precision_in(described)
    except ValueError as error:
        raise InvalidRequestError(f"{folder / DESCRIPTION}: {error}") from error


def _folder_of(path: str, data_dir: Path) -> Path:
    run, kind, name = parse_tinker_path(path, "checkpoint")
    parent = data_dir / "checkpoints" / safe_segment(run) / kind
    found = [
        folder
        for folder in parent.glob(f"{name}@*")
        if not any((folder / mark).exists() for mark in (UNFINISHED, REMOVING))
    ]
    if not found:
        raise NotFoundError(
            f"{path} is not in the data folder {data_dir}; name the server's folder with --data-dir, or download the "
            f"checkpoint from its server (tinker checkpoint download {path}) and give the folder"
        )
    return max(found, key=lambda folder: folder.name.rpartition("@")[2])


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """An adapter on `base`, with the names of PEFT: `tensors`: A [r, in] and B [out, r] of each module path; of more
    ranks for modules whose parts were trained (`joined_parts.py`). `parts`: the same as the trainer has them."""

    source: CheckpointFolder
    base: BaseModel
    config: LoraConfig
    tensors: Mapping[str, npt.NDArray[Any]]
    paths: tuple[str, ...]
    parts: Mapping[str, npt.NDArray[Any]]

    @property
    def has_head(self) -> bool:
        """Whether the LM head was trained."""
        return HEAD in self.paths

    @property
    def has_experts(self) -> bool:
        """Whether routed experts were trained."""
        return any(array.ndim == 3 for array in self.tensors.values())

    def state(self) -> AdapterState:
        """For a trainer of the base model."""
        targets = self.base.target_modules(_paths(self.parts))
        return AdapterState(self.base.path, self.config, targets, self.parts)

    def peft_config(self, experts: Experts | None = None) -> dict[str, Any]:
        """PEFT's `adapter_config.json` for `tensors`, with those of `experts`, if given, as parameters (see
        `peft_experts.py`)."""
        rank, split = self.config.rank, self.base.family.lora.split
        parts = {
            name: len(rows.projections)
            for name, rows in split.items()
            if any(f".{name}.lora" in t for t in self.tensors)
        }
        modules = {"target_modules": list(self.base.target_modules(self.paths))}
        parameters = target_parameters(self.tensors, experts)
        if parameters:
            parts[EXPERTS_GATE_UP] = 2
        others = [path for path in self.paths if self.factors(path)[0].ndim == 2]
        if experts is not None and experts.peft_fuses:
            alike = [path for path in others if path.rpartition(".")[2] in experts.in_files]
            others = [path for path in others if path not in alike]
            parameters += [f"{name}.weight" for name in self.base.target_modules(alike)]
        if parameters:
            modules = {"target_modules": list(self.base.target_modules(others)), "target_parameters": parameters}
        patterns = {
            "rank_pattern": {name: count * rank for name, count in parts.items()},
            "alpha_pattern": {name: count * LORA_ALPHA for name, count in parts.items()},
        }
        return self.state().peft_config() | modules | (patterns if parts else {})

    @property
    def largest_rank(self) -> int:
        """Of all modules."""
        return max(int(array.shape[-2]) for name, array in self.tensors.items() if ".lora_A." in name)

    def factors(self, path: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A [r, in] and B [out, r] of the module at `path`; of experts [E, ...], or [1, ...] where they share it."""
        return self.tensors[tensor_name(path, "A")], self.tensors[tensor_name(path, "B")]


def read_trained(source: CheckpointFolder, base: BaseModel) -> Trained:
    """The adapter in `source`, whatever layout it has. InvalidRequestError if it does not fit `base`."""
    given = _json(source.folder / CONFIG)
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if given.get("peft_type") != "LORA" or not isinstance(rank, int) or alpha != LORA_ALPHA:
        raise InvalidRequestError(
            f"{source.folder / CONFIG}: expected a LoRA adapter with lora_alpha {LORA_ALPHA}, as this server writes; "
            f"found peft_type {given.get('peft_type')!r}, r {rank!r}, lora_alpha {alpha!r}"
        )
    try:
        read = read_adapter(source.folder, source.base_name, LoraConfig(rank=rank), optimizer=False)
    except SafetensorError as error:
        raise InvalidRequestError(f"{source.folder / WEIGHTS} cannot be read: {error}") from error
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{source.name} cannot be exported: {error}") from error
    lora = base.family.lora
    parts = {_own_name(name, base): np.asarray(array, np.float32) for name, array in read.tensors.items()}
    if whole := [name for name in parts if name.split(".")[-3] in (*lora.split, "base_layer")]:
        raise InvalidRequestError(f"{source.name} is an export, which joined {whole[0]}; give its checkpoint")
    check_experts_together(parts, lora.experts, str(source.folder / WEIGHTS))
    _check_complete(given.get("target_modules"), parts, base, source)
    tensors = joined_parts(parts, lora.split, source.name)
    paths = _paths(tensors)
    nothing = np.empty(0)
    shapes = {path: [tensors.get(tensor_name(path, factor), nothing).shape for factor in "AB"] for path in paths}
    base.check(paths, shapes)
    in_tower = {path for path in paths if base.family.in_tower(path)}
    flags = {lora.flag(path) for path in _paths(parts) if path not in in_tower}
    config = LoraConfig(
        rank=rank,
        train_unembed=HEAD in paths,
        train_attn="attn" in flags,
        train_mlp="mlp" in flags,
        train_vision=bool(in_tower),
    )
    return Trained(source, base, config, tensors, paths, parts)


def _check_complete(targets: Any, tensors: Mapping[str, Any], base: BaseModel, source: CheckpointFolder) -> None:
    """InvalidRequestError if the configuration lists among its `targets` a module of `base` that `tensors` lack."""
    lora = base.family.lora
    known = {name.rpartition(".")[2] for name, _ in base.model.named_modules()}
    known.update(*(rows.projections for rows in lora.split.values()), lora.experts.names if lora.experts else ())
    there = {path.rpartition(".")[2] for path in _paths(tensors)}
    listed = {str(each).rpartition(".")[2] for each in targets} if isinstance(targets, list) else set[str]()
    if lacking := sorted((listed & known) - there):
        raise InvalidRequestError(
            f"{source.name}: {CONFIG} names {', '.join(lacking)} in target_modules, and {WEIGHTS} has no tensor of it: "
            "what was trained there is lost, as when PEFT loads an adapter of which it knows a part, and saves it again"
        )


def _paths(tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules of `tensors`."""
    return tuple(dict.fromkeys(path_of(name) for name in tensors))


def _own_name(name: str, base: BaseModel) -> str:
    """A tensor's name by its module in the model: exports of the hosted service and of this server differ in some."""
    factor = name.rpartition(".lora_")[2].removesuffix(".weight")
    return tensor_name(base.family.own_path(path_of(name)), factor)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} holds no object")
    return found
