"""Whether the tensors in a model's files are those of its class in transformers, and are numbers.

transformers fills in random numbers for tensors that it does not find, drops those that it does not know, and only
warns. So a trainer and a sampler may agree on a model that differs from the one in the files.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tinker_local.backend.weight_files import StoredTensor, not_finite, stored_tensors
from tinker_local.backend.weights.published import published_of
from tinker_local.types import UnsupportedError
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2**24
_AGAIN = "give the config.json that was saved with these weights, or download the model again"


def check_files(model: Any, folder: Path, text_tied: bool | None = None) -> None:
    """UnsupportedError in a sentence if the files of `folder` are not those of transformers' `model`, which is on
    torch's meta device and is used up. Reads headers alone, and an LM head beside an embedding that it is tied to.
    `text_tied`: whether the embedding is the LM head by the config of the language model, where vLLM builds that one by
    itself; None if it reads the whole config."""
    tensors = stored_tensors(folder)
    if (published := published_of(str(folder))) is not None:
        tensors = published.as_dense(tensors)
    stored = {
        name: torch.empty(tensor.shape, dtype=_DTYPES.get(tensor.dtype, torch.int64), device="meta")
        for name, tensor in tensors.items()
    }
    embedding = next(name for name, each in model.named_parameters() if each is model.get_input_embeddings().weight)
    mapping = get_model_conversion_mapping(model)
    settings = LoadStateDictConfig(
        device_map={"": torch.device("meta")}, dtype=next(model.parameters()).dtype, weight_mapping=mapping
    )
    with _without_bar():
        info, _ = convert_and_load_state_dict_in_model(model, stored, settings)
    no_embedding = embedding in info.missing_keys
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    if info.conversion_errors:
        name = min(info.conversion_errors)
        raise UnsupportedError(
            f"{folder}: the tensors that make {name} do not fit together{_others(info.conversion_errors)}; {_AGAIN}"
        )
    missing = {*info.missing_keys, *([embedding] if no_embedding else [])}
    unexpected = info.unexpected_keys
    if published is not None:  # of biases `load_published` sees whether they are zeros
        unexpected = {name for name in unexpected if published.bias(name) is None}
    check_found(model, str(folder), missing, unexpected, info.mismatched_keys, tensors)
    _check_tied(folder, bool(model.all_tied_weights_keys), tensors, text_tied)


def check_found(
    model: Any,
    path: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]],
    tensors: Mapping[str, StoredTensor] | None = None,
) -> None:
    """UnsupportedError in a sentence if transformers found tensors in other `mismatched` shapes (name, found, expected)
    than those of `model`, some `missing`, or others. `tensors`: of the files at `path`, if they are known."""
    if mismatched:
        name, found, expected = min(mismatched, key=lambda each: each[0])
        raise UnsupportedError(
            f"{path}: {name} is {[*found]} in its files, and {[*expected]} by its config.json{_others(mismatched)}; "
            f"{_AGAIN}"
        )
    if missing:
        name = min(missing, key=lambda each: (not each.endswith(".embed_tokens.weight"), each))
        tie = "; set tie_word_embeddings if the LM head is the embedding" if name == "lm_head.weight" else ""
        instead = f", and {min(unexpected)}{_others(unexpected)} instead" if unexpected else ""
        raise UnsupportedError(
            f"{path}: its files have no {name}{_others(missing)}, for which transformers would make up random numbers"
            f"{instead}{tie}; {_AGAIN}"
        )
    if unexpected:
        name = min(unexpected)
        file = tensors[name].file.name if tensors and name in tensors else "a file"
        raise UnsupportedError(
            f"{path}: {file} has {name}{_others(unexpected)}, which {type(model).__name__} does not have by its "
            f"config.json, so that it would be left out; {_AGAIN}"
        )


def _others(names: Collection[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(folder: Path, tied: bool, tensors: Mapping[str, StoredTensor], text_tied: bool | None) -> None:
    """UnsupportedError if engines may read the LM head of the files in different ways. `tied`: whether it is the
    embedding in transformers' model. `text_tied`: of `check_files`."""
    heads = [tensor for name, tensor in tensors.items() if f".{name}".endswith(".lm_head.weight")]
    embeddings = [tensor for name, tensor in tensors.items() if f".{name}".endswith(".embed_tokens.weight")]
    if len(heads) == len(embeddings) == 1 and _equal(heads[0], embeddings[0]):
        return
    if text_tied is not None and text_tied != bool(heads):
        return  # transformers takes the LM head that files have, whatever the flag
    config = json.loads((folder / "config.json").read_bytes())
    text = config.get("text_config") or {}
    flags = [part["tie_word_embeddings"] for part in (config, text) if "tie_word_embeddings" in part]
    if len({*flags}) > 1:
        raise UnsupportedError(
            f"{folder}: tie_word_embeddings is {flags[0]} in config.json and {flags[1]} in its text_config, so engines "
            f"may take either; set both to {not heads}, as the files have {'an' if heads else 'no'} lm_head.weight"
        )
    if tied and heads:
        raise UnsupportedError(
            f"{folder}: config.json says that the LM head is the embedding (tie_word_embeddings), and "
            f"{heads[0].name} in {heads[0].file.name} is another matrix; transformers would use it and vLLM would not: "
            "set tie_word_embeddings to false, or remove the tensor"
        )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.stop - one.start, _CHUNK):
            size = min(_CHUNK, one.stop - one.start - done)
            if first.read(size) != second.read(size):
                return False
    return True


@contextmanager
def _without_bar() -> Iterator[None]:
    """Without transformers' progress bar: nothing is loaded."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _sum(parameter: torch.Tensor) -> torch.Tensor:
    """NaN or infinite if a number of `parameter` is."""
    if parameter.dtype == torch.float8_e4m3fn:  # without a sum; it has no infinities, and NaN is 127 beside the sign
        return torch.where(((parameter.detach().view(torch.uint8) & 127) == 127).any(), torch.nan, 0.0)
    return parameter.detach().sum(dtype=torch.float64 if parameter.dtype == torch.float64 else torch.float32)


def check_finite(model: Any, path: str, folder: Path | None) -> None:
    """UnsupportedError if a parameter of `model` has NaN or an infinity. Sums each where it is, which takes no memory;
    only after a fault the files in `folder` are read again, for its place."""
    parameters = dict(model.named_parameters())
    for name, finite in zip(
        parameters, torch.stack([*map(_sum, parameters.values())]).isfinite().tolist(), strict=True
    ):
        if finite or bool(parameters[name].float().isfinite().all()):  # large numbers may add up to infinity
            continue
        place = None if folder is None else not_finite(stored_tensors(folder).values())
        raise UnsupportedError(
            f"{place or f'{path}: {name} has a number that is NaN or infinite in {parameters[name].dtype}'}; download "
            "the model again, or save it again from weights that are finite"
        )
