"""From a save of ephemeral weights to the first sampled token."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator

from harness.lines import Line
from harness.scale import Scale
from harness.timing import DeviceMemory

from measurements.hosting import Host
from measurements.steps import text_data
from measurements.ways import Way, step


async def measure(host: Host) -> None:
    """In process with an idle trainer, over HTTP likewise, and in process while another model trains."""
    await idle(host.way, host.scale)
    await host.in_sdk_process("handover")
    async with _another_trains(host):
        await _measure(host.way, host.scale, "handover.busy", "another model trains on the same GPU")


async def idle(way: Way, scale: Scale) -> None:
    """Prints `handover.in_process` or `handover.sdk`."""
    await _measure(way, scale, f"handover.{way.name}", "the trainer is idle")


async def _measure(way: Way, scale: Scale, name: str, note: str) -> None:
    run = await way.create(scale.rank)
    data = text_data(scale, seed=7)[:1]
    found = []
    with DeviceMemory() as memory:
        for _ in range(1 + scale.handovers):
            await step(way, run, way.prepared(data))  # type: ignore[arg-type]
            start = time.perf_counter()
            await way.sample(await way.sampler(run), [1, 2, 3, 4], 1)
            found.append(1e3 * (time.perf_counter() - start))
    found = found[1:]
    note = f"{note}; {min(found):.0f} to {max(found):.0f} ms, {len(found)} saves"
    Line(name, statistics.median(found), "ms", peak_gib=memory.peak_gib, note=note).emit()


@contextlib.asynccontextmanager
async def _another_trains(host: Host) -> AsyncIterator[None]:
    """Train another model step by step, sending each step before the result of the previous one."""
    run = await host.way.create(host.scale.rank)
    data = host.way.prepared(text_data(host.scale, seed=8))  # type: ignore[arg-type]

    async def train() -> None:
        while True:
            await step(host.way, run, data)

    training = asyncio.create_task(train())
    try:
        await asyncio.sleep(0)
        yield
    finally:
        training.cancel()
        outcome = (await asyncio.gather(training, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise outcome
