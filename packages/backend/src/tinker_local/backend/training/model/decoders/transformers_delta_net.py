"""Keep transformers' layers of linear attention off kernels that their tensors cannot use.

transformers takes the kernels of `fla` and `causal_conv1d` if these packages can be imported, which they can without a
GPU, and then calls them for every tensor: on a CPU they fail, as they do on the meta device."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_FUNCTIONS = (
    *("causal_conv1d_fn", "causal_conv1d_update"),
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
)
"""What transformers wraps so, in the modules of Qwen3.5. Each has the function in plain torch as its `__wrapped__`."""


def use_kernels_on_gpus_alone(model: Any) -> None:
    """Have the classes of transformers' `model` compute linear attention in plain torch unless tensors are on CUDA, in
    16 bits. Changes transformers in this process, once."""
    for module in {type(each).__module__ for each in model.modules()}:
        _change(module)


@functools.cache
def _change(module: str) -> None:
    functions = vars(sys.modules[module])
    for name in _FUNCTIONS:
        if (plain := getattr(functions.get(name), "__wrapped__", None)) is not None:
            functions[name] = _chosen(functions[name], plain)


def _chosen(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of two functions whose first argument is a tensor, `kernel` for those that it takes, else `plain`."""

    @functools.wraps(plain)
    def chosen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        of_kernel = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
        return (kernel if of_kernel else plain)(x, *args, **kwargs)

    return chosen
