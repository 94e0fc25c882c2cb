"""Looks at the files of a base model before anything is loaded: what is missing, cut off, of another format, or would
be read by one of the two engines alone.

Imports neither torch nor transformers, and reads headers alone: a fraction of a second.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_local.backend.adapters.adapter_files import CONFIG as ADAPTER_CONFIG
from tinker_local.backend.families import OTHER, written_family
from tinker_local.backend.families.family import Family
from tinker_local.backend.options import ModelSource
from tinker_local.backend.weight_files import FLOATS, INDEX, SINGLE, StoredTensor, folder_of, tensors_in, weight_files
from tinker_local.backend.weights.published import MODELOPT, OTHER_CONFIGS, Published, published_of, quantization_of
from tinker_local.backend.weights.published_forms import UnknownMethodError
from tinker_local.types import UnsupportedError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")

_LFS = b"version https://git-lfs"


@dataclass(slots=True)
class ModelFiles:
    """What the files of a model say.

    `problems`: why it cannot be served, a sentence each; `warnings`: what will not work. `parameters`: of the weights,
    0 if they are not here. `hub`: it is a name of a hub, and not a folder. `vision`: it reads images. `published`: how
    its weights are in fewer bits, if they are.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parameters: int = 0
    model_type: str = ""
    hub: bool = False
    vision: bool = False
    published: Published | None = None


def look_at(source: ModelSource) -> ModelFiles:
    """What can be said of `source` without loading it."""
    found, folder = ModelFiles(), Path(source.path)
    if not folder.exists():
        if (problem := no_folder(source.path)) is not None:
            found.problems.append(problem)
            return found
        found.hub = True
        if (cached := folder_of(source.path)) is None:
            return found
        folder = cached
    if folder.suffix == ".gguf" or (folder.is_dir() and not (folder / "config.json").exists() and _has_gguf(folder)):
        found.problems.append(
            f"{folder} is in GGUF, whose quantized weights cannot be trained; give the folder of the original model, "
            "with config.json and safetensors files"
        )
        return found
    found.problems += [*_pointers(folder), *_adapters(folder)]
    if found.problems:
        return found
    config = _config(folder, found)
    if config is None:
        return found
    found.model_type = str(config.get("model_type"))
    try:
        family = written_family(found.model_type, str(folder))
    except UnsupportedError as error:
        found.problems.append(str(error))
        return found
    if family is OTHER:
        found.vision = "vision_config" in config
        found.warnings.append(
            f"model_type {found.model_type!r} is not among those that docs/models.md lists as tested; it is compared "
            "in vLLM and transformers when it is loaded, and refused if they differ"
        )
    found.vision = found.vision or family.vision is not None
    tensors = _weights(folder, found)
    quantized = [*_quantized(folder, config, family)]
    found.problems += quantized
    if not found.problems and (published := published_of(str(folder))) is not None:
        tensors = published.as_dense(tensors)
        found.published = published
    found.parameters = sum(tensor.size for tensor in tensors.values())
    if not quantized and quantization_of(config) is None:  # else it has been said
        found.problems += _other_dtypes(tensors, family)
    found.problems += _embedding_rows(folder, config, tensors)
    found.problems += _ids_beyond(folder, config, family)
    if tensors and any(folder.glob("pytorch_model*.bin")):
        found.warnings.append(f"{folder} has weights as pickles (*.bin) beside safetensors files, which alone are read")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        found.warnings.append(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS[:2])}, ...): chat and the OpenAI and Anthropic endpoints"
            " will not serve it, and clients must bring theirs"
        )
    if found.vision and not any((folder / name).is_file() for name in PROCESSORS):
        found.problems.append(f"{folder} has no {PROCESSORS[0]}, without which images cannot be read")
    return found


def no_folder(path: str) -> str | None:
    """Why `path` is neither a folder nor the name of a model on a hub; None if it may be one of them."""
    if Path(path).exists() or re.fullmatch(r"\w[\w.-]*/[\w.-]+", path):
        return None
    return f"there is no folder {path} (the name of a model on a hub has the form ORG/NAME)"


def check_source(source: ModelSource) -> None:
    """ValueError, before anything is loaded, with the first reason why `source` cannot be served."""
    if problems := look_at(source).problems:
        raise ValueError(f"{source.name}: {problems[0]}")


def _has_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf"))


def _config(folder: Path, found: ModelFiles) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        found.problems.append(
            f"{folder} holds no config.json; give a model's folder, with config.json, tokenizer and *.safetensors"
        )
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


