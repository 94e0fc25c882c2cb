"""Copy arrays between the host and the model's device.

Only page-locked memory is copied at full speed and asynchronously. Locking is slow, but torch caches locked memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on `device` (on the CPU: the same memory), queued after the device's work without blocking the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in unshared host memory, rounded on the device. Waits for the device's work so far."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", dtype, copy=True)
    rounded = tensor.to(dtype)
    copy = torch.empty(rounded.shape, dtype=dtype, pin_memory=True)
    copy.copy_(rounded, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy
