"""A client sent a gradient knowing of a failure if it began to arrive after that was read; and so all of a call."""

import asyncio
import math
from typing import Any

import pytest
from tinker_local.backend.scheduling.operations import Operation
from tinker_local.backend.scheduling.run_queue import CommandLog, GradientCommand, RunQueue
from tinker_local.backend.training.trainer import TrainWork
from tinker_local.types import InvalidRequestError


class Sent:
    """A run whose clock is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.queue = RunQueue("run", "session", "owner", CommandLog(), lambda: self.time, released=True)

    async def gradient(self, seq_id: int, began: float | None = None) -> GradientCommand:
        """A forward_backward that is prepared."""
        operation: Operation[Any] = Operation(f"run:{seq_id}", "forward_backward")
        command = GradientCommand(operation, None, began=began)
        command.prepared = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
        command.prepared.set_result(TrainWork("run", [], "cross_entropy"))  # type: ignore[union-attr]
        self.queue.add(seq_id, command)
        return command

    def run(self, command: GradientCommand) -> bool:
        """Whether its gradient is computed."""
        taken = self.queue.take()
        assert taken is command
        work = self.queue.work_of(command)
        self.queue.added(work)
        return work.backward

    async def fail(self, command: GradientCommand, *, read: bool) -> str:
        """Its failure, in its place."""
        assert self.queue.take() is command
        self.queue.fail(command, InvalidRequestError("bad"))
        if read:
            with pytest.raises(InvalidRequestError):
                await command.operation
        return str(command.operation.error)


async def test_a_gradient_begins_anew_after_its_client_has_read_the_failure() -> None:
    sent = Sent()
    assert sent.run(await sent.gradient(1))
    failed, pipelined = await sent.gradient(2), await sent.gradient(3)
    assert "1 earlier forward_backward request was discarded" in await sent.fail(failed, read=True)
    assert (sent.queue.gradients, sent.queue.void) == (0, True)
    assert not sent.run(pipelined)
    sent.time = 1.0
    on_its_way, later = await sent.gradient(4, began=-0.5), await sent.gradient(5)
    assert not sent.run(on_its_way)
    assert sent.run(later)
    assert not sent.queue.commands.poisoned


async def test_the_first_request_of_a_call_arrives_last_and_was_sent_with_the_others() -> None:
    sent = Sent()
    failed, second = await sent.gradient(1), await sent.gradient(3)
    await sent.fail(failed, read=True)
    sent.time = 1.0
    first = await sent.gradient(2)
    assert not sent.run(first)
    assert not sent.run(second)
    assert sent.queue.commands.take_poisoned() == "run:1 failed: bad"


async def test_a_failure_that_was_not_read_is_not_forgotten_with_an_earlier_one() -> None:
    sent = Sent()
    await sent.fail(await sent.gradient(1), read=True)
    sent.time = 1.0
    again, pipelined = await sent.gradient(2), await sent.gradient(3)
    await sent.fail(again, read=False)
    assert not sent.run(pipelined)
    assert sent.queue.commands.take_poisoned() == "run:2 failed: bad"


async def test_a_gap_is_no_failure_that_a_client_reads() -> None:
    sent = Sent()
    sent.queue.commands.poison("the request with seq_id 1 never arrived")
    sent.queue.commands.start_anew(10**6)
    assert sent.queue.commands.poisoned
    assert sent.queue.commands._poisoned_in == math.inf
