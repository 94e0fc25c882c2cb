"""Records the shapes of all that the checks send to a server of fakes: python -m tests.compatibility.record"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import tinker_local.backend.hosting.server as http_server
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer
from tinker_local.backend.models.served_models import Engines

from tests.compatibility.recording import Recorder, written
from tests.compatibility.surface import surface
from tests.compatibility.world import World
from tests.compatibility.write_report import run_all

SHAPES = Path(__file__).parent / "shapes.json"
MODEL = "fake/bigram"


def record(data_dir: Path) -> dict[str, Any]:
    """Run every check (what they compare is not asked here) and return the shapes."""

    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(FakeRenderer(model), FakeTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)

    recorders: list[Recorder] = []
    create_app: Any = vars(http_server)["create_app"]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorders.append(Recorder(create_app(*args, **kwargs)))
        return recorders[0]

    with mock.patch.object(http_server, "create_app", recorded):
        server = http_server.LoopbackServer(
            InProcessBackend([ModelSource(MODEL, MODEL)], BackendOptions(data_dir=data_dir), load=load)
        )
    try:
        with mock.patch.dict(os.environ, TINKER_API_KEY=server.api_key, TINKER_BASE_URL=server.url):
            world = World(server.url, MODEL, server.api_key)
            run_all(world, surface())
            # The SDK sends one after ten seconds, which a quick run does not take.
            beat = {"session_id": world.service.holder.get_session_id(), "type": "session_heartbeat"}
            httpx.post(f"{server.url}/api/v1/session_heartbeat", json=beat, headers={"X-API-Key": server.api_key})
            world.renew()
    finally:
        server.close()
    return recorders[0].shapes


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with tempfile.TemporaryDirectory() as scratch:
        SHAPES.write_text(written(record(Path(scratch))))
    print(f"wrote {SHAPES}", file=sys.stderr)


if __name__ == "__main__":
    main()
