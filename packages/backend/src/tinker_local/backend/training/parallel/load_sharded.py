"""Load a base model of which each rank of the trainer holds a part of the layers and of an untied LM head.

A rank reads its part of each tensor from the checkpoint, unit after unit. The rest (embedding, vision tower, last norm)
is whole on each rank, and transformers loads it, with one layer of each kind for the sake of a complete model.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.families.family import Family
from tinker_local.backend.training.model.checkpoint_fit import check_finite, check_found
from tinker_local.backend.training.parallel.sharded_weights import ReadPart, ShardedWeights
from tinker_local.backend.weight_files import INDEX, SINGLE, folder_of, weight_files
from tinker_local.types import UnsupportedError
from transformers.utils import logging
from transformers.utils.hub import cached_file


class Checkpoint:
    """The tensors of a checkpoint in safetensors files, by the names in it. A context manager."""

    def __init__(self, path: str) -> None:
        config = cached_file(path, "config.json")
        assert config is not None
        self._folder = Path(config).parent
        self._files = ExitStack()
        self._by_name: dict[str, Any] = {}

    def __enter__(self) -> "Checkpoint":
        for file in self._names():
            opened = self._files.enter_context(safe_open(self._folder / file, "pt"))
            self._by_name |= dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, *_: object) -> None:
        self._by_name.clear()
        self._files.close()

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Any:
        return iter(self._by_name)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return torch.Size(self._by_name[name].get_slice(name).get_shape())

    def elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements [start, stop) of a tensor in row-major order. Reads no more than its rows that hold them."""
        rows = self._by_name[name].get_slice(name)
        width = torch.Size(rows.get_shape()[1:]).numel()
        first = start // width
        found: torch.Tensor = rows[first : -(-stop // width)]
        return found.flatten()[start - first * width : stop - first * width]

    def _names(self) -> list[str]:
        if not (names := weight_files(self._folder)):
            raise UnsupportedError(f"{self._folder}: has no {SINGLE} and no {INDEX}, so ranks cannot read parts of it")
        return names


def load_sharded(
    path: str, config: Any, family: Family, dtype: torch.dtype, device: torch.device, shards: int
) -> tuple[Any, ShardedWeights]:
    """The model at `path`, frozen, and where its large weights are: `shards` ranks hold a copy. All ranks must load at
    the same time."""
    auto_class = getattr(transformers, family.auto_class)
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    _fill_in(model, _rest(path, config, dtype), f"{family.decoder_path}.layers.", device)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    weights = ShardedWeights(device, shards)
    with Checkpoint(path) as checkpoint:
        layers = model.get_submodule(family.decoder_path).layers
        names = _names_of_layers(checkpoint, layers, path)
        for index, layer in enumerate(layers):
            tensors = _weights_first(layer, f"layer {index}")
            weights.add_layer(tensors, _reader(checkpoint, tensors, f"{names}{index}.", path))
        if not tied:
            tensors = _weights_first(model.lm_head, HEAD)
            weights.add_head(tensors, _reader(checkpoint, tensors, "lm_head.", path))
    for module, views in zip(layers if tied else [*layers, model.lm_head], weights.connect(), strict=True):
        _replace(module, views)
    return model, weights


def _rest(path: str, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model without LM head, with all its weights, and with one layer of each kind."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ["only"]))
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = kinds
    with _quiet():
        model, info = transformers.AutoModel.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_found(model, path, info["missing_keys"], (), info["mismatched_keys"])
    check_finite(model, path, folder_of(path))
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warning that it does not use the other layers."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _fill_in(model: Any, rest: Any, besides: str, device: torch.device) -> None:
    """Give `model`, without values, the weights and buffers of `rest`, but no names that start with `besides`."""
    base = model.base_model_prefix
    for name, tensor in [*rest.named_parameters(remove_duplicate=False), *rest.named_buffers(remove_duplicate=False)]:
        if f"{base}.{name}".startswith(besides):
            continue
        owner, _, last = f"{base}.{name}".rpartition(".")
        module = model.get_submodule(owner)
        placed = tensor.detach().to(device)
        if last in module._parameters:
            module._parameters[last] = torch.nn.Parameter(placed, requires_grad=False)
        else:
            module._buffers[last] = placed


def _weights_first(module: Any, where: str) -> dict[str, torch.Tensor]:
    """The module's parameters, biases last: matrices that decoders join then lie side by side."""
    if any(True for _ in module.buffers()):
        raise UnsupportedError(f"{where} has buffers, so it cannot be sharded")
    return dict(sorted(module.named_parameters(), key=lambda each: each[0].endswith(".bias")))


def _names_of_layers(checkpoint: Checkpoint, layers: Any, path: str) -> str:
    """What the checkpoint's names of the layers' tensors begin with, before the number of the layer."""
    names = [name for name, _ in layers[0].named_parameters()]
    suffix = f"layers.0.{names[0]}"
    for each in checkpoint:
        start = each.removesuffix(f"0.{names[0]}")
        if each.endswith(suffix) and all(f"{start}0.{name}" in checkpoint for name in names):
            return str(start)
    raise UnsupportedError(f"{path}: its layers have other tensors than the model, such as {names[0]}; not sharded yet")


def _reader(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], prefix: str, path: str) -> ReadPart:
    """Reads the parts of `tensors`, whose names in the checkpoint begin with `prefix`."""
    for name, tensor in tensors.items():
        if f"{prefix}{name}" not in checkpoint:
            raise UnsupportedError(f"{path}: has no tensor {prefix}{name}")
        shape = checkpoint.shape(f"{prefix}{name}")
        if shape != tensor.shape:
            raise UnsupportedError(f"{path}: {prefix}{name} is {[*shape]}, and {[*tensor.shape]} in the model")

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        elements = checkpoint.elements(f"{prefix}{name}", start, stop)
        if not elements.isfinite().all():
            raise UnsupportedError(f"{path}: {prefix}{name} has a number that is NaN or infinite; download it again")
        return elements

    return read


def _replace(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Let the module's parameters be `tensors`."""
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
