"""The functions of torch that losses and optimizers compute with, for NumPy arrays."""

from typing import Any

import numpy.typing as npt
from numpy import absolute as absolute
from numpy import clip as clip
from numpy import empty_like as empty_like
from numpy import exp as exp
from numpy import finfo as finfo
from numpy import log as log
from numpy import maximum as maximum
from numpy import minimum as minimum
from numpy import sign as sign
from numpy import sqrt as sqrt
from numpy import stack as stack
from numpy import where as where
from numpy import zeros_like as zeros_like

Array = npt.NDArray[Any]


def clone(input: Array) -> Array:
    """A copy."""
    return input.copy()


def aminmax(input: Array) -> tuple[Any, Any]:
    """The smallest and the largest number; NaN if one is."""
    return input.min(), input.max()


def add(input: Array, other: Array, *, alpha: float = 1.0, out: Array) -> None:
    """input + alpha other."""
    out[...] = input + alpha * other


def lerp(input: Array, end: Array, weight: float, *, out: Array) -> None:
    """input + weight (end - input)."""
    out[...] = input + weight * (end - input)


def addcmul(input: Array, tensor1: Array, tensor2: Array, *, value: float, out: Array) -> None:
    """input + value tensor1 tensor2."""
    out[...] = input + value * tensor1 * tensor2


def addcdiv(input: Array, tensor1: Array, tensor2: Array, *, value: float, out: Array) -> None:
    """input + value tensor1 / tensor2."""
    out[...] = input + value * tensor1 / tensor2
