"""Promise 17: a named save is acknowledged when it is on the disk, and not before."""

import asyncio
import threading
from typing import Any

import pytest

from tests.http.conftest import Api


@pytest.mark.mutation(
    "acknowledged-before-it-is-written",
    "Training.save_weights.run",
    "            model.beside(operation, write())\n",
    '            operation.succeed({"path": record.tinker_path})\n            model.beside(operation, write())\n',
    cases=("save_weights",),
)
@pytest.mark.parametrize("path", ["save_weights", "save_weights_for_sampler"])
async def test_named_save_is_acknowledged_only_when_it_is_on_the_disk_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("tinker_local.backend.http.future_routes.LONG_POLL_SECONDS", 0.2)
    written, go_on = threading.Event(), threading.Event()
    original = api.backend.store.write_checkpoint

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(30)
        record = original(*args, **kwargs)
        written.set()
        return record

    monkeypatch.setattr(api.backend.store, "write_checkpoint", slow)
    model = await api.model()
    request = await api.submit(path, {"model_id": model, "seq_id": 1, "path": "a"})
    poll = asyncio.create_task(api.poll(request))
    # The disk holds up nothing else.
    await api.result(await api.gradient(model, 2))
    assert (await poll).status_code == 408
    assert not written.is_set()
    go_on.set()
    tinker_path = (await api.result(request))["path"]
    assert written.is_set()
    record = await api.backend.checkpoints.get(tinker_path)
    assert (api.backend.store.checkpoint_folder(record) / "adapter_model.safetensors").is_file()
