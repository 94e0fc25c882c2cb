"""A loaded model's tensors by the names of its files, which vLLM's loading knows."""

from typing import Any

import safetensors
import torch
from tinker_local.backend.weight_files import folder_of, weight_files
from tinker_local.backend.weights.lent_weights import CannotShareError, LentWeights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion


class _Views(TorchDispatchMode):
    """A tensor that is copied stays a view: transformers makes parts contiguous before it writes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def lent_weights(model: Any, source: str) -> LentWeights:
    """All tensors of the files of `source`. A matrix that transformers' `model` has unchanged is lent, as it lies in
    the model's memory: experts one by one, for instance. All others are read from the files, as if nothing was lent.

    CannotShareError if the files are not safetensors on this machine, or transformers cannot tell their names.
    """
    if (folder := folder_of(source)) is None:
        raise CannotShareError(f"{source} has no safetensors files on this machine")
    try:
        with torch.no_grad(), _Views():
            own = revert_weight_conversion(model, {name: each.detach() for name, each in model.state_dict().items()})
    except Exception as error:  # of any type: it is written for saving, where a copy is a copy
        raise CannotShareError(f"transformers' names of its files: {type(error).__name__}: {error}") from None
    found: dict[str, torch.Tensor] = {}
    lent = set()
    for file in weight_files(folder):
        with safetensors.safe_open(folder / file, "pt") as stored:
            for name in list(stored.keys()):
                found[name] = stored.get_tensor(name)
                if name in own and _same(own[name], found[name]):
                    found[name] = own[name]
                    lent.add(name)
    return LentWeights(found, frozenset(lent))


def _same(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether `tensor` is the matrix `stored`, whose numbers all fit its dtype."""
    if tensor.dim() < 2 or tensor.shape != stored.shape or not tensor.is_floating_point():
        return False
    given = stored.to(tensor.device)
    there_and_back: bool = torch.equal(tensor, given.to(tensor.dtype)) and torch.equal(tensor.to(given.dtype), given)
    return there_and_back
