"""From a save of ephemeral weights to the first sampled token; how long steps wait for an autosave."""

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
        await first_token(host.way, host.scale, "handover.busy", "another model trains on the same GPU")


async def idle(way: Way, scale: Scale) -> None:
    """Prints `handover.in_process` or `handover.sdk`."""
    await first_token(way, scale, f"handover.{way.name}", "the trainer is idle")


async def first_token(way: Way, scale: Scale, name: str, note: str) -> None:
    """Prints `name`: from the call that saves ephemeral weights to the first token sampled from them."""
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


async def autosave(host: Host) -> None:
    """Prints `autosave.wait`: how much longer the slowest short step takes while its run is saved with its optimizer,
    than the median step without."""
    way, run = host.way, await host.way.create(host.scale.rank)
    data = way.prepared(text_data(host.scale, seed=9)[:1])
    (model,) = [model for model in host.backend.runs.all_live() if model.model_id == run]

    async def timed() -> float:
        start = time.perf_counter()
        await step(way, run, data)  # type: ignore[arg-type]
        return 1e3 * (time.perf_counter() - start)

    for _ in range(3):
        await timed()
    usual = statistics.median([await timed() for _ in range(10)])
    waits, seconds = [], []
    with DeviceMemory() as memory:
        for _ in range(1 + host.scale.repeats):
            start = time.perf_counter()
            saving = asyncio.create_task(host.backend.autosaves.save(model))
            slowest = 0.0
            while not saving.done():
                slowest = max(slowest, await timed())
            assert saving.result() is not None
            waits.append(slowest - usual)
            seconds.append(time.perf_counter() - start)
    note = (
        f"rank {host.scale.rank}, steps of {host.scale.step_length} tokens take {usual:.0f} ms; the longest of each of "
        f"{len(waits)} saves: {', '.join(f'{wait:.0f}' for wait in waits)} ms; a save takes {max(seconds):.1f} s"
    )
    Line("autosave.wait", max(waits), "ms", peak_gib=memory.peak_gib, note=note).emit()


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
