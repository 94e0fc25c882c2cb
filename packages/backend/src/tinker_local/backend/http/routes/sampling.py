"""Sampling sessions and samples."""

from typing import Any

from fastapi import APIRouter, Request
from tinker_local.backend.http.access import Backend, promise
from tinker_local.backend.http.bodies import MAX_SAMPLE_BYTES, parse
from tinker_local.types import CreateSamplingSessionRequest, SampleRequest

router = APIRouter(tags=["sampling"])


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, backend: Backend) -> dict[str, Any]:
    body = await parse(request, CreateSamplingSessionRequest)
    return {"sampling_session_id": await backend.create_sampling_session(body), "type": "create_sampling_session"}


@router.post("/asample")
async def asample(request: Request, backend: Backend) -> dict[str, Any]:
    return promise(await backend.sample(await parse(request, SampleRequest, MAX_SAMPLE_BYTES)))


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, backend: Backend) -> dict[str, Any]:
    return await backend.get_sampler(sampler_id)
