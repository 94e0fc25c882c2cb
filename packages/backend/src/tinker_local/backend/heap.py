"""Memory: how much there is and is taken, buffers that are not written before they are filled, giving it back."""

import asyncio
import ctypes
import functools
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8

IDLE_SECONDS = 30.0
"""A process that computes again sooner than this keeps its memory."""

_IDLE_SHARE, _SOME_WORK = 0.1, 0.1
"""The share of a processor that a process takes which computes nothing; and processor seconds without which there is
nothing to give back again."""

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype, _new_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)


def unfilled(size: int) -> bytearray:
    """A buffer of `size` bytes of any content. It takes memory as it is filled; `bytearray(size)` would write all of it
    at once, while all threads wait."""
    buffer: bytearray = _new_bytearray(None, size)
    return buffer


@contextmanager
def while_importing(module: str) -> Iterator[None]:
    """Import `module`, and what it needs, without garbage collection, which then never looks at what there is.

    An import makes hundreds of thousands of objects that stay, and hardly any garbage. To look for it again and again
    takes 3.4 of the 11.4 processor seconds in which vLLM is imported and starts a tiny model. Does nothing if `module`
    is imported already: what a process holds by then may become garbage.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()  # what is garbage already must not be frozen
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def give_memory_back() -> None:
    """Return memory that is free in this process, which glibc otherwise keeps. Threads that allocate wait meanwhile,
    for milliseconds, or longer where gigabytes were kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Where no GPU computes, let this process keep what it frees for what it takes next; before it starts a thread.

    glibc maps each large buffer anew, and a thread's arena has no blocks above 64 MiB, so the kernel clears 1.2 million
    pages in a training step of a small model: a sixth of its time. What is kept goes back to the machine whenever this
    process has rested for one or two times `IDLE_SECONDS`. Does nothing without glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not memory_of_gpus():
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
            set_option(option, value)
        threading.Thread(target=_give_back_at_rest, daemon=True, name="memory").start()


def _give_back_at_rest() -> None:
    given = 0.0  # after so many processor seconds of this process
    while True:
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        now = time.process_time()
        if now - before < _IDLE_SHARE * IDLE_SECONDS and now - given > _SOME_WORK:
            give_memory_back()
            given = time.process_time()


def freeze_heap() -> None:
    """Let garbage collection leave long-lived objects alone, so that it does not delay kernel launches."""
    gc.collect()
    gc.freeze()


def memory_of_machine() -> int:
    """Bytes that this process may have: of the machine, or of its container."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return most


def memory_available() -> int:
    """Bytes that processes may still take (Linux): of the machine, or of its container."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = 1024 * int(found[1]) if found else memory_of_machine() // 2
    return max(0, min([free, *_left_by_groups(Path("/sys/fs/cgroup"))]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group (v2) of this process with a limit still allows; files that are cached can be dropped."""
    with suppress(OSError):
        named = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        inner = root / (named[1] if named else "")
        for group in (inner, *inner.parents):
            if group.is_relative_to(root):
                with suppress(OSError, ValueError):  # no limit ("max"), or not a group
                    most = int((group / "memory.max").read_text())
                    cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                    taken = int((group / "memory.current").read_text())
                    yield most - taken + (int(cached[1]) if cached else 0)


def memory_of_processes() -> int:
    """Resident bytes of this process and of all that it started (Linux). What they share counts once for each."""
    pages: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            # The name of a program, in brackets, may have spaces and brackets itself.
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            pages[int(entry.name)] = int((entry / "statm").read_text().split()[1])
    ours = {os.getpid()}
    while found := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= found
    return sum(pages.get(process, 0) for process in ours) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _nvml() -> Any:
    """NVIDIA's library, which vLLM for GPUs brings; None where there is none, or no GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def memory_of_gpus() -> dict[int, tuple[int, int]]:
    """Bytes in use, by any process, and in all, of each GPU that this process sees, by the number that it has here.
    Empty without GPUs."""

    def memory(nvml: Any, gpu: Any) -> tuple[int, int]:
        found = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return int(found.used), int(found.total)

    return _of_visible_gpus(memory)


def free_on_gpu(gpu: int) -> tuple[int, int]:
    """Free bytes and all bytes of a GPU, by its number here, as `torch.cuda.mem_get_info`, whose context would stay: it
    takes half a gibibyte of the GPU as long as this process lives. RuntimeError if the driver refuses, OSError without
    one."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"GPU {gpu}: {name} failed with CUDA error {status}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), gpu)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxGetCurrent", ctypes.byref(before))
        call("cuCtxSetCurrent", context)
        try:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call("cuCtxSetCurrent", before)
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value, total.value


def names_of_gpus() -> dict[int, str]:
    """The kind of each GPU that this process sees, by the number that it has here."""
    return _of_visible_gpus(lambda nvml, gpu: str(nvml.nvmlDeviceGetName(gpu)))


def driver_of_gpus() -> str:
    """The version of NVIDIA's driver, "580.65.06"; empty without GPUs, or if it does not say."""
    nvml = _nvml()
    if nvml is None:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""


def _of_visible_gpus(read: Callable[[Any, Any], T]) -> dict[int, T]:
    """What `read` tells, from NVIDIA's library and its handle of a GPU, of each that this process sees. One that does
    not answer is left out."""
    nvml, found = _nvml(), dict[int, T]()
    if nvml is None:
        return found
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(at) for at in range(nvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
    for at, name in enumerate(name.strip() for name in names):
        with suppress(nvml.NVMLError):
            by_name = (
                nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
            )
            found[at] = read(nvml, by_name)
    return found


class MemoryInUse(NamedTuple):
    """`processes`: as `memory_of_processes`; `gpus`: as `memory_of_gpus`."""

    processes: int
    gpus: dict[int, tuple[int, int]]


async def memory_in_use() -> MemoryInUse:
    """Read in a thread: looking at every process of the machine takes milliseconds."""
    return await asyncio.to_thread(lambda: MemoryInUse(memory_of_processes(), memory_of_gpus()))
