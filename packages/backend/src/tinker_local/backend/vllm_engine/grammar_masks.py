"""What sequences that follow grammars may say next, without a step that waits for it.

vLLM matches grammars on the thread of the engine, where one that is slow stops everybody. Here each request has a
process (`grammar_process.py`) that writes masks into shared memory. A step waits a moment for those that were fast
the last time. A sequence without its mask is left out of the step, as vLLM leaves out running ones when a step is
full, and takes part again when the mask is there.
"""

import select
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.vllm_engine.compat_vllm import scheduler
from tinker_local.backend.vllm_engine.grammar_process import Matcher

MOMENT = 0.02
"""Seconds that a step waits for masks, in all."""

AT_ONCE = 0.005
"""Seconds of processor time for one token, up to which a step waits for the next one."""

SEAT = "tinker_local_grammar"
"""In `SamplingParams.extra_args`: the `Seat` of a sequence."""

Told = Mapping[str, npt.NDArray[np.int32]]
"""The masks that are there, by sequence."""


class Seat:
    """Where a sequence finds its matcher. Other ranks have none: rank 0 sends them the masks."""

    def __init__(self, matcher: Matcher | None, index: int) -> None:
        self.matcher = matcher
        self.index = index

    def __reduce__(self) -> Any:
        return Seat, (None, self.index)

    def __deepcopy__(self, _: Any) -> "Seat":
        return self


@dataclass(slots=True, eq=False)
class _Sequence:
    """Implements vLLM's StructuredOutputGrammar, for one sequence without speculative tokens. `begun`: done when the
    first mask is there."""

    masks: "GrammarMasks"
    key: str
    seat: Seat
    request: Any
    begun: "Future[Any]"

    @property
    def ready(self) -> bool:
        """Whether its mask is that of the next token to draw."""
        if getattr(self.request, "num_output_placeholders", 0):  # vLLM draws ahead: the last token is not known yet
            return False
        if self.seat.matcher is None:
            return self.key in self.masks.told
        return self.seat.index not in self.seat.matcher.waiting

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """int32 [words]."""
        if self.seat.matcher is None:
            return self.masks.told[self.key]
        mask: npt.NDArray[np.int32] = self.seat.matcher.masks[self.seat.index]
        return mask

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on, unless the sequence has ended."""
        if self.seat.matcher is not None and not self.request.is_finished():
            for token in tokens:
                self.seat.matcher.take(self.seat.index, int(token))
        return True

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        """Write the mask into a row of vLLM's."""
        bitmask[index].numpy()[:] = self.mask

    def is_terminated(self) -> bool:
        """Never: the mask says what may follow the end."""
        return False


class _Backend:
    """What vLLM's manager needs of a backend."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allocate_token_bitmask(self, count: int) -> Any:
        """vLLM's rows."""
        import xgrammar

        return xgrammar.allocate_token_bitmask(count, self._vocab_size)

    def destroy(self) -> None:
        """Nothing is held."""


