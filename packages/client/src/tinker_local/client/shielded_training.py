"""A training client of which a future can be cancelled (SDK 0.38.0).

In the SDK, Ctrl-C in a notebook or `asyncio.wait_for` cancels the submission behind a future as well. If that has not
had its turn yet, it never takes it, and every later call of the client waits for it for ever. Here only the wait is
cancelled: the request is sent in its turn, the server carries it out, and the next result says what became of it.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import tinker
from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.backcompat_sampling_client_future import BackcompatSamplingClientFuture
from tinker.lib.public_interfaces.backcompat_training_client_future import BackcompatTrainingClientFuture
from typing_extensions import deprecated

log = logging.getLogger(__name__)
T = TypeVar("T")

CANCELLED = "cancelled_forward_backwards"
"""The metric of a later result (`:sum` of a forward_backward): how many cancelled forward_backwards are in the gradient
that is accumulated, or that the step used."""

GRADIENTS = ("forward_backward", "forward_backward_custom")
STEP = "optim_step"
OTHERS = ("forward", "save_state", "load_state", "load_state_with_optimizer")
SAVES = ("save_weights_for_sampler", "save_weights_external")


class ShieldedFuture(APIFuture[T]):
    """`inner`, the SDK's future of call number `number`, without a way to cancel it. It can be awaited again."""

    def __init__(self, client: "ShieldedTrainingClient", number: int, name: str, inner: Future[T]) -> None:
        self.number = number
        self.name = name
        self.inner = inner
        self._client = client
        self._outer: Future[T] = Future()
        self._outer.add_done_callback(lambda outer: client.gave_up(self) if outer.cancelled() else None)
        inner.add_done_callback(self._pass_on)

    def _pass_on(self, inner: Future[T]) -> None:
        """When all calls before it that were given up have ended, too: the server has carried them out before."""
        if (earlier := self._client.unfinished_before(self)) is not None:
            earlier.inner.add_done_callback(lambda _: self._pass_on(inner))
            return
        said = self._client.said_with(self)
        copy_result(inner, self._outer, said)

    def future(self) -> Future[T]:
        return self._outer

    def result(self, timeout: float | None = None) -> T:
        with self._client.waiting_for(self):
            return self._outer.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        with self._client.waiting_for(self):
            waited = asyncio.wrap_future(self._outer)
            waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, also if given up
            async with asyncio.timeout(timeout):
                return await asyncio.shield(waited)


class _Waiting:
    """A wait for `future`, which is given up if the wait ends first."""

    def __init__(self, future: ShieldedFuture[Any], client: "ShieldedTrainingClient") -> None:
        self._future, self._client = future, client

    def __enter__(self) -> None:
        self._client.came_back(self._future)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None and not self._future.future().done():
            self._client.gave_up(self._future)


