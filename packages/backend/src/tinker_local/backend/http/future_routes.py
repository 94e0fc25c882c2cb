"""Polling: a long poll that an event ends, and cancelling."""

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.http.error_responses import message
from tinker_local.backend.scheduling.operations import Operation, as_api_error
from tinker_local.types import ApiError, Frozen, InternalError, OptimStepOutput
from tinker_local.types.base import TupleOf
from tinker_local.types.requests_and_results import Id, RequestId

log = logging.getLogger(__name__)
router = APIRouter(tags=["futures"])

LONG_POLL_SECONDS = 30.0
"""How long a poll is held; the SDK gives up at 45."""

MAX_RETRIEVED_BYTES, MAX_RETRIEVED_VALUES = 16 * 2**20, 2**17
"""Of a call that reports which results were read: a hundred thousand ids and more."""

PROTOBUF = "application/x-protobuf"


class RetrieveBody(Frozen):
    request_id: RequestId
    allow_metadata_only: bool = False


class SamplingClientTarget(Frozen):
    """One client of a sampling session: the original is 0, a copy is what its `seq_id`s begin with."""

    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0)] = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveManyBody(Frozen):
    """`prev_cursor`: that of the last answer, 0 at first. `timeout` seconds None: a long poll."""

    target: SamplingClientTarget
    prev_cursor: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: TupleOf[RequestId] = ()


class CancelBody(Frozen):
    request_id: RequestId


def promise(operation: Operation[Any]) -> dict[str, object]:
    """The answer to a submitted operation."""
    found: dict[str, object] = {"request_id": operation.request_id}
    if operation.kind == "sample":
        found["sample_sequence_ids"] = operation.sequence_ids
    return found


@router.post("/retrieve_future")
async def retrieve_future(request: Request, backend: Backend) -> Response:
    """The result; 408 if it is not there yet; a failure is 200 with `error` and `category`."""
    body = await parse(request, RetrieveBody)
    operation = backend.operations.get(body.request_id)
    if operation is None:
        error = await backend.lost_requests.why(body.request_id)
        if isinstance(error, InternalError):
            return failure(error)
        raise error
    if not await operation.wait(LONG_POLL_SECONDS):
        owners = backend.sampling if operation.kind == "sample" else backend.runs
        state = owners.state_of(operation)
        waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": state.state}
        if state.reason is not None:
            waiting["queue_state_reason"] = state.reason
        return JSONResponse(waiting, 408)
    if operation.failed and operation.kind == "forward_backward":
        await backend.runs.pause_before_failure(operation)
    try:
        answer = await encode(operation)
        backend.operations.was_read(operation)
        return answer
    except ApiError as error:
        return failure(error)
    except Exception as error:  # a 5xx would be polled again for ever
        log.exception("the result of %s cannot be sent", body.request_id)
        return failure(as_api_error(error))


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request, backend: Backend) -> dict[str, Any]:
    """Which samples of one client ended since its last call; their results are got from `retrieve_future`."""
    body = await parse(request, RetrieveManyBody, MAX_RETRIEVED_BYTES, MAX_RETRIEVED_VALUES)
    sampling_session_id, client = body.target.sampling_session_id, body.target.cloned_sampler_id
    await backend.sampling.retrieved(sampling_session_id, client, body.retrieved_request_ids)
    timeout = LONG_POLL_SECONDS if body.timeout is None else min(body.timeout, LONG_POLL_SECONDS)
    ended = await backend.sampling.completions(sampling_session_id, client, body.prev_cursor, timeout)
    return {
        "completions": [
            {"state": "failed" if completion.failed else "finished", "request_id": completion.request_id}
            for completion in ended
        ],
        "cursor": ended[-1].cursor if ended else body.prev_cursor,
    }


@router.post("/cancel_future", status_code=204)
async def cancel_future(request: Request, backend: Backend) -> Response:
    backend.operations.cancel((await parse(request, CancelBody)).request_id)
    return Response(status_code=204)


def failure(error: ApiError) -> JSONResponse:
    """A failed operation: HTTP 200, because the SDK would poll again on anything else."""
    return JSONResponse({"error": message(error), "category": error.category})


async def encode(operation: Operation[Any]) -> Response:
    """Gradients and samples as protobuf, everything else as JSON."""
    if operation.form is not None:
        return Response(await operation.encoded(), media_type=PROTOBUF)
    result = await operation
    if isinstance(result, OptimStepOutput):
        return JSONResponse({"metrics": finite(result.metrics)})
    return JSONResponse(result)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` as JSON can hold them: a non-finite one becomes `NAME_is_nan`, or `NAME_is_inf` (1 or -1). The SDK
    fails on any spelling of NaN."""
    found = {}
    for name, value in metrics.items():
        if math.isnan(value):
            found[f"{name}_is_nan"] = 1.0
        elif math.isinf(value):
            found[f"{name}_is_inf"] = math.copysign(1.0, value)
        else:
            found[name] = value
    return found
