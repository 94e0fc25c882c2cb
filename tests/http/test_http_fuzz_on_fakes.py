"""Whatever is sent, the answer is JSON and no 5xx, which the SDK would repeat for minutes or for ever."""

import asyncio
import json
import re
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_local.backend.hosting.app import create_app
from tinker_local.backend.http.client_routes import REFUSED
from tinker_local.backend.training.losses import LOSSES
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import encode_forward_backward_request

from tests.conftest import few
from tests.fuzz.mutate import places, replaced
from tests.http.conftest import Api

BOUNDED = settings(max_examples=few(60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 2**200, -(2**63) - 1]),
    st.floats(),
    st.sampled_from([0.5, -0.0, 1e308]),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "..", "a/b", "\u0000", "tinker://a/weights/b", "tinker://", "x" * 300, "{session}", "{model}", "{digits}"]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=10,
)

BODIES: dict[str, dict[str, Any]] = {
    "client/config": {"sdk_version": "0.38.0"},
    "client/dynamic_config": {"sdk_version": "0.38.0"},
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "display_name": "d"},
    "session_heartbeat": {"session_id": "{session}", "type": "session_heartbeat"},
    "sessions/{other}/finish": {"reason": {"type": "success"}, "detail": None},
    "create_model": {
        "session_id": "{session}",
        "model_seq_id": 77,
        "base_model": "fake/bigram",
        "lora_config": {"rank": 2, "seed": 1, "train_mlp": True},
        "user_metadata": {"a": "b"},
        "optimizer_config": {"type": "adamw"},
    },
    "get_info": {"model_id": "{model}", "type": "get_info"},
    "optim_step": {
        "model_id": "{model}",
        "seq_id": 1,
        "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0},
        "type": "optim_step",
    },
    "save_weights": {"model_id": "{model}", "seq_id": 2, "path": "a", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
    "load_weights": {"session_id": "{session}", "model_seq_id": 78, "path": "{saved}", "optimizer": True},
    "save_weights_for_sampler": {"model_id": "{model}", "seq_id": 3, "path": "b", "kind": "snapshot"},
    "create_sampling_session": {"session_id": "{session}", "sampling_session_seq_id": 99, "base_model": "fake/bigram"},
    "asample": {
        "sampling_session_id": "{sampler}",
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {
            "chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "image", "format": "png", "data": ""}]
        },
        "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 1, "stop": ["a"]},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": {"data": [3, -1], "dtype": "int64", "shape": [1, 2]},
        "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 1,
        "record_stability_info": False,
        "type": "sample",
    },
    "join_sampling_session": {"sampling_session_id": "{sampler}", "type": "join_sampling_session"},
    "save_weights_external": {"model_id": "{model}", "seq_id": 4, "path": "c", "ttl_seconds": 3600},
    "PUT training_runs/{model}/checkpoints/weights/saved/ttl": {"ttl_seconds": 7200},
    "retrieve_futures": {
        "target": {"sampling_session_id": "{sampler}", "cloned_sampler_id": 0, "type": "sampling_session"},
        "prev_cursor": 0,
        "timeout": 0.01,
        "retrieved_request_ids": ["{sampler}:0"],
    },
    "retrieve_future": {"request_id": "{model}:create", "allow_metadata_only": True},
    "cancel_future": {"request_id": "{model}:create"},
    "weights_info": {"tinker_path": "{saved}"},
    "training_runs/{model}/metrics": {"metrics": {"reward": 1.0}, "step": 1},
    "sessions/search": {
        "session_id": "{session}",
        "project_ids": ["local"],
        "user_metadata": {"a": "b"},
        "display_name": "d",
        "owner": {"type": "user", "owner_urns": ["tml:organization_user:local"]},
        "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}],
        "limit": 2,
        "cursor": {"last_created_at": "2026-01-01T00:00:00+00:00", "last_session_id": "{session}"},
    },
    "copy_weights": {"source_path": "{saved}", "session_id": "{session}", "model_seq_id": 79, "ttl_seconds": 3600},
    "telemetry": {"events": [], "session_id": "{session}"},
    "/v1/chat/completions": {
        "model": "fake/bigram",
        "messages": [
            {"role": "system", "content": "a"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "b"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,", "detail": "auto"}},
                ],
            },
        ],
        "max_tokens": 2,
        "n": 2,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"end": "."},
        "tools": [],
        "stream": False,
    },
    "/v1/completions": {
        "model": "fake/bigram",
        "prompt": ["a", [98]],
        "max_tokens": 2,
        "logprobs": 1,
        "echo": True,
        "stop_token_ids": [5],
        "presence_penalty": 0.5,
        "return_token_ids": True,
    },
    "/tokenize": {
        "model": "fake/bigram",
        "messages": [{"role": "user", "content": "a"}],
        "add_special_tokens": False,
        "return_token_strs": True,
    },
    "/detokenize": {"model": "fake/bigram", "tokens": [97, 98]},
    "/v1/messages": {
        "model": "fake/bigram",
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "a", "data": ""}}],
            }
        ],
        "max_tokens": 2,
        "stop_sequences": ["a"],
        "stream": False,
    },
    "/v1/messages/count_tokens": {"model": "fake/bigram", "messages": [{"role": "user", "content": "a"}]},
    "recorded_sessions": {"name": "{other}", "lifetime_hours": 1.0, "max_bytes": 100, "keep_thoughts": True},
    "recorded_sessions/{recorded}/rewards": {"rewards": {"0": 0.5}},
    "/session/{recorded}/v1/chat/completions": {
        "model": "fake/bigram",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "look"}}],
    },
    "/session/{recorded}/v1/messages": {
        "model": "fake/bigram",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "max_tokens": 2,
    },
    "/session/{recorded}/v1/messages/count_tokens": {
        "model": "fake/bigram",
        "messages": [{"role": "user", "content": "a"}],
    },
}
"""Those below `/api/v1/`, and whole paths."""


