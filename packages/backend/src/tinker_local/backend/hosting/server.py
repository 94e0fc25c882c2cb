"""Serving: `run` for the command line, `LoopbackServer` for a program that holds its backend itself."""

import asyncio
import contextlib
import gc
import resource
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
import uvloop
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.hosting.forwarded import Network
from tinker_local.backend.hosting.key_file import KeyFile
from tinker_local.backend.hosting.listening import bind, url_of
from tinker_local.backend.hosting.request_logs import Logs
from tinker_local.backend.http.connections import MAX_CONNECTIONS, SPARE_FILES, bounded_http, most_connections


def allow_many_connections() -> str | None:
    """Raise this process's soft limit of open files to the hard one: every long poll is a connection, and a soft
    limit of 1024 is usual. A sentence if that is still less than the connections need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if (most := most_connections()) >= MAX_CONNECTIONS:
        return None
    return (
        f"the limit of open files, {hard}, leaves {most} connections of {MAX_CONNECTIONS}, and each request that waits "
        f"is one: raise it to {MAX_CONNECTIONS + SPARE_FILES} (ulimit -Hn, LimitNOFILE of systemd)"
    )


SWITCH_SECONDS = 0.0005
"""After which a thread gives up the GIL if another waits. Python's 5 ms, for each of some threads that compute and for
each time the event loop had nothing to do, make a sample of one token take half a second."""


def let_threads_alternate() -> None:
    """Let the event loop of this process go on soon while other threads compute."""
    sys.setswitchinterval(SWITCH_SECONDS)


def event_loop() -> asyncio.Runner:
    """What serves HTTP: uvloop takes a fifth less time for a request than asyncio's own loop."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class _Server(uvicorn.Server):
    """uvicorn that ends long polls when it stops, and leaves signals of the process alone.

    `saves`: it first stops the backend's training, and answers requests until that is saved.
    """

    def __init__(self, config: uvicorn.Config, backend: ControlPlane, *, saves: bool) -> None:
        super().__init__(config)
        self._backend = backend
        self._saves = saves

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End pending long polls with 408 so that shutdown is not blocked."""
        if self._saves:
            await self._backend.stop()
        self._backend.stop_waiting()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: uvicorn would raise them again at its end and cut short the clean-up of the caller."""
        yield


SAME_SIGNAL = 0.5
"""Seconds for which another signal is the same: a wrapper passes on what the terminal sent already."""


@contextlib.contextmanager
def _stopped_by_signals(server: _Server, backend: ControlPlane) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP stop `server`. A second SIGINT or SIGTERM skips what `backend` saves, and a third ends
    the process. A SIGHUP never does: shells and systemd send it beside other signals, and more than once. A process
    that was started with SIGHUP ignored (`nohup`) still ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first = 0.0
    before: dict[signal.Signals, Any] = {}

    def stop(number: signal.Signals) -> None:
        nonlocal first
        if not server.should_exit:
            server.should_exit = True
            first = loop.time()
        elif number != signal.SIGHUP and loop.time() - first >= SAME_SIGNAL:
            backend.skip_saving()
            server.force_exit = True
            for other in (signal.SIGINT, signal.SIGTERM):
                signal.signal(other, before[other])

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(
                number, lambda number, _: loop.call_soon_threadsafe(stop, signal.Signals(number))
            )
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _server(
    backend: ControlPlane,
    api_keys: Sequence[str] | KeyFile | None,
    *,
    saves: bool,
    logs: Logs | None = None,
    proxies: Sequence[Network] = (),
) -> _Server:
    config = uvicorn.Config(
        create_app(backend, api_keys=api_keys, logs=logs, proxies=proxies),
        http=bounded_http(),
        ws="none",
        proxy_headers=False,  # the app has its own, which believes no proxy that the operator did not name
        log_config=None,  # uvicorn's own would close the handlers that there are
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
        server_header=False,
    )
    return _Server(config, backend, saves=saves)


async def run(
    backend: ControlPlane,
    listening: socket.socket,
    *,
    api_keys: Sequence[str] | KeyFile | None,
    on_ready: Callable[[], None],
    logs: Logs | None = None,
    proxies: Sequence[Network] = (),
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> bool:
    """Serve until SIGINT, SIGTERM or SIGHUP comes, then save training. Answers 503 while models load; raises what
    stopped them from loading. `beside` runs meanwhile, from when models are loaded.

    Returns false if the signal came while models were loading: a thread goes on with that, and cannot be stopped.
    """
    server = _server(backend, api_keys, saves=True, logs=logs, proxies=proxies)

    async def load() -> None:
        try:
            await backend.start()
        except BaseException:
            server.should_exit = True
            raise
        # A full collection of garbage would walk every module and model, for 70 ms and more, while all threads wait;
        # a thousand new connections bring one about.
        gc.collect()
        gc.freeze()
        on_ready()

        if beside is not None:
            others.append(asyncio.create_task(beside()))

    others: list[asyncio.Task[None]] = []
    with _stopped_by_signals(server, backend):
        loading = asyncio.create_task(load())
        try:
            await server.serve(sockets=[listening])
        finally:
            if not loading.done():
                loading.cancel()
            for other in others:
                other.cancel()
            await backend.close()
    outcome = (await asyncio.gather(loading, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        raise outcome
    return not loading.cancelled()


class LoopbackServer:
    """Serves `backend` over HTTP on this machine, in a daemon thread with its own event loop.

    Starts the backend there and returns when it is ready; `close` stops both, and saves no training: the program that
    trains also decides when this ends. `url` and `api_key` (random) are what a
    client needs.
    """

    def __init__(self, backend: ControlPlane, host: str = "127.0.0.1", port: int = 0) -> None:
        if backend.ready:
            raise RuntimeError("this backend already runs in an event loop; give one that was not started")
        self.api_key = f"tml-{secrets.token_urlsafe(24)}"
        self._socket = bind(host, port)
        self.url = url_of(self._socket)
        self._server = _server(backend, [self.api_key], saves=False)
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(backend,), daemon=True, name="tinker-local")
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def _main(self, backend: ControlPlane) -> None:
        async def serve() -> None:
            try:
                await backend.start()
            finally:
                if not backend.ready:
                    self._socket.close()
            self._ready.set()
            try:
                await self._server.serve(sockets=[self._socket])
            finally:
                await backend.close()

        try:
            with event_loop() as runner:
                runner.run(serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    def close(self) -> None:
        """Stop serving, close the backend and wait for both."""
        self._server.should_exit = True
        self._thread.join()
