"""A backend with real engines in this process, reachable in process and over HTTP at the same time."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.lines import failed
from harness.scale import Scale

from measurements.ways import DONE, InProcess


class Client:
    """A process of `measurements.sdk_process`, which starts with this object and ends with `close`."""

    def __init__(self, scale: Scale) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "measurements.sdk_process", scale.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    async def measure(self, order: str) -> None:
        """Send `order` and pass on its output until it is done; raise RuntimeError with what went wrong there."""
        try:
            fault = await asyncio.to_thread(self._measure, order)
        except asyncio.CancelledError:
            self._process.kill()  # else its late lines would count for the next measurement
            raise
        if fault:
            raise RuntimeError(f"the SDK's process: {fault}")

    def _measure(self, order: str) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(DONE):
                return line[len(DONE) :].strip()
            print(line, end="", flush=True)
        return f"ended with status {process.wait()}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """`backend` serves one model under `model`; `url` is its HTTP side, on the same event loop."""

    scale: Scale
    folder: Path
    backend: Any
    url: str
    model: str
    way: InProcess
    client: Client

    async def in_sdk_process(self, measurement: str) -> None:
        """Measure the same with the SDK in a separate process."""
        await self.client.measure(f"{self.url} {self.model} {measurement}")


@dataclass(frozen=True, slots=True)
class Hosted:
    """A measurement on a host, and its limit in seconds."""

    name: str
    measure: Callable[[Host], Awaitable[None]]
    limit: float


def run_hosted(scale: Scale, folder: Path, client: Client, measurements: Sequence[Hosted]) -> None:
    """Start one backend with the model in `folder` for all `measurements`; each that fails or takes too long prints its
    error as a line."""
    from tinker_local.backend.hosting.server import allow_many_connections, event_loop

    async def run() -> None:
        async with hosted(scale, folder, client) as host:
            for measurement in measurements:
                try:
                    async with asyncio.timeout(measurement.limit):
                        await measurement.measure(host)
                except TimeoutError:
                    failed(measurement.name, TimeoutError(f"not done after {measurement.limit:.0f} s")).emit()
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


@contextlib.asynccontextmanager
async def hosted(scale: Scale, folder: Path, client: Client) -> AsyncIterator[Host]:
    """The backend, started, with its HTTP side on a free port."""
    import uvicorn
    from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
    from tinker_local.backend.hosting.app import create_app
    from tinker_local.backend.hosting.server import bind, url_of

    model = f"bench/{folder.name}"
    with tempfile.TemporaryDirectory() as data_dir:
        options = BackendOptions(
            data_dir=Path(data_dir),
            max_rank=scale.rank,
            kv_cache_bytes=scale.kv_cache_bytes if folder.name == "text" else scale.kv_cache_bytes // 8,
            micro_batch_tokens=scale.micro_batch_tokens,
        )
        async with InProcessBackend([ModelSource(model, str(folder))], options) as backend:
            listening = bind("127.0.0.1", 0)
            server = uvicorn.Server(
                uvicorn.Config(create_app(backend), log_level="warning", access_log=False, lifespan="off")
            )
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            way = InProcess(backend, await backend.sessions.create(), model)
            try:
                yield Host(scale, folder, backend, url_of(listening), model, way, client)
            finally:
                server.should_exit = True
                backend.stop_waiting()
                await serving
