"""Host memory for adapters that is quick to have and that CUDA copies from without blocking.

Page-locked memory as torch makes it comes from one call of the driver that holds up everybody's work on the GPU until
all of it is mapped and cleared (90 ms for the 185 MB of an adapter of rank 32 for an 8B model, on the machine of an
H200). Huge pages that torch's threads map by writing to them take 8 ms, and locking those takes 5 ms in the driver.
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
    """A vector [count] in memory of its own, with all that `write` writes to it; `locked`: in locked pages, if the
    system allows it (else copies from it to the GPU block)."""
    if not count:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            log.debug("no huge pages", exc_info=True)
    memory = np.frombuffer(pages, np.uint8)
    vector = torch.from_numpy(memory).view(dtype)
    write(vector)
    if locked:
        _lock(memory, pages)
    return vector


def _lock(memory: npt.NDArray[np.uint8], pages: mmap.mmap) -> None:
    """Lock `pages` until `memory`, which lies in them, is freed."""
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        log.warning("%d bytes of host memory could not be locked: CUDA error %d", memory.nbytes, code)
    else:
        # With `pages`, which an array may let go before it says that it ends (numpy 2.5 does).
        weakref.finalize(memory, _unlock, runtime, address, pages).atexit = False


def _unlock(runtime: Any, address: int, pages: mmap.mmap) -> None:
    """Before `pages` are unmapped, which is when this has returned."""
    with contextlib.suppress(RuntimeError):  # of a device that is lost
        torch.cuda.synchronize()  # it may be read still
    runtime.cudaHostUnregister(address)
