"""Which replica has read the beginning of a prompt: its KV cache may still hold it."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from tinker_local.backend.sampling.sampler import SampleWork

FIRST, GROWTH = 64, 1.25
"""Prompts are compared up to `FIRST` positions, `GROWTH` times as many, and so on, and as a whole."""

KEPT = 2**15
"""Beginnings that are remembered for each replica: those of about 1,500 prompts of 4,096 positions."""

Prefix = tuple[int, bytes]
"""A number of positions, and a digest of the version and of all that stands there."""


def prefixes(work: SampleWork) -> list[Prefix]:
    """Beginnings of the prompt, the shortest first and the last of them whole."""
    tokens, length = work.prompt.token_ids, work.prompt.length
    name = "" if work.version is None else work.version.name
    if work.moving is not None:
        name = work.moving.namespace
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    images = iter(work.prompt.images)
    image = next(images, None)
    found, start, end = [], 0, FIRST
    while start < length:
        end = min(end, length)
        digest.update(tokens[start:end].tobytes())
        while image is not None and image.offset < end:
            digest.update(f"{image.offset}:{image.image.content_hash}".encode())
            image = next(images, None)
        found.append((end, digest.copy().digest()))
        start, end = end, int(end * GROWTH)
    return found


class PrefixRoutes:
    """What each of `replicas` has read last."""

    def __init__(self, replicas: int) -> None:
        self._read: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]

    def positions_read(self, replica: int, beginnings: Sequence[Prefix]) -> int:
        """How many positions of a prompt with these `beginnings` a replica has read."""
        read = self._read[replica]
        return next((length for length, digest in reversed(beginnings) if digest in read), 0)

    def note(self, replica: int, beginnings: Sequence[Prefix]) -> None:
        """A replica reads a prompt with these `beginnings`."""
        read = self._read[replica]
        for _, digest in beginnings:
            read[digest] = None
            read.move_to_end(digest)
        while len(read) > KEPT:
            read.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        self._read[replica].clear()
