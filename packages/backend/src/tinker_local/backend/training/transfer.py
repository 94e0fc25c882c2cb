"""Arrays from the host to the model's device without making the host wait for what the device is still doing."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on `device` (on the CPU the same memory). It is queued behind the device's work; only memory that is
    page-locked can be copied so, and torch keeps such memory for the next time."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
