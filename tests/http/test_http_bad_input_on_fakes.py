"""Bad input is answered by an error that names the field; the server stays healthy and other clients are unaffected."""

import asyncio
import base64
import io
import json
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
import zstandard
from tinker_local.types import Datum, EncodedTextChunk, ForwardBackwardRequest, ImageChunk, ModelInput
from tinker_local.types.codec import encode_forward_backward_request
from tinker_local.types.wire import tinker_local_wire_pb2 as wire

from tests.http.conftest import Api, StartApi
from tests.traced import start_tracing

MIB = 2**20


def png(width: int, height: int) -> bytes:
    """A small real picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of about a hundred bytes whose header names any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")


def image_input(data: bytes, expected_tokens: int | None = None) -> ModelInput:
    image = ImageChunk(data=data, format="png", expected_tokens=expected_tokens)
    return ModelInput(chunks=(EncodedTextChunk(tokens=[5, 6]), image, EncodedTextChunk(tokens=[7])))


def targets(count: int, value: int = 3) -> dict[str, Any]:
    return {"target_tokens": [value] * count}


def gradient(model: str, seq_id: int, *, loss_fn: str = "cross_entropy", data: Any = None, **fields: Any) -> bytes:
    data = data if data is not None else [Datum(model_input=ModelInput.from_ints([5, 9]), loss_fn_inputs=targets(2))]
    request = ForwardBackwardRequest(model_id=model, seq_id=seq_id, data=tuple(data), loss_fn=loss_fn, **fields)
    return encode_forward_backward_request(request)


async def refused(api: Api, body: bytes, *words: str, **headers: str) -> None:
    """The submit itself is refused: there is no model or place that the request could fail in."""
    answer = await api.send_gradient(body, **headers)
    assert answer.status_code == 400, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    for word in words:
        assert word in answer.json()["detail"], answer.text


async def test_body_that_is_no_protobuf_on_fakes(api: Api) -> None:
    model = await api.model()
    good = gradient(model, 1)
    for body in (b"\xff\xff\xff\xff", b"{}", json.dumps({"model_id": model}).encode(), good[:-3], good[1:]):
        await refused(api, body)
    await refused(api, b"", "model_id")
    await refused(api, gradient("", 1), "model_id")
    message = wire.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy")
    await refused(api, message.SerializeToString(), "seq_id")
    message.seq_id = -3
    await refused(api, message.SerializeToString(), "seq_id", "-3")
    await api.result(await api.gradient(model, 1))  # none of them took its place
    assert await api.healthy()


async def test_zstd_bodies_whole_and_broken_on_fakes(api: Api) -> None:
    model = await api.model()
    body = gradient(model, 1, data=[Datum(model_input=ModelInput.from_ints([5] * 500), loss_fn_inputs=targets(500))])
    packed = zstandard.ZstdCompressor().compress(body)
    streamed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(streamed, closefd=False) as writer:
        writer.write(body)
    zstd = {"Content-Encoding": "zstd"}
    for end in (0, 1, 4, 6, len(packed) // 2, len(packed) - 1):
        await refused(api, packed[:end], "zstd", **zstd)
    await refused(api, packed + b"x", "zstd", **zstd)
    await refused(api, packed + packed, "zstd", **zstd)
    await refused(api, body, "zstd", **zstd)
    await refused(api, streamed.getvalue(), "content size", **zstd)
    await refused(api, packed)  # without the header it is not protobuf
    for encoding in ("gzip", "br", "zstd, zstd", "ZSTD?"):
        await refused(api, packed, "Content-Encoding", **{"Content-Encoding": encoding})
    answer = await api.send_gradient(packed, **zstd)
    assert len((await api.result(answer.json()["request_id"])).loss_fn_outputs[0]["logprobs"].data) == 500


async def test_zstd_bomb_is_refused_without_its_memory_on_fakes(api: Api) -> None:
    bombs = [zstandard.ZstdCompressor(level=19).compress(bytes(size * MIB)) for size in (33, 400)]
    liar = bytearray(zstandard.ZstdCompressor().compress(bytes(100 * MIB)))
    assert zstandard.frame_content_size(bytes(liar)) == 100 * MIB
    liar[6:10] = struct.pack("<I", MIB)  # says one MiB
    assert zstandard.frame_content_size(bytes(liar)) == MIB
    start_tracing()
    for bomb in (*bombs, bytes(liar)):
        assert len(bomb) < 64 * 1024
        await refused(api, bytes(bomb), "zstd", **{"Content-Encoding": "zstd"})
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 8 * MIB
    assert await api.healthy()


async def test_bodies_over_their_limits_are_refused_before_they_are_read_on_fakes(api: Api) -> None:
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += MIB
            yield b" " * MIB

    for path in ("optim_step", "create_session", "retrieve_future", "cancel_future", "sessions/x/finish"):
        read = 0
        answer = await api.post(path, content=endless())
        assert answer.status_code == 400
        assert "limit" in answer.json()["detail"]
        assert read <= 3 * MIB
    declared = await api.post("asample", content=b"", headers={"Content-Length": str(2**40)})
    assert declared.status_code == 400
    assert str(2**40) in declared.json()["detail"]
    large = await api.post("create_session", {"user_metadata": {"a": "x" * 2 * MIB}})
    assert large.status_code == 400


async def test_nested_and_odd_json_is_refused_on_fakes(api: Api) -> None:
    model = await api.model()
    nested = b'{"model_id": "%s", "seq_id": 1, "adam_params": ' % model.encode() + b"[" * 100_000 + b"]" * 100_000
    bodies = [
        nested + b"}",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"model_id": "\\ud800", "seq_id": 1}',
        b'{"model_id": "x", "seq_id": 1',
        b"null",
        b"[]",
        b'"text"',
        b"1e999",
        b"{}",
        b'{"model_id": 5, "seq_id": 1}',
        b'{"model_id": "%s", "seq_id": true}' % model.encode(),
        b'{"model_id": "%s", "seq_id": "1"}' % model.encode(),
        b'{"model_id": "%s", "seq_id": 1.5}' % model.encode(),
        b'{"model_id": "%s", "seq_id": 1e400}' % model.encode(),
        b'{"model_id": "%s", "seq_id": %s}' % (model.encode(), b"9" * 5000),
    ]
    for path in ("optim_step", "save_weights", "create_model", "asample", "retrieve_future", "weights_info"):
        for body in bodies:
            answer = await api.post(path, content=body)
            if answer.status_code != 200:  # an unknown model fails through its future
                assert answer.status_code in (400, 404), (path, body[:60], answer.text)
                assert len(answer.json()["detail"]) < 5000
            else:
                await api.failure(answer.json()["request_id"])
    await api.result(await api.step(model, 1))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"NaN", ("adam_params.learning_rate", "nan")),
        (b"Infinity", ("adam_params.learning_rate", "inf")),
        (b"-Infinity", ("adam_params.learning_rate", "-inf")),
        (b"null", ("adam_params.learning_rate", "NaN")),
        (b'"0.1"', ("adam_params.learning_rate",)),
        (b"-1", ("adam_params.learning_rate", "-1")),
        (b"1e400", ("adam_params.learning_rate",)),
        (b"[]", ("adam_params.learning_rate",)),
    ],
)
async def test_learning_rate_that_is_none_fails_in_its_place_on_fakes(
    api: Api, value: bytes, words: tuple[str, ...]
) -> None:
    model = await api.model()
    gradient = await api.gradient(model, 1)
    body = b'{"model_id": "%s", "seq_id": 2, "adam_params": {"learning_rate": %s}}' % (model.encode(), value)
    answer = await api.post("optim_step", content=body)
    assert answer.status_code == 200
    message = await api.failure(answer.json()["request_id"])
    assert message.startswith("user: ")
    for word in words:
        assert word in message
    await api.result(gradient)
    await api.result(await api.step(model, 3))


BAD_GRADIENTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("no data", {"data": []}, ("data", "at least one")),
    ("unknown loss", {"loss_fn": "mse"}, ("loss_fn", "mse", "cross_entropy")),
    ("loss that needs records", {"loss_fn": "stable_reinforce"}, ("loss_fn_inputs.advantages", "is missing")),
    ("uploaded loss", {"loss_fn": "custom"}, ("loss_fn", "custom", "forward_backward_custom")),
    ("no loss", {"loss_fn": ""}, ("loss_fn",)),
    ("unknown setting", {"loss_fn_config": {"beta": 0.1}}, ("loss_fn_config.beta",)),
    ("text setting", {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": "low"}}, ("clip_low_threshold",)),
    ("nan setting", {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": float("nan")}}, ("nan",)),
    (
        "unknown input",
        {"data": [([5, 9], {**targets(2), "mask": [1.0, 1.0]})]},
        ("data[0].loss_fn_inputs.mask", "weights"),
    ),
    ("missing input", {"data": [([5, 9], {})]}, ("data[0].loss_fn_inputs.target_tokens", "missing")),
    ("missing advantages", {"loss_fn": "ppo"}, ("data[0].loss_fn_inputs.logprobs", "missing")),
    (
        "token out of the vocabulary",
        {"data": [([5, 9], targets(2)), ([5, 512], targets(2))]},
        ("data[1].model_input.chunks[0].tokens[1]", "512"),
    ),
    (
        "target out of the vocabulary",
        {"data": [([5, 9], targets(2, 600))]},
        ("data[0].loss_fn_inputs.target_tokens", "600", "512"),
    ),
    ("negative target", {"data": [([5, 9], targets(2, -1))]}, ("data[0].loss_fn_inputs.target_tokens", "-1")),
    ("fewer targets", {"data": [([5, 9, 20], targets(2))]}, ("data[0].loss_fn_inputs.target_tokens", "2", "3")),
    (
        "fewer weights",
        {"data": [([5, 9, 20], {**targets(3), "weights": [1.0, 1.0]})]},
        ("data[0].loss_fn_inputs.weights", "[2]", "[3]"),
    ),
    (
        "weights that are not finite",
        {"data": [([5, 9], {**targets(2), "weights": [1.0, float("inf")]})]},
        ("data[0].loss_fn_inputs.weights", "inf", "position 1"),
    ),
    ("too long", {"data": [([5] * 4097, targets(4097))]}, ("data[0].model_input", "4097", "4096")),
]


@pytest.mark.parametrize(("fields", "words"), [pytest.param(f, w, id=name) for name, f, w in BAD_GRADIENTS])
async def test_bad_gradient_fails_through_its_future_on_fakes(
    api: Api, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    session = await api.session()
    model, other = await api.model(session, 0), await api.model(session, 1)
    if "data" in fields:
        data = [Datum(model_input=ModelInput.from_ints(t), loss_fn_inputs=i) for t, i in fields["data"]]
        fields = {**fields, "data": data}
    bad = await api.send_gradient(gradient(model, 1, **fields))
    fine = await api.gradient(other, 1)
    assert bad.status_code == 200  # or the SDK's training client would hang
    message = await api.failure(bad.json()["request_id"])
    assert message.startswith("user: ")
    for word in words:
        assert word in message, message
    await api.result(fine)
    assert "discarded" in await api.failure(await api.step(model, 2))
    await api.result(await api.gradient(model, 3))
    await api.result(await api.step(model, 4))
    await api.result(await api.step(other, 2))


async def test_target_out_of_the_vocabulary_is_fine_where_its_weight_is_0_on_fakes(api: Api) -> None:
    model = await api.model()
    inputs = {"target_tokens": [9, -100, 600], "weights": [1.0, 0.0, 0.0]}
    data = [Datum(model_input=ModelInput.from_ints([5, 9, 20]), loss_fn_inputs=inputs)]
    output = await api.result(await api.gradient(model, 1, data))
    assert output.metrics["loss:sum"] == pytest.approx(-float(output.loss_fn_outputs[0]["logprobs"].to_numpy()[0]))


async def test_bad_image_fails_its_own_request_on_fakes(api: Api) -> None:
    session = await api.session()
    model, sampler = await api.model(session), await api.base_sampler(session)
    good = png(64, 40)  # 4 tokens of the fake
    whole = image_input(good, 4)
    noise = image_input(b"\x89PNG\r\n\x1a\n" + b"no image at all" * 10)
    cases = [
        (image_input(good, 5), ("expected_tokens", "5", "4")),
        (noise, ("data", "decoded")),
        (image_input(good[: len(good) // 2]), ("data", "decoded")),
        (image_input(png_that_claims(10_000, 10_000)), ("data", "10000")),
        (image_input(png_that_claims(2**31 - 1, 2**31 - 1)), ("data",)),
    ]
    for at, (broken, words) in enumerate(cases):
        data = [Datum(model_input=whole, loss_fn_inputs=targets(7)), Datum(model_input=broken, loss_fn_inputs={})]
        message = await api.failure(await api.gradient(model, at + 1, data))
        chunks = broken.model_dump(mode="json")["chunks"]
        request = await api.submit("asample", {**api.sample_body(sampler, at), "prompt": {"chunks": chunks}})
        sampled = await api.failure(request)
        for word in words:
            assert f"data[1].model_input.chunks[1].{words[0]}" in message
            assert f"prompt.chunks[1].{words[0]}" in sampled
            assert word in message
            assert word in sampled
    data = [Datum(model_input=whole, loss_fn_inputs=targets(7))]
    await api.result(await api.gradient(model, len(cases) + 1, data))
    chunks = whole.model_dump(mode="json")["chunks"]
    await api.result(await api.submit("asample", {**api.sample_body(sampler, 10), "prompt": {"chunks": chunks}}))


BAD_SAMPLES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("no samples", {"num_samples": 0}, ("num_samples", "0")),
    ("negative samples", {"num_samples": -1}, ("num_samples", "-1")),
    ("too many samples", {"num_samples": 2000}, ("num_samples", "2000", "1024")),
    ("negative seq_id", {"seq_id": -1}, ("seq_id", "-1")),
    ("huge seq_id", {"seq_id": 2**63}, ("seq_id",)),
    ("no tokens wanted", {"sampling_params": {"max_tokens": 0}}, ("sampling_params.max_tokens", "0")),
    ("temperature below 0", {"sampling_params": {"temperature": -1.0}}, ("sampling_params.temperature", "-1")),
    ("top_p 0", {"sampling_params": {"top_p": 0.0}}, ("sampling_params.top_p", "0")),
    ("top_k 0", {"sampling_params": {"top_k": 0}}, ("sampling_params.top_k", "0")),
    ("empty stop", {"sampling_params": {"stop": ""}}, ("sampling_params.stop",)),
    ("mixed stop", {"sampling_params": {"stop": ["a", 5]}}, ("sampling_params.stop",)),
    ("empty chunk", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}}, ("prompt.chunks[0]",)),
    ("negative token", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, -2]}]}}, ("-2",)),
    ("huge token", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**31]}]}}, (str(2**31),)),
    ("text for tokens", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": "abc"}]}}, ("tokens",)),
    ("unknown chunk", {"prompt": {"chunks": [{"type": "video", "data": "x"}]}}, ("prompt.chunks[0]",)),
    ("no chunk type", {"prompt": {"chunks": [{"tokens": [1]}]}}, ("prompt.chunks[0]",)),
    ("no prompt", {"prompt": None}, ("prompt",)),
    (
        "no base64",
        {"prompt": {"chunks": [{"type": "image", "format": "png", "data": "§§"}]}},
        ("prompt.chunks[0].data", "base64"),
    ),
    ("empty prompt", {"prompt": {"chunks": []}}, ("prompt", "at least one token")),
    (
        "prompt over the context",
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 5000}]}},
        ("Prompt length plus max_tokens", "5000 prompt tokens", "4096"),
    ),
    (
        "max_tokens over the context",
        {"sampling_params": {"max_tokens": 4095}},
        ("Prompt length plus max_tokens exceeds the model's context window: 2 prompt tokens + 4095 max_tokens > 4096",),
    ),
]


@pytest.mark.parametrize(("fields", "words"), [pytest.param(f, w, id=name) for name, f, w in BAD_SAMPLES])
async def test_bad_sample_is_refused_at_once_on_fakes(api: Api, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    sampler = await api.base_sampler()
    answer = await api.post("asample", {**api.sample_body(sampler, 0), **fields})
    assert answer.status_code == 400
    for word in words:
        assert word in answer.json()["detail"]
    await api.result(await api.sample(sampler, 0))


@pytest.mark.parametrize(("says", "at_once"), [(5000, True), (None, False)])
async def test_a_picture_counts_towards_the_context_by_what_it_says_or_when_rendered_on_fakes(
    api: Api, says: int | None, at_once: bool
) -> None:
    picture = {
        "type": "image",
        "format": "png",
        "data": base64.b64encode(png(64, 40)).decode(),
        "expected_tokens": says,
    }
    sampler = await api.base_sampler()
    body = {**api.sample_body(sampler, 0), "prompt": {"chunks": [picture]}, "sampling_params": {"max_tokens": 4093}}
    answer = await api.post("asample", body)
    if at_once:
        assert answer.status_code == 400
        assert "5000 prompt tokens + 4093 max_tokens > 4096" in answer.json()["detail"]
    else:
        assert "4 prompt tokens + 4093 max_tokens > 4096" in await api.failure(answer.json()["request_id"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 512]}]}},
            ("prompt.chunks[0].tokens[1]", "512"),
            id="token out of the vocabulary",
        ),
        pytest.param(
            {
                "prompt": {
                    "chunks": [{"type": "image_asset_pointer", "location": "file:///etc/passwd", "format": "png"}]
                }
            },
            ("prompt.chunks[0].location", "--image-folder"),
            id="image pointer",
        ),
    ],
)
async def test_bad_sample_fails_through_its_future_on_fakes(
    api: Api, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    sampler = await api.base_sampler()
    message = await api.failure(await api.submit("asample", {**api.sample_body(sampler, 0), **fields}))
    assert message.startswith("user: ")
    for word in words:
        assert word in message
    await api.result(await api.sample(sampler, 1))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, 2**200, -(2**200)])
async def test_any_integer_is_a_seed_on_fakes(api: Api, seed: int) -> None:
    session = await api.session()
    model = await api.model(session, lora_config={"rank": 4, "seed": seed})
    sampler = await api.nameless(model, 1, 0)
    outputs = []
    for seq_id in range(2):
        body = api.sample_body(sampler, seq_id, num_samples=2)
        body["sampling_params"] |= {"seed": seed, "max_tokens": 20, "stop": []}
        outputs.append((await api.result(await api.submit("asample", body))).sequences)
    assert [s.tokens.tolist() for s in outputs[0]] == [s.tokens.tolist() for s in outputs[1]]
    assert outputs[0][0].tokens.tolist() != outputs[0][1].tokens.tolist()
    path = await api.save(model, 2, "a")  # the seed is stored too
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    await api.result(await api.submit("load_weights", load))


async def test_unknown_base_model_is_refused_with_those_that_are_served_on_fakes(start_api: StartApi) -> None:
    api = await start_api(models=("fake/bigram", "fake/other"))
    session = await api.session()
    for path, fields in (
        ("create_model", {"model_seq_id": 0}),
        ("create_sampling_session", {"sampling_session_seq_id": 0}),
    ):
        for name in ("Fake/Bigram", "fake/bigram:long", "unknown/model"):
            answer = await api.post(path, {"session_id": session, "base_model": name, **fields})
            assert answer.status_code == 400
            detail = answer.json()["detail"]
            assert "base_model" in detail
            assert name in detail
            assert "fake/bigram, fake/other" in detail
        answer = await api.post(path, {"session_id": session, "base_model": "m" * 10**5, **fields})
        assert len(answer.json()["detail"]) < 200


async def test_a_context_in_a_models_name_must_fit_and_the_name_before_it_is_recorded_on_fakes(
    start_api: StartApi,
) -> None:
    api = await start_api(models=("fake/bigram", "fake/other:peft:9999"))
    session = await api.session()
    model = await api.model(session, base_model="fake/bigram:peft:4096")
    info = await api.ok("get_info", {"model_id": model})
    assert info["model_data"]["model_name"] == "fake/bigram"
    path = await api.named(model, 1, "a")
    state = await api.save(model, 2, "a")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake/bigram:peft:1024"}
    for fields in ({}, {}, {"sampling_session_seq_id": 1, "model_path": path}):  # the second is the first again
        await api.ok("create_sampling_session", {**body, **fields})
    load = {"session_id": session, "model_seq_id": 1, "path": state, "optimizer": False}
    await api.result(await api.submit("load_weights", {**load, "base_model": "fake/bigram:peft:4096"}))
    await api.model(session, 2, base_model="fake/other:peft:9999")  # served under this very name
    for name, words in (
        ("fake/bigram:peft:4097", "names a context of 4097 positions, and 'fake/bigram' has 4096 here"),
        ("fake/bigram:peft:0", "is not served here"),
        ("fake/bigram:peft:4096:sampling", "is not served here"),
        ("fake/other:peft:4096", "is not served here"),
    ):
        for answer in (
            await api.post("create_model", {"session_id": session, "model_seq_id": 3, "base_model": name}),
            await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 3, "base_model": name}),
            await api.post("load_weights", {**load, "model_seq_id": 3, "base_model": name}),
        ):
            assert answer.status_code == 400
            assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../weights/a",
        "tinker://{model}/weights/..",
        "tinker://{model}/weights/../../a",
        "tinker://{model}/../weights/a",
        "tinker://{model}/weights/.",
        "tinker://{model}/weights/a/b",
        "tinker://{model}/weights/",
        "tinker:///weights/a",
        "tinker://{model}/secrets/a",
        "/etc/passwd",
        "file:///etc/passwd",
        "",
        "tinker://",
        "tinker://{model}/weights/a\u0000",
        "tinker://{model}/weights/ä",
    ],
)
async def test_path_that_is_none_is_refused_everywhere_on_fakes(api: Api, path: str) -> None:
    session = await api.session()
    model = await api.model(session)
    path = path.format(model=model)
    for answer in (
        await api.post("load_weights", {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}),
        await api.post(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        ),
        await api.post("weights_info", {"tinker_path": path}),
    ):
        assert answer.status_code == 400, answer.text
        assert "path" in answer.json()["detail"]
    assert (await api.get("checkpoints")).json()["checkpoints"] == []


async def test_checkpoint_that_does_not_exist_is_404_and_of_the_wrong_kind_400_on_fakes(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    weights, sampler = await api.save(model, 1, "a"), await api.named(model, 2, "a")

    async def load(path: str, optimizer: bool = True) -> Any:
        body = {"session_id": session, "model_seq_id": 7, "path": path, "optimizer": optimizer}
        return await api.post("load_weights", body)

    async def sample(path: str) -> Any:
        body = {"session_id": session, "sampling_session_seq_id": 7, "model_path": path}
        return await api.post("create_sampling_session", body)

    for answer, status in (
        (await load(weights + "x"), 404),
        (await load("tinker://s-0:train:0/weights/a"), 404),
        (await sample(sampler + "x"), 404),
        (await load(sampler), 400),
        (await sample(weights), 400),
    ):
        assert answer.status_code == status
        assert "path: " in answer.json()["detail"]
        assert "tinker://" in answer.json()["detail"]
    await api.result((await load(weights)).json()["request_id"])


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", ".hidden", "a b", "ä", "a" * 129, "a\u0000b", "a%2Fb", "a:b"])
async def test_name_that_is_none_fails_in_its_place_on_fakes(api: Api, name: str) -> None:
    model = await api.model()
    for seq_id, path in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        message = await api.failure(await api.submit(path, {"model_id": model, "seq_id": seq_id, "path": name}))
        assert message.startswith("user: path")
    await api.save(model, 3, "good")
    listed = (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/good"]


@pytest.mark.parametrize("seq_id", [0, -1, 2**31, 2**63, 2**200])
async def test_seq_id_out_of_range_is_refused_on_fakes(api: Api, seq_id: int) -> None:
    session = await api.session()
    model = await api.model(session)
    for path, body in (
        ("optim_step", {"adam_params": {"learning_rate": 0.1}}),
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "a"}),
    ):
        answer = await api.post(path, {"model_id": model, "seq_id": seq_id, **body})
        assert answer.status_code == 400
        assert "seq_id" in answer.json()["detail"]
    if not 0 <= seq_id < 2**63:
        for path, field in (("create_model", "model_seq_id"), ("create_sampling_session", "sampling_session_seq_id")):
            answer = await api.post(path, {"session_id": session, field: seq_id, "base_model": "fake/bigram"})
            assert answer.status_code == 400
            assert field in answer.json()["detail"]
    await api.result(await api.step(model, 1))


async def test_page_out_of_range_is_refused_on_fakes(api: Api) -> None:
    for path in ("training_runs", "checkpoints", "sessions"):
        for params in (
            {"limit": 0},
            {"limit": 1001},
            {"limit": "many"},
            {"offset": -1},
            {"offset": 2**63},
            {"offset": 10**40},
            {"offset": "1.5"},
        ):
            answer = await api.get(path, **params)
            assert answer.status_code == 400, (params, answer.text)
            ((name, value),) = params.items()
            assert answer.json()["detail"].startswith(f"{name}: ")
            assert answer.json()["detail"].endswith(f", not {str(value)!r}")
            assert answer.json()["category"] == "user"
        assert (await api.get(path, offset=2**63 - 1, limit=1000)).status_code == 200


async def test_sparse_tensor_that_would_be_huge_is_refused_before_it_is_dense_on_fakes(api: Api) -> None:
    """A few bytes of CSR can ask for any amount of memory, once per datum."""
    import numpy as np
    from tinker_local.types import TensorData

    model = await api.model()
    rows, cols = 2, 2**26
    sparse = TensorData(
        data=np.ones(1, np.float32),
        dtype="float32",
        shape=(rows, cols),
        sparse_crow_indices=np.array([0, 1, 1]),
        sparse_col_indices=np.array([5]),
    )
    inputs = {
        "target_tokens": TensorData(**{**dict(sparse), "dtype": "int64", "data": np.ones(1, np.int64)}),
        "weights": sparse,
    }
    data = [Datum(model_input=ModelInput.from_ints([5, 9]), loss_fn_inputs=inputs)] * 8
    start_tracing()
    message = await api.failure(await api.gradient(model, 1, data))
    _, peak = tracemalloc.get_traced_memory()
    assert message.startswith("user: data[0].loss_fn_inputs")
    assert peak < 16 * MIB


async def test_storm_of_bad_requests_hurts_nobody_on_fakes(api: Api) -> None:
    """Somebody else's training gives the same numbers as without it."""
    session = await api.session()
    quiet, model = await api.model(session, 0), await api.model(session, 1)

    async def train(model: str) -> list[float]:
        losses = []
        for step in range(5):
            output = await api.result(await api.gradient(model, 2 * step + 1))
            losses.append(output.metrics["loss:sum"])
            await api.result(await api.step(model, 2 * step + 2))
        return losses

    async def storm() -> None:
        villain = await api.model()
        for seq_id in range(1, 40):
            await api.send_gradient(gradient(villain, seq_id, loss_fn="mse"))
            await api.send_gradient(b"\xff" * 100)
            await api.post("asample", {"seq_id": []})
            await api.post("optim_step", {"model_id": villain, "seq_id": seq_id, "adam_params": 5})

    want = await train(quiet)
    storming = asyncio.create_task(storm())
    assert await train(model) == want
    await storming
    assert await api.healthy()
