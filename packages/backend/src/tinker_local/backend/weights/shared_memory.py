"""Memory that processes of one user have in common: of the host, or of a GPU.

Who makes it gets a file descriptor. The memory exists as long as a descriptor of it or a mapping does, in any process,
so that it outlives who made it. It is written once. From then on it is mapped for reading alone, and a stray write ends
the process that makes it in place of changing what others compute.

On a GPU these are the driver's functions for virtual memory (`cuMemCreate` and those after it), since memory that is
shared by `cudaIpcGetMemHandle` ends with the process that made it.
"""

import fcntl
import mmap
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch


class CannotShareError(Exception):
    """Why processes cannot have the frozen weights in common."""


def write_shared(size: int, device: torch.device, fill: Callable[[torch.Tensor], None]) -> int:
    """New memory of `size` bytes on `device`, which `fill` writes through a tensor uint8 [size] that it must not keep.
    Returns its file descriptor, which the caller closes. CannotShareError if `device` has no such memory."""
    return (_write_on_gpu if device.type == "cuda" else _write_on_host)(size, device, fill)


def map_shared(file: int, size: int, device: torch.device) -> torch.Tensor:
    """The memory behind `file` as a tensor uint8 [size] on `device` that can only be read. It is unmapped with the last
    tensor that views it. The caller closes `file`."""
    return (_map_on_gpu if device.type == "cuda" else _map_on_host)(file, size, device)


def _write_on_host(size: int, device: torch.device, fill: Callable[[torch.Tensor], None]) -> int:
    try:
        file = os.memfd_create("tinker-local-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise CannotShareError(f"the system gives no memory to share: {error}") from None
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        fill(torch.frombuffer(memory, dtype=torch.uint8))
        del memory  # the kernel seals what is mapped for writing nowhere
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError):
            raise CannotShareError(f"{size} bytes of memory to share: {error}") from None
        raise
    return file


def _map_on_host(file: int, size: int, device: torch.device) -> torch.Tensor:
    try:
        # A private mapping has the same pages; before Linux 6.7 what is sealed cannot be mapped in another way.
        memory = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise CannotShareError(f"memory of the trainer cannot be mapped: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that refuse a write; the kernel refuses it
        return torch.frombuffer(memory, dtype=torch.uint8)


class _OnGpu:
    """Addresses of the GPU `device` with the memory of `handle` behind them, for torch to make a tensor of. `end`
    unmaps them."""

    def __init__(self, driver: Any, handle: Any, size: int, device: torch.device, *, writable: bool) -> None:
        room = _rounded(driver, size, device)
        address = _called(driver.cuMemAddressReserve(room, 0, 0, 0))
        self.end = weakref.finalize(self, _unmap, driver, address, room)
        self.end.atexit = False  # the process's mappings end with it, and the driver may be gone before
        _called(driver.cuMemMap(address, room, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = _allocation(driver, device).location
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        _called(driver.cuMemSetAccess(address, room, [access], 1))
        self.__cuda_array_interface__ = {
            "data": (int(address), False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _write_on_gpu(size: int, device: torch.device, fill: Callable[[torch.Tensor], None]) -> int:
    driver = _driver(device)
    handle = _called(driver.cuMemCreate(_rounded(driver, size, device), _allocation(driver, device), 0))
    try:
        mapped = _OnGpu(driver, handle, size, device, writable=True)
        fill(torch.as_tensor(mapped, device=device))
        torch.cuda.synchronize(device)
        mapped.end()
        return int(_called(driver.cuMemExportToShareableHandle(handle, _file_handle(driver), 0)))
    finally:
        _called(driver.cuMemRelease(handle))


def _map_on_gpu(file: int, size: int, device: torch.device) -> torch.Tensor:
    driver = _driver(device)
    handle = _called(driver.cuMemImportFromShareableHandle(file, _file_handle(driver)))
    try:
        return torch.as_tensor(_OnGpu(driver, handle, size, device, writable=False), device=device)
    finally:
        _called(driver.cuMemRelease(handle))  # a mapping keeps the memory


def _driver(device: torch.device) -> Any:
    """CUDA's driver, once torch's context of `device` is the current one."""
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError as error:
        raise CannotShareError(f"the package cuda-bindings is missing ({error})") from None
    torch.zeros(1, device=device)  # makes torch's context, that of `device`, the one of this thread
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    found = _called(driver.cuCtxGetDevice())
    if not _called(driver.cuDeviceGetAttribute(attribute, found)):  # so it is in WSL2
        raise CannotShareError("this GPU's driver gives no file descriptors for memory")
    return driver


def _file_handle(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _allocation(driver: Any, device: torch.device) -> Any:
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = int(_called(driver.cuCtxGetDevice()))
    kind.requestedHandleTypes = _file_handle(driver)
    return kind


def _rounded(driver: Any, size: int, device: torch.device) -> int:
    """`size`, up to what the driver gives memory in."""
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = int(_called(driver.cuMemGetAllocationGranularity(_allocation(driver, device), least)))
    return -(-size // step) * step


def _unmap(driver: Any, address: Any, size: int) -> None:
    driver.cuMemUnmap(address, size)
    driver.cuMemAddressFree(address, size)


def _called(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returned besides its status. CannotShareError if that is an error, and torch's
    error if memory is short."""
    status, *values = result
    if int(status) == 2:  # CUDA_ERROR_OUT_OF_MEMORY
        raise torch.OutOfMemoryError("the GPU has no memory left for the weights that trainer and sampler share")
    if int(status):
        raise CannotShareError(f"CUDA's driver answers {status.name}")
    return values[0] if values else None
