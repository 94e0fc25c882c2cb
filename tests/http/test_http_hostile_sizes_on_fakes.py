"""Small bodies that would become large: refused before anything is built of them."""

import base64
import json
from typing import Any

import pytest
import zstandard
from tinker_local.backend.control import training_commands
from tinker_local.types import InvalidRequestError, UnsupportedError, codec
from tinker_local.types.codec import encode_forward_backward_request, parse_forward_backward_envelope
from tinker_local.types.requests_and_results import LONGEST_ID, ForwardBackwardRequest
from tinker_local.types.wire import tinker_local_wire_pb2 as wire

from tests.http.conftest import Api, datum
from tests.http.test_http_off_the_loop_on_fakes import png

EMPTY_DATUM, UNKNOWN_FIELD = b"\x1a\x00", b"\xa0\x06\x00"


def head(model: str, seq_id: int) -> bytes:
    return wire.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy").SerializeToString()


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("something was built of it")


async def test_two_million_empty_datums_are_counted_and_not_built_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    body = head(model, 1) + EMPTY_DATUM * 2_000_000
    packed = zstandard.ZstdCompressor(level=19).compress(body)
    assert len(packed) < 1000
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_decode_datum", never)
        sent = await api.send_gradient(packed, **{"Content-Encoding": "zstd"})
        failed = await api.failure(sent.json()["request_id"])
    assert f"more than {codec.MAX_DATUMS} datums" in failed
    await api.failure(await api.step(model, 2))
    await api.result(await api.gradient(model, 3))


@pytest.mark.parametrize(
    ("datums", "expected"),
    [
        (wire.Datum().SerializeToString() + b"\x0a\x00" * 2_000_000, "data[0]: with it the request has more than"),
        (UNKNOWN_FIELD * 2_000_000, "data[0]: field numbers [100]"),
    ],
    ids=["chunks", "unknown fields"],
)
def test_parts_of_a_datum_are_counted_and_not_built(
    datums: bytes, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_decode_datum", never)
    size = bytes([len(datums) & 127 | 128, len(datums) >> 7 & 127 | 128, len(datums) >> 14 & 127 | 128])
    body = head("m", 1) + b"\x1a" + size + bytes([len(datums) >> 21]) + datums
    with pytest.raises((InvalidRequestError, UnsupportedError)) as caught:
        parse_forward_backward_envelope(body).decode()
    assert str(caught.value).startswith(expected)


def test_unknown_fields_of_a_request_are_told_after_the_first_thousand() -> None:
    envelope = parse_forward_backward_envelope(head("m", 1) + UNKNOWN_FIELD * 3_400_000)
    assert envelope.model_id == "m"
    with pytest.raises(UnsupportedError, match=r"body: field numbers \[100\] are not known"):
        envelope.decode()
    tensor = wire.Tensor(dense=bytes(8), dtype=wire.DTYPE_INT64)
    tensor.MergeFromString(UNKNOWN_FIELD * 1_000_000)
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().loss_fn_inputs["weights"].CopyFrom(tensor)
    with pytest.raises(UnsupportedError, match=r"'weights'\]: 3000000 bytes of fields that are not known"):
        parse_forward_backward_envelope(message.SerializeToString()).decode()


def test_a_tensor_of_a_million_dimensions_is_refused() -> None:
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = bytes(8), wire.DTYPE_INT64
    tensor.shape.extend([1] * 1_000_000)
    with pytest.raises(InvalidRequestError, match="1000000 dimensions"):
        parse_forward_backward_envelope(message.SerializeToString()).decode()


@pytest.mark.more
async def test_a_small_gradient_is_prepared_between_the_slices_of_a_large_one_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_commands, "SLICE_SECONDS", 0.0)  # one datum in each
    ended: list[str] = []
    prepare = training_commands.prepare_work

    def noting(base: Any, model_id: str, *rest: Any, **options: Any) -> Any:
        work = yield from prepare(base, model_id, *rest, **options)
        ended.append(model_id)
        return work

    monkeypatch.setattr(training_commands, "prepare_work", noting)
    session = await api.session()
    large, other, small = [await api.model(session, number) for number in range(3)]
    request_ids = []
    for model, count in ((large, 2000), (other, 2000), (small, 1)):
        request = ForwardBackwardRequest(
            model_id=model, seq_id=1, data=(datum([5, 6, 7]),) * count, loss_fn="cross_entropy"
        )
        sent = await api.send_gradient(encode_forward_backward_request(request))
        request_ids.append(sent.json()["request_id"])
    for request_id in request_ids:
        await api.result(request_id)
    assert ended[0] == small


