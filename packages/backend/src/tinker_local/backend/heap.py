"""Memory of this process: how much there is, buffers that are not written before they are filled, giving it back."""

import ctypes
import os
from pathlib import Path

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype, _new_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)


def unfilled(size: int) -> bytearray:
    """A buffer of `size` bytes of any content. It takes memory as it is filled; `bytearray(size)` would write all of it
    at once, while all threads wait."""
    buffer: bytearray = _new_bytearray(None, size)
    return buffer


def give_memory_back() -> None:
    """Return memory that is free in this process; blocks for milliseconds, in which threads that allocate wait.

    glibc otherwise keeps what was freed, in each thread's arena and whatever its size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_of_machine() -> int:
    """Bytes that this process may have: of the machine, or of its container."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return most
