"""Servers of one tiny model that start, and those that are refused before an engine starts."""

import asyncio
from pathlib import Path

import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.cli.check_command import check_model
from tinker_local.backend.models import load_engines
from tinker_local.types import UnsupportedError

NAME = "tiny/other"


async def started(folder: Path, data_dir: Path) -> list[str]:
    """What a server of the model says, as `NAME`, until it is ready."""
    said: list[str] = []
    options = BackendOptions(
        data_dir=data_dir, dtype="float32", kv_cache_bytes=2**26, max_rank=8, trainer="inline", sampler="inline"
    )
    async with InProcessBackend([ModelSource(NAME, str(folder))], options, progress=said.append):
        return said


def check_refused(folder: Path, data_dir: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` and a server refuse the model in one sentence, which has `why` in it, before an engine starts."""
    (told,) = [
        finding.text
        for finding in check_model(ModelSource("m", str(folder)), BackendOptions(), whole=True)
        if finding.level == "problem"
    ]
    monkeypatch.setattr(load_engines, "load_both", lambda *_, **__: pytest.fail("an engine starts"))
    with pytest.raises(UnsupportedError) as no:
        asyncio.run(started(folder, data_dir))
    assert str(no.value) == told
    assert why in told
    assert "\n" not in told
