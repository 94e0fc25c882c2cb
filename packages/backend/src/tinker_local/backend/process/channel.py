"""Sends messages over a socket between two processes, and their arrays through unnamed shared memory.

Small messages are records of the socket. A larger one is written once into a `memfd`, whose descriptor goes over the
socket. The receiver maps the memory and closes the descriptor. From then on the memory belongs to the arrays in it.
After the last of them is freed, the memory is released, or returns to the sender if it is large (`blocks.py`). Since it
has no name, nothing is left behind however a process ends. And it does not use /dev/shm, which is small in containers.
"""

import functools
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tinker_local.backend.process.blocks import Block, Blocks, received
from tinker_local.backend.process.messages import ALIGNMENT, Encoded, decode, encode, join
from tinker_local.backend.rendering.rendered_input import RenderedImage

INLINE_BYTES = 2**16
"""The largest message sent as a record of the socket, whose buffer holds three of these by default."""

MAPPED_BYTES = 2**20
"""The smallest message that is mapped. Smaller ones are read, because the number of mappings is limited (65,530)."""

BLOCK_BYTES = 2**22
"""The smallest message that uses a block; its arrays are copied into the block one by one."""

_JOINED_BYTES = 2**8
"""More than what a joined message takes besides its head and arrays."""

PIECE_BYTES = 2**23
"""The most bytes that one thread copies at a time."""

_SIZE = struct.Struct("<Q")
_RECORD = struct.Struct("<?Q")
"""Precedes a message: whether it is in a `memfd`, and its size in bytes."""


