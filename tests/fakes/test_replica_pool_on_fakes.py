"""Several replicas are one sampler: who answers, what is complete when, and what happens when one of them ends."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.fakes import FakeModel, FakeSampler, FakeTrainer
from tinker_local.backend.process.process_group import ProcessEndedError
from tinker_local.backend.rendering.rendered_input import ImagePlacement, RenderedImage, RenderedInput
from tinker_local.backend.sampling.prefix_routes import KEPT, PrefixRoutes, prefixes
from tinker_local.backend.sampling.replica_pool import AHEAD, ReplicaPool
from tinker_local.backend.sampling.sampler import SampleWork
from tinker_local.backend.scheduling.memory_sharing import Gate, MemorySharing
from tinker_local.types import InternalError, InvalidRequestError, SampledSequence, SampleOutput, SamplingParams


class FakeReplica(FakeSampler):
    """Samples end when the test says so. `inside`: what it samples. `loading`: its loads wait for it, if there is one.
    `refusal`: what a load raises. `fails_to_sleep`: so it does."""

    def __init__(self) -> None:
        super().__init__(FakeModel("fake/bigram"))
        self.ready = True
        self.can_sleep = True
        self.sleeps = False
        self.fails_to_sleep = False
        self.inside: list[tuple[SampleWork, asyncio.Future[None]]] = []
        self.versions: list[str] = []
        self.loading: asyncio.Event | None = None
        self.refusal: Exception | None = None

    @property
    def asleep(self) -> bool:
        return self.sleeps

    async def sleep(self) -> None:
        if self.fails_to_sleep:
            raise InternalError("no host memory")
        self.sleeps = True

    async def wake(self) -> None:
        self.sleeps = False

    async def load_version(self, version: AdapterVersion) -> None:
        if self.loading is not None:
            await self.loading.wait()
        if self.refusal is not None:
            raise self.refusal
        self.versions.append(version.name)

    async def remove_version(self, version: AdapterVersion) -> None:
        self.versions.remove(version.name)

    async def sample(self, work: SampleWork) -> SampleOutput:
        entry = (work, asyncio.get_running_loop().create_future())
        self.inside.append(entry)
        try:
            await entry[1]
        finally:
            self.inside.remove(entry)
        return SampleOutput(sequences=(SampledSequence(stop_reason="length", tokens=np.zeros(1, np.int32)),))

    def end(self) -> None:
        """Its process ends."""
        self.ready = False
        for _, future in self.inside:
            future.set_exception(ProcessEndedError("the process ended"))


class Pool:
    """`count` fake replicas, and the tasks of what they sample."""

    def __init__(self, count: int = 2, places: int = 256) -> None:
        self.replicas = [FakeReplica() for _ in range(count)]
        self.sampler = ReplicaPool(self.replicas, places)

    async def put(self, prompt: RenderedInput, samples: int = 1, version: str | None = None) -> int:
        """The replica that gets a sample."""
        before = [len(replica.inside) for replica in self.replicas]
        named = None if version is None else AdapterVersion(version, Path("/nowhere"))
        work = SampleWork(prompt, named, SamplingParams(max_tokens=4), samples)
        self.task = asyncio.create_task(self.sampler.sample(work))
        await settle()
        after = [len(replica.inside) for replica in self.replicas]
        (chosen,) = (at for at, (old, new) in enumerate(zip(before, after, strict=True)) if new > old)
        return chosen

    async def end_all(self) -> None:
        """All samples end."""
        for replica in self.replicas:
            for _, future in replica.inside:
                future.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def prompt(seed: int, length: int = 200, after: RenderedInput | None = None) -> RenderedInput:
    tokens = np.random.default_rng(seed).integers(1, 200, length).astype(np.int32)
    return RenderedInput(tokens if after is None else np.concatenate([after.token_ids, tokens]))


def image_at(offset: int, name: str) -> RenderedInput:
    image = RenderedImage(name, 4, np.zeros((1, 1), np.float32), (1, 2, 2))
    return RenderedInput(np.full(100, 7, np.int32), (ImagePlacement(offset, image),))


# Who answers ----------------------------------------------------------------------------------------------------------


async def test_samples_of_one_prompt_stay_together_and_others_go_where_the_fewest_are_on_fakes() -> None:
    pool = Pool(3)
    first = await pool.put(prompt(1), 16)
    assert [await pool.put(prompt(1), 16) for _ in range(3)] == [first] * 3
    others = {await pool.put(prompt(2)), await pool.put(prompt(3))}
    assert others == {0, 1, 2} - {first}
    assert sorted(pool.sampler.sequences) == [1, 1, 64]
    await pool.end_all()
    assert pool.sampler.sequences == [0, 0, 0]


async def test_the_next_turn_of_a_conversation_goes_to_the_replica_of_the_last_on_fakes() -> None:
    pool = Pool(3)
    conversation = prompt(1, 300)
    first = await pool.put(conversation)
    for turn in range(2, 6):
        await pool.end_all()
        for other in range(turn):
            await pool.put(prompt(100 * turn + other))
        conversation = prompt(turn, 150, conversation)
        assert await pool.put(conversation) == first


async def test_a_large_group_is_spread_and_a_full_replica_gets_nothing_that_another_has_room_for_on_fakes() -> None:
    pool = Pool(2)
    for _ in range(1024 // 16):
        await pool.put(prompt(1), 16)
    assert abs(pool.sampler.sequences[0] - pool.sampler.sequences[1]) <= AHEAD + 16
    small = Pool(2, places=20)
    assert [await small.put(prompt(1), 16) for _ in range(2)] == [0, 1]


async def test_a_short_beginning_that_all_prompts_share_moves_nothing_on_fakes() -> None:
    """A system prompt of 100 positions."""
    pool, system = Pool(4), prompt(0, 100)
    chosen = [await pool.put(prompt(seed, 400, system)) for seed in range(1, 9)]
    assert sorted(chosen) == sorted([*range(4), *range(4)])


@pytest.mark.mutation(
    "versions-share-a-cache",
    "prefixes",
    '    name = "" if work.version is None else work.version.name\n',
    '    name = ""\n',
)
def test_a_beginning_is_that_of_one_version_with_these_images_on_fakes() -> None:
    def of(rendered: RenderedInput, version: str | None = None) -> set[bytes]:
        named = None if version is None else AdapterVersion(version, Path("/nowhere"))
        return {digest for _, digest in prefixes(SampleWork(rendered, named, SamplingParams(max_tokens=1)))}

    one = prompt(1, 1000)
    assert of(one) == of(RenderedInput(one.token_ids.copy()))
    assert not of(one) & of(one, "v1")
    assert not of(one, "v1") & of(one, "v2")
    assert not of(image_at(10, "cat")) & of(image_at(10, "dog"))
    assert not of(image_at(10, "cat")) & of(image_at(11, "cat"))
    assert len(of(image_at(70, "cat")) & of(image_at(70, "dog"))) == 1, "64 positions come before the image"
    lengths = [length for length, _ in prefixes(SampleWork(one, None, SamplingParams(max_tokens=1)))]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (64, 1000)


def test_what_is_remembered_of_prompts_is_bounded_on_fakes() -> None:
    routes = PrefixRoutes(1)
    beginnings = [(at, at.to_bytes(8, "big")) for at in range(1, KEPT + 11)]
    for beginning in beginnings:
        routes.note(0, [beginning])
    assert routes.positions_read(0, beginnings[:10]) == 0
    assert routes.positions_read(0, beginnings[:11]) == 11
    assert routes.positions_read(0, beginnings) == KEPT + 10


# Versions -------------------------------------------------------------------------------------------------------------


async def test_a_version_is_complete_when_all_have_verified_it_and_goes_from_all_on_fakes() -> None:
    pool, version = Pool(3), AdapterVersion("v1", Path("/nowhere"))
    pool.replicas[2].loading = asyncio.Event()
    loading = asyncio.create_task(pool.sampler.load_version(version))
    await settle()
    assert not loading.done()
    pool.replicas[2].loading.set()
    await loading
    assert [replica.versions for replica in pool.replicas] == [["v1"]] * 3
    await pool.sampler.remove_version(version)
    assert [replica.versions for replica in pool.replicas] == [[]] * 3


async def test_a_version_that_one_refuses_is_refused_and_one_that_ended_is_not_waited_for_on_fakes() -> None:
    pool, version = Pool(3), AdapterVersion("v1", Path("/nowhere"))
    pool.replicas[1].refusal = InvalidRequestError("it holds NaN")
    with pytest.raises(InvalidRequestError, match="it holds NaN"):
        await pool.sampler.load_version(version)
    pool.replicas[1].refusal = ProcessEndedError("it ended")
    await pool.sampler.load_version(version)
    for replica in pool.replicas:
        replica.refusal = ProcessEndedError("all ended")
    with pytest.raises(ProcessEndedError, match="all ended"):
        await pool.sampler.load_version(version)


async def test_what_is_to_be_compared_is_answered_by_the_replica_that_it_names_on_fakes() -> None:
    pool = Pool(3)
    params = SamplingParams(max_tokens=1)
    for at in (2, 0, 1):
        asking = asyncio.create_task(pool.sampler.sample(SampleWork(prompt(1), None, params, replica=at)))
        await settle()
        assert [len(replica.inside) for replica in pool.replicas] == [int(each == at) for each in range(3)]
        await pool.end_all()
        await asking


# Sleep ----------------------------------------------------------------------------------------------------------------


async def test_sleep_and_wake_reach_all_and_a_sleep_that_fails_leaves_all_awake_on_fakes() -> None:
    pool = Pool(3)
    await pool.sampler.sleep()
    assert [replica.asleep for replica in pool.replicas] == [True] * 3
    assert pool.sampler.asleep
    await pool.sampler.wake()
    assert not pool.sampler.asleep
    pool.replicas[1].fails_to_sleep = True
    with pytest.raises(InternalError, match="no host memory"):
        await pool.sampler.sleep()
    assert [replica.asleep for replica in pool.replicas] == [False] * 3


async def test_a_cache_that_a_sleep_has_emptied_attracts_nothing_on_fakes() -> None:
    pool = Pool(2)
    assert await pool.put(prompt(1)) == 0
    await pool.end_all()
    await pool.sampler.sleep()
    await pool.sampler.wake()
    assert await pool.put(prompt(1)) == 1, "the one that was handed fewer"
    await pool.end_all()


# Ends -----------------------------------------------------------------------------------------------------------------


async def test_a_replica_that_has_ended_gets_nothing_and_its_samples_are_repeated_elsewhere_on_fakes() -> None:
    pool = Pool(2)
    chosen = await pool.put(prompt(1))
    failing = pool.task
    pool.replicas[chosen].end()
    with pytest.raises(ProcessEndedError):
        await failing
    assert pool.sampler.sequences == [0, 0]
    other = 1 - chosen
    assert [await pool.put(prompt(1)) for _ in range(3)] == [other] * 3
    pool.replicas[chosen].ready = True
    assert await pool.put(prompt(2)) == chosen
    await pool.end_all()


def open_gates(gates: list[Gate]) -> list[bool]:
    return [gate.is_open for gate in gates]


async def test_calls_wait_only_while_no_replica_works_and_fail_only_if_all_are_far_away_on_fakes() -> None:
    sharing = MemorySharing(None, None)  # type: ignore[arg-type]
    gate, (one, two) = sharing.sampler_gate, sharing.replica_gates(2)
    one.close()
    assert gate.is_open
    two.close()
    assert not gate.is_open
    waiting = asyncio.create_task(gate.passed())
    one.refuse("far away")
    await settle()
    assert not waiting.done(), "the other may be near"
    two.refuse("far away, too")
    with pytest.raises(ProcessEndedError, match="far away"):
        await waiting
    two.refuse(None)
    waiting = asyncio.create_task(gate.passed())
    await settle()
    assert not waiting.done()
    two.open()
    await waiting
    assert gate.is_open
    gate.shut("the sampler was closed")
    one.open()
    with pytest.raises(ProcessEndedError, match="the sampler was closed"):
        await gate.passed()
    await sharing.close()


async def test_a_replica_that_loads_while_others_sleep_wakes_them_so_that_all_are_alike_on_fakes() -> None:
    pool, trainer = Pool(2), FakeTrainer(FakeModel("fake/bigram"))
    sharing = MemorySharing(trainer, pool.sampler)
    one, _ = sharing.replica_gates(2)
    one.close()
    pool.replicas[0].ready = False
    await sharing._put_sampler_to_sleep()
    assert [replica.asleep for replica in pool.replicas] == [False, True]
    await sharing.load_sampler(lambda: setattr(pool.replicas[0], "ready", True), one)
    assert [replica.asleep for replica in pool.replicas] == [False, False]
    assert one.is_open
    await sharing.close()
    trainer.close()
