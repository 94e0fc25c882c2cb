"""Sessions share the places of a sampler: a short sample starts at once, and one session alone fills them all."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.sampling.sampler import RESERVED, SampleWork
from tinker_local.backend.scheduling.sample_turns import PIECE, PROMPTS_AHEAD, SampleTurns
from tinker_local.types import InternalError, SampledSequence, SampleOutput, SamplingParams

PROMPT = RenderedInput(np.arange(5, dtype=np.int32))


class Places:
    """A sampler in which sequences end when the test says so. `inside`: works by session, the oldest first."""

    def __init__(self, places: int) -> None:
        self.turns = SampleTurns(places)
        self.inside: list[tuple[str, SampleWork, asyncio.Future[None]]] = []

    def sample(
        self, session: str, num_samples: int = 1, owner: str = "local", prompt: RenderedInput = PROMPT, **fields: object
    ) -> asyncio.Task[SampleOutput]:
        work = SampleWork(prompt, None, SamplingParams(max_tokens=2000), num_samples, **fields)  # type: ignore[arg-type]

        async def run(piece: SampleWork) -> SampleOutput:
            entry = (session, piece, asyncio.get_running_loop().create_future())
            self.inside.append(entry)
            try:
                await entry[2]
            finally:
                self.inside.remove(entry)
            first = piece.first_sample
            indices = [np.array([index], np.int32) for index in range(first, first + piece.num_samples)]
            sequences = tuple(SampledSequence(stop_reason="length", tokens=tokens) for tokens in indices)
            scores = np.zeros(5, np.float32) if piece.prompt_logprobs else None
            return SampleOutput(sequences=sequences, prompt_logprobs=scores)

        return asyncio.create_task(self.turns.sample(owner, session, work, run))

    def held(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for session, piece, _ in self.inside:
            found[session] += piece.num_samples
        return found

    async def end(self, which: Callable[[str], bool] = lambda session: True) -> None:
        """End the oldest of the pieces."""
        entry = next(entry for entry in self.inside if which(entry[0]))
        entry[2].set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_short_sample_starts_at_once_beside_any_number_of_long_ones() -> None:
    """64 requests of 1,024 sequences; a real sampler has room for them all, and would finish them first."""
    places = Places(256)
    long = [places.sample("greedy", 1024) for _ in range(64)]
    await settle()
    assert 256 <= places.held()["greedy"] < 256 + PIECE
    short = places.sample("short")
    await settle()
    assert places.held()["short"] == 1
    await places.end("short".__eq__)
    assert len((await short).sequences) == 1
    assert places.turns.sequences <= 256 + RESERVED
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert places.turns.sequences == 0
    assert not places.turns._owners
    assert not places.turns._new


@pytest.mark.parametrize(("requests", "num_samples"), [(400, 1), (64, 16), (3, 1024)])
async def test_a_session_that_is_alone_fills_the_sampler_until_its_end(requests: int, num_samples: int) -> None:
    places = Places(256)
    tasks = [places.sample("alone", num_samples) for _ in range(requests)]
    left = requests * num_samples
    await settle()
    while left:
        assert places.turns.sequences >= min(left, 256)
        left -= places.inside[0][1].num_samples
        await places.end()
    outputs = await asyncio.gather(*tasks)
    for output in outputs:
        assert [int(sequence.tokens[0]) for sequence in output.sequences] == list(range(num_samples))


async def test_sessions_get_equal_places_whatever_they_send() -> None:
    places = Places(240)
    sent = {"a": [(200, 1024)], "b": [(2000, 1)], "c": [(20, 100)]}
    tasks = [
        places.sample(session, count) for session, kinds in sent.items() for times, count in kinds for _ in range(times)
    ]
    rng = np.random.default_rng(1)
    shares = []
    await settle()
    for turn in range(150):
        await places.end()
        if turn % 7 == 0:  # sequences of `b` are short
            with_b = [entry for entry in places.inside if entry[0] == "b"]
            for entry in rng.permutation(len(with_b))[:5]:
                with_b[entry][2].set_result(None)
            await settle()
        shares.append(places.held())
    for share in shares[75:]:
        assert max(share.values()) - min(share.values()) <= PIECE + RESERVED, share
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_owners_get_equal_places_however_many_sessions_they_have() -> None:
    places = Places(240)
    tasks = [places.sample(f"a{number}", 1024, owner="a") for number in range(9)]
    tasks += [places.sample("b", 1024, owner="b"), places.sample("c", 1024, owner="c")]
    await settle()
    for _ in range(60):
        await places.end()
    held = places.held()
    of_a = sum(count for session, count in held.items() if session.startswith("a"))
    assert max(of_a, held["b"], held["c"]) - min(of_a, held["b"], held["c"]) <= PIECE + RESERVED, held
    assert max(held[f"a{number}"] for number in range(9)) <= 2 * PIECE
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not places.turns._owners


async def test_a_sampler_has_few_unread_prompts_and_one_of_a_newcomer() -> None:
    """64 prompts of 4,000 positions once came before another session's two tokens."""
    places, long = Places(256), RenderedInput(np.zeros(PROMPTS_AHEAD // 8, np.int32))
    tasks = [places.sample("greedy", prompt=long) for _ in range(64)]
    await settle()
    assert len(places.inside) == 8
    short = places.sample("short", owner="b")
    await settle()
    assert places.held() == {"greedy": 8, "short": 1}
    for entry in (places.inside[0], places.inside[-1]):  # their prompts are read
        entry[1].begun()
    await settle()
    assert places.held() == {"greedy": 9, "short": 1}
    while places.inside:
        await places.end()
    await asyncio.gather(short, *tasks)
    assert (places.turns.sequences, places.turns.unread) == (0, 0)
    assert not places.turns._owners


async def test_places_are_free_as_each_sequence_ends() -> None:
    places = Places(PIECE)
    first, second = places.sample("a", PIECE), places.sample("a", PIECE)
    await settle()
    assert len(places.inside) == 1
    places.inside[0][1].ended()
    await settle()
    assert len(places.inside) == 2
    await places.end()
    await places.end()
    assert len((await first).sequences) == len((await second).sequences) == PIECE
    assert places.turns.sequences == 0


async def test_the_prompt_is_asked_about_once_and_seeds_go_on_from_piece_to_piece() -> None:
    places = Places(1024)
    task = places.sample("a", 40, prompt_logprobs=True, prompt_logprobs_last_n=2)
    await settle()
    works = [work for _, work, _ in places.inside]
    assert [work.prompt_logprobs for work in works] == [True, False, False]
    assert [work.prompt_logprobs_last_n for work in works] == [2, None, None]
    assert [work.first_sample for work in works] == [0, 16, 32]
    for _ in works:
        await places.end()
    assert (await task).prompt_logprobs is not None


async def test_a_piece_that_fails_ends_its_request_and_frees_all_of_its_places() -> None:
    places = Places(64)
    task, other = places.sample("a", 1024), places.sample("a", 4)
    await settle()
    places.inside[1][2].set_exception(InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await task
    await settle()
    assert places.held() == {"a": 4}
    await places.end()
    assert len((await other).sequences) == 4


@pytest.mark.parametrize("pause", range(6))
async def test_requests_cancelled_one_after_the_other_free_all_of_their_places(pause: int) -> None:
    """The end of one hands its places to the next, whose pieces may be cancelled before they start."""
    places = Places(64)
    tasks = [places.sample("a", 200) for _ in range(4)]
    await settle()
    for task in tasks:
        task.cancel()
        for _ in range(pause):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle()
    assert (places.turns.sequences, places.held()) == (0, {})


@pytest.mark.parametrize("pause", range(6))
async def test_a_request_cancelled_as_its_piece_ends_leaves_nothing(pause: int) -> None:
    places = Places(64)
    task = places.sample("a", 4)
    await settle()
    places.inside[0][2].set_result(None)
    for _ in range(pause):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settle()
    turns = places.turns
    assert (turns.sequences, turns.requests, turns.unread, turns._owners, turns._new) == (0, 0, 0, {}, {})


async def test_turns_need_memory_for_the_sessions_that_wait_alone() -> None:
    places = Places(32)
    tasks = [places.sample("a", 3000), places.sample("b", 3000)]
    await settle()
    for _ in itertools.count():
        if not places.inside:
            break
        for _ in range(places.inside[0][1].num_samples):
            places.inside[0][1].ended()
        await places.end()
    assert len(places.turns._turns) <= 1010
    assert [len((await task).sequences) for task in tasks] == [3000, 3000]


async def test_a_request_that_fails_and_is_cancelled_then_is_counted_out() -> None:
    """Its session ends while the sampler takes a while to cancel its other pieces."""
    turns, ending = SampleTurns(64), asyncio.Event()

    async def run(piece: SampleWork) -> SampleOutput:
        if piece.first_sample:
            raise InternalError("the engine failed")
        try:
            await asyncio.Event().wait()
        finally:
            await ending.wait()
        raise AssertionError

    work = SampleWork(PROMPT, None, SamplingParams(max_tokens=9), 2 * PIECE)
    task = asyncio.create_task(turns.sample("alice", "s", work, run))
    await settle()
    assert (turns.sequences, turns.requests) == (PIECE, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (turns.sequences, turns.requests, turns.unread, turns._owners) == (0, 0, 0, {})
