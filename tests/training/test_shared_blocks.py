"""Memory of large messages is reused, but never while arrays in it are alive."""

import gc
import os
import random
import socket
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from tinker_local.backend.process.blocks import Block, Blocks
from tinker_local.backend.process.channel import BLOCK_BYTES, Channel

MIB = 2**20


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Two ends, both in this process."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = Channel(one, os.getpid()), Channel(other, os.getpid())
    yield channels
    for channel in channels:
        channel.close()


def memory_files() -> set[int]:
    """Inodes of the memory files that this process has open or mapped."""
    gc.collect()
    opened = {
        int(link.stat().st_ino)
        for link in Path("/proc/self/fd").iterdir()
        if link.exists() and "memfd:tinker-local" in str(link.readlink())
    }
    mapped = {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line}
    return opened | mapped


@lru_cache(maxsize=8)
def array(seed: int, size: int = 2 * BLOCK_BYTES) -> np.ndarray:
    """Random bytes. Do not write to them: the same seed returns the same array."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


@pytest.mark.more
def test_a_block_is_reused_once_its_arrays_are_gone(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    before = memory_files()
    for seed in range(20):
        sender.send([array(seed), array(seed + 100)])
        first, second = receiver.receive()
        assert np.array_equal(first, array(seed))
        assert np.array_equal(second, array(seed + 100))
        del first, second
        assert len(memory_files() - before) == 1


def test_received_arrays_do_not_change(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    numbers = random.Random(0)
    held: dict[int, np.ndarray] = {}
    for seed in range(60):
        size = numbers.choice((BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 5))
        sender.send(array(seed, size))
        held[seed] = receiver.receive()[7:]  # a view keeps the whole alive
        if len(held) > 4:
            del held[numbers.choice(list(held))]
        for old, view in held.items():
            assert np.array_equal(view, array(old, view.size + 7)[7:])


def test_threads_never_get_the_same_block() -> None:
    blocks = Blocks(8 * MIB)
    taken: set[int] = set()
    guard = threading.Lock()
    failures: list[str] = []

    def use(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(200):
            block = blocks.take(numbers.choice((MIB, 2 * MIB, 3 * MIB)))
            with guard:
                if block.file in taken:
                    failures.append(f"file {block.file} was given twice")
                taken.add(block.file)
            if os.fstat(block.file).st_size < MIB:
                failures.append("too small")
            with guard:
                taken.remove(block.file)
            block.memory[0] = 0  # as its receiver does on release
            blocks.keep(block)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks.close()
    assert not failures


def test_kept_bytes_are_bounded() -> None:
    before = memory_files()
    blocks = Blocks(6 * MIB)
    for block in [blocks.take(2 * MIB) for _ in range(10)]:
        block.memory[0] = 0
        blocks.keep(block)
    del block
    assert len(memory_files() - before) == 3
    blocks.close()
    assert memory_files() == before


@pytest.mark.parametrize(("kept", "asked", "again"), [(4, 4, True), (4, 2, True), (4, 1, False), (2, 3, False)])
def test_a_block_is_large_enough_and_not_much_larger(kept: int, asked: int, again: bool) -> None:
    blocks = Blocks()
    block = blocks.take(kept * MIB)
    block.memory[0] = 0
    blocks.keep(block)
    found = blocks.take(asked * MIB)
    assert (found is block) == again
    assert len(found.memory) >= Block.START + asked * MIB
    blocks.close()


def test_a_message_that_cannot_be_sent_leaves_nothing(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    before = memory_files()
    receiver.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        sender.send(array(0))
    assert memory_files() == before


def test_a_message_outlives_its_sender(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    sender.send(array(3))
    sender.close()
    assert np.array_equal(receiver.receive(), array(3))
