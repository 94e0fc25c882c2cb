"""A backend with real engines in this process, reachable in process and over HTTP at the same time."""

import asyncio
import os
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.lines import failed
from harness.scale import Scale

from measurements.ways import InProcess


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """`backend` serves one model under `model`; `url` is its HTTP side, on the same event loop."""

    scale: Scale
    folder: Path
    backend: Any
    url: str
    model: str
    way: InProcess

    async def in_sdk_process(self, measurement: str) -> None:
        """Measure the same with the SDK in a process of its own, which prints its lines itself."""
        command = (sys.executable, "-m", "measurements.sdk_process", self.url, self.model, self.scale.name, measurement)
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        try:
            status = await process.wait()
        except BaseException:
            process.kill()
            raise
        if status:
            raise RuntimeError(f"the SDK's process ended with status {status}")


@dataclass(frozen=True, slots=True)
class Hosted:
    """A measurement on a host, and its limit in seconds."""

    name: str
    measure: Callable[[Host], Awaitable[None]]
    limit: float


def run_hosted(scale: Scale, models: Path, kind: str, measurements: Sequence[Hosted]) -> None:
    """Start one backend for all `measurements`; each that fails or takes too long prints an error as a line."""
    from tinker_local.backend.http.server import allow_many_connections, event_loop

    async def run() -> None:
        async with hosted(scale, models / kind, f"bench/{kind}") as host:
            for measurement in measurements:
                try:
                    await asyncio.wait_for(measurement.measure(host), measurement.limit)
                except Exception as error:
                    traceback.print_exc()
                    failed(measurement.name, error).emit()

    allow_many_connections()
    try:
        with event_loop() as runner:
            runner.run(run())
    except Exception as error:
        traceback.print_exc()
        for measurement in measurements:
            failed(measurement.name, error).emit()


@asynccontextmanager
async def hosted(scale: Scale, folder: Path, model: str) -> AsyncIterator[Host]:
    """The backend, started, with its HTTP side on a free port."""
    import uvicorn
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
    from tinker_local.backend.http.app import create_app
    from tinker_local.backend.http.server import bind, url_of

    with tempfile.TemporaryDirectory() as data_dir:
        options = BackendOptions(
            data_dir=Path(data_dir),
            max_rank=scale.rank,
            kv_cache_bytes=scale.kv_cache_bytes,
            micro_batch_tokens=scale.micro_batch_tokens,
        )
        async with InProcessBackend([ModelSource(model, str(folder))], options) as backend:
            listening = bind("127.0.0.1", 0)
            server = uvicorn.Server(
                uvicorn.Config(create_app(backend), log_level="warning", access_log=False, lifespan="off")
            )
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            way = InProcess(backend, await backend.create_session(), model)
            try:
                yield Host(scale, folder, backend, url_of(listening), model, way)
            finally:
                server.should_exit = True
                backend.stop_waiting()
                await serving
