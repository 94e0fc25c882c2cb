"""A user's process: runs the measurements named on its standard input with the official SDK. Loads no model.

`python -m measurements.sdk_process SCALE` reads lines `URL MODEL MEASUREMENT`, prints lines as every measurement does,
and after each measurement `DONE`, or `DONE` and what went wrong.
"""

import asyncio
import sys
import traceback

from harness.scale import SCALES

from measurements import handovers, sampling, steps
from measurements.ways import DONE, Sdk

MEASUREMENTS = {
    "steps.text": steps.text_step,
    "images.api": steps.images_step,
    "sampling": sampling.many_at_once,
    "handover": handovers.idle,
}


async def main() -> None:
    import tinker  # noqa: F401  takes seconds, while the engines load

    scale = SCALES[sys.argv[1]]
    clients: dict[tuple[str, str], Sdk] = {}
    while order := await asyncio.to_thread(sys.stdin.readline):
        url, model, measurement = order.split()
        fault = ""
        try:
            if (url, model) not in clients:
                clients[url, model] = Sdk(url, model)
            await MEASUREMENTS[measurement](clients[url, model], scale)
        except Exception as error:
            traceback.print_exc()
            fault = f" {type(error).__name__}: {error}".replace("\n", " ")
        print(f"{DONE}{fault}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
