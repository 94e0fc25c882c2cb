"""Memory of a GPU that processes share: it outlives who wrote it, and is read alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tinker_local.backend.weights.checksum import checksum
from tinker_local.backend.weights.memory_holder import Deposit, MemoryHolder, get
from tinker_local.backend.weights.shared_memory import map_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.more,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 3 * 2**20 + 512

WRITES = """
import os, signal, sys, torch
from tinker_local.backend.weights.checksum import checksum
from tinker_local.backend.weights.memory_holder import Deposit, put
from tinker_local.backend.weights.shared_memory import write_shared

def fill(memory):
    memory.view(torch.bfloat16).copy_(torch.randn(len(memory) // 2, generator=torch.Generator().manual_seed(3)))
    print(checksum(memory), flush=True)

file = write_shared(int(sys.argv[2]), torch.device("cuda"), fill)
put(sys.argv[1], Deposit(None, [file]))
os.kill(os.getpid(), signal.SIGKILL)
"""

WRITES_INTO = """
import sys, torch
from tinker_local.backend.weights.memory_holder import get
from tinker_local.backend.weights.shared_memory import map_shared

memory = map_shared(get(sys.argv[1], wait=True).files[0], int(sys.argv[2]), torch.device("cuda"))
memory.add_(1)
torch.cuda.synchronize()
"""


@pytest.fixture
def holder() -> Iterator[MemoryHolder]:
    made = MemoryHolder()
    yield made
    made.close()


def deposit_of(holder: MemoryHolder) -> Deposit:
    found = get(holder.address, wait=False)
    assert found is not None
    return found


def test_the_memory_of_a_killed_process_is_read_and_not_written(holder: MemoryHolder) -> None:
    arguments = [holder.address, str(SIZE)]
    wrote = subprocess.run([sys.executable, "-c", WRITES, *arguments], capture_output=True, text=True, check=False)
    assert wrote.returncode == -signal.SIGKILL, wrote.stderr[-2000:]
    file = deposit_of(holder).files[0]
    memory = map_shared(file, SIZE, torch.device("cuda"))
    os.close(file)
    expected = torch.randn(SIZE // 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(memory.view(torch.bfloat16).cpu(), expected)
    assert checksum(memory) == checksum(expected) == int(wrote.stdout)
    w = memory[: 2**21].view(torch.bfloat16).view(1024, 1024)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(x @ w.T, x @ w.clone().T, rtol=0, atol=0)
    wrote = subprocess.run([sys.executable, "-c", WRITES_INTO, *arguments], capture_output=True, text=True, check=False)
    assert wrote.returncode != 0
    assert "CUDA error" in wrote.stderr
    assert checksum(memory) == checksum(expected)


def test_memory_ends_with_the_last_who_has_it(holder: MemoryHolder) -> None:
    size = 2**30
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    subprocess.run([sys.executable, "-c", WRITES, holder.address, str(size)], capture_output=True, check=False)
    file = deposit_of(holder).files[0]
    memory = map_shared(file, size, torch.device("cuda"))
    os.close(file)
    holder.close()
    assert torch.cuda.mem_get_info()[0] <= free - size
    view = memory[5:]
    del memory
    assert torch.cuda.mem_get_info()[0] <= free - size
    del view
    assert torch.cuda.mem_get_info()[0] > free - size // 2
