"""Sampling and training on one GPU at the same time, and each alone."""

import asyncio
import time

from harness.lines import Line
from harness.timing import DeviceMemory

from measurements.hosting import Host
from measurements.sampling import at_once
from measurements.steps import text_data
from measurements.ways import step


async def measure(host: Host) -> None:
    """Prints `overlap.sampling_alone`, `…training_alone`, `…sampling_together`, `…training_together`. Sampling has a
    quarter of the sampling measurement's requests; training sends the HTTP measurement's steps one after another."""
    scale, way = host.scale, host.way
    sampled_run, trained_run = await way.create(scale.rank), await way.create(scale.rank)
    sampler = await way.sampler(sampled_run)
    data = way.prepared(text_data(scale, seed=9))  # type: ignore[arg-type]

    async def sampling() -> float:
        return await at_once(
            scale,
            lambda prompt, count: way.sample(sampler, prompt, count),
            max(1, scale.requests // 4),
            max(1, scale.output_tokens // 2),
        )

    async def training(until: asyncio.Future[float] | None, steps: int) -> float:
        done, start = 0, time.perf_counter()
        while done < steps or (until is not None and not until.done()):
            await step(way, trained_run, data)
            done += 1
        return scale.step_tokens * done / (time.perf_counter() - start)

    with DeviceMemory() as memory:
        await training(None, scale.warmup)
        found = {"sampling_alone": await sampling(), "training_alone": await training(None, 2 + 3 * scale.repeats)}
        together = asyncio.ensure_future(sampling())
        found["training_together"] = await training(together, 1)
        found["sampling_together"] = await together
    for name, rate in found.items():
        Line(f"overlap.{name}", rate, "tokens/s", peak_gib=memory.peak_gib).emit()
