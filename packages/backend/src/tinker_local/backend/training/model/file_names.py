"""A loaded model's tensors by the names of its files, for loaders that know these."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion


class _Views(TorchDispatchMode):
    """A tensor that is copied stays a view: transformers makes parts contiguous before it writes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def tensors_by_file_name(model: Any) -> dict[str, torch.Tensor]:
    """All tensors of transformers' `model` as its files have them, in its own memory: experts one by one, for instance.
    What is not a part of one of its tensors, but for example the transpose of one that is stored, is a copy."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), _Views():
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found
