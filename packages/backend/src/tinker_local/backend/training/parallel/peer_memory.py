"""Memory of this process that other ranks of the machine read while it computes, and theirs.

On a GPU: CUDA's driver API, whose copies between GPUs are the copy engines' work. NCCL's gathers run on the same
multiprocessors as the computation. On the CPU: shared memory without a name.

What is read must not change: nothing tells the owner, or makes the reader wait. `NCCL_P2P_DISABLE=1`, which keeps NCCL
from such reads, keeps us from them.
"""

import ctypes
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from tinker_local.backend.training.parallel.ranks import fingerprint

Handle = tuple[bytes, int]
"""What another process needs to find memory of this one: what to open, and where it begins in that, in bytes."""


CANNOT = (OSError, RuntimeError, ValueError)
"""What is raised where memory cannot be shared or opened: by a driver, by torch and by `mmap`. A rank that let one of
them through would leave the others waiting for it."""


class PeerMemory(Protocol):
    """Memory of one kind of device."""

    def share(self, tensor: torch.Tensor) -> Handle:
        """Let other processes read a contiguous `tensor`, while it lives."""

    def open(self, handle: Handle, nbytes: int) -> Any:
        """The memory of another process, for `copy`. Raises one of `CANNOT` if this process cannot read it."""

    def own(self, tensor: torch.Tensor) -> Any:
        """The memory of a tensor of this process, for `copy`."""

    def copy(self, source: Any, into: torch.Tensor) -> None:
        """Copy as many bytes as `into` [bytes] has. On a GPU, the current stream does it. Autograd does not see it:
        weights that it has saved are whole again before it reads them."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class DeviceMemory:
    """Of a GPU that this one can read directly (NVLink, or PCIe with peer access). Other GPUs need not be visible."""

    _MAY_ENABLE_PEER_ACCESS = 1

    def __init__(self) -> None:
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        self._opened: dict[bytes, int] = {}

    def share(self, tensor: torch.Tensor) -> Handle:
        """See `PeerMemory.share`."""
        start, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        address = ctypes.c_uint64(tensor.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), start)
        return bytes(handle.bytes), tensor.data_ptr() - start.value

    def open(self, handle: Handle, nbytes: int) -> int:
        """See `PeerMemory.open`. An allocation is opened once, as CUDA wants it; it stays open."""
        what, offset = handle
        if what not in self._opened:
            start = ctypes.c_uint64()
            wanted = _IpcHandle.from_buffer_copy(what)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(start), wanted, self._MAY_ENABLE_PEER_ACCESS)
            self._opened[what] = start.value
        return self._opened[what] + offset

    def own(self, tensor: torch.Tensor) -> int:
        """See `PeerMemory.own`."""
        address: int = tensor.data_ptr()
        return address

    def copy(self, source: int, into: torch.Tensor) -> None:
        """See `PeerMemory.copy`."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(into.device).cuda_stream)
        places = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(len(into)), stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: CUDA error {code} ({(text.value or b'unknown').decode()})")


class HostMemory:
    """Of the host."""

    def share(self, tensor: torch.Tensor) -> Handle:
        """See `PeerMemory.share`. Moves the tensor's storage into shared memory."""
        storage: Any = tensor.untyped_storage()
        if not storage.is_shared() and (free := shutil.disk_usage("/dev/shm").free) < 2 * storage.nbytes():
            raise OSError(f"/dev/shm has {free} bytes free, and this needs {storage.nbytes()}")
        descriptor, _ = storage._share_fd_cpu_()
        return f"/proc/{os.getpid()}/fd/{descriptor}".encode(), tensor.storage_offset() * tensor.itemsize

    def open(self, handle: Handle, nbytes: int) -> Any:
        """See `PeerMemory.open`."""
        path, offset = handle
        with Path(path.decode()).open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return np.frombuffer(whole, np.uint8, nbytes, offset)

    def own(self, tensor: torch.Tensor) -> Any:
        """See `PeerMemory.own`."""
        return tensor.numpy()

    def copy(self, source: Any, into: torch.Tensor) -> None:
        """See `PeerMemory.copy`."""
        np.copyto(into.numpy(), source)


class Peers:
    """Units of which each rank of a copy has a part. This rank reads the parts of the others from their memory."""

    def __init__(self, memory: PeerMemory, parts: Sequence[Sequence[Any]]) -> None:
        """`parts` by rank and unit, as `memory` copies them."""
        self._memory = memory
        self._parts = parts

    def read(self, number: int, into: torch.Tensor) -> None:
        """Fill `into` [bytes] with unit `number`, its parts in the order of their ranks."""
        for parts, target in zip(self._parts, into.view(len(self._parts), -1), strict=True):
            self._memory.copy(parts[number], target)


def connect(own: Sequence[torch.Tensor], group: Any) -> Peers | str:
    """Let the ranks of `group`, which all call this, read each other's parts `own` [bytes] of each unit; every part is
    read once and its sum compared. If one of them cannot, none does, and the result says why."""
    rank, device = dist.get_rank(group), own[0].device
    memory: PeerMemory | None = None
    fault, handles, sums = "", [], []
    try:
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            raise OSError("NCCL_P2P_DISABLE is set")
        memory = DeviceMemory() if device.type == "cuda" else HostMemory()
        handles = [memory.share(part) for part in own]
        sums = [_sum(part) for part in own]  # which also waits until the parts are written
    except CANNOT as error:
        fault = str(error) or type(error).__name__
    shared = _all(((handles, sums), fault), group)
    if fault := next((said for _, said in shared if said), ""):
        return fault
    assert memory is not None
    try:
        parts = [
            [
                memory.own(part) if each == rank else memory.open(handle, len(part))
                for handle, part in zip(handles, own, strict=True)
            ]
            for each, ((handles, _), _) in enumerate(shared)
        ]
        peers = Peers(memory, parts)
        for number, part in enumerate(own):
            whole = torch.empty(len(shared) * len(part), dtype=torch.uint8, device=device)
            peers.read(number, whole)
            for each, found in enumerate(map(_sum, whole.view(len(shared), -1))):
                if found != shared[each][0][1][number]:
                    raise OSError(f"rank {rank} reads other bytes from rank {each} than are there")
    except CANNOT as error:
        fault = str(error) or type(error).__name__
    fault = next((said for said in _all(fault, group) if said), "")
    return fault or peers


def _all(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _sum(part: torch.Tensor) -> int:
    return fingerprint(part.view(torch.float64))
