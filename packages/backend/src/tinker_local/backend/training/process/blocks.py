"""Shared memory for large messages, which the sender uses again when the receiver has let go of it.

A fresh `memfd` costs more than what is written to it: the kernel clears every page, one thread at a time (80 ms for the
185 MB of an adapter of rank 32 for an 8B model, on the machine of an H200; 7 ms once the pages are there).

A block begins with a page whose first byte says whether the receiver still has it. Receiving maps that page apart from
the message, so that the byte can be cleared after the message's own mapping has gone with the last of its arrays: no
message is sent back, and nothing can block where objects are freed.
"""

import mmap
import os
import threading
import weakref

KEPT_BYTES = 2**31
"""The most that a sender keeps for later; the receiver may hold more, which goes when the receiver lets go."""

_SPARE = 2
"""How many times larger than needed a block may be."""

_FREE, _TAKEN = 0, 1


class Block:
    """Memory for one message at a time, in `memory` from `START` on."""

    START = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = size
        self.file = os.memfd_create("tinker-local", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, self.START + size)
            self.memory = mmap.mmap(self.file, self.START + size)
        except BaseException:
            os.close(self.file)
            raise

    @property
    def free(self) -> bool:
        """Whether the receiver of the last message has let go of it."""
        return self.memory[0] == _FREE

    def take(self) -> None:
        """The next receiver has it, from now on."""
        self.memory[0] = _TAKEN

    def forget(self) -> None:
        """Use it no more; whoever was sent it has it still."""
        os.close(self.file)
        del self.memory  # with the last view of it it is unmapped


class Blocks:
    """A sender's blocks, at most `kept_bytes` of them. Any thread may call it."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[Block] = []  # all were sent, the oldest first
        self._closed = False
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes, with anything in it, for the caller to `keep` or to forget. OSError if
        there is no memory for it."""
        with self._lock:
            fitting = [block for block in self._kept if size <= block.size <= _SPARE * size and block.free]
            block = min(fitting, key=lambda block: block.size, default=None)
            if block is not None:
                self._kept.remove(block)
        if block is None:
            block = Block(size)
        block.take()
        return block

    def keep(self, block: Block) -> None:
        """A block that was taken has been sent."""
        with self._lock:
            self._kept.append(block)
            total = sum(block.size for block in self._kept)
            while self._kept and (self._closed or total > self._kept_bytes):
                total -= self._kept[0].size
                self._kept.pop(0).forget()

    def close(self) -> None:
        """Keep none from now on."""
        with self._lock:
            self._closed = True
            while self._kept:
                self._kept.pop().forget()


def received(file: int, size: int) -> mmap.mmap:
    """The mapping of a block that came with a message of `size` bytes, from `Block.START` on. When it is unmapped, the
    sender has its block back. The caller closes `file`."""
    memory = mmap.mmap(file, Block.START + size)
    weakref.finalize(memory, _clear, mmap.mmap(file, Block.START)).atexit = False
    return memory


def _clear(page: mmap.mmap) -> None:
    page[0] = _FREE
