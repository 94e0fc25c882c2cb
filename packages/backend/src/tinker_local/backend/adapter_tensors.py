"""The matrices of an adapter in host memory: in one vector, and in float32 or bfloat16.

numpy has no bfloat16, so its bits travel as uint16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensors(Mapping[str, npt.NDArray[Any]]):
    """Matrices that lie one behind the other in the vector `flat`; reading one makes a view. `places`: where each name
    begins, and its shape. Hundreds of matrices are so copied, sent and checked as one."""

    flat: npt.NDArray[Any]
    places: Mapping[str, tuple[int, tuple[int, int]]]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        start, (rows, columns) = self.places[name]
        view: npt.NDArray[Any] = self.flat[start : start + rows * columns].reshape(rows, columns)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def as_torch(array: npt.NDArray[Any]) -> "torch.Tensor":
    """The same memory as a tensor: float32, or bfloat16 for its bits."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """`array` rounded to the nearest bfloat16, to even between two, as its bits; finite values only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
