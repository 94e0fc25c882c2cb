"""Weights that move under running sequences: each adapter says tokens that no other says, so the text itself tells
which weights drew it."""

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.sampling.sampler import DrawnTokens, MovingWeights, Sampler, SampleWork
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.backend.vllm_engine import compat_vllm
from tinker_local.backend.vllm_engine.engine_thread import EngineThread
from tinker_local.backend.vllm_engine.moved_sequences import Move, drawn_under
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import DrawnUnder, InternalError, SampledSequence, SampleOutput, SamplingParams

from tests.sampling.conftest import Served, write_adapter_files

PROMPT = [20 + at % 90 for at in range(300)]
"""More than a block of vLLM's KV cache, which is of 128 positions on a CPU."""
ATTENTION = r"(q|k|v|o)_proj$"


def words_of(number: int) -> tuple[int, int]:
    """The tokens of version `number`."""
    return 100 + 2 * number, 101 + 2 * number


def forcing(served: Served, folder: Path, number: int, *, force: bool = True) -> AdapterVersion:
    """An adapter that says one of two tokens: which one depends on the sign of a number that only the weights know.
    Keys and values differ from those of other adapters as well. Without `force`, that is all."""
    adapter = served.adapter(folder / "keys", ATTENTION, 2, seed=number)
    if not force:
        return AdapterVersion(f"{folder.parent.name}/{number}", folder / "keys")
    vocab, hidden = served.hf.model.lm_head.weight.shape
    a = torch.randn(2, hidden, generator=torch.Generator().manual_seed(number))
    b = torch.zeros(vocab, 2)
    # So large that no other token is as likely where the number is almost 0.
    b[words_of(number)[0], 0], b[words_of(number)[1], 0] = 5e5, -5e5
    write_adapter_files(folder / "all", {**adapter.weights, "lm_head": (a, b)}, 2)
    return AdapterVersion(f"{folder.parent.name}/{number}", folder / "all")


class Target:
    """A target of the sampler of `served`; `clients`: the version that each was made of, by its name."""

    def __init__(self, served: Served, folder: Path, sampler: Sampler | None = None, *, force: bool = True) -> None:
        self.served, self.folder = served, folder
        self.sampler: Any = served.sampler if sampler is None else sampler
        self.name = f"{folder.name}/in-flight"
        self.number = 0
        self.force = force
        self.versions: list[AdapterVersion] = []
        self.version: AdapterVersion | None = None
        self.since: dict[str, int] = {}

    def write(self, count: int) -> None:
        """Have so many versions in their folders, which takes as long as many tokens."""
        for number in range(len(self.versions) + 1, count + 1):
            self.versions.append(forcing(self.served, self.folder / str(number), number, force=self.force))

    async def save(self, client: str) -> None:
        """Publish the next version, and make a client of it."""
        self.write(self.number + 1)
        self.version = self.versions[self.number]
        self.number += 1
        self.since[client] = self.number
        await self.sampler.publish(self.name, self.version, self.number)

    async def sample(self, client: str, tokens: int, prompt: Sequence[int] = PROMPT, **asked: Any) -> SampleOutput:
        moving = MovingWeights(self.name, self.number, self.since[client], f"{self.name}/{client}")
        params = SamplingParams(max_tokens=tokens, temperature=1.0, stop=())
        work = SampleWork(self.served.prompt(prompt), self.version, params, moving=moving, **asked)
        output: SampleOutput = await self.sampler.sample(work)
        return output


@pytest.fixture
async def target(text: Served, tmp_path: Path) -> Any:
    found = Target(text, tmp_path)
    yield found
    await found.sampler.end_target(found.name)


class Watch:
    """Waits for tokens of a sample."""

    def __init__(self) -> None:
        self.loop, self.seen, self.news = asyncio.get_running_loop(), 0, asyncio.Event()

    def __call__(self, drawn: DrawnTokens) -> None:
        self.loop.call_soon_threadsafe(self._note, len(drawn.tokens))

    def _note(self, tokens: int) -> None:
        self.seen += tokens
        self.news.set()

    async def until(self, tokens: int) -> None:
        while self.seen < tokens:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)


