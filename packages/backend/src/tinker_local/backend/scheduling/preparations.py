"""What is prepared next: session by session, model by model, in each in order, and not more than is soon needed."""

import asyncio
from collections import OrderedDict

from tinker_local.backend.scheduling.model_queue import ModelQueue
from tinker_local.backend.training.interface import TrainWork

AT_ONCE = 4
"""Preparations that are under way at once: twice the threads that do them, so that none of those ever waits."""


class Preparations:
    """Starts the preparation of gradients.

    What is prepared (pixels above all) takes more memory than what was sent, and whoever sends much must not keep the
    threads from others. So sessions take turns, in each its models do, and a model has ready what it could put into
    one call of `ahead` positions, and one gradient more, so that its session always has something to take.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._under_way = 0
        self._sessions: OrderedDict[str, OrderedDict[int, ModelQueue]] = OrderedDict()

    def add(self, queue: ModelQueue) -> None:
        self._sessions.setdefault(queue.session_id, OrderedDict())[id(queue)] = queue

    def remove(self, queue: ModelQueue) -> None:
        """Unknown queues are ignored."""
        models = self._sessions.get(queue.session_id, OrderedDict())
        if models.pop(id(queue), None) is not None and not models:
            del self._sessions[queue.session_id]

    def start(self) -> list[asyncio.Task[TrainWork]]:
        """Start as many as there is room for; `start` again when one of them is done."""
        started = []
        while self._under_way < AT_ONCE and (queue := self._next()) is not None:
            self._under_way += 1
            started.append(queue.prepare())
            started[-1].add_done_callback(self._done)
        return started

    def _done(self, task: asyncio.Task[TrainWork]) -> None:
        self._under_way -= 1

    def _next(self) -> ModelQueue | None:
        for session_id, models in self._sessions.items():
            for queue in models.values():
                if queue.next_unprepared(self._ahead):
                    models.move_to_end(id(queue))
                    self._sessions.move_to_end(session_id)
                    return queue
        return None
