"""Sampling sessions and samples."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from tinker_local.backend.control.life_cycle import ControlPlane
from tinker_local.backend.http.access import READ_AS_PUBLIC, Backend
from tinker_local.backend.http.bodies import MAX_IMAGE_BYTES, MAX_JSON_BYTES, MAX_JSON_VALUES, parse
from tinker_local.backend.http.future_routes import promise
from tinker_local.types import CreateSamplingSessionRequest, Frozen, SampleRequest
from tinker_local.types.requests_and_results import Id

router = APIRouter(tags=["sampling"])

VALUES_PER_POSITION = 64
"""JSON values in a request for samples for each position of the context: its token, and targets of
`target_prompt_logprobs`."""

BYTES_PER_VALUE = 12
"""A token id of seven digits, a comma and a space, and some for what is around."""


def body_limits(backend: ControlPlane) -> tuple[int, int]:
    """Most bytes and JSON values of a request for samples."""
    values = VALUES_PER_POSITION * backend.models.longest_context
    most = MAX_JSON_BYTES + BYTES_PER_VALUE * values + (MAX_IMAGE_BYTES if backend.models.take_images else 0)
    return most, MAX_JSON_VALUES + values


class JoinBody(Frozen):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, CreateSamplingSessionRequest)
    as_public = READ_AS_PUBLIC in request.scope
    session_id = await backend.sampling.create_session(body, read_as_public=as_public)
    return {"sampling_session_id": session_id, "type": "create_sampling_session"}


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, backend: Backend) -> dict[str, Any]:
    """A number for a copy of a sampling client (a pickled one, for example), so that ids stay unique."""
    body = await parse(request, JoinBody)
    return {"client_counter": await backend.sampling.join(body.sampling_session_id), "type": "join_sampling_session"}


@router.post("/asample")
async def asample(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, SampleRequest, *body_limits(backend))
    return promise(await backend.sampling.sample(body))


@router.get("/samplers/{sampler_id}/weights_of_tokens")
async def get_weights_of_tokens(sampler_id: str, sequence_id: str, backend: Backend) -> dict[str, Any]:
    """Which in-flight saves drew the tokens of a sequence. Not part of the Tinker API."""
    return {"sequence_id": sequence_id, "drawn_under": backend.sampling.weights_of_tokens(sampler_id, sequence_id)}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, backend: Backend) -> dict[str, Any]:
    record = await backend.sampling.record(sampler_id)
    found = {"sampler_id": sampler_id, "base_model": record.base_model}
    return found if record.model_path is None else {**found, "model_path": record.model_path}
