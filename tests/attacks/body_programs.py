"""Attacks with the bodies of requests: protobuf, ids, JSON."""

import json
import struct
from collections.abc import Iterator

from tinker_local.types.wire import tinker_local_wire_pb2 as wire

from tests.attacks.attacker import JSON, Attacker, attack
from tests.attacks.tenant import PROTOBUF, gradient_message, sample_body
from tests.fuzz.mutate import varint


def zstd(body: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=19).compress(body))


GRADIENT = {"Content_Type": PROTOBUF}


@attack("8")
def empty_data(attacker: Attacker) -> Iterator[None]:
    """Two requests of 2,000,000 empty `Datum`s, 400 bytes each as zstd."""
    tenant = attacker.tenant()
    model = tenant.run()
    bodies = [
        zstd(gradient_message(model, seq_id, [1, 2], 0).SerializeToString() + b"\x1a\x00" * 2_000_000)
        for seq_id in (1, 2)
    ]
    yield
    attacker.post_at_once("forward_backward", bodies, Content_Encoding="zstd", **GRADIENT)


@attack("8")
def empty_chunks(attacker: Attacker) -> Iterator[None]:
    """Two requests of one `Datum` of 2,000,000 empty chunks."""
    tenant = attacker.tenant()
    model = tenant.run()
    chunks = b"\x0a\x00" * 2_000_000
    datum = b"\x1a" + varint(len(chunks)) + chunks
    bodies = [zstd(gradient_message(model, seq_id, [1, 2], 0).SerializeToString() + datum) for seq_id in (1, 2)]
    yield
    attacker.post_at_once("forward_backward", bodies, Content_Encoding="zstd", **GRADIENT)


@attack("8")
def unknown_fields(attacker: Attacker) -> Iterator[None]:
    """Two requests of 10 MB of unknown protobuf fields."""
    tenant = attacker.tenant()
    model = tenant.run()
    unknown = b"\xa0\x06\x00" * 3_400_000
    bodies = [gradient_message(model, seq_id, [1, 2]).SerializeToString() + unknown for seq_id in (1, 2)]
    yield
    attacker.post_at_once("forward_backward", bodies, **GRADIENT)


@attack("8")
def sparse_tensors(attacker: Attacker) -> Iterator[None]:
    """Two requests of eight sparse tensors of 2**25 cells with one value each, 700 bytes."""
    tenant = attacker.tenant()
    model = tenant.run()
    words = struct.Struct("<q").pack
    csr = wire.SparseCsr(values=words(1), crow_indices=words(0) + words(1), col_indices=words(0))
    tensor = wire.Tensor(sparse_csr=csr, dtype=wire.DTYPE_INT64, shape=[1, 2**25])
    text = wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=b"\5\0\0\0"))
    datum = wire.Datum(model_input=[text], loss_fn_inputs={"target_tokens": tensor})
    bodies = []
    for seq_id in (1, 2):
        message = gradient_message(model, seq_id, [1, 2], 0)
        message.data.extend([datum] * 8)
        bodies.append(message.SerializeToString())
    yield
    attacker.post_at_once("forward_backward", bodies, **GRADIENT)


@attack("9")
def long_sampler_id(attacker: Attacker) -> Iterator[None]:
    """One request, with an id of 2 MB, for 1,024 samples of a sampling session that does not exist."""
    body = json.dumps(sample_body("x" * 2_000_000, 0, num_samples=1024)).encode()
    yield
    attacker.send("asample", body, **JSON)


@attack("10")
def long_model_ids(attacker: Attacker) -> Iterator[None]:
    """Three gradients, with ids of 200 MB, for models that do not exist."""
    bodies = [gradient_message(letter * 200_000_000, 1, [1, 2]).SerializeToString() for letter in "abc"]
    yield
    for body in bodies:
        attacker.send("forward_backward", body, **GRADIENT)


@attack("10")
def many_unknown_models(attacker: Attacker) -> Iterator[None]:
    """100 optimizer steps, with ids of 0.9 MB, for models that do not exist."""
    bodies = [
        json.dumps({"model_id": f"{number}" + "y" * 900_000, "seq_id": 1, "adam_params": {}}).encode()
        for number in range(100)
    ]
    yield
    for body in bodies:
        attacker.send("optim_step", body, **JSON)


@attack("12", seconds=150)
def long_json(attacker: Attacker) -> Iterator[None]:
    """A prompt of 50,000,000 tokens: 100 MB of JSON."""
    sampler = attacker.tenant().sampler()
    body = (
        json.dumps(sample_body(sampler, 0, []))
        .encode()
        .replace(b'"tokens": []', b'"tokens": [%s1]' % (b"1," * 50_000_000))
    )
    yield
    attacker.send("asample", body, **JSON)


@attack("12")
def deep_json(attacker: Attacker) -> Iterator[None]:
    """Four metadata of 0.9 MB: lists in lists, empty objects."""
    bodies = [
        b'{"user_metadata": {"a": %s}}' % (b"[" * 400_000 + b"]" * 400_000),
        b'{"user_metadata": {"a": [%s{}]}}' % (b"{}," * 300_000),
    ]
    yield
    for body in bodies * 2:
        attacker.send("create_session", body, **JSON)


@attack("12")
def retrieved_ids(attacker: Attacker) -> Iterator[None]:
    """Two reports of 15 MB of ids that were read."""
    sampler = attacker.tenant().sampler()
    target = {"target": {"sampling_session_id": sampler}, "timeout": 0}
    ids = b",".join(b'"a"' for _ in range(3_800_000))
    body = json.dumps(target).encode()[:-1] + b', "retrieved_request_ids": [%s]}' % ids
    yield
    attacker.post_at_once("retrieve_futures", [body] * 2, **JSON)