@pytest.fixture(scope="module")
def fuzzed(api_in_loop: Any) -> Any:
    """(api, run, names): `names` of things that exist, to be put in for `{session}` and so on."""
    api, loop = api_in_loop

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await coroutine

        return loop.run_until_complete(bounded())

    async def prepare() -> dict[str, str]:
        session = await api.session()
        model = await api.model(session, 0)
        return {
            "session": session,
            "recorded": str((await api.ok("recorded_sessions", {}))["name"]),
            "other": await api.session(),
            "model": model,
            "saved": await api.save(model, 1, "saved"),
            "sampler": await api.base_sampler(session, 0),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinker_local.backend.http.future_routes.LONG_POLL_SECONDS", 0.02)
        yield api, run, run(prepare())


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace(f"{{{name}}}", text)
        return value
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    if isinstance(value, dict):
        return {filled(key, names): filled(item, names) for key, item in value.items()}
    return value


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 409
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return
    assert int(answer.headers.get("content-length", 0)) == len(answer.content)
    if answer.status_code == 204:
        return
    assert answer.content
    if answer.headers["content-type"] != "application/x-protobuf":
        answer.json()


async def send_to(api: Api, path: str, content: bytes, **headers: str) -> Any:
    method, _, path = path.rpartition(" ")
    url = path if path.startswith("/") else f"/api/v1/{path}"
    return await api.http.request(method or "POST", url, content=content, headers=headers)


async def submit_and_poll(api: Api, path: str, content: bytes) -> None:
    answer = await send_to(api, path, content, **{"Content-Type": "application/json"})
    check(answer)
    if answer.status_code == 200 and "request_id" in answer.json():
        polled = await api.poll(answer.json()["request_id"])
        check(polled)
        if polled.status_code == 200 and polled.headers["content-type"] == "application/json":
            assert polled.json().get("category", "user") == "user", polled.text


@pytest.mark.parametrize("path", BODIES)
def test_no_json_body_gets_a_5xx_on_fakes(fuzzed: Any, path: str) -> None:
    api, run, names = fuzzed
    body = BODIES[path]

    @BOUNDED
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(["replace", "replace", "replace", "add", "any"]))
        if how == "any":
            changed = data.draw(JSON)
        elif how == "add":
            changed = {**body, data.draw(TEXTS): data.draw(JSON)}
        else:
            changed = body
            for _ in range(data.draw(st.integers(1, 2))):
                changed = replaced(changed, data.draw(st.sampled_from(places(changed))), data.draw(JSON))
        # Surrogates and NaN on purpose: Python's JSON writes what others would not.
        text = json.dumps(filled(changed, names), ensure_ascii=False).replace('"{digits}"', "9" * 5000)
        run(submit_and_poll(api, filled(path, names), text.encode("utf-8", "surrogatepass")))

    fuzz()
    run(api.ok("session_heartbeat", {"session_id": names["session"]}))


def test_no_bytes_get_a_5xx_on_fakes(fuzzed: Any) -> None:
    api, run, names = fuzzed
    request = ForwardBackwardRequest(
        model_id=names["model"],
        seq_id=10,
        data=(Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [3, 4]}),),
        loss_fn="cross_entropy",
    )
    body = encode_forward_backward_request(request)

    @BOUNDED
    @given(
        st.sampled_from(["forward_backward", *BODIES]),
        st.one_of(
            st.binary(max_size=64),
            st.builds(
                lambda at, to, end: (body[:at] + to + body[at + len(to) :])[: len(body) - end],
                st.integers(0, len(body) - 1),
                st.binary(min_size=1, max_size=4),
                st.integers(0, 5),
            ),
        ),
        st.sampled_from([None, "zstd", "identity", "gzip"]),
    )
    def fuzz(path: str, content: bytes, encoding: str | None) -> None:
        async def send() -> None:
            headers = {"Content-Encoding": encoding} if encoding else {}
            answer = await send_to(api, filled(path, names), content, **headers)
            check(answer)
            if answer.status_code == 200 and "request_id" in answer.json():
                check(await api.poll(answer.json()["request_id"]))

        run(send())

    fuzz()


