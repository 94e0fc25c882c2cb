"""The SDK's clients, which connect to a local server by default."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlencode

import tinker
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker.lib.public_interfaces.backcompat_training_client_future import BackcompatTrainingClientFuture
from tinker_local.client.endpoint import connect
from tinker_local.client.loopback import LoopbackBackend, LoopbackServer
from tinker_local.client.shielded_training import shielded
from tinker_local.types import TRAIN_VISION, InvalidRequestError


class ServiceClient(tinker.ServiceClient):
    """The official `tinker.ServiceClient` with local defaults. All of its methods work the same;
    `create_lora_training_client` can also train the vision tower, and a future of a training client can be cancelled
    without harm to later calls.

    Args:
        base_url: URL of the server. Default: $TINKER_BASE_URL, then http://127.0.0.1:8000.
        api_key: Default: $TINKER_API_KEY, then `tml-local`. Stored credentials of the hosted service are never used.
        backend: A backend in this process instead of a URL, e.g. an `InProcessBackend` that has not been started. A
            daemon thread serves it on a free port of 127.0.0.1 with a random key. The thread ends after `close()` (or
            the `with` block) has finished the session. Cannot be combined with `base_url` or `api_key`.
        check_server: Check the health of a server on a loopback address before returning. A missing server is then
            reported within a second (tinker.APIConnectionError) instead of the SDK's five minutes. Other addresses
            are never checked. False: send nothing, like the official client.
        user_metadata: As in the official client.
        project_id: As in the official client.
        display_name: As in the official client.
        default_headers_overrides: As in the official client.

    For a loopback address, 127.0.0.1 and localhost are added to this process's NO_PROXY, because the SDK would
    otherwise send its requests through a proxy.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        backend: LoopbackBackend | None = None,
        check_server: bool = True,
        **kwargs: Any,
    ) -> None:
        self._loopback: LoopbackServer | None = None
        self._loopback_closed: AwaitableConcurrentFuture[None] | None = None
        self._loopback_lock = threading.Lock()
        if backend is not None:
            for name, value in (("base_url", base_url), ("api_key", api_key)):
                if value is not None:
                    raise InvalidRequestError(f"{name}: cannot be combined with backend, which has its own")
            self._loopback = backend.serve_in_thread(host="127.0.0.1", port=0)
            base_url, api_key, check_server = self._loopback.url, self._loopback.api_key, False
        endpoint = connect(base_url, api_key, check_server=check_server)
        self.endpoint = endpoint
        super().__init__(
            user_metadata,
            project_id,
            display_name=display_name,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            default_headers_overrides=default_headers_overrides,
            **kwargs,
        )

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: tinker.types.OptimizerConfig | None = None,
        *,
        train_vision: bool = False,
    ) -> BackcompatTrainingClientFuture:
        """As in the official client; `train_vision` also trains the vision tower of `base_model`.

        The server must allow it (`--train-vision`). It is an entry of the run's `user_metadata` on the wire, so that
        the official client can ask for it, too: {"tinker_local.train_vision": "true"}.
        """
        if train_vision:
            user_metadata = {**(user_metadata or {}), TRAIN_VISION: "true"}
        return shielded(
            super().create_lora_training_client(
                base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
            )
        )

    def create_training_client_from_state(self, *args: Any, **kwargs: Any) -> BackcompatTrainingClientFuture:
        """As in the official client."""
        return shielded(super().create_training_client_from_state(*args, **kwargs))

    def create_training_client_from_state_with_optimizer(
        self, *args: Any, **kwargs: Any
    ) -> BackcompatTrainingClientFuture:
        """As in the official client."""
        return shielded(super().create_training_client_from_state_with_optimizer(*args, **kwargs))

    def get_console_url(self, run: tinker.TrainingClient | None = None) -> str:
        """The page of this client's runs on its server, or of `run`; before its first request, the page of all.

        `TrainingClient.get_console_url` is the SDK's, which knows only the console of the hosted service.
        """
        if run is not None:
            return f"{self._base_url}/#{urlencode({'run': run.model_id})}"
        holder = self._session_holder
        if holder is None or holder._session_id is None:
            return f"{self._base_url}/"
        return f"{self._base_url}/#{urlencode({'session': holder._session_id})}"

    def close(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None = None
    ) -> AwaitableConcurrentFuture[None]:
        """Finish the session as the official client does, then stop the server of `backend=`, if there is one.

        The returned future covers both. It raises what finishing the session raised; the server is stopped anyway.
        """
        finished = super().close(status, detail)
        loopback = self._loopback
        if loopback is None:
            return finished
        with self._loopback_lock:
            if self._loopback_closed is None:
                # Not on the SDK's event loop, which has to stay free while the server shuts down. Not in a daemon
                # thread either, so that a program that exits without waiting still finishes its session.
                thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinker-local-close")
                stopped = thread.submit(_stop_after, finished, loopback)
                thread.shutdown(wait=False)
                self._loopback_closed = AwaitableConcurrentFuture(stopped)
            return self._loopback_closed


def _stop_after(finished: AwaitableConcurrentFuture[None], loopback: LoopbackServer) -> None:
    try:
        finished.result()
    finally:
        loopback.close()


class RestClient(tinker.RestClient):
    """The official `tinker.RestClient` with the defaults of `ServiceClient`."""

    def __init__(
        self,
        _holder: InternalClientHolder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        check_server: bool = True,
    ) -> None:
        if _holder is None:
            endpoint = connect(base_url, api_key, check_server=check_server)
            base_url, api_key = endpoint.base_url, endpoint.api_key
        super().__init__(_holder, base_url=base_url, api_key=api_key)


class AdminClient(tinker.AdminClient):
    """The official `tinker.AdminClient` with the defaults of `ServiceClient`; a local server refuses its requests."""

    def __init__(
        self,
        _holder: InternalClientHolder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        check_server: bool = True,
    ) -> None:
        if _holder is None:
            endpoint = connect(base_url, api_key, check_server=check_server)
            base_url, api_key = endpoint.base_url, endpoint.api_key
        super().__init__(_holder, base_url=base_url, api_key=api_key)
