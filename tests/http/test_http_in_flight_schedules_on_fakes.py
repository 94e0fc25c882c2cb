"""Random schedules of in-flight saves and samples: every token is of the version that it is said to be, and of none
before the save of its client; nothing that was acknowledged is lost; nothing hangs; nothing is left."""

import asyncio
from pathlib import Path

import pytest

from tests.http.in_flight_schedules import mortal_api


async def follow(folder: Path, seed: int, seconds: float, replicas: int, faults: str) -> None:
    async with asyncio.timeout(seconds + 60), mortal_api(folder, seed, replicas, faults.split()) as schedule:
        await schedule.run(seconds)
        counts = schedule.counts
    assert not faults or counts["kills"] + counts["refusals"] + counts["sleeps"] > 0


@pytest.mark.parametrize(("seed", "replicas", "faults"), [(1, 1, "sleep"), (2, 2, "kill refuse")])
async def test_each_token_is_of_the_version_that_it_is_said_to_be_on_fakes(
    tmp_path: Path, seed: int, replicas: int, faults: str
) -> None:
    await follow(tmp_path, seed, 1.0, replicas, faults)


@pytest.mark.more
@pytest.mark.parametrize("seed", range(3, 7))
@pytest.mark.parametrize(("replicas", "faults"), [(1, ""), (1, "kill sleep"), (2, "kill refuse sleep end")])
async def test_long_schedules_of_in_flight_saves_keep_every_promise_on_fakes(
    tmp_path: Path, seed: int, replicas: int, faults: str
) -> None:
    await follow(tmp_path, seed, 5.0, replicas, faults)
