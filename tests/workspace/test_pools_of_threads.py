"""Threads that wait leave no pool of torch's behind. In separate processes: pools live as long as threads."""

import asyncio
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main

pytestmark = pytest.mark.more

COUNTED = """
import asyncio, os, sys, threading
import torch
from tinker_local.backend import threads as the_threads
from tinker_local.backend.scheduling.memory_sharing import MemorySharing
from tinker_local.backend.threads import Threads
from tinker_local.backend.vllm_engine.engine_thread import EngineThread

if torch.cuda.is_available() or the_threads._libgomp() is None:
    sys.exit(77)
torch.set_num_threads(3)
torch.set_num_interop_threads(1)


def count():
    return len(os.listdir("/proc/self/task"))


def multiply():
    # The number is that of each thread; other threads begin with the environment's.
    torch.set_num_threads(3)
    return float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()), count()


async def main(way):
    threads = Threads("some", 1)
    engines = EngineThread()
    sharing = MemorySharing(None)
    runs = {
        "threads": lambda: threads.run(multiply),
        "trainer": lambda: sharing.in_turn(multiply),
        "engine": lambda: asyncio.wrap_future(engines._call(multiply)),
        "bare": lambda: asyncio.get_running_loop().run_in_executor(None, multiply),
    }
    for _ in range(2):
        product, while_multiplying = await runs[way]()
        assert product == 512.0**3, product
        for _ in range(100):
            if count() == while_multiplying - 2:
                break
            await asyncio.sleep(0.02)
        print(count() - while_multiplying)


asyncio.run(main(sys.argv[1]))
os._exit(0)
"""


@pytest.mark.parametrize(("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_commands_let_waiting_threads_spin_briefly(
    given: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", given)
    assert CliRunner().invoke(main, ["completion", "bash"]).exit_code == 0
    assert os.environ["GOMP_SPINCOUNT"] == found


@pytest.mark.parametrize(("way", "left"), [("threads", -2), ("trainer", -2), ("engine", -2), ("bare", 0)])
async def test_a_thread_that_waits_has_no_pool(way: str, left: int) -> None:
    """After `bare` the two other threads of the pool stay: the test would notice."""
    command = [sys.executable, "-c", COUNTED, way]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("a GPU computes, or torch has another OpenMP than libgomp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(left)] * 2
