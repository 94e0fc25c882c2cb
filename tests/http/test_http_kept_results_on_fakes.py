"""Results that wait for their clients: what they take in memory, in files, and what is left of them."""

import asyncio
import math
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.scheduling import operations, result_memory
from tinker_local.backend.scheduling.result_memory import HeldResult, ResultMemory
from tinker_local.backend.storage import result_files
from tinker_local.types.codec import encode_forward_backward_output, encode_sample_output

from tests.http.conftest import Api, StartApi, datum
from tests.traced import start_tracing

PROMPT = [1 + number % 100 for number in range(50)]
TOPK = 50 * 64 * 8
"""Bytes of the top 64 at 50 positions."""
MEMORY = 2 * TOPK + operations.OBJECT_BYTES


async def ended(api: Api, request: str) -> operations.Operation[Any]:
    """The operation when it is done and its result counted."""
    operation = api.backend.operations.get(request)
    assert operation is not None
    await operation.wait(60)
    await asyncio.sleep(0)
    return operation


async def topk_samples(api: Api, count: int) -> list[str]:
    """Samples whose results have a bit more than `TOPK` bytes, when all have ended."""
    sampler = await api.base_sampler()
    requests = [await api.sample(sampler, seq_id, PROMPT, topk_prompt_logprobs=64) for seq_id in range(count)]
    for request in requests:
        await ended(api, request)
    return requests


def files(api: Api) -> list[Path]:
    return list((api.backend.options.data_dir / "results").iterdir())


async def test_results_that_are_not_read_leave_memory_and_are_read_as_they_were_on_fakes(start_api: StartApi) -> None:
    """64 unread answers once kept 0.5 GiB of memory, and again so much with each repetition."""
    api = await start_api(result_memory_bytes=MEMORY)
    kept = api.backend.operations
    model = await api.model()
    gradients = [await api.gradient(model, seq_id, [datum(PROMPT, weights=[1.0] * 49)] * 8) for seq_id in (1, 2)]
    requests = [*gradients, *await topk_samples(api, 12)]
    await api.until(lambda: kept.memory.bytes <= MEMORY)
    assert 10 <= len(files(api)) < len(requests)
    for request in requests:
        operation = await ended(api, request)
        assert (operation._result is None) == (operation.file is not None)
        answer = await api.poll(request)
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert (await api.poll(request)).content == answer.content
        result = await operation  # as a program in this process gets it
        if operation.kind == "sample":
            assert encode_sample_output(result) == answer.content
            assert [sequence.sequence_id for sequence in result.sequences] == operation.sequence_ids
        else:
            assert encode_forward_backward_output(result) == answer.content
    assert (await ended(api, requests[0])).file is not None


async def test_files_of_results_go_with_the_results_and_with_the_server_on_fakes(
    start_api: StartApi, tmp_path: Path
) -> None:
    left = tmp_path / "data" / "results" / "of a killed server"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"somebody's prompt")
    api = await start_api(result_memory_bytes=0)
    assert not left.exists()
    assert left.parent.stat().st_mode & 0o777 == 0o700
    requests = await topk_samples(api, 3)
    await api.until(lambda: len(files(api)) == 3 and api.backend.operations.memory.bytes == 0)
    for request in requests[:2]:
        api.backend.operations.forget(request)
    await api.until(lambda: len(files(api)) == 1)
    await api.backend.close()
    assert not left.parent.exists()


async def test_a_result_that_ends_while_memory_is_given_back_goes_to_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving, go = threading.Event(), threading.Event()

    def give_back() -> None:
        giving.set()
        assert go.wait(60)

    monkeypatch.setattr(result_memory, "give_memory_back", give_back)
    memory = ResultMemory(0, result_files.ResultFiles(tmp_path / "results"))

    async def encoded() -> bytes:
        return b"result"

    memory.add("first", HeldResult(6, encoded, lambda file: None))
    assert await asyncio.to_thread(giving.wait, 60)
    memory.add("second", HeldResult(6, encoded, lambda file: None))
    go.set()
    assert memory._filing is not None
    await memory._filing
    assert memory.bytes == 0
    assert len(list((tmp_path / "results").iterdir())) == 2
    await memory.close()


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "SHARE_OF_DISK", 0.0)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)


@pytest.mark.parametrize("disk", [no_room, full_disk], ids=["no room", "full"])
async def test_results_stay_in_memory_while_the_disk_has_no_room_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch, disk: Callable[[pytest.MonkeyPatch], None]
) -> None:
    api = await start_api(result_memory_bytes=0)
    with monkeypatch.context() as patch:
        disk(patch)
        requests = await topk_samples(api, 3)
        filing = api.backend.operations.memory._filing
        assert filing is not None
        await filing
        assert files(api) == []
        assert api.backend.operations.memory.bytes >= 3 * TOPK
    for request in requests:
        await api.result(request)
    await topk_samples(api, 1)  # there is room again
    await api.until(lambda: api.backend.operations.memory.bytes == 0)
    assert len(files(api)) == 4


async def test_many_short_sequences_count_for_the_memory_that_they_take_on_fakes(api: Api) -> None:
    sampler = await api.base_sampler()
    await ended(api, await api.sample(sampler, 0, num_samples=16))  # what the first one needs once
    kept = api.backend.operations
    before = kept.memory.bytes
    start_tracing()
    await ended(api, await api.sample(sampler, 1, num_samples=1024, sampling_params={"max_tokens": 1}))
    taken, _ = tracemalloc.get_traced_memory()
    assert kept.memory.bytes - before >= taken


async def test_results_beyond_what_all_may_have_are_dropped_of_the_owner_that_has_most_on_fakes(tmp_path: Path) -> None:
    size = operations.OPERATION_BYTES + 1000
    memory = ResultMemory(math.inf, result_files.ResultFiles(tmp_path / "results"))
    kept = operations.Operations(900.0, math.inf, 6 * size, memory)
    for owner, session, count in [("bob", "b", 2), *(("alice", f"a{number}", 1) for number in range(5))]:
        for seq_id in range(count):
            operation: operations.Operation[None] = operations.Operation(f"{session}:sample:0:{seq_id}", "sample")
            operation.owner = owner
            kept.add(operation)
            operation.succeed(None, 1000)
            await asyncio.sleep(0)
    assert kept.kept_bytes == 6 * size
    assert all(kept.get(f"b:sample:0:{seq_id}") is not None for seq_id in range(2))
    await memory.close()
