"""The matrices of an adapter in host memory: one vector, in float32 or bfloat16.

numpy has no bfloat16, so its bits are stored as uint16.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensors(Mapping[str, npt.NDArray[Any]]):
    """Matrices concatenated in the vector `flat`, so that hundreds are copied, sent and checked as one.

    Reading one returns a view. `places`: each name's offset in `flat` and shape.
    """

    flat: npt.NDArray[Any]
    places: Mapping[str, tuple[int, tuple[int, ...]]]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        start, shape = self.places[name]
        view: npt.NDArray[Any] = self.flat[start : start + math.prod(shape)].reshape(shape)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def as_torch(array: npt.NDArray[Any]) -> "torch.Tensor":
    """`array` as a tensor that shares its memory; uint16 becomes bfloat16."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def in_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The numbers of `array`; uint16 are the bits of bfloat16."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def as_numpy(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    """The reverse of `as_torch`, for a tensor in host memory."""
    import torch

    array: npt.NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round `array` to bfloat16 (nearest, ties to even) and return the bits. Values must be finite."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
