"""Page-locked host memory for adapters that is fast to allocate and that CUDA copies from without blocking.

torch allocates page-locked memory in one call of the driver, which stalls all work on the GPU until all of it is mapped
and cleared: 90 ms for the 185 MB of a rank 32 adapter for an 8B model, on the host of an H200. Mapping huge pages by
writing to them from torch's threads takes 8 ms, and locking those 5 ms in the driver.
"""

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)


def new_vector(
    count: int, dtype: torch.dtype, write: Callable[[torch.Tensor], object], *, locked: bool
) -> torch.Tensor:
    """A vector [count] in newly mapped memory, filled by `write`. `locked`: lock its pages, if the system allows it;
    otherwise copies to the GPU block."""
    if not count:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # the kernel has none
            log.debug("no huge pages", exc_info=True)
    memory = np.frombuffer(pages, np.uint8)
    vector = torch.from_numpy(memory).view(dtype)
    write(vector)
    if locked:
        _lock(memory, pages)
    return vector


def _lock(memory: npt.NDArray[np.uint8], pages: mmap.mmap) -> None:
    """Lock `pages` until `memory`, a view of them, is freed."""
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        log.warning("%d bytes of host memory could not be locked: CUDA error %d", memory.nbytes, code)
    else:
        # Holds `pages`, which numpy 2.5 releases before it calls finalizers.
        weakref.finalize(memory, _unlock, runtime, address, pages).atexit = False


def _unlock(runtime: Any, address: int, pages: mmap.mmap) -> None:
    """Unlock `pages`, which are unmapped when this returns."""
    with contextlib.suppress(RuntimeError):  # the device may be lost
        torch.cuda.synchronize()  # a copy may still read it
    runtime.cudaHostUnregister(address)
