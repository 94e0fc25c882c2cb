"""Leaves some of a GPU's memory to others: the sampler beside the trainer, and programs that need a little at any
moment. torch's allocator would keep whatever it once had, up to the last byte."""

from contextlib import suppress

import torch

_shares: dict[torch.device, float] = {}
"""Of each device, what `leave_spare_memory` set last."""


def leave_spare_memory(device: torch.device, spare: int) -> None:
    """From now on, let this process take what is free on `device` but `spare` bytes. What torch's allocator keeps for
    later is given back if less than that is free. What is in use stays.

    The limit is torch's: an allocation beyond it first frees what is cached, and then is out of memory as if the GPU
    were smaller. A limit that others have set stays as it is.
    """
    if device.type != "cuda":
        return
    if torch.cuda.get_per_process_memory_fraction(device.index) not in (1.0, _shares.get(device)):
        return
    give_back_if_short(device, spare)
    free, total = torch.cuda.mem_get_info(device)
    allowed = max(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device) + free - spare)
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device.index)
    _shares[device] = torch.cuda.get_per_process_memory_fraction(device.index)


def give_back_if_short(device: torch.device, spare: int) -> None:
    """Give what torch's allocator keeps for later back to `device` if less than `spare` bytes are free there."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < spare and cached_bytes(device):
        torch.cuda.empty_cache()


def give_back_at_rest(spare: int) -> None:
    """This process has nothing to do: give back what its allocator keeps of the current GPU for later, unless as much
    is free there for those who leave `spare` bytes free."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # of a GPU that no longer works, which the next step says
            device = torch.device("cuda", torch.cuda.current_device())
            give_back_if_short(device, spare + cached_bytes(device))


def take_all_memory_again(device: torch.device) -> None:
    """Undo `leave_spare_memory`."""
    share = _shares.pop(device, None)
    if share is not None and torch.cuda.get_per_process_memory_fraction(device.index) == share:
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)


def cached_bytes(device: torch.device) -> int:
    """Bytes of `device` that torch's allocator keeps for later; 0 if it is not a GPU, or no longer works."""
    if device.type != "cuda":
        return 0
    try:
        return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    except RuntimeError:
        return 0
