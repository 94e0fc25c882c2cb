"""A program that was written for the SDK runs with nothing changed but its import (the server is a stand-in)."""

import base64
from typing import Any

import numpy as np
import pytest
import tinker_local.client as local
from tinker import types
from tinker.lib import internal_client_holder

PROGRAM = """
import {module} as tinker
from tinker import types

service = tinker.ServiceClient({{"purpose": "test"}}, "project-1", display_name="a program")
assert isinstance(service, tinker.ServiceClient)
capabilities = tinker.RestClient().get_server_capabilities().result()
sampler = service.create_sampling_client(base_model=capabilities.supported_models[0].model_name)
prompt = tinker.ModelInput(chunks=[tinker.types.EncodedTextChunk(tokens=[1, 2]), tinker.EncodedTextChunk(tokens=[3])])
params = types.SamplingParams(max_tokens=2, temperature=0.0)
answer = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
tokens = answer.sequences[0].tokens
service.close("success").result()
try:
    raise tinker.RequestFailedError("x", request_id="r", category=types.RequestErrorCategory.User)
except tinker.TinkerError:
    pass
"""


def run(
    module: str, fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[str, dict[str, Any]]]]:
    monkeypatch.setenv("TINKER_BASE_URL", fake_server.url)
    monkeypatch.setenv("TINKER_API_KEY", f"tml-{module}")
    # For good, RestClient() means the server that the environment named when the process first asked for one.
    monkeypatch.setattr(internal_client_holder.sessionless_holder_cache, "_holders", {})
    names: dict[str, Any] = {}
    fake_server.requests.clear()
    exec(PROGRAM.format(module=module), names)
    dropped = {"healthz", "client/dynamic_config", "session_heartbeat"}
    return names["tokens"], [request for request in fake_server.requests if request[0] not in dropped]


def test_an_unchanged_program_sends_a_fake_server_what_the_sdk_sends(
    fake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = run("tinker", fake_server, monkeypatch)
    ours = run("tinker_local.client", fake_server, monkeypatch)
    assert ours == official
    assert ours[0] == [7, 8]
    assert dict(ours[1])["create_session"]["user_metadata"] == {"purpose": "test"}


def test_a_prompt_with_an_image_reaches_a_fake_server_whole(fake_server: Any, tokenizer: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    prompt = local.model_input("What is this? ", pixels, tokenizer=tokenizer)
    with local.ServiceClient(base_url=fake_server.url) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        sampler.sample(prompt, num_samples=1, sampling_params=local.SamplingParams(max_tokens=2)).result()
    sent = fake_server.body("asample")["prompt"]["chunks"]
    assert [chunk["type"] for chunk in sent] == ["encoded_text", "image", "encoded_text"]
    assert isinstance(prompt.chunks[1], types.ImageChunk)
    assert base64.b64decode(sent[1]["data"]) == prompt.chunks[1].data
    assert fake_server.headers[-1]["x-api-key"] == "tml-local"
