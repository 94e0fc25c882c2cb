"""Grammars that compile and then cost more and more: their request ends by its budget, and no step waits for it."""

import asyncio
import importlib.metadata
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tinker_local.backend.rendering.grammar import SWITCHED_OFF, Grammar
from tinker_local.backend.vllm_engine import compat_vllm
from tinker_local.backend.vllm_engine.grammar_process import GrammarProcess
from tinker_local.backend.vllm_engine.grammar_server import Limits
from tinker_local.types import InvalidRequestError

from tests.sampling.test_grammars import COLOURS, constrained, same, spelled

pytestmark = pytest.mark.more

RULES = 50
DOUBLING = "\n".join(
    ["root ::= r0 root", *(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(RULES)), f'r{RULES} ::= "a"']
)
HOSTILE = {
    "a token": (Grammar("grammar", DOUBLING, "f"), Limits(token_seconds=0.1)),
    "a request": (
        Grammar("grammar", DOUBLING, "f"),
        Limits(token_seconds=60, request_seconds=0.1, seconds_per_token=0),
    ),
}


@pytest.fixture(params=list(HOSTILE.values()), ids=list(HOSTILE))
def hostile(text: Any, request: pytest.FixtureRequest) -> Iterator[Grammar]:
    """A grammar, and a sampler with a budget that it uses up in a short test."""
    grammar, limits = request.param
    before = text.sampler._grammars
    text.sampler._grammars = GrammarProcess(str(text.folder), text.sampler._vocab_size, limits)
    yield grammar
    text.sampler._grammars.close()
    text.sampler._grammars = before


async def test_a_grammar_that_costs_seconds_a_token_ends_alone(text: Any, hostile: Grammar) -> None:
    free = constrained(text, None, 2, seed=5, max_tokens=24, stop=())
    alone = await text.sampler.sample(free)
    ended = asyncio.create_task(text.sampler.sample(constrained(text, hostile, 2, max_tokens=900)))
    neighbours = []
    while not ended.done():
        neighbours.append(await text.sampler.sample(free))
    with pytest.raises(
        InvalidRequestError, match=r"f: following it takes more than .* s of processor time for one token"
    ):
        await ended
    for output in neighbours:
        for one, expected in zip(output.sequences, alone.sequences, strict=True):
            same(one, expected)
    assert text.sampler._engine.restarts == 0
    assert not text.sampler._engine.in_flight


async def test_the_engine_makes_steps_while_a_grammar_computes(text: Any) -> None:
    """However long a token of it takes: here its process stands still."""
    text.sampler._grammars._limits = Limits(silent_seconds=3600)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    work = constrained(text, Grammar("regex", "[ab]{200}", "structured_outputs.regex"), 1, max_tokens=300,
                       drawn=lambda _: loop.call_soon_threadsafe(started.set))  # fmt: skip
    slow = asyncio.create_task(text.sampler.sample(work))
    await started.wait()
    (matcher,) = text.sampler._engine.built.grammar_masks._matchers.values()
    os.kill(matcher._pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            output = await text.sampler.sample(constrained(text, COLOURS, 2))
            assert set(spelled(text, output)) <= {"red", "green", "grey"}
            await text.sampler.sample(constrained(text, None, 2, max_tokens=8, stop=()))
        assert not slow.done()
    finally:
        os.kill(matcher._pid, signal.SIGCONT)
        text.sampler._grammars._limits = Limits()
    output = await slow
    assert [len(said) for said in spelled(text, output)] == [200]


async def test_a_request_that_is_cancelled_ends_its_process(text: Any) -> None:
    task = asyncio.create_task(
        text.sampler.sample(constrained(text, Grammar("regex", "[ab]{900}", "f"), 1, max_tokens=900))
    )
    masks = text.sampler._engine.built.grammar_masks
    while not masks._matchers:
        await text.sampler.pulse()
    (matcher,) = masks._matchers.values()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert matcher._process == -1
    deadline = time.monotonic() + 60
    while matcher.fileno() in masks._matchers and time.monotonic() < deadline:
        await text.sampler.sample(constrained(text, COLOURS, 1))
    assert not masks._matchers or matcher not in masks._matchers.values()


def test_a_vllm_whose_grammars_have_known_faults_follows_none_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.31.1+cu130"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert compat_vllm.why_no_grammars("auto").startswith("needs vLLM 0.32, and 0.31 is installed")
    assert compat_vllm.why_no_grammars("always") == ""
    installed["vllm"] = "0.32.0"
    assert compat_vllm.why_no_grammars("auto") == ""
    assert compat_vllm.why_no_grammars("never") == SWITCHED_OFF