def check_text(sequence: SampledSequence) -> list[int]:
    """Assert that each token is of the version that it is said to be; the versions in order."""
    assert sequence.drawn_under is not None
    assert sequence.logprobs is not None
    assert sum(span.tokens for span in sequence.drawn_under) == sequence.tokens.size
    at = 0
    for span in sequence.drawn_under:
        drawn = sequence.tokens[at : at + span.tokens]
        assert set(drawn.tolist()) <= set(words_of(span.version)), (span, drawn)
        at += span.tokens
    assert np.abs(sequence.logprobs).max() < 0.01  # of what the token was drawn from
    return [span.version for span in sequence.drawn_under]


async def test_running_sequences_go_on_under_each_new_version_and_every_token_says_which_drew_it(
    target: Target,
) -> None:
    target.write(4)
    await target.save("first")
    watch = Watch()
    running = asyncio.create_task(target.sample("first", 700, num_samples=3, drawn=watch))
    for _ in range(3):
        seen = watch.seen
        await watch.until(seen + 60)
        await target.save(f"client {target.number}")
    output = await running
    for sequence in output.sequences:
        versions = check_text(sequence)
        assert versions == sorted(set(versions))
        assert (versions[0], versions[-1]) == (1, 4)
        assert sequence.drawn_under is not None
        assert [span.on_older_keys for span in sequence.drawn_under] == [version > 1 for version in versions]


async def test_a_client_reads_the_keys_of_its_own_namespace_alone(target: Target) -> None:
    """After a save, a new client computes the prompt; an older one goes on with its own keys, and that is said."""
    await target.save("first")
    assert [(await target.sample("first", 2)).prompt_cache_hit_tokens > 0 for _ in range(2)] == [False, True]
    await target.save("second")
    new = await target.sample("second", 4)
    assert new.prompt_cache_hit_tokens == 0
    old = await target.sample("first", 4)
    assert old.prompt_cache_hit_tokens > 0
    for output, older in (new, False), (old, True), (await target.sample("second", 4), False):
        assert check_text(output.sequences[0]) == [2]
        assert [span.on_older_keys for span in output.sequences[0].drawn_under or ()] == [older]
    assert (await target.sample("first", 2, PROMPT[::-1])).prompt_cache_hit_tokens == 0


async def test_snapshots_beside_an_in_flight_client_keep_their_weights(target: Target) -> None:
    target.write(2)
    await target.save("first")
    snapshot = target.version
    watch = Watch()
    params = SamplingParams(max_tokens=700, temperature=1.0, stop=())
    kept = asyncio.create_task(
        target.sampler.sample(SampleWork(target.served.prompt(PROMPT), snapshot, params, drawn=watch))
    )
    moving = asyncio.create_task(target.sample("first", 700))
    await watch.until(30)
    await target.save("second")
    (sequence,) = (await kept).sequences
    assert set(sequence.tokens.tolist()) <= set(words_of(1))
    assert sequence.drawn_under is None
    assert check_text((await moving).sequences[0]) == [1, 2]
    assert snapshot is not None
    await target.sampler.remove_version(snapshot)


