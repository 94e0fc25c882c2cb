"""The arrays of an `AdapterState` in float32 or bfloat16; numpy has no bfloat16, so its bits travel as uint16."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def as_torch(array: npt.NDArray[Any]) -> "torch.Tensor":
    """The same memory as a tensor: float32, or bfloat16 for its bits."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """`array` rounded to the nearest bfloat16, to even between two, as its bits; finite values only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
