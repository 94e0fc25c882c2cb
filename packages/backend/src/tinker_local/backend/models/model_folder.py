"""Looks at the files of a base model before anything is loaded: what is missing, cut off, or of another format.

Imports neither torch nor transformers, and reads headers alone: a fraction of a second.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.families import NO_FAMILY, OTHER, family_of
from tinker_local.backend.options import ModelSource
from tinker_local.backend.weight_files import INDEX, SINGLE, weight_files
from tinker_local.types import UnsupportedError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
LONGEST_HEADER = 100 * 2**20
"""Bytes of a safetensors header that its format allows."""

ITEMSIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclass(slots=True)
class ModelFiles:
    """What the files of a model say.

    `problems`: why it cannot be served, a sentence each; `warnings`: what will not work. `parameters`: of the weights,
    0 if they are not here. `hub`: it is a name of a hub, and not a folder. `vision`: it reads images.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parameters: int = 0
    model_type: str = ""
    hub: bool = False
    vision: bool = False


def look_at(source: ModelSource) -> ModelFiles:
    """What can be said of `source` without loading it."""
    found, folder = ModelFiles(), Path(source.path)
    if not folder.exists():
        if source.path.startswith((".", "/", "~")) or source.path.count("/") != 1:
            found.problems.append(f"there is no folder {source.path}")
        found.hub = not found.problems
        return found
    if folder.suffix == ".gguf" or (folder.is_dir() and not (folder / "config.json").exists() and _has_gguf(folder)):
        found.problems.append(
            f"{folder} is in GGUF, whose quantized weights cannot be trained; give the folder of the original model, "
            "with config.json and safetensors files"
        )
        return found
    config = _config(folder, found)
    if config is None:
        return found
    found.model_type = str(config.get("model_type"))
    try:
        family = family_of(found.model_type, str(folder))
    except UnsupportedError as error:
        found.problems.append(str(error))
        return found
    if family is OTHER:
        if "text_config" in config or "vision_config" in config:
            found.problems.append(NO_FAMILY.format(found.model_type))
            return found
        found.warnings.append(
            f"model_type {found.model_type!r} is not among those that docs/models.md lists as tested; it is compared "
            "in vLLM and transformers when it is loaded, and refused if they differ"
        )
    if config.get("quantization_config"):
        found.problems.append(f"{folder / 'config.json'}: quantized weights cannot be trained; {family.quantized}")
    found.vision = family.vision is not None
    found.parameters = _weights(folder, found)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        found.warnings.append(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS[:2])}, ...): chat and the OpenAI and Anthropic endpoints"
            " will not serve it, and clients must bring theirs"
        )
    if found.vision and not any((folder / name).is_file() for name in PROCESSORS):
        found.problems.append(f"{folder} has no {PROCESSORS[0]}, without which images cannot be read")
    return found


def check_source(source: ModelSource) -> None:
    """ValueError, before anything is loaded, with the first reason why `source` cannot be served."""
    if problems := look_at(source).problems:
        raise ValueError(f"--model {source.name}: {problems[0]}")


def _has_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf"))


def _config(folder: Path, found: ModelFiles) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        found.problems.append(f"{folder} holds no config.json")
        return None
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        found.problems.append(f"{path}: {error}")
        return None
    if not isinstance(config, dict):
        found.problems.append(f"{path} holds no JSON object")
        return None
    return config


def _weights(folder: Path, found: ModelFiles) -> int:
    """The parameters in the safetensors files of `folder`; what is wrong with these is added to `found`."""
    files = _weight_files(folder, found)
    parameters = 0
    for name in files:
        try:
            parameters += _parameters(folder / name)
        except FileNotFoundError:
            found.problems.append(f"{folder / name} is missing, which {INDEX} names; download the model again")
        except (OSError, ValueError) as error:
            found.problems.append(f"{folder / name}: {error}; download it again")
    return parameters


def _weight_files(folder: Path, found: ModelFiles) -> list[str]:
    try:
        names = weight_files(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.problems.append(f"{folder / INDEX} cannot be read: {error!r}")
        return []
    if names:
        return names
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        found.problems.append(f"{folder} has {others[0]}, but neither {SINGLE} nor {INDEX}")
    elif any(folder.glob("*.bin")):
        found.problems.append(
            f"{folder} has weights as pickles (*.bin), which can run code; convert them to safetensors"
        )
    else:
        found.problems.append(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    return []


def _parameters(path: Path) -> int:
    """Of a safetensors file; ValueError if it is cut off or something else.

    The format: 8 bytes with the length of a JSON object, which has the place of each tensor in what follows it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(_cut_off(size))
        try:
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        except ValueError:
            raise ValueError("it is not a safetensors file") from None
    ends = [0]
    parameters = 0
    for begin, end, itemsize in _tensors(header):
        ends.append(end)
        parameters += (end - begin) // itemsize
    if 8 + length + max(ends) != size:
        raise ValueError(_cut_off(size, 8 + length + max(ends)))
    return parameters


def _tensors(header: Any) -> Iterator[tuple[int, int, int]]:
    if not isinstance(header, dict):
        raise ValueError("it is not a safetensors file")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(int, tensor["data_offsets"])
            yield begin, end, ITEMSIZES.get(tensor["dtype"], 1)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its header has no place for {name!r}") from None


def _cut_off(size: int, whole: int | None = None) -> str:
    """In words. A pointer of git-lfs is the usual reason for a tiny file."""
    told = f"it has {size:,} bytes" + ("" if whole is None else f" of {whole:,}")
    return f"{told}, a pointer of git-lfs?" if size < 1024 else f"{told}: it is cut off"
