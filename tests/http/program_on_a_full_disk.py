"""Trains on fakes until the disk of `argv[1]`, a small file system, has 0 bytes free; says as JSON what works then."""

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from tinker_local.backend.backend import InProcessBackend
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.options import BackendOptions, ModelSource
from tinker_local.types import (
    AdamParams,
    ApiError,
    CreateModelRequest,
    LoadWeightsRequest,
    LoraConfig,
    OptimStepRequest,
    SaveWeightsRequest,
)


def fill(disk: Path) -> None:
    """Until not one byte can be written."""
    with (disk / "junk").open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass


async def failure(work: Awaitable[Any]) -> str:
    try:
        await work
    except ApiError as error:
        return f"{type(error).__name__}: {error}"
    return "worked"


async def main(disk: Path) -> dict[str, object]:
    options = BackendOptions(data_dir=disk / "data")
    said: dict[str, object] = {}
    async with InProcessBackend([ModelSource.parse("fake/model")], options, load=load_fake) as backend:
        sessions = [await backend.sessions.create() for _ in range(2)]
        models = []
        for session in sessions:
            created = await backend.runs.create(
                CreateModelRequest(
                    session_id=session, model_seq_id=0, base_model="fake/model", lora_config=LoraConfig(rank=8)
                )
            )
            models.append((await created)["model_id"])
        first, second = models

        async def save(model: str, seq_id: int, name: str) -> str:
            request = SaveWeightsRequest(model_id=model, seq_id=seq_id, path=name, overwrite=True)
            return (await (await backend.training.save_weights(request)))["path"]

        async def step(model: str, seq_id: int) -> None:
            request = OptimStepRequest(model_id=model, seq_id=seq_id, adam_params=AdamParams())
            await (await backend.training.optim_step(request))

        paths = [await save(first, number, f"c{number}") for number in (1, 2)]
        fill(disk)
        said["free"] = shutil.disk_usage(disk).free
        said["save"] = await failure(save(first, 3, "c3"))
        said["overwrite"] = await failure(save(first, 4, "c1"))
        said["create_session"] = await failure(backend.sessions.create())
        said["step"] = await failure(step(first, 5))
        asked = {"model": "fake/model", "prompt": "hi", "max_tokens": 2}
        transport = httpx.ASGITransport(create_app(backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/completions", json=asked)
            said["new_owner"] = "worked" if answer.status_code == 200 else answer.text
            said["health"] = (await client.get("/api/v1/healthz")).json()
        said["problems"] = backend.problems()
        said["junk_left"] = [path.name for path in (disk / "data/checkpoints").glob("*/*/.*")]
        fill(disk)
        said["finish"] = await failure(backend.sessions.finish(sessions[1]))
        said["live"] = sorted(model.model_id for model in backend.runs.all_live())
        said["first"] = first
        said["step_of_finished"] = await failure(step(second, 1))
        said["why_ended"] = (await backend.sessions.record(sessions[1])).why_ended
        fill(disk)
        said["free_again"] = shutil.disk_usage(disk).free
        said["delete"] = await failure(backend.checkpoints.delete(paths[1]))
        said["left"] = [record.tinker_path for record in await backend.checkpoints.of(first)]
        fill(disk)
        said["expire"] = await failure(backend.checkpoints.set_ttl(paths[0], 3600))
        said["path"] = paths[0]
    # And it starts again.
    async with InProcessBackend([ModelSource.parse("fake/model")], options, load=load_fake) as backend:
        (disk / "junk").unlink()
        session = await backend.sessions.create()
        load = LoadWeightsRequest(session_id=session, model_seq_id=0, path=paths[0], optimizer=True)
        said["load"] = await failure(await backend.training.load_weights(load))
        remaining = (await backend.checkpoints.get(paths[0])).expires_at
        said["expires"] = remaining is not None and remaining > remaining - timedelta(hours=1)
    return said


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
