"""Shared memory for large messages, which the sender reuses when the receiver has released it.

A fresh `memfd` costs more than writing to it, because the kernel clears every page in one thread: 80 ms for the 185 MB
of a rank-32 adapter of an 8B model on an H200's host, compared with 7 ms once the pages exist.

A block begins with a page whose first byte says whether the receiver still uses the block. The receiver maps that page
separately from the message. When the last array is freed, the message's mapping disappears, and then the byte is
cleared. No message is sent back, and freeing objects never blocks.
"""

import mmap
import os
import threading
import weakref

KEPT_BYTES = 2**31
"""The most bytes that a sender keeps for reuse. The receiver may hold more, which is freed when it releases them."""

_SPARE = 2
"""A block may be this many times larger than needed."""

_FREE, _TAKEN = 0, 1


class Block:
    """Memory for one message at a time; the message starts at `START` in `memory`."""

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
        """Whether the receiver of the last message has released it."""
        return self.memory[0] == _FREE

    def take(self) -> None:
        """Mark it as in use by the next receiver."""
        self.memory[0] = _TAKEN

    def forget(self) -> None:
        """Stop using it; a receiver can still use it."""
        os.close(self.file)
        del self.memory  # unmapped together with its last view


class Blocks:
    """A sender's blocks, of which it keeps at most `kept_bytes`. Thread-safe."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[Block] = []  # all have been sent, oldest first
        self._closed = False
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes with arbitrary content. The caller has to `keep` or `forget` it. OSError if
        memory is short."""
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
        """Call this after sending a block that was taken."""
        with self._lock:
            self._kept.append(block)
            total = sum(block.size for block in self._kept)
            while self._kept and (self._closed or total > self._kept_bytes):
                total -= self._kept[0].size
                self._kept.pop(0).forget()

    def close(self) -> None:
        """Forget all blocks and keep no more."""
        with self._lock:
            self._closed = True
            while self._kept:
                self._kept.pop().forget()


def received(file: int, size: int) -> mmap.mmap:
    """The mapping of a received block with a message of `size` bytes, from `Block.START` on. When it is unmapped, the
    sender can reuse the block. The caller closes `file`."""
    memory = mmap.mmap(file, Block.START + size)
    weakref.finalize(memory, _clear, mmap.mmap(file, Block.START)).atexit = False
    return memory


def _clear(page: mmap.mmap) -> None:
    page[0] = _FREE
