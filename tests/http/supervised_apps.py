"""Apps whose engines are in processes, for tests of what happens when one of these ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.models.served_models import Engines, ServedModel

from tests.http.conftest import BASE, Api

OTHER = "fake/other"
Load = Callable[[ModelSource, BackendOptions], Engines]


@asynccontextmanager
async def apps(data_dir: Path) -> AsyncIterator[Callable[..., Awaitable[Api]]]:
    """`begin(load, models, **options)`: an app that is closed at the end of the context."""
    started: list[Api] = []

    async def begin(load: Load, models: tuple[str, ...], **options: Any) -> Api:
        sources = [ModelSource.parse(name) for name in models]
        backend = InProcessBackend(sources, BackendOptions(data_dir=data_dir, **options), load=load)
        await backend.start()
        transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)
        started.append(Api(backend, http))
        return started[-1]

    yield begin
    for api in started:
        await api.http.aclose()
        await api.backend.close()


def served(api: Api, name: str = BASE) -> ServedModel:
    """A model of the app with its engines."""
    return api.backend.models.get(name)


async def works_again(api: Api, name: str = BASE) -> None:
    """Wait until all engines of the model work."""
    await api.until(lambda: served(api, name).problem is None, 60)


def children(pid: int) -> list[int]:
    """Processes that `pid` has started. A thread that ends meanwhile has none."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found
