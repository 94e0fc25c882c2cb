"""A loaded model's tensors by the names of its files, which vLLM's loading knows."""

from collections.abc import Mapping
from typing import Any

import torch
from tinker_local.backend.weights.lent_weights import Place, stored_tensors
from tinker_local.backend.weights.packed import CODES, MATRICES, dense_name
from tinker_local.backend.weights.packed_vocabulary import shape_of
from tinker_local.backend.weights.published import published_of
from tinker_local.backend.weights.shared_memory import CannotShareError
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion


class _Views(TorchDispatchMode):
    """A tensor that is copied stays a view: transformers makes parts contiguous before it writes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def places_in_files(model: Any, pieces: Mapping[int, int], source: str) -> Mapping[str, Place]:
    """Where matrices of the files of `source` are in `pieces`, whose numbers are given by the addresses of their
    storages: those that transformers' `model` has there and has not changed, experts one by one, for instance. A packed
    one has places of its codes, its scales and its zero points, and none by its name in the files.

    CannotShareError if the files are not safetensors on this machine, or transformers cannot tell their names.
    """
    state = {name: each.detach() for name, each in model.state_dict().items()}
    # transformers knows the names of dense matrices: one without memory stands for each packed one.
    packed = {path: each for path, each in model.named_modules() if CODES in each._parameters}
    dense = {path: torch.empty(shape_of(each), device="meta") for path, each in packed.items()}
    try:
        with torch.no_grad(), _Views():
            own = revert_weight_conversion(
                model,
                {name: each for name, each in state.items() if name == dense_name(name)}
                | {f"{path}.weight": each for path, each in dense.items()},
            )
    except Exception as error:  # of any type: it is written for saving, where a copy is a copy
        raise CannotShareError(f"transformers' names of its files: {type(error).__name__}: {error}") from None
    found: dict[str, Place] = {}
    paths = {id(each): path for path, each in dense.items()}
    of_packed = {name: paths[id(tensor)] for name, tensor in own.items() if id(tensor) in paths}
    published = published_of(source)
    without = of_packed.keys() | (published.consumed if published else frozenset())
    for name, stored in stored_tensors(source, {}, without):
        place = Place.of(own[name], pieces) if name in own else None
        if place is not None and _same(own[name], stored):
            found[name] = place
    # A tied head comes after the embedding, whose codes it has (`LentWeights.codes_once`).
    for name, path in sorted(of_packed.items(), key=lambda pair: packed[pair[1]] is model.lm_head):
        for kind in MATRICES:
            if (matrix := getattr(packed[path], kind, None)) is not None:
                place = Place.of(matrix.detach(), pieces)
                assert place is not None, "all matrices are in the pieces"
                found[f"{name.removesuffix('weight')}{kind}"] = place
    return found


def _same(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether `tensor` is the matrix `stored`, rounded to its dtype as vLLM would."""
    if tensor.dim() < 2 or tensor.shape != stored.shape or not tensor.is_floating_point():
        return False
    same: bool = torch.equal(tensor, stored.to(tensor.device).to(tensor.dtype))
    return same