async def test_a_slot_that_was_written_half_way_serves_nothing_until_the_next_version(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.write(2)
    await target.save("first")
    watch = Watch()
    running = asyncio.create_task(target.sample("first", 700, drawn=watch))
    await watch.until(20)
    sampler = target.sampler
    assert isinstance(sampler, VLLMSampler)
    worker = sampler._adapters._worker
    modules = list(worker._adapter_manager.modules.values())
    module = modules[len(modules) // 2]

    def torn(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(module, "set_lora", torn)
        with pytest.raises(
            InternalError, match=r"in-flight save 2 .*the device is lost.*save with kind='inflight' again"
        ):
            await target.save("second")
        with pytest.raises(InternalError, match="in-flight save 2"):
            await running
        for client in "first", "second":
            with pytest.raises(InternalError, match="in-flight save 2"):
                await target.sample(client, 4)
    assert sampler._engine.restarts == 0
    await target.save("third")
    for client in "first", "second", "third":
        assert check_text((await target.sample(client, 4)).sequences[0]) == [3]


async def test_a_target_that_vllm_dropped_or_a_new_engine_serves_the_same_version(target: Target) -> None:
    await target.save("first")
    await target.save("second")
    sampler = target.sampler
    lora_id = sampler._adapters._targets[target.name].request.lora_int_id
    await asyncio.wrap_future(sampler._thread.call(sampler._engine, lambda engine: engine.remove_lora(lora_id)))
    assert check_text((await target.sample("first", 4)).sequences[0]) == [2]


@pytest.fixture(scope="module")
def recomputing(text: Served, engine_thread: EngineThread) -> Iterator[VLLMSampler]:
    sampler = VLLMSampler(replace(text.options, moves_keys=True), engine_thread)
    yield sampler
    asyncio.run(sampler.close())


@pytest.mark.more
async def test_keys_are_computed_again_where_the_server_says_so(
    text: Served, recomputing: VLLMSampler, tmp_path: Path
) -> None:
    """Then the version of each token gives its logprob again; a sequence that keeps its keys has others."""
    for sampler, again in (recomputing, True), (text.sampler, False):
        target = Target(text, tmp_path / str(again), sampler, force=False)
        target.write(2)
        await target.save("first")
        watch = Watch()
        running = asyncio.create_task(target.sample("first", 700, num_samples=2, drawn=watch))
        await watch.until(80)
        await target.save("second")
        other = await target.sample("first", 2)
        assert [span.on_older_keys for span in other.sequences[0].drawn_under or ()] == [not again]
        for sequence in (await running).sequences:
            assert sequence.drawn_under is not None
            assert sequence.logprobs is not None
            assert [span.on_older_keys for span in sequence.drawn_under] == [False, not again]
            before = sequence.drawn_under[0].tokens
            assert 0 < before < 700
            for version, drawn in (0, slice(before)), (1, slice(before, None)):
                scored = await text.score(text.prompt([*PROMPT, *sequence.tokens]), target.versions[version])
                far = float(np.abs(scored[len(PROMPT) - 1 :] - sequence.logprobs)[drawn].max())
                assert (far < text.tolerance) is (again or version == 0), (again, version, far)
        await sampler.end_target(target.name)


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory, engine_thread: EngineThread) -> Iterator[Served]:
    """Adapters may change its vision tower, and sequences compute their keys again."""
    folder = make_tiny_vl_model(tmp_path_factory.mktemp("sees") / "model")
    options = {"train_vision": True, "moves_keys": True, "max_context_length": 1024}
    served = Served(folder, "Qwen3VLForConditionalGeneration", engine_thread, **options)
    yield served
    asyncio.run(served.sampler.close())


def changing_tower(served: Served, folder: Path, number: int) -> AdapterVersion:
    """An adapter that changes the vision tower alone."""
    generator, weights = torch.Generator().manual_seed(number), {}
    for name, module in served.hf.model.named_modules():
        if "visual" in name and re.search(r"attn\.(qkv|proj)$", name):
            a = torch.randn(4, module.in_features, generator=generator)
            weights[name] = (a, torch.randn(module.out_features, 4, generator=generator))
    write_adapter_files(folder, weights, 4)
    return AdapterVersion(f"{folder.parent.name}/{number}", folder)


@pytest.mark.more
async def test_image_features_are_computed_again_with_the_keys_where_the_tower_has_moved(
    sees: Served, tmp_path: Path, noise: Callable[..., Image.Image]
) -> None:
    """A sequence that goes on, and the next one of its client, see the image as the new weights do: each token's
    logprob is that of a snapshot of its version."""
    versions = [changing_tower(sees, tmp_path / str(number), number) for number in (1, 2)]
    target, params = "run/in-flight", SamplingParams(max_tokens=500, temperature=1.0, stop=())

    async def sample(number: int, watch: Watch | None = None) -> SampleOutput:
        moving = MovingWeights(target, number, 1, "client")
        work = SampleWork(prompt, versions[number - 1], params, 2, moving=moving, drawn=watch)
        return await sees.sampler.sample(work)

    image, watch = noise(96, 64, 3), Watch()
    prompt = sees.prompt(PROMPT[:20], image, PROMPT[:100])
    await sees.sampler.publish(target, versions[0], 1)
    running = asyncio.create_task(sample(1, watch))
    await watch.until(80)
    await sees.sampler.publish(target, versions[1], 2)
    moved, after = (await running).sequences, (await sample(2)).sequences
    await sees.sampler.end_target(target)
    for sequence in (*moved, *after):
        assert sequence.drawn_under is not None
        assert sequence.logprobs is not None
        assert [span.version for span in sequence.drawn_under] == ([1, 2] if sequence in moved else [2])
        whole = sees.prompt(PROMPT[:20], image, [*PROMPT[:100], *sequence.tokens])
        under = [(await sees.score(whole, version))[prompt.length - 1 :] for version in versions]
        assert np.abs(under[0] - under[1]).max() > 100 * sees.tolerance  # or the adapters would say nothing
        at = 0
        for span in sequence.drawn_under:
            drawn = slice(at, at + span.tokens)
            sees.same(sequence.logprobs[drawn], under[span.version - 1][drawn])
            at += span.tokens


@pytest.mark.more
@pytest.mark.parametrize("seed", range(3))
async def test_random_schedules_of_saves_samples_and_cancellations_keep_the_contract(
    text: Served, recomputing: VLLMSampler, tmp_path: Path, seed: int
) -> None:
    """With keys kept and computed again."""
    for sampler in text.sampler, recomputing:
        rng, again = random.Random(seed), sampler is recomputing
        target = Target(text, tmp_path / str(again), sampler)
        target.write(12)
        await target.save("client 0")
        watch = Watch()
        long = asyncio.create_task(target.sample("client 0", 600, drawn=watch))
        running = {long: "client 0"}
        while target.number < 12:
            for _ in range(rng.choice((0, 1, 3))):
                client = rng.choice(list(target.since))
                prompt = PROMPT[: rng.choice((3, 200, 300))]
                sample = target.sample(client, rng.choice((1, 40, 150)), prompt, num_samples=rng.choice((1, 3)))
                running[asyncio.create_task(sample)] = client
            await watch.until(watch.seen + rng.choice((1, 3, 20)))
            for _ in range(rng.choice((1, 1, 2))):
                if target.number < 12:
                    await target.save(f"client {target.number}")
            if len(running) > 1 and rng.random() < 0.3:
                task = rng.choice(list(running)[1:])
                del running[task]
                task.cancel()
        for task, client in running.items():
            for sequence in (await task).sequences:
                versions = check_text(sequence)
                assert versions == sorted(set(versions))
                assert versions[0] >= target.since[client]
                assert task is not long or len(versions) > 4
                assert sequence.drawn_under is not None
                assert not again or not any(span.on_older_keys for span in sequence.drawn_under)
        await asyncio.wait_for(sampler.end_target(target.name), 60)


async def test_more_targets_than_slots_take_turns_and_no_sequence_has_anothers_weights(
    text: Served, tmp_path: Path
) -> None:
    """Seven runs on four slots, each of which moves while the samples of all wait for a slot or run."""
    targets = [Target(text, tmp_path / f"run{at}") for at in range(7)]
    for at, target in enumerate(targets):
        for number in range(10 * at + 1, 10 * at + 3):  # words that no other run has
            target.versions.append(forcing(text, target.folder / str(number), number))
        await target.save("first")
    watch = Watch()
    running = [asyncio.create_task(target.sample("first", 300, drawn=watch)) for target in targets]
    await watch.until(40)
    for target in targets:
        await target.save("second")
    moved = 0
    for at, (target, sample) in enumerate(zip(targets, running, strict=True)):
        (sequence,) = (await sample).sequences
        place = 0
        for span in sequence.drawn_under or ():
            drawn = sequence.tokens[place : place + span.tokens].tolist()
            assert set(drawn) <= set(words_of(10 * at + span.version)), (at, span)
            place += span.tokens
        assert place == 300
        assert sequence.drawn_under is not None
        assert sequence.drawn_under[-1].version == 2
        moved += len(sequence.drawn_under) == 2
        await text.sampler.end_target(target.name)
    assert 1 <= moved <= 4  # those that had a slot; the others began with the second version


def test_a_change_behind_the_last_token_does_not_say_that_a_prompt_was_read_with_older_keys() -> None:
    """The sequence began with keys of the version that drew it; the next one came when it had ended."""
    behind = Move(2, 2**62)
    assert drawn_under([Move(1), behind], 9, since=1, cached=128) == (
        DrawnUnder(version=1, tokens=9, on_older_keys=False),
    )
    assert drawn_under([Move(1), Move(2), behind], 9, since=1, cached=128) == (
        DrawnUnder(version=2, tokens=9, on_older_keys=True),
    )


def test_one_slot_or_an_older_vllm_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat_vllm.why_not_in_flight(2) == ""
    assert "one slot for adapters" in compat_vllm.why_not_in_flight(1)
    monkeypatch.setattr(compat_vllm, "_distribution_version", lambda: (0, 26))
    assert compat_vllm.why_not_in_flight(4) == "it needs vLLM 0.32, and 0.26 is installed"