async def test_preparing_has_a_time_limit_on_fakes(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_commands, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(training_commands, "MAX_PREPARATION_SECONDS", 0.0)
    model = await api.model()
    failed = await api.failure(await api.gradient(model, 1))
    assert "data: decoding and rendering took more than 0 s" in failed
    monkeypatch.undo()
    await api.failure(await api.step(model, 2))
    await api.result(await api.gradient(model, 3))


async def test_sequence_ids_are_built_for_a_known_sampling_session_alone_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_local.backend.control import sampling_sessions

    monkeypatch.setattr(sampling_sessions, "Operation", never)
    answer = await api.post("asample", api.sample_body("s-none:sample:0", 0, num_samples=1024))
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("asample", {"sampling_session_id": None, "seq_id": 0, "prompt": {"chunks": []}}),
        ("optim_step", {"model_id": None, "seq_id": 1, "adam_params": {}}),
        ("save_weights", {"model_id": None, "seq_id": 1, "path": "a"}),
        ("get_info", {"model_id": None}),
        ("create_model", {"session_id": None, "model_seq_id": 0, "base_model": "fake/bigram"}),
        ("create_sampling_session", {"session_id": None, "sampling_session_seq_id": 0}),
        ("session_heartbeat", {"session_id": None}),
    ],
)
async def test_ids_have_a_longest_length_on_fakes(api: Api, path: str, body: dict[str, Any]) -> None:
    kept = len(api.backend.operations)
    longest = "x" * (LONGEST_ID + 1)
    answer = await api.post(path, {name: longest if value is None else value for name, value in body.items()})
    assert answer.status_code == 400
    assert f"at most {LONGEST_ID} characters" in answer.json()["detail"]
    gradient = await api.send_gradient(head(longest, 1))
    assert gradient.status_code == 400
    assert f"the most is {LONGEST_ID}" in gradient.json()["detail"]
    assert len(api.backend.operations) == kept


async def test_json_is_refused_by_its_number_of_values_before_it_is_parsed_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_local.backend.http import bodies

    nameless = await api.nameless(await api.model(), 1, 0)
    prompt = json.dumps(api.sample_body(nameless, 0)).encode()
    tokens = b'"tokens": [%s1]' % (b"1," * 50_000_000)
    bodies_of = {
        "asample": prompt.replace(b'"tokens": [', tokens[:-2] + b",", 1),
        "create_session": b'{"user_metadata": {"a": [%s{}]}}' % (b"{}," * 300_000),
    }
    monkeypatch.setattr(bodies, "validate", never)
    for path, body in bodies_of.items():
        answer = await api.http.post(f"/api/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert "JSON values" in answer.json()["detail"]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
async def test_json_is_refused_by_the_bytes_that_context_and_images_need_on_fakes(
    api: Api, images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinker_local.backend.http import sampling_routes as routes
    from tinker_local.backend.http.bodies import MAX_JSON_BYTES

    monkeypatch.setattr(routes, "MAX_IMAGE_BYTES", 2**21)
    monkeypatch.setattr(api.engines["fake/bigram"].renderer, "takes_images", images, raising=False)
    context = api.engines["fake/bigram"].sampler.max_context_length
    limit = MAX_JSON_BYTES + routes.BYTES_PER_VALUE * routes.VALUES_PER_POSITION * context + images * 2**21
    body = json.dumps(api.sample_body(await api.base_sampler(), 0)).encode()
    headers = {"Content-Type": "application/json"}
    read = 0

    async def parts(size: int) -> Any:
        nonlocal read
        yield body
        for _ in range(0, size - len(body), 2**16):
            read += 2**16
            yield b" " * 2**16

    answer = await api.http.post("/api/v1/asample", content=parts(2 * limit), headers=headers)
    assert answer.status_code == 400
    assert f"over the limit of {limit} bytes" in answer.json()["detail"]
    assert read <= limit + 2**17
    assert (await api.http.post("/api/v1/asample", content=parts(limit - 2**17), headers=headers)).status_code == 200


@pytest.mark.more
async def test_the_largest_ordinary_requests_pass_every_limit_on_fakes(api: Api) -> None:
    """4,096 datums, as the cookbook sends them in one batch; a datum and a prompt of the whole context, with targets
    for each position; and an image."""
    model = await api.model()
    context = api.engines["fake/bigram"].sampler.max_context_length
    tokens = [100 + place % 400 for place in range(context)]
    for seq_id, data in enumerate([(datum([5, 6, 7]),) * 4096, (datum(tokens),)], 1):
        request = ForwardBackwardRequest(model_id=model, seq_id=seq_id, data=data, loss_fn="cross_entropy")
        sent = await api.send_gradient(encode_forward_backward_request(request))
        assert len((await api.result(sent.json()["request_id"])).loss_fn_outputs) == len(data)
    sampler = await api.base_sampler()
    image = {"type": "image", "data": base64.b64encode(png()).decode(), "format": "png"}
    for seq_id, chunks in enumerate(
        [[{"type": "encoded_text", "tokens": tokens[:-4]}], [{"type": "encoded_text", "tokens": tokens[:-9]}, image]]
    ):
        body = api.sample_body(sampler, seq_id, topk_prompt_logprobs=20, prompt_logprobs=True)
        await api.result(await api.submit("asample", {**body, "prompt": {"chunks": chunks}}))
