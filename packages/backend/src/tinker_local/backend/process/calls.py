"""Calls to a group of processes that run `child.serve_calls`: one at a time, each waiting for its answer."""

import itertools
import select
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from tinker_local.backend.process.channel import Channel
from tinker_local.backend.process.child import CLOSE, LOAD
from tinker_local.backend.process.messages import Answer, Call, Failure, ForgetImages, KeepImage, Log, encode
from tinker_local.backend.process.process_group import (
    CHANNEL_ENDED,
    TICK,
    ChildProcess,
    ProcessEndedError,
    ProcessGroup,
    log_here,
)
from tinker_local.backend.process.sent_images import SentImages

CLOSE_SECONDS = 2.0
"""How long to wait for the end of a call, and for the end of the processes, before killing them."""

AFTER_FAILURE_SECONDS = 30.0
"""How long the others have to answer a call after one process has failed in it. If they agree on a failure, they answer
together; after one that fails alone they would wait for it as long as the call may take."""


class Calls:
    """Calls methods of the objects that the processes of `group` serve, from any thread; one call runs, others wait.

    Every process gets every call in the same order; the first one's result counts, and the first error if there is
    one. After the group has ended, every call raises ProcessEndedError at once. `image_bytes`: how many bytes of pixel
    values a process keeps. `states`: what each process told with its last answer.
    """

    def __init__(self, group: ProcessGroup, *, image_bytes: int = 2**30) -> None:
        self.group = group
        self.states: list[Mapping[str, Any]] = [{} for _ in group.members]
        self._numbers = itertools.count(1)
        self._images = SentImages(image_bytes)
        self._turn = threading.Lock()

    def call(self, seconds: float | None, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return or raise what `method` of the object does. Arrays of the result own their memory. After `seconds` the
        group is killed; None: never."""
        return self._call(self.group.members, seconds, Call(next(self._numbers), method, args, kwargs))

    def call_first(self, seconds: float | None, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """The same in the first process alone, for a method that changes nothing which the others have as well."""
        return self._call(self.group.members[:1], seconds, Call(next(self._numbers), method, args, kwargs))

    def _call(self, members: Sequence[ChildProcess], seconds: float | None, call: Call) -> Any:
        with self._turn:
            if self.group.ended:
                raise ProcessEndedError(self.group.why)
            channels = [member.channel for member in members]
            try:
                with self.group.limit(seconds):
                    self._ask(channels, call)
                    messages = self._answers(channels, call)
            except CHANNEL_ENDED:
                raise self.group.error() from None
            for at, message in messages.items():
                self.states[at] = message.state
            for _, message in sorted(messages.items()):
                if isinstance(message, Failure):
                    raise message.error
            first = messages[0]
            assert isinstance(first, Answer)
            return first.value

    def close(self) -> None:
        """End the processes in order; after `CLOSE_SECONDS`, kill them together with a running call."""
        self.group.closing()
        in_turn = self._turn.acquire(timeout=CLOSE_SECONDS)
        if in_turn and not self.group.ended:
            with suppress(*CHANNEL_ENDED):
                for member in self.group.members:
                    member.channel.send(Call(next(self._numbers), CLOSE))
        if not in_turn:
            self.group.kill("was closed")
            self._turn.acquire()  # a running call has ended with the processes
        self.group.close(CLOSE_SECONDS)
        self._turn.release()

    def _ask(self, channels: Sequence[Channel], call: Call) -> None:
        """Send the images that the processes lack, then the call, then which images to forget after it."""
        encoded = encode(call)
        everybody = [member.channel for member in self.group.members]
        for image in self._images.missing(encoded.images):
            for channel in everybody:
                channel.send(KeepImage.of(image))
            self._images.sent(image)
        for at, channel in enumerate(channels):
            try:
                channel.send_encoded(encoded)
            except CHANNEL_ENDED:
                raise
            except BaseException:  # as when memory is short
                if at:  # the others have begun, and would run every later call against another one
                    self.group.kill("did not get a call that others of its group got")
                raise
        if too_many := self._images.too_many():
            for channel in everybody:
                channel.send(ForgetImages(too_many))

    def _answers(self, channels: Sequence[Channel], call: Call) -> dict[int, Answer | Failure]:
        """Wait for the answer of each process, by its index; handle log records that arrive before it. Returns at once
        when one could not load its object, because the others may be waiting for that one. After any other failure the
        others have `AFTER_FAILURE_SECONDS` to answer."""
        answers: dict[int, Answer | Failure] = {}
        with ExitStack() as failed:
            try:
                self._await(channels, call, answers, failed)
            except CHANNEL_ENDED:
                for message in answers.values():
                    if isinstance(message, Failure):
                        self.group.note(message.error)
                raise
        return answers

    def _await(
        self, channels: Sequence[Channel], call: Call, answers: dict[int, Answer | Failure], failed: ExitStack
    ) -> None:
        """Add to `answers`. `failed`: holds a limit from the first failure on."""
        poll = select.poll()
        waited = {file: at for at, channel in enumerate(channels) for file in channel.files}
        for file in waited:
            poll.register(file, select.POLLIN)
        while len(answers) < len(channels):
            ready = poll.poll(TICK * 1000)
            if not ready:
                if self.group.ended:  # killed, but it hangs in the kernel
                    raise EOFError
                continue
            at = waited[ready[0][0]]
            message = channels[at].receive()
            if isinstance(message, Log):
                log_here(message)
            elif message.number == call.number:  # earlier numbers belong to interrupted calls (KeyboardInterrupt)
                answers[at] = message
                if isinstance(message, Failure) and message.final:
                    self.group.note(message.error)
                    raise EOFError
                if isinstance(message, Failure) and call.method == LOAD:
                    break
                if isinstance(message, Failure) and len(answers) < len(channels):
                    failed.enter_context(self.group.limit(AFTER_FAILURE_SECONDS))