class Channel:
    """One end of the channel. `receive` ends when the process `peer` does, even if others still hold its socket."""

    def __init__(self, end: socket.socket, peer: int) -> None:
        self._socket = end
        self._peer = os.fdopen(
            os.pidfd_open(peer), "rb", buffering=0
        )  # a file object, so that the descriptor cannot leak
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._poll.register(self._peer, select.POLLIN)
        self._blocks = Blocks()

    @property
    def files(self) -> tuple[int, int]:
        """What becomes readable when there is something to receive or the peer has ended."""
        return self._socket.fileno(), self._peer.fileno()

    def send(self, message: Any) -> None:
        """Send `message`; see `send_encoded`."""
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: Encoded) -> None:
        """Send one message; any thread may call this. Raises BrokenPipeError or ConnectionResetError if the peer is
        gone, and OSError if memory is short (then nothing was sent)."""
        first = _first_array(len(encoded.head))
        total = first + encoded.offsets[-1]
        if total < BLOCK_BYTES:
            self.send_bytes(_joined(encoded, first))  # there may be thousands of small arrays
        else:
            self._send_block(total, lambda block: _copy_into(block, encoded, first))

    def send_bytes(self, message: bytes | bytearray | memoryview) -> None:
        """Send a message in the form of `message_bytes` and `receive_bytes`; as `send_encoded`."""
        total = len(message)
        if total <= INLINE_BYTES:
            self._socket.send(_RECORD.pack(False, total) + message)
        elif total >= BLOCK_BYTES:
            self._send_block(total, lambda block: _copy_bytes(block, message))
        else:
            memory = os.memfd_create("tinker-local", os.MFD_CLOEXEC)
            try:
                _write(memory, memoryview(message))
                socket.send_fds(self._socket, [_RECORD.pack(True, total)], [memory])
            finally:
                os.close(memory)

    def _send_block(self, total: int, fill: Callable[[Block], None]) -> None:
        block = self._blocks.take(total)
        try:
            fill(block)
            socket.send_fds(self._socket, [_RECORD.pack(True, total)], [block.file])
        except BaseException:
            block.forget()
            raise
        self._blocks.keep(block)

    def send_joined(self, messages: Sequence[Encoded]) -> None:
        """Send messages in order, neighbours together as long as they fit into a record: each record wakes the
        receiver, and each time this thread gives up the GIL. A large one stays alone, because one array keeps the
        memory of all that came with it."""
        together: list[Encoded] = []
        size = 0
        for message in messages:
            bytes_of = len(message.head) + message.offsets[-1] + _JOINED_BYTES
            if together and size + bytes_of > INLINE_BYTES:
                self.send_encoded(join(together) if len(together) > 1 else together[0])
                together, size = [], 0
            together.append(message)
            size += bytes_of
        if together:
            self.send_encoded(join(together) if len(together) > 1 else together[0])

    def receive(self, images: Mapping[str, RenderedImage] | None = None) -> Any:
        """The next message, or a list of joined ones, whose images are looked up in `images`. EOFError if the peer has
        ended."""
        memory, start, _ = self._received()
        (size,) = _SIZE.unpack_from(memory, start)
        head = bytes(memory[start + _SIZE.size : start + _SIZE.size + size])
        return decode(head, memory, start + _first_array(size), images or {})

    def receive_bytes(self) -> memoryview:
        """The next message, not decoded. EOFError if the peer has ended."""
        memory, start, total = self._received()
        return memoryview(memory)[start : start + total]

    def _received(self) -> tuple[bytearray | mmap.mmap, int, int]:
        """The memory of the next message, and where it starts and its size there."""
        ready = dict(self._poll.poll())
        if self._socket.fileno() not in ready:
            raise EOFError
        record, descriptors, flags, _ = socket.recv_fds(
            self._socket, _RECORD.size + INLINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not record:
            raise EOFError
        shared, total = _RECORD.unpack_from(record)
        if not shared:
            return bytearray(memoryview(record)[_RECORD.size :]), 0, total
        if not descriptors:
            raise OSError(f"a message of {total} bytes came without its memory (flags {flags}): too many open files?")
        return *_taken(descriptors[0], total), total

    def wait_for_end(self) -> None:
        """Block until the other end is closed or its process has ended, without receiving a message."""
        poll = select.poll()
        poll.register(self._socket, 0)  # a hang-up is always reported
        poll.register(self._peer, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
        self._peer.close()
        self._blocks.close()


def message_bytes(message: Any) -> bytearray:
    """A message in one piece, for `Channel.send_bytes`."""
    encoded = encode(message)
    return _joined(encoded, _first_array(len(encoded.head)))


def _first_array(head: int) -> int:
    """Where the arrays begin, after the size of the head and the head itself."""
    return -(-(_SIZE.size + head) // ALIGNMENT) * ALIGNMENT


def _joined(encoded: Encoded, first: int) -> bytearray:
    joined = bytearray(first + encoded.offsets[-1])
    _SIZE.pack_into(joined, 0, len(encoded.head))
    joined[_SIZE.size : _SIZE.size + len(encoded.head)] = encoded.head
    for array, at in zip(encoded.arrays, encoded.offsets, strict=False):
        np.ndarray(array.shape, array.dtype, joined, first + at)[...] = array
    return joined


def _copy_bytes(block: Block, message: bytes | bytearray | memoryview) -> None:
    block.memory[Block.START : Block.START + len(message)] = message


def _copy_into(block: Block, encoded: Encoded, first: int) -> None:
    """Copy a message with several threads, because one alone cannot saturate the memory."""
    start = Block.START
    _SIZE.pack_into(block.memory, start, len(encoded.head))
    block.memory[start + _SIZE.size : start + _SIZE.size + len(encoded.head)] = encoded.head
    whole = np.frombuffer(block.memory, np.uint8)
    pieces = [
        (whole[begin:end], data[begin - at : end - at])
        for array, offset in zip(encoded.arrays, encoded.offsets, strict=False)
        for data in [np.ascontiguousarray(array).reshape(-1).view(np.uint8)]
        for at in [start + first + offset]
        for begin in range(at, at + len(data), PIECE_BYTES)
        for end in [min(begin + PIECE_BYTES, at + len(data))]
    ]
    list(_copiers().map(lambda piece: np.copyto(*piece), pieces))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="tinker-local-channel")


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _taken(file: int, total: int) -> tuple[bytearray | mmap.mmap, int]:
    """The memory of a descriptor, which is then closed, and the offset of the message in it."""
    try:
        if total >= BLOCK_BYTES:
            return received(file, total), Block.START
        if total >= MAPPED_BYTES:
            return mmap.mmap(file, total), 0
        memory = bytearray(total)
        os.preadv(file, [memory], 0)
        return memory, 0
    finally:
        os.close(file)
