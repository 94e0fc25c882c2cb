"""Checksums of tensors, which are computed where these are: on a GPU at the speed of its memory."""

import functools

import torch

_WORDS = 2**20
"""Words of a part; each is multiplied by another number."""
_MASK = 2**64 - 1


def checksum(tensor: torch.Tensor) -> int:
    """A number of 64 bits of the bytes of `tensor`, in the order of its elements.

    The sum of its words of 64 bits, each times another odd number, modulo 2^64: no change of a single word leaves it as
    it was, and of others one in 2^63 or so.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    words = data[:whole].view(torch.int64)
    rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
    odd = _odd_numbers(tensor.device)
    parts = [(part * odd[: len(part)]).sum() for part in words.split(_WORDS)]
    found = rest
    for part in torch.stack(parts).tolist() if parts else ():
        found = (found * 0x9E3779B97F4A7C15 + part) & _MASK
    return found


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    """int64 [_WORDS], without a pattern."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (_WORDS,), generator=random, dtype=torch.int64)
    return (numbers | 1).to(device)
