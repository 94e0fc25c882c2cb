"""Ephemeral sampler versions beyond the limits of their owner and of all: the least recently used are dropped, but none
that is sampled from, and none of another owner."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Api, StartApi
from tests.http.test_http_owners_on_fakes import ALICE, BOB, key_file
from tests.http.test_http_quotas_on_fakes import as_owner, quotas


@pytest.fixture
def start(start_api: StartApi, tmp_path: Path) -> Callable[..., Awaitable[Api]]:
    """A server with the keys of alice and bob."""

    async def begin() -> Api:
        return await start_api(api_keys=key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\n"))

    return begin


async def version(api: Api, at: int) -> str:
    """A sampler of an ephemeral version of a new session."""
    return await api.nameless(await api.model(), 1, at)


def size_of(api: Api, sampler: str) -> int:
    found = api.backend.sampling._open[sampler].ephemeral
    assert found is not None
    return found.size


async def refusal(api: Api, sampler: str) -> str:
    answer = await api.post("asample", api.sample_body(sampler, 99))
    assert answer.status_code == 404, answer.text
    return str(answer.json()["detail"])


async def test_versions_of_many_sessions_beyond_the_quota_of_their_owner_are_dropped_on_fakes(
    start: Callable[..., Awaitable[Api]],
) -> None:
    api = await start()
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    foreign = await version(bob, 0)
    size = size_of(api, foreign)
    api.backend.quotas._given = quotas(f"alice:ephemeral-versions={3 * size / 2**30}")
    samplers = [await version(alice, number) for number in range(3)]
    await alice.score(samplers[0], 0)  # now the second is the least recently used
    assert (await usage(alice))["used"]["ephemeral_bytes"] == 3 * size
    newest = await version(alice, 4)
    assert (
        f"was dropped: the ephemeral versions of the owner 'alice' have more than {3 * size / 2**30:g} GiB"
        in await refusal(alice, samplers[1])
    )
    for api_of, sampler in (alice, samplers[0]), (alice, samplers[2]), (alice, newest), (bob, foreign):
        await api_of.score(sampler, 9)
    told = await usage(alice)
    assert (told["used"]["ephemeral_bytes"], told["limits"]["ephemeral_bytes"]) == (3 * size, 3 * size)
    assert api.backend.metrics()["fake/bigram"].ephemeral_bytes == 4 * size


async def test_versions_that_are_sampled_from_stay_beyond_the_quota_until_their_samples_end_on_fakes(
    start: Callable[..., Awaitable[Api]],
) -> None:
    api = await start()
    alice = as_owner(api, ALICE)
    samplers = [await version(alice, number) for number in range(3)]
    size = size_of(api, samplers[0])
    api.sampler.hold.clear()
    held = [await alice.sample(sampler, 0) for sampler in samplers]
    await api.until(lambda: api.sampler.running == 3)
    api.backend.quotas._given = quotas(f"alice:ephemeral-versions={size / 2**30}")
    newest = api.backend.sampling._open[samplers[2]].ephemeral
    assert newest is not None
    api.backend.sampling.ephemeral._drop(newest)
    assert api.backend.metrics()["fake/bigram"].versions_dropped == 0
    api.sampler.hold.set()
    for request in held:
        assert await alice.result(request)
    await api.until(lambda: api.backend.metrics()["fake/bigram"].versions_dropped == 2)


async def test_versions_beyond_what_all_may_have_are_dropped_of_the_owner_that_has_most_on_fakes(
    start: Callable[..., Awaitable[Api]],
) -> None:
    api = await start()
    alice, bob = as_owner(api, ALICE), as_owner(api, BOB)
    foreign = await version(bob, 0)  # the least recently used of all
    size = size_of(api, foreign)
    api.backend.quotas._given = quotas("ephemeral-versions=none")
    api.backend.quotas.all = replace(api.backend.quotas.all, ephemeral_bytes=3 * size)
    samplers = [await version(alice, number) for number in range(3)]
    assert "the ephemeral versions of all sessions have more than" in await refusal(alice, samplers[0])
    await bob.score(foreign, 9)
    for sampler in samplers[1:]:
        await alice.score(sampler, 9)


async def usage(api: Api) -> dict[str, Any]:
    (found,) = (await api.get("usage")).json()["owners"]
    return dict(found)


async def test_ephemeral_versions_are_listed_with_their_run_and_are_no_checkpoints_on_fakes(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api()
    model, other = await api.model(), await api.model(await api.session())
    first, second = [await api.nameless(model, number + 1, number) for number in range(2)]
    await api.result(await api.sample(first, 0))

    async def listed() -> dict[str, list[str]]:
        runs = (await api.get("status")).json()["runs"]
        return {
            run["training_run_id"]: [version["sampler_id"] for version in run["ephemeral_versions"]] for run in runs
        }

    assert await listed() == {model: [first, second], other: []}, "the last used first"
    run = next(run for run in (await api.get("status")).json()["runs"] if run["training_run_id"] == model)
    size = api.backend.folders.size(f"{model}/1#1")
    assert run["ephemeral_versions"][0] == {"sampler_id": first, "size_bytes": size, "samples": 0}
    assert run["ephemeral_version_count"] == 2
    assert (await api.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"] == []
    monkeypatch.setattr("tinker_local.backend.http.progress_routes.MOST_EPHEMERAL", 1)
    assert await listed() == {model: [first], other: []}
    assert {first, second} <= set((await api.get(f"sessions/{model.partition(':')[0]}")).json()["sampler_ids"])
