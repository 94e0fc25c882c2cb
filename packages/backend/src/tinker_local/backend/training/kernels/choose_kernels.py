"""Which kernels compute on a device."""

import torch
from tinker_local.backend.training.kernels.kernels import Kernels, TorchKernels


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels for activations of `dtype` on `device`."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from tinker_local.backend.training.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()
