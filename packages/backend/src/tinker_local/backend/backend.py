"""`InProcessBackend`: the whole Tinker API in this process."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinker_local.backend.control.life_cycle import ControlPlane

if TYPE_CHECKING:
    from tinker_local.backend.hosting.server import LoopbackServer


class InProcessBackend(ControlPlane):
    """The Tinker API without HTTP: parts with one async method per operation, on the shared types.

    Every operation that takes time returns an `Operation`; await it for the result. Operations of one training run
    execute in the order of their `seq_id`, from 1. Different runs, and samples, are independent.

        async with InProcessBackend([ModelSource("my/model", "path/to/folder")]) as backend:
            session = await backend.sessions.create()
            created = await backend.runs.create(CreateModelRequest(session_id=session, model_seq_id=0, ...))
            model_id = (await created)["model_id"]
            request = ForwardBackwardRequest(model_id=model_id, seq_id=1, ...)
            output = await (await backend.training.forward_backward(request))

    Use it only from the event loop that started it. `load` makes the engines that serve a model: real ones by default,
    fakes in tests. Errors are those of `tinker_local.types.errors`.

    `close` saves no training by itself; `stop` does. The context manager calls both if it is left by an exception.
    """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self.stop()
        await self.close()

    def serve_in_thread(self, host: str = "127.0.0.1", port: int = 0) -> "LoopbackServer":
        """Start this backend behind HTTP in a new thread, for a client in the same process."""
        from tinker_local.backend.hosting.server import LoopbackServer  # loads FastAPI and uvicorn

        return LoopbackServer(self, host, port)