def test_no_protobuf_content_gets_a_5xx_on_fakes(fuzzed: Any) -> None:
    """Well-formed messages with any content: refused or failed, by name, never an error of the server."""
    from tinker_local.types.wire import tinker_local_wire_pb2 as wire

    api, run, _ = fuzzed
    tensors = st.builds(
        lambda raw, dtype, shape: wire.Tensor(dense=raw, dtype=dtype, shape=shape),
        st.one_of(st.binary(max_size=24), st.just(b"\0" * 16), st.just(b"\1" * 16)),
        st.integers(0, 5),
        st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**62]), max_size=3),
    )
    texts = st.builds(
        lambda raw: wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=raw)),
        st.sampled_from([b"", b"\1\0\0\0\2\0\0\0", b"\xff\xff\xff\xff", b"\1\0", b"\0\2\0\0"]),
    )
    images = st.builds(
        lambda raw, kind: wire.Chunk(image=wire.ImageChunk(data=raw, format=kind, expected_tokens=1)),
        st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"]),
        st.sampled_from(["png", "jpeg", "gif", ""]),
    )
    dmels = st.just(wire.Chunk(dmel=wire.DmelChunk(dmel=b"x")))
    names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "other"])
    datums = st.builds(
        lambda chunks, inputs: wire.Datum(model_input=chunks, loss_fn_inputs=inputs),
        st.lists(st.one_of(texts, images, dmels, st.just(wire.Chunk())), max_size=3),
        st.dictionaries(names, tensors, max_size=3),
    )
    losses = st.sampled_from([*LOSSES, "custom", "", "\u0000"])
    model = run(api.model())
    seq_id = 0

    @settings(BOUNDED, max_examples=few(150))
    @given(losses, st.lists(datums, max_size=3), st.booleans(), st.sampled_from([0.5, float("nan"), -1.0]))
    def fuzz(loss_fn: str, data: list[Any], forward_only: bool, setting: float) -> None:
        nonlocal seq_id
        seq_id += 1
        message = wire.ForwardBackwardRequest(
            model_id=model, seq_id=seq_id, data=data, loss_fn=loss_fn, forward_only=forward_only
        )
        if setting != 0.5:
            message.loss_fn_config_v2["clip_low_threshold"].number = setting

        async def send() -> None:
            answer = await api.send_gradient(message.SerializeToString())
            check(answer)
            polled = await api.outcome(answer.json()["request_id"])
            check(polled)
            if polled.headers["content-type"] == "application/json":
                assert polled.json()["category"] == "user", polled.text
                assert ":" in polled.json()["error"]  # field: what is wrong

        run(send())

    fuzz()
    run(api.result(run(api.gradient(model, seq_id + 1))))


PATHS = ["sessions/{}", "sessions/{}/finish", "samplers/{}", "training_runs/{}", "training_runs/{}/checkpoints"]
CHECKPOINT = "training_runs/{}/checkpoints/weights/{}"


def test_no_path_or_parameter_gets_a_5xx_on_fakes(fuzzed: Any) -> None:
    api, run, _ = fuzzed
    segments = st.one_of(
        st.text(max_size=10), st.sampled_from(["..", "%00", "a/../b", "é", "s:train:0", "%ff", "\u0000"])
    )

    @BOUNDED
    @given(
        st.sampled_from([*PATHS, CHECKPOINT, f"{CHECKPOINT}/publish", f"{CHECKPOINT}/ttl"]),
        segments,
        st.booleans(),
        JSON,
    )
    def fuzz(path: str, segment: str, raw: bool, parameter: Any) -> None:
        text = segment.encode("utf-8", "replace").decode() if raw else quote(segment, safe="", errors="replace")
        url = path.replace("{}", text or "x")
        for method in ("GET", "POST", "DELETE", "PUT"):
            try:
                call = api.http.build_request(method, f"/api/v1/{url}", params={"limit": repr(parameter)[:99]})
            except Exception:  # httpx refuses to send it
                return
            check(run(api.http.send(call)))

    fuzz()


WITHOUT_BODY = {
    *("forward_backward", "import_adapter"),  # protobuf and a tar archive, which have separate tests
    *("check_weights", "publish", "training_runs/{}/checkpoints/{}/ttl"),  # no body at all, or refused whatever it is
}


def test_every_route_that_takes_a_body_is_fuzzed_on_fakes(fuzzed: Any) -> None:
    api, _, _ = fuzzed

    def plain(path: str) -> str:
        return re.sub(r"\{[^}]*\}|/weights/saved/", lambda found: "/{}/{}/" if "saved" in found[0] else "{}", path)

    known = {plain(path.rpartition(" ")[2]) for path in BODIES}
    refused = {plain(path.strip("/")) for _, path in REFUSED}
    routes: list[Any] = create_app(api.backend).routes
    for route in routes:
        if getattr(route, "methods", set()) & {"POST", "PUT"}:
            path = plain(re.sub("^/(oai|anthropic)/api/v1", "/v1", route.path.removeprefix("/api/v1/")))
            assert path in known or path in refused or {path, path.rpartition("/")[2]} & WITHOUT_BODY, route.path