class GrammarMasks:
    """Of one engine; used on its thread. `told`: on ranks above 0, the masks of rank 0 in this step."""

    def __init__(self, engine: Any) -> None:
        """Match the grammars of `engine`, an `LLMEngine`, outside of its process."""
        self.told: Told = {}
        self._sequences: dict[str, _Sequence] = {}
        self._matchers: dict[int, Matcher] = {}
        self._poll = select.epoll()
        self._core = engine.engine_core.engine_core
        self._scheduler = scheduler(engine)
        manager = self._core.structured_output_manager
        manager.backend = _Backend(engine.model_config.get_vocab_size())
        manager.grammar_init = self._begin
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._schedule_ready
        self._step = self._core.step_fn
        self._core.step_fn = self._step_in_order

    # Before a step ----------------------------------------------------------------------------------------------------

    def settle(self) -> Mapping[str, Exception]:
        """Take the masks that are there, or come in a moment. The sequences whose request cannot go on, by the first
        two parts of their ids, with the reason."""
        if not self._sequences:
            return {}
        self._forget()
        for matcher in self._matchers.values():
            matcher.flush()
        running = {id(each.seat.matcher) for each in self._sequences.values() if each.begun.done()}
        end = time.monotonic() + MOMENT
        while True:
            hurry = any(
                matcher.waiting and matcher.patient and id(matcher) in running for matcher in self._matchers.values()
            )
            left = end - time.monotonic() if hurry or not self._others() else 0
            self._read(max(0.0, left))
            if left <= 0:
                break
        for matcher in self._matchers.values():
            if matcher.waiting:
                matcher.missed()
        for each in self._sequences.values():
            if not each.begun.done() and each.seat.matcher is not None and each.ready:
                each.begun.set_result(each)
        failed = {
            each.key: each.seat.matcher.failure
            for each in self._sequences.values()
            if each.seat.matcher is not None and each.seat.matcher.failure is not None
        }
        for key in failed:
            del self._sequences[key]
        return failed

    def tell(self) -> Told:
        """The masks of this step, for other ranks."""
        return {each.key: each.mask.copy() for each in self._sequences.values() if each.ready}

    def hear(self, told: Told) -> None:
        """The masks of this step, from rank 0."""
        self.told = told
        self._forget()
        for each in self._sequences.values():
            if not each.begun.done() and each.ready:
                each.begun.set_result(each)

    def _others(self) -> bool:
        """Whether a step could do something."""
        ready = sum(each.ready for each in self._sequences.values())
        return ready > 0 or len(self._scheduler.requests) > len(self._sequences)

    def _read(self, timeout: float) -> None:
        for descriptor, _ in self._poll.poll(timeout):
            self._matchers[descriptor].read(AT_ONCE)
            if self._matchers[descriptor].failure is not None:
                self._poll.unregister(descriptor)
                del self._matchers[descriptor]

    def _forget(self) -> None:
        """Sequences that have ended, and matchers without any."""
        for key in [key for key, each in self._sequences.items() if each.request.is_finished()]:
            del self._sequences[key]
        used = {id(each.seat.matcher) for each in self._sequences.values()}
        for descriptor, matcher in list(self._matchers.items()):
            if id(matcher) not in used:
                self._poll.unregister(descriptor)
                del self._matchers[descriptor]

    # In place of vLLM's -----------------------------------------------------------------------------------------------

    def _begin(self, request: Any) -> None:
        """In place of `grammar_init`."""
        if request.structured_output_request is None:
            return
        seat: Seat = request.sampling_params.extra_args[SEAT]
        key = "-".join(request.request_id.split("-", 2)[:2])  # vLLM appends a random part
        begun: Future[Any] = Future()
        self._sequences[key] = _Sequence(self, key, seat, request, begun)
        request.structured_output_request.grammar = begun
        matcher = seat.matcher
        if matcher is not None:
            if matcher.failure is None and matcher.fileno() not in self._matchers:
                self._matchers[matcher.fileno()] = matcher
                self._poll.register(matcher.fileno(), select.EPOLLIN)
            matcher.begin(seat.index, sorted(request.sampling_params.all_stop_token_ids))

    def _schedule_ready(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `schedule`: without running sequences that have no mask. What they hold, a place and the slot of
        their adapter, stays theirs."""
        of_engine = self._scheduler
        absent = {each.request.request_id for each in self._sequences.values() if not each.ready}
        left_out = [request for request in of_engine.running if request.request_id in absent and _draws(request)]
        if not left_out:
            return self._schedule(*args, **kwargs)
        kept = [request for request in of_engine.running if request not in left_out]
        slots = len(_adapters(of_engine.running) - _adapters(kept))
        of_engine.running = kept
        of_engine.max_num_running_reqs -= len(left_out)
        lora = of_engine.lora_config
        if lora is not None:
            lora.max_loras -= slots
        try:
            return self._schedule(*args, **kwargs)
        finally:
            of_engine.running = [*left_out, *of_engine.running]
            of_engine.max_num_running_reqs += len(left_out)
            if lora is not None:
                lora.max_loras += slots

    def _step_in_order(self) -> Any:
        """In place of `step_fn`: where vLLM draws ahead, the tokens of sequences whose masks come at once are taken
        before the next step is made, so that they are in each."""
        ahead = getattr(self._core, "batch_queue", None)
        if not ahead or not any(self._is_ahead(each) for each in self._sequences.values()):
            return self._step()
        self._scheduler.has_requests = _nothing
        try:
            return self._step()
        finally:
            del self._scheduler.has_requests

    def _is_ahead(self, each: _Sequence) -> bool:
        matcher = each.seat.matcher
        return bool(getattr(each.request, "num_output_placeholders", 0)) and (matcher is None or matcher.patient)


def _nothing() -> bool:
    """There are no requests."""
    return False


def _draws(request: Any) -> bool:
    """Whether its next step draws a token."""
    return not getattr(request, "is_prefill_chunk", False)


def _adapters(requests: list[Any]) -> set[int]:
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