class ShieldedTrainingClient(tinker.TrainingClient):
    """The official `tinker.TrainingClient`, made of one by `shielded`."""

    _calls: int
    _steps: list[int]
    _given_up: list[ShieldedFuture[Any]]
    _told: set[int]
    _lock: threading.RLock

    def call(self, name: str, inner: APIFuture[T]) -> ShieldedFuture[T]:
        """The future of a call that was just submitted."""
        with self._lock:
            self._calls += 1
            number = self._calls
            if name == STEP:
                self._steps.append(number)
        return ShieldedFuture(self, number, name, inner.future())

    # Calls that were given up ----------------------------------------------------------------------------------------

    def waiting_for(self, future: ShieldedFuture[Any]) -> _Waiting:
        return _Waiting(future, self)

    def gave_up(self, future: ShieldedFuture[Any]) -> None:
        """Nothing waits for a call any more."""
        with self._lock:
            if future.name in (*GRADIENTS, STEP) and future not in self._given_up:
                self._given_up.append(future)

    def came_back(self, future: ShieldedFuture[Any]) -> None:
        """Something waits for it again."""
        with self._lock:
            if future in self._given_up:
                self._given_up.remove(future)

    def unfinished_before(self, future: ShieldedFuture[Any]) -> ShieldedFuture[Any] | None:
        with self._lock:
            return next((one for one in self._before(future) if not one.inner.done()), None)

    def _before(self, future: ShieldedFuture[Any]) -> list[ShieldedFuture[Any]]:
        return [one for one in self._given_up if one.number < future.number]

    def said_with(self, future: ShieldedFuture[Any]) -> "Said":
        """What the result of `future` says of the calls before it that were given up."""
        with self._lock:
            if future.name not in (*GRADIENTS, STEP) or future in self._given_up:  # nothing reads it
                return Said()
            said = Said(name=CANCELLED if future.name == STEP else f"{CANCELLED}:sum")
            for one in self._before(future):
                used = next((step for step in self._steps if one.number < step <= future.number), None)
                text = f"a cancelled {one.name} had been sent: "
                if (error := _error_of(one.inner)) is not None:
                    text += f"it failed ({error})"
                elif one.name == STEP:
                    text += "the step was taken"
                elif used is None:
                    text += "its gradient is in the accumulated one, which the next optim_step uses"
                else:
                    text += "its gradient is in that of this step" if used == future.number else "a step used it"
                over = error is not None or used is not None or one.name == STEP
                said.count += error is None and one.name != STEP and used in (None, future.number)
                if over or one.number not in self._told:
                    said.texts.append(text)
                self._told.add(one.number)
                if over:
                    self._given_up.remove(one)
            self._steps = [step for step in self._steps if not self._given_up or step > self._given_up[0].number]
        for text in said.texts:
            log.warning("%s: %s", self.model_id, text)
        return said

    def save_weights_and_get_sampling_client(self, *args: Any, **kwargs: Any) -> BackcompatSamplingClientFuture:
        """As in the official client."""
        made = super().save_weights_and_get_sampling_client(*args, **kwargs)
        inner = self.call("save_weights_and_get_sampling_client", made)
        return BackcompatSamplingClientFuture(cast("AwaitableConcurrentFuture[Any]", inner))


class Said:
    """What a result says of calls that were given up: texts, and how many of their gradients are in it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.count = 0
        self.texts: list[str] = []

    def add_to(self, result: Any) -> Any:
        """`result` with the metric, if there is something to say."""
        if not self.count:
            return result
        if result.metrics is None:
            return result.model_copy(update={"metrics": {self.name: float(self.count)}})
        result.metrics[self.name] = float(self.count)
        return result


def copy_result(inner: Future[T], outer: Future[T], said: Said) -> None:
    """What `inner` has ended with, for `outer`, unless that was cancelled."""
    if not outer.set_running_or_notify_cancel():
        return
    if inner.cancelled():
        outer.set_exception(asyncio.CancelledError())
    elif (error := inner.exception()) is not None:
        for text in said.texts:
            error.add_note(text)
        outer.set_exception(error)
    else:
        outer.set_result(said.add_to(inner.result()))


def _error_of(inner: Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if inner.cancelled() else inner.exception()


def _shield(name: str) -> Callable[..., Any]:
    original = getattr(tinker.TrainingClient, name)
    message = getattr(original, "__deprecated__", None)
    submit = original.__wrapped__ if message else original

    @functools.wraps(submit)
    def method(self: ShieldedTrainingClient, *args: Any, **kwargs: Any) -> ShieldedFuture[Any]:
        return self.call(name, submit(self, *args, **kwargs))

    return cast("Callable[..., Any]", deprecated(message, category=FutureWarning)(method)) if message else method


for _name in (*GRADIENTS, STEP, *OTHERS, *SAVES):
    setattr(ShieldedTrainingClient, _name, _shield(_name))


def shielded(made: BackcompatTrainingClientFuture) -> BackcompatTrainingClientFuture:
    """The future of a training client of the SDK, as one of a `ShieldedTrainingClient`."""
    outer: Future[tinker.TrainingClient] = Future()

    def change(inner: Future[tinker.TrainingClient]) -> None:
        if not inner.cancelled() and inner.exception() is None:
            client = inner.result()
            client.__class__ = ShieldedTrainingClient
            assert isinstance(client, ShieldedTrainingClient)
            client._calls, client._lock = 0, threading.RLock()
            client._steps, client._given_up, client._told = [], [], set()
        copy_result(inner, outer, Said())

    made.future().add_done_callback(change)
    return BackcompatTrainingClientFuture(AwaitableConcurrentFuture(outer))