def _weights(folder: Path, found: ModelFiles) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of `folder`; what is wrong with these is added to `found`."""
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(folder, found):
        path = folder / file
        try:
            inside = tensors_in(path)
        except FileNotFoundError:
            found.problems.append(f"{path} is missing, which {INDEX} names; download the model again")
        except ValueError as error:
            found.problems.append(f"{path}: {error}; download it again")
        except OSError as error:
            found.problems.append(f"{path} cannot be read: {error.strerror}")
        else:
            if not inside:
                found.problems.append(f"{path} holds no tensors; download it again")
            twice = sorted(inside.keys() & tensors.keys())
            if twice:
                found.problems.append(
                    f"{twice[0]} is in {tensors[twice[0]].file.name} and in {file} of {folder}, so engines may read "
                    "either; remove the file that does not belong to the model"
                )
            tensors |= inside
    return tensors


def _weight_files(folder: Path, found: ModelFiles) -> list[str]:
    try:
        names = weight_files(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.problems.append(f"{folder / INDEX} cannot be read: {error!r}")
        return []
    if names:
        found.problems += _files_beside(folder, names)
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


def _files_beside(folder: Path, names: list[str]) -> Iterator[str]:
    """Why engines would read other files of `folder` than those that `names` has."""
    if (folder / INDEX).is_file() and (folder / SINGLE).is_file() and names != [SINGLE]:
        yield (
            f"{folder} has {SINGLE} and also {INDEX}, which names {names[0]}; transformers reads the first and vLLM "
            "the second: remove the one that is not the model"
        )
    elif not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != SINGLE)
        if others:
            yield (
                f"{folder} has {others[0]} beside {SINGLE}, and no {INDEX}; vLLM would read both, and transformers "
                f"{SINGLE} alone: remove the file that is not the model"
            )


def _pointers(folder: Path) -> Iterator[str]:
    """The first file of `folder` that git-lfs has not replaced."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix in (".json", ".safetensors", ".model") and path.is_file() and path.stat().st_size < 1024:
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    yield f"{path} is a pointer of git-lfs, in place of the file; run `git lfs pull` in its folder"
                    return


def _adapters(folder: Path) -> Iterator[str]:
    """Why an adapter of PEFT in `folder` is in the way."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    if not (folder / "config.json").exists():
        yield (
            f"{folder} holds an adapter ({ADAPTER_CONFIG}), and no model; serve its base model"
            f"{_base_model(folder / ADAPTER_CONFIG)}, and send the adapter with `tinker-local import`"
        )
        return
    yield (
        f"{folder / ADAPTER_CONFIG} belongs to an adapter, which transformers would add to the weights of the model "
        "beside it, and vLLM would not; if these weights have it already, remove the adapter's files, otherwise keep "
        "them in another folder and send it with `tinker-local import`"
    )


def _base_model(path: Path) -> str:
    """The base model that an adapter's config names, in brackets."""
    try:
        name = json.loads(path.read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, OSError):
        return ""
    return f" ({name})" if name else ""


def _quantized(folder: Path, config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Why weights that have fewer bits by the configs in `folder` cannot be served."""
    if quantization_of(config) is None and not (folder / MODELOPT).is_file():
        for name in OTHER_CONFIGS:
            if (folder / name).is_file():
                yield (
                    f"{folder / name} tells of quantized weights, and config.json has no quantization_config, by which "
                    f"they are read; {family.quantized}"
                )
        return
    try:
        published = published_of(str(folder))
    except UnknownMethodError as error:
        yield f"{error}; {family.quantized}"
        return
    except UnsupportedError as error:
        yield str(error)
        return
    if published is not None and family.lora.experts is not None:
        yield f"{folder}: mixtures of experts cannot be served with quantized weights yet; {family.quantized}"


def _other_dtypes(tensors: Mapping[str, StoredTensor], family: Family) -> Iterator[str]:
    """The first tensor of integers, or of floating-point numbers of fewer than 16 bits."""
    for tensor in tensors.values():
        if tensor.dtype not in FLOATS and not tensor.name.endswith("position_ids"):
            told = f"{tensor.file}: {tensor.name} is in {tensor.dtype}"
            yield f"{told}: quantized weights cannot be trained; {family.quantized}"
            return


def _embedding_rows(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Why the embedding is not that of `config`."""
    size = _vocab_size(config)
    for tensor in tensors.values():
        if size and f".{tensor.name}".endswith(".embed_tokens.weight") and tensor.shape[:1] != (size,):
            yield (
                f"{tensor.file}: {tensor.name} is {[*tensor.shape]}, and vocab_size in {folder / 'config.json'} is "
                f"{size}; if the embeddings were resized, save the config with them (vocab_size {tensor.shape[0]})"
            )


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    """None if `config` leaves it to its class."""
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) else None


def _ids_beyond(folder: Path, config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """The token with the largest id for which the embedding has no row."""
    size = _vocab_size(config)
    try:
        ids = {token: at for token, at in _tokens(folder) if size and at >= size and token not in family.unused_tokens}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"the tokenizer of {folder} cannot be read: {error!r}; download it again"
        return
    if ids:
        token = max(ids, key=ids.__getitem__)
        yield (
            f"the tokenizer of {folder} gives {token!r} the id {ids[token]}, and the embedding has {size} rows "
            f"({len(ids)} tokens are beyond them); give the model its own tokenizer, or embeddings for this one"
        )


def _tokens(folder: Path) -> Iterator[tuple[str, int]]:
    """Tokens and their ids in the files of a tokenizer."""

    def read(name: str) -> Any:
        return json.loads((folder / name).read_bytes()) if (folder / name).is_file() else {}

    fast, slow = read("tokenizer.json"), read("tokenizer_config.json")
    vocabulary = fast.get("model", {}).get("vocab", {})
    yield from vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], at) for at, v in enumerate(vocabulary))
    yield from ((each["content"], each["id"]) for each in fast.get("added_tokens", ()))
    yield from ((each["content"], int(at)) for at, each in slow.get("added_tokens_decoder", {}).items())
    yield from read("added_tokens.json").items()
