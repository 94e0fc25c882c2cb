"""When a sequence gets its place on the device: vLLM's scheduler tells it to nobody unless it keeps statistics."""

from collections.abc import Callable
from typing import Any


def on_sequences_begun(engine: Any, note: Callable[[str], None]) -> None:
    """Let `note` be called, on the thread that steps, with the request id of each sequence in the step that first runs
    it; one that was put off may be told again when it is taken up."""
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = type(scheduler).schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        for new in output.scheduled_new_reqs:
            # Ours is `number-index`; vLLM adds a random part of its own.
            note("-".join(new.req_id.split("-", 2)[:2]))
        return output

    scheduler.schedule = noting
