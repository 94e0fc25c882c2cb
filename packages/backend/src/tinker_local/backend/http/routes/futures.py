"""Polling: a long poll that an event ends, and cancelling."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tinker_local.backend.http.access import Backend
from tinker_local.backend.http.bodies import parse
from tinker_local.backend.http.errors import message
from tinker_local.types import ApiError, ForwardBackwardOutput, Frozen, InternalError, OptimStepOutput, SampleOutput
from tinker_local.types.codec import encode_forward_backward_output, encode_sample_output

router = APIRouter(tags=["futures"])

LONG_POLL_SECONDS = 30.0
"""How long a poll is held; the SDK gives up at 45."""

PROTOBUF = "application/x-protobuf"


class RetrieveBody(Frozen):
    request_id: str
    allow_metadata_only: bool = False


class CancelBody(Frozen):
    request_id: str


@router.post("/retrieve_future")
async def retrieve_future(request: Request, backend: Backend) -> Response:
    """The result; 408 if it is not there yet; a failure is 200 with `error` and `category`."""
    body = await parse(request, RetrieveBody)
    try:
        operation = await backend.operation(body.request_id)
    except InternalError as error:
        return failure(error)
    if not await operation.wait(LONG_POLL_SECONDS):
        waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(waiting, 408)
    try:
        result = await operation
    except ApiError as error:
        return failure(error)
    return await encode(result)


@router.post("/cancel_future", status_code=204)
async def cancel_future(request: Request, backend: Backend) -> Response:
    await backend.cancel((await parse(request, CancelBody)).request_id)
    return Response(status_code=204)


def failure(error: ApiError) -> JSONResponse:
    """A failed operation: HTTP 200, because the SDK would poll again on anything else."""
    return JSONResponse({"error": message(error), "category": error.category})


async def encode(result: Any) -> Response:
    """Gradients and samples as protobuf (encoded in a thread), everything else as JSON."""
    if isinstance(result, ForwardBackwardOutput):
        return Response(await asyncio.to_thread(encode_forward_backward_output, result), media_type=PROTOBUF)
    if isinstance(result, SampleOutput):
        return Response(await asyncio.to_thread(encode_sample_output, result), media_type=PROTOBUF)
    if isinstance(result, OptimStepOutput):
        return JSONResponse({"metrics": result.metrics})
    return JSONResponse(result)
