"""A base model with an adapter added to its weights, tensor by tensor: no model is ever whole in memory."""

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from tinker_local.backend.adapters.adapter import HEAD, LORA_ALPHA
from tinker_local.backend.adapters.adapter_tensors import as_torch
from tinker_local.backend.exporting.base_model import BaseModel
from tinker_local.backend.exporting.merged_experts import Merge, expert_modules, merges
from tinker_local.backend.exporting.trained import Trained
from tinker_local.backend.weight_files import INDEX, SINGLE, weight_files
from tinker_local.backend.weights.joined_names import DRAFT, EXPERTS_GATE_UP
from tinker_local.backend.weights.published import OTHER_CONFIGS, in_layers
from tinker_local.types import InvalidRequestError

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 * 2**30
"""Most bytes of a file, unless one tensor alone has more."""

_NOT_COPIED = {"readme.md", ".gitattributes", INDEX, "config.json", *OTHER_CONFIGS}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def write_merged(folder: Path, trained: Trained, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the merged model, with the base's other files, into `folder`; each tensor keeps the base's dtype. Of a
    published checkpoint in fewer bits all numbers are written in `BaseModel.dtype`: they fit no codes with an adapter.

    A trained head that the base ties to its embedding becomes a matrix of itself, since the embedding was not trained.
    InvalidRequestError if the base is not in safetensors files, or if the disk has too little space.
    """
    base = trained.base
    weights = {file: _names(file, base) for file in _weight_files(base)}
    names = [name for file in weights.values() for name in file]
    changed = _changed(trained, [name for name in names if not name.startswith(DRAFT)])  # which stay as they are
    untied = trained.has_head and base.tied_head
    own_head = next((name for name in names if f".{name}".endswith(f".{HEAD}.weight")), f"{HEAD}.weight")
    head = _embedding(names, base) if untied else own_head
    if trained.has_head and head not in names:
        raise InvalidRequestError(f"{base.folder}: has no tensor {head}, to which the trained LM head is added")
    _check_space(folder, base, list(weights), base.model.lm_head.weight.nbytes if untied else 0)

    def tensors() -> Iterator[tuple[str, "torch.Tensor"]]:
        for file, inside in weights.items():
            for name, tensor in _tensors(file, inside, base):
                if untied and name == own_head:
                    continue  # a copy of the embedding, from which the head is made
                yield name, changed[name](tensor) if name in changed else tensor
                if untied and name == head:
                    yield f"{HEAD}.weight", _added(trained, HEAD, tensor)

    if trained.has_head and not untied:
        changed[head] = partial(_added, trained, HEAD)
    _write_shards(folder, ((name, _written(tensor, base)) for name, tensor in tensors()), shard_bytes)
    for file in base.folder.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and file.name.lower() not in _NOT_COPIED:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((base.folder / "config.json").read_text("utf-8"))
    if untied:
        config = _untied(config)
    if base.published is not None:
        config = _unpacked(config, base.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _changed(trained: Trained, names: list[str]) -> dict[str, Merge]:
    """What changes which tensor of the layers."""
    base, experts = trained.base, expert_modules(trained)
    found: dict[str, Merge] = {}
    for path in trained.paths:
        if path != HEAD and path.rpartition(".")[0] not in experts:
            found[_name_in_files(base, f"{path}.weight", names)] = partial(_added, trained, path)
    for module in experts:
        called = base.family.lora.experts
        assert called is not None, "it has experts"
        whole = any(name.endswith(f".{EXPERTS_GATE_UP}") for name in names)
        first = EXPERTS_GATE_UP if whole else f"0.{called.in_files[0]}.weight"
        name = _name_in_files(base, called.path_in_files(f"{module}.{first}"), names)
        found |= merges(trained, module, name.removesuffix(first), whole=whole)
    if missing := found.keys() - set(names):
        raise InvalidRequestError(f"{base.folder}: {len(missing)} tensors are missing, such as {min(missing)}")
    return found


def _added(trained: Trained, path: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """W + alpha / r B A, computed in float32."""
    a, b = (as_torch(factor) for factor in trained.factors(path))
    scale = LORA_ALPHA / trained.config.rank
    return tensor.float().addmm(b, a, alpha=scale).to(tensor.dtype)  # not in place: the embedding stays


def _tensors(file: Path, names: list[str], base: BaseModel) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Those of `names` in `file`. Of a published checkpoint in float32, until they are written: a packed one is made of
    what the files have of it, and what stays as it is may be in a narrower dtype than the rest."""
    import torch
    from tinker_local.backend.weights.read_published import read_packed, reading

    published = base.published
    with safe_open(file, "pt") as opened, reading(base.folder) as read:
        for name in names:
            module = name.removesuffix(".weight")
            if published is None:
                yield name, opened.get_tensor(name)
            elif module in published.modules:
                yield name, read_packed(published, module, read).numbers(torch.float32)
            else:
                tensor = opened.get_tensor(name)
                yield name, tensor.float() if tensor.is_floating_point() else tensor


def _written(tensor: "torch.Tensor", base: BaseModel) -> "torch.Tensor":
    """`tensor` in the dtype in which it is written."""
    import torch

    if base.published is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(getattr(torch, base.dtype))


def _unpacked(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """`config` without what it says of fewer bits, in `dtype`."""
    gone = ("quantization_config", "compression_config", "torch_dtype", "dtype")
    found = {name: value for name, value in config.items() if name not in gone} | {"dtype": dtype}
    text = config.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {name: value for name, value in text.items() if name not in gone} | {"dtype": dtype}
    return found


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, and the text model's in it, with `tie_word_embeddings` off."""
    text = config.get("text_config")
    inner = {"text_config": {**text, "tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return {**config, **inner, "tie_word_embeddings": False}


def _weight_files(base: BaseModel) -> list[Path]:
    if not (names := weight_files(base.folder)):
        raise InvalidRequestError(
            f"{base.folder}: has neither {SINGLE} nor {INDEX}; only safetensors files can be merged"
        )
    return [base.folder / name for name in names]


def _names(file: Path, base: BaseModel) -> list[str]:
    """The tensors of `file`, and packed matrices by the names that they would have, where their codes are."""
    if not file.exists():
        raise InvalidRequestError(f"{file} is missing, and the index of the base model names it")
    with safe_open(file, "pt") as opened:
        inside = list(opened.keys())
    if (published := base.published) is None:
        return inside
    known = {in_layers(name) for name, _ in base.model.named_parameters()}
    without = {name for name in published.biases if in_layers(name) not in known}  # zeros, as `load_published` sees
    codes = {f"{module}.{published.form.codes}": f"{module}.weight" for module in published.modules}
    without |= published.consumed - codes.keys()
    return [codes.get(name, name) for name in inside if name not in without]


def _name_in_files(base: BaseModel, path: str, names: list[str]) -> str:
    """The parameter at `path`: older files of a family begin its names differently."""
    vision = base.family.vision
    roots = () if vision is None else (vision.tower, vision.vllm_tower, *vision.connectors)
    towers = [f"{root.removeprefix('model.')}." for root in roots]
    start = (None if vision is None else vision.part_of(path)) or base.family.decoder_path
    inside = path.removeprefix(f"{start}.")
    found = [
        name
        for name in names
        if f".{name}".endswith(f".{inside}")
        and any(f".{part}" in f".{name}" for part in towers) == base.family.in_tower(path)
    ]
    if len(found) != 1:
        raise InvalidRequestError(f"{base.folder}: {len(found)} tensors are named *{inside}, expected one")
    return found[0]


def _embedding(names: list[str], base: BaseModel) -> str:
    found = [name for name in names if name.endswith("embed_tokens.weight")]
    if len(found) != 1:
        raise InvalidRequestError(f"{base.folder}: {len(found)} tensors are named *embed_tokens.weight, expected one")
    return found[0]


def _check_space(folder: Path, base: BaseModel, weights: Sequence[Path], further: int) -> None:
    needed, free = sum(file.stat().st_size for file in weights) + further, shutil.disk_usage(folder).free
    if base.published is not None:
        needed += base.published.packable.numbers * (4 if base.dtype == "float32" else 2)  # and the codes, at most
    if free < needed:
        raise InvalidRequestError(
            f"--to merged: {folder.parent} has {free / 2**30:.1f} GiB free, and the model takes {needed / 2**30:.1f}"
        )


def _write_shards(folder: Path, tensors: Iterator[tuple[str, "torch.Tensor"]], limit: int) -> None:
    """Files of up to `limit` bytes, and an index if there are several."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > limit:
            flush()
        held[name] = tensor.contiguous()
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
