"""A client of its own process: `python -m measurements.sdk_process URL MODEL SCALE MEASUREMENT`. Loads no model."""

import asyncio
import sys

from harness.scale import SCALES

from measurements import handovers, sampling, steps
from measurements.ways import Sdk

MEASUREMENTS = {
    "steps.text": steps.text_step,
    "steps.images": steps.images_step,
    "sampling": sampling.many_at_once,
    "handover": handovers.idle,
}


async def main() -> None:
    url, model, scale, measurement = sys.argv[1:]
    await MEASUREMENTS[measurement](Sdk(url, model), SCALES[scale])


if __name__ == "__main__":
    asyncio.run(main())
