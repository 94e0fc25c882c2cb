"""What a program says of its prompts reaches those who ask its checkpoints."""

from typing import Any

import httpx
import pytest
from tinker_local import client
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.client import PromptLayout
from tinker_local.types import InvalidRequestError
from tinker_local.types.prompt_layout import PICTURE_SIDE, PROMPT_ORDER

BASE = "fake/bigram"


@pytest.fixture
def service(loopback_server: LoopbackServer) -> client.ServiceClient:
    return client.ServiceClient(base_url=loopback_server.url, api_key=loopback_server.api_key)


def shown(server: LoopbackServer, model: str) -> Any:
    """The layout that `GET /v1/models/MODEL` tells."""
    name = model.replace("/", "%2F").replace(":", "%3A")
    answer = httpx.get(f"{server.url}/v1/models/{name}", headers={"Authorization": f"Bearer {server.api_key}"})
    return answer.raise_for_status().json().get("prompt_layout")


def test_a_checkpoint_has_the_layout_of_its_run_or_its_own_on_fakes(
    loopback_server: LoopbackServer, service: client.ServiceClient
) -> None:
    metadata = {"idea": "7", **PromptLayout("text-first", 32).as_metadata()}
    run = service.create_lora_training_client(BASE, rank=2, user_metadata=metadata).result()
    of_run = run.save_weights_for_sampler("a").result().path
    own = run.save_weights_for_sampler("b", user_metadata={PROMPT_ORDER: "picture-first"}).result().path
    plain = service.create_lora_training_client(BASE, rank=2).result().save_weights_for_sampler("a").result().path
    assert shown(loopback_server, of_run) == {"order": "text-first", "side": 32}
    assert shown(loopback_server, own) == {"order": "picture-first", "side": 32}
    assert shown(loopback_server, plain) is None
    assert shown(loopback_server, BASE) is None


def test_a_run_that_goes_on_and_a_copy_keep_the_layout_on_fakes(
    loopback_server: LoopbackServer, service: client.ServiceClient
) -> None:
    metadata = {"idea": "7", **PromptLayout("text-first", 32).as_metadata()}
    run = service.create_lora_training_client(BASE, rank=2, user_metadata=metadata).result()
    state, sampler = run.save_state("a").result().path, run.save_weights_for_sampler("a").result().path
    for given, expected in (
        (None, {"order": "text-first", "side": 32}),
        ({PROMPT_ORDER: "picture-first"}, {"order": "picture-first", "side": 32}),
    ):
        again = service.create_training_client_from_state(state, user_metadata=given).result()
        assert shown(loopback_server, again.save_weights_for_sampler("a").result().path) == expected
        assert "idea" not in (
            service.create_rest_client().get_training_run(again.model_id).result().user_metadata or {}
        )
    body = {"source_path": sampler, "destination_project_id": "local"}
    headers = {"X-API-Key": loopback_server.api_key}
    copied = httpx.post(f"{loopback_server.url}/api/v1/copy_weights", json=body, headers=headers).raise_for_status()
    assert shown(loopback_server, copied.json()["tinker_path"]) == {"order": "text-first", "side": 32}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({PROMPT_ORDER: "question-first"}, "must be 'picture-first' or 'text-first', not 'question-first'"),
        ({PICTURE_SIDE: "32px"}, "must be a number of pixels, not '32px'"),
        ({PICTURE_SIDE: "0"}, "must be a number of pixels, not '0'"),
    ],
)
def test_a_layout_that_is_none_is_refused_on_fakes(
    service: client.ServiceClient, metadata: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        PromptLayout.of(metadata)
    with pytest.raises(client.TinkerError, match=message):
        service.create_lora_training_client(BASE, rank=2, user_metadata=metadata).result()


def test_words_say_what_is_known() -> None:
    assert PromptLayout().words() == ""
    assert PromptLayout("text-first").words() == "pictures after the text"
    assert (
        PromptLayout("picture-first", 32).words() == "pictures before the text and pictures of at most 32 pixels a side"
    )
