"""A loaded model's tensors by the names of its files, which vLLM's loading knows."""

from collections.abc import Mapping
from typing import Any

import torch
from tinker_local.backend.families import family_of
from tinker_local.backend.families.family import Experts
from tinker_local.backend.weights.lent_weights import Place, stored_tensors
from tinker_local.backend.weights.packed import CODES, MATRICES, dense_name
from tinker_local.backend.weights.packed_stack import PackedExperts, PackedMatrices, dense_experts, file_names
from tinker_local.backend.weights.packed_vocabulary import shape_of
from tinker_local.backend.weights.published import published_of
from tinker_local.backend.weights.share_matrices import InFiles
from tinker_local.backend.weights.shared_memory import CannotShareError
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

_EXPERTS = ".experts."
"""In names of what experts have, in files as in transformers."""


class _Views(TorchDispatchMode):
    """A tensor that is copied stays a view: transformers makes parts contiguous before it writes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def places_in_files(model: Any, pieces: Mapping[int, int], source: str) -> InFiles:
    """Where matrices of the files of `source` are in `pieces`, whose numbers are given by the addresses of their
    storages: those that transformers' `model` has there and has not changed, experts one by one, for instance. A packed
    one has places of its codes, its scales and its zero points, and none by its name in the files.

    CannotShareError if the files are not safetensors on this machine, or transformers cannot tell their names.
    """
    state = {name: each.detach() for name, each in model.state_dict().items()}
    # transformers knows the names of dense matrices: one without memory stands for each packed one.
    packed = {
        path: each
        for path, each in model.named_modules()
        if CODES in each._parameters and not isinstance(each, PackedMatrices)
    }
    dense = {path: torch.empty(shape_of(each), device="meta") for path, each in packed.items()}
    experts = {path: each for path, each in model.named_modules() if isinstance(each, PackedExperts)}
    try:
        with torch.no_grad(), _Views(), dense_experts(model) as stacks:
            own = revert_weight_conversion(
                model,
                {name: each for name, each in state.items() if name == dense_name(name)}
                | {f"{path}.weight": each for path, each in dense.items()}
                | {name: each.detach() for name, each in stacks.items()},
            )
    except Exception as error:  # of any type: it is written for saving, where a copy is a copy
        raise CannotShareError(f"transformers' names of its files: {type(error).__name__}: {error}") from None
    found: dict[str, Place] = {}
    paths = {id(each): path for path, each in dense.items()}
    of_packed = {name: paths[id(tensor)] for name, tensor in own.items() if id(tensor) in paths}
    published = published_of(source)
    of_experts = _names_of_experts(own, stacks)
    without = of_packed.keys() | of_experts.keys() | (published.consumed if published else frozenset())
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
    names = family_of(model.config.model_type, source).lora.experts or Experts()
    found |= _places_of_experts(of_experts, experts, pieces, names)
    return InFiles(found, {*of_packed, *of_experts})


def _places_of_experts(
    names: Mapping[str, str], modules: Mapping[str, PackedExperts], pieces: Mapping[int, int], called: Experts
) -> dict[str, Place]:
    """Where codes and scales of packed `modules` are, by the names of `file_names`. `names`: those in the files of what
    they have, each with the name of its stack. `called`: how the family names their parts."""
    found: dict[str, Place] = {}
    for prefix, stack in {name.partition(_EXPERTS)[0]: stack for name, stack in names.items()}.items():
        module = modules[stack.rpartition(".")[0]]
        for name, part in file_names(
            f"{prefix}{_EXPERTS.removesuffix('.')}", module, called.in_files, whole=called.interleaved
        ):
            place = Place.of(part, pieces)
            assert place is not None, "all matrices are in the pieces"
            found[name] = place
    return found


def _names_of_experts(own: Mapping[str, torch.Tensor], stacks: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names in the files of the matrices that are parts of `stacks`, each with the name of its stack."""
    storages = {stack.untyped_storage()._cdata: path for path, stack in stacks.items()}
    found = {name: storages.get(tensor.untyped_storage()._cdata) for name, tensor in own.items()}
    return {name: path for name, path in found.items() if path is not None}


def _same(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether `tensor` is the matrix `stored`, rounded to its dtype as vLLM would."""
    if tensor.dim() < 2 or tensor.shape != stored.shape or not tensor.is_floating_point():
        return False
    same: bool = torch.equal(tensor, stored.to(tensor.device).to(tensor.dtype))
    return same
