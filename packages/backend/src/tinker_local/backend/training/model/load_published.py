"""transformers' model of a published checkpoint in fewer bits, whose matrices stay as its files have them."""

from typing import Any

import torch
from tinker_local.backend.weight_files import folder_of, stored_tensors
from tinker_local.backend.weights.joined_names import JOINED
from tinker_local.backend.weights.packed import PackedLinear
from tinker_local.backend.weights.published import Published, published_of
from tinker_local.backend.weights.read_published import read_packed, reading
from tinker_local.types import UnsupportedError


def load_published(path: str, model_class: Any, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model at `path` in `dtype`, on the CPU, and what transformers tells of its loading. The tensors that are not
    packed are loaded by transformers, with the names of its `model_class`; for each packed matrix it gets a tensor
    without memory, and the module that has this afterwards is replaced. Biases of zeros that the model does not have
    are left out: AutoGPTQ writes them."""
    published, folder = published_of(path), folder_of(path)
    assert published is not None
    assert folder is not None
    held = {module: torch.zeros(1, dtype=dtype).expand(shape) for module, shape in published.modules.items()}
    with reading(folder) as read:
        state = {name: read(name) for name in stored_tensors(folder) if name not in published.consumed}
        state |= {f"{module}.weight": tensor for module, tensor in held.items()}
        model, info = model_class.from_pretrained(
            None, config=config, dtype=dtype, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model.config.name_or_path = path
        biases = {name: published.bias(name) for name in info["unexpected_keys"]}
        zeros = {name for name, bias in biases.items() if bias is not None and not read(bias).any()}
        info = {**info, "unexpected_keys": info["unexpected_keys"] - zeros}
        if not info["mismatched_keys"]:
            _replace(model, published, {tensor.data_ptr(): module for module, tensor in held.items()}, read)
    return model, info


def _replace(model: Any, published: Published, modules: dict[int, str], read: Any) -> None:
    """Put the packed matrices of the `modules` of the files, given by the addresses of tensors, where these are."""
    found: set[str] = set()
    for path, linear in list(model.named_modules()):
        weight = getattr(linear, "weight", None) if isinstance(linear, torch.nn.Linear) else None
        if weight is None or weight.data_ptr() not in modules or weight.stride() != (0, 0):
            continue
        module = modules[weight.data_ptr()]
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, PackedLinear(linear, read_packed(published, module, read)))
        found.add(module)
    for parent in model.modules():
        _check_orders(parent)
    if left := sorted(published.modules.keys() - found):
        raise UnsupportedError(f"{left[0]} is quantized, and transformers' model has no Linear module there")


def _check_orders(parent: Any) -> None:
    """UnsupportedError if matrices that are multiplied as one have columns in different orders."""
    for joined in JOINED:
        parts = [getattr(parent, name, None) for name in joined.parts]
        orders = [each.order for each in parts if isinstance(each, PackedLinear) and each.order is not None]
        if any(not torch.equal(order, orders[0]) for order in orders):
            raise UnsupportedError(
                f"{', '.join(joined.parts)} have columns in different orders (desc_act), and both engines multiply by "
                "them as one matrix"
            )
