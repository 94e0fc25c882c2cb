"""Sequences whose weights change while they run: how far each was, and which weights drew its tokens.

vLLM schedules a sequence under the id of its adapter. Other weights under the same id, written between two steps, are
those of its next token; keys and values that it has stay, or are computed again (`--in-flight-cache`).
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_local.backend.sampling.sampler import MovingWeights
from tinker_local.backend.vllm_engine.compat_vllm import scheduler
from tinker_local.types import DrawnUnder, InternalError, SampleOutput


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence runs on version `number` after its first `drawn` tokens. `on_older_keys`: it has keys and values of an
    earlier version."""

    number: int
    drawn: int = 0
    on_older_keys: bool = False


class TornSlotError(Exception):
    """The slot of a target could not be written, so that nothing may run on it. `error`: what clients see."""

    def __init__(self, error: InternalError) -> None:
        super().__init__(str(error))
        self.error = error


def moves(engine: Any, number: int, request_ids: Sequence[str], *, again: bool) -> list[Move]:
    """What a change to version `number` is for sequences of `engine`, between two steps. `again`: those that have keys
    compute them again (`compute_again`)."""
    found = {own_id(request_id): request for request_id, request in scheduler(engine).requests.items()}
    result = []
    for request_id in request_ids:
        request = found.get(request_id)
        if request is None:  # its last step has ended, and its output is on its way
            result.append(Move(number, 2**62))
            continue
        # A step that is on the device draws its token with the weights of before.
        drawn = request.num_output_tokens + (0 if again else request.num_output_placeholders)
        has_keys = bool(request.num_computed_tokens or drawn)
        result.append(Move(number, drawn, on_older_keys=has_keys and not again))
    return result


def salt(namespace: str, number: int) -> str:
    """What keys and values of version `number` alone are kept under."""
    return f"{namespace}@{number}"


def compute_again(engine: Any, request_ids: Collection[str], number: int) -> None:
    """Let sequences of `engine` compute their keys and values again with version `number`, between two steps. Their
    tokens stay, but for one that a step on the device draws, which is dropped."""
    of_engine, now, wanted = scheduler(engine), time.monotonic(), set(request_ids)
    # In reverse order, since each goes to the front of those that wait.
    for request in reversed([each for each in of_engine.running if own_id(each.request_id) in wanted]):
        of_engine.running.remove(request)
        of_engine._preempt_request(request, now, drop_stale_output=True)
        of_engine.prev_step_scheduled_req_ids.discard(request.request_id)
    for request_id, request in of_engine.requests.items():
        if own_id(request_id) in wanted:
            before, request.cache_salt = request.cache_salt, salt(request.cache_salt.rpartition("@")[0], number)
            for feature in request.mm_features:  # of an adapter that changes the tower
                feature.identifier = feature.identifier.replace(f"{before}:", f"{request.cache_salt}:", 1)
            request.block_hashes.clear()
            request.update_block_hashes()


def own_id(request_id: str) -> str:
    """Our id, `number-index`, to which vLLM appends a random part."""
    return "-".join(request_id.split("-", 2)[:2])


def with_moves(
    output: SampleOutput, moving: MovingWeights, moved: Sequence[Sequence[Move]], cached: Sequence[int]
) -> SampleOutput:
    """`output`, each of whose sequences says which weights drew it. `cached`: how many positions of the prompt each
    sequence found in the KV cache."""
    sequences = []
    for sequence, its, found in zip(output.sequences, moved, cached, strict=True):
        spans = drawn_under(its, sequence.tokens.size, since=moving.since, cached=found)
        sequences.append(sequence.model_copy(update={"drawn_under": spans}))
    return output.model_copy(update={"sequences": tuple(sequences)})


def drawn_under(moves: Sequence[Move], tokens: int, *, since: int, cached: int) -> tuple[DrawnUnder, ...]:
    """Which weights drew `tokens` tokens. What is `cached` in the namespace of a client is of the version of `since`,
    which made it, or of a later one: of that of the sequence itself, if this is the client's first."""
    began = [move for move in moves if not move.drawn and not move.on_older_keys][-1]
    older, spans = cached > 0 and began.number > since, []
    for move, end in zip(moves, [*(later.drawn for later in moves[1:]), tokens], strict=True):
        count = min(end, tokens) - min(move.drawn, tokens)
        if count > 0:
            spans.append(DrawnUnder(version=move.number, tokens=count, on_older_keys=older or move.on_older_keys))
    return tuple(spans)
