"""Training runs: creation, gradients, optimizer steps, checkpoints. Every submit answers with a promise.

A malformed body that names its model and `seq_id` is not refused here. Its operation fails in its place in the order,
because the SDK's training client hangs if a submit in the middle of a group is refused.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.http.access import Backend, ServerKeys, check_ids, check_own_body
from tinker_local.backend.http.bodies import MAX_GRADIENT_BYTES, Body, body_of, parse, parse_json, unpack
from tinker_local.backend.http.future_routes import promise
from tinker_local.backend.scheduling.operations import Operation, OperationKind
from tinker_local.backend.threads import PARSING
from tinker_local.types import (
    CreateModelRequest,
    Frozen,
    InvalidRequestError,
    LoadWeightsRequest,
    NotFoundError,
    OptimStepRequest,
    PermissionDeniedError,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinker_local.types.codec import ForwardBackwardEnvelope, parse_forward_backward_envelope
from tinker_local.types.requests_and_results import Id, TrainingSeqId

router = APIRouter(tags=["training"])
M = TypeVar("M", bound=Frozen)


class Place(BaseModel):
    """Model and `seq_id` of a body that is otherwise wrong."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model_id: Id
    seq_id: TrainingSeqId


class GetInfoBody(Frozen):
    model_id: Id
    type: Literal["get_info"] = "get_info"


@router.post("/create_model")
async def create_model(request: Request, backend: Backend) -> dict[str, Any]:
    return promise(await backend.runs.create(await parse(request, CreateModelRequest)))


@router.post("/get_info")
async def get_info(request: Request, backend: Backend) -> dict[str, Any]:
    """What the client needs to know of a training run, above all its tokenizer."""
    model = await backend.runs.info((await parse(request, GetInfoBody)).model_id)
    name = model.record.base_model
    return {
        "model_id": model.model_id,
        "model_data": {"arch": model.base.engines.arch, "model_name": name, "tokenizer_id": model.base.tokenizer_id},
        "optimizer_config": {"type": model.optimizer.name},
        "is_lora": True,
        "lora_rank": model.record.lora_config.rank,
        "model_name": name,
        "type": "get_info",
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, backend: Backend) -> dict[str, Any]:
    began = asyncio.get_running_loop().time()
    async with body_of(request, MAX_GRADIENT_BYTES, math.inf) as body:
        found, size = await PARSING.run(_envelope, body, request.headers.get("content-encoding"))
    del body  # as it was sent: the envelope has what it needs
    await check_ids(request, {"model_id": found.model_id})
    return promise(
        await backend.training.forward_backward_encoded(
            found.model_id,
            found.seq_id,
            forward_only=found.forward_only,
            size=size,
            decoding=found.decoding(),
            began=began,
        )
    )


def _envelope(body: Body, encoding: str | None) -> tuple[ForwardBackwardEnvelope, int]:
    """The envelope of a body, and its bytes unpacked; blocks."""
    unpacked = unpack(body, encoding)
    return parse_forward_backward_envelope(unpacked), len(unpacked)


@router.post("/optim_step")
async def optim_step(request: Request, backend: Backend) -> dict[str, Any]:
    return await _ordered(request, backend, "optim_step", OptimStepRequest, backend.training.optim_step)


@router.post("/save_weights")
async def save_weights(request: Request, backend: Backend) -> dict[str, Any]:
    return await _ordered(request, backend, "save_weights", SaveWeightsRequest, backend.training.save_weights)


@router.post("/load_weights")
async def load_weights(request: Request, backend: Backend, keys: ServerKeys) -> dict[str, Any]:
    async def submit(asked: LoadWeightsRequest) -> Operation[Any]:
        return await backend.training.load_weights(keys.opened(asked))

    return await _ordered(request, backend, "load_weights", LoadWeightsRequest, submit)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, backend: Backend) -> dict[str, Any]:
    return await _ordered(
        request,
        backend,
        "save_weights_for_sampler",
        SaveWeightsForSamplerRequest,
        backend.training.save_weights_for_sampler,
    )


@router.post("/save_weights_external")
async def save_weights_external(request: Request, backend: Backend) -> dict[str, Any]:
    return await _ordered(
        request, backend, "save_weights_external", SaveWeightsExternalRequest, backend.training.save_weights_external
    )


async def _ordered(
    request: Request,
    backend: ControlPlane,
    kind: OperationKind,
    model: type[M],
    submit: Callable[[M], Awaitable[Operation[Any]]],
) -> dict[str, Any]:
    async with body_of(request) as body:
        try:
            asked = await parse_json(body, model)
            await check_own_body(request, asked)
            return promise(await submit(asked))
        except (InvalidRequestError, PermissionDeniedError, NotFoundError) as error:
            try:
                place = Place.model_validate_json(body)
            except ValidationError:
                raise error from None
            await check_ids(request, {"model_id": place.model_id})
            return promise(await backend.training.refuse(kind, place.model_id, place.seq_id, error))
