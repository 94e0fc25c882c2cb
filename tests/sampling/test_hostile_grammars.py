"""Grammars that compile and then cost more and more: their request ends by its budget, and no step waits for it."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.vllm_engine.grammar_process import GrammarProcess
from tinker_local.backend.vllm_engine.grammar_server import Limits
from tinker_local.types import InvalidRequestError

from tests.sampling.test_grammars import COLOURS, constrained, same, spelled

RULES = 50
DOUBLING = "\n".join(
    ["root ::= r0 root", *(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(RULES)), f'r{RULES} ::= "a"']
)
HOSTILE = [
    Grammar("grammar", DOUBLING, "structured_outputs.grammar"),
    Grammar("regex", "((a?){100}){100}", "structured_outputs.regex"),
]
SMALL = Limits(token_seconds=0.1, request_seconds=0.3, seconds_per_token=0.0)


@pytest.fixture
def small_budgets(text: Any) -> Iterator[None]:
    """Budgets that a grammar uses up in a short test."""
    before = text.sampler._grammars
    text.sampler._grammars = GrammarProcess(str(text.folder), text.sampler._vocab_size, SMALL)
    yield
    text.sampler._grammars.close()
    text.sampler._grammars = before


@pytest.mark.mutation(
    "grammar-without-a-budget",
    "grammar_server.py",
    "        signal.setitimer(signal.ITIMER_PROF, self._seconds)\n",
    "        pass\n",
)
@pytest.mark.parametrize("grammar", HOSTILE, ids=["doubling", "repeated"])
async def test_a_grammar_that_costs_seconds_a_token_ends_alone(text: Any, small_budgets: None, grammar: Grammar) -> None:
    free = constrained(text, None, 2, seed=5, max_tokens=24, stop=())
    alone = await text.sampler.sample(free)
    hostile = asyncio.create_task(text.sampler.sample(constrained(text, grammar, 2, max_tokens=400)))
    neighbours = []
    while not hostile.done():
        output, other = await asyncio.gather(
            text.sampler.sample(free), text.sampler.sample(constrained(text, COLOURS, 2))
        )
        assert set(spelled(text, other)) <= {"red", "green", "grey"}
        neighbours.append(output)
    with pytest.raises(InvalidRequestError, match=rf"{grammar.field}: following it takes more than 0.1 s of processor"):
        await hostile
    for output in neighbours:
        for one, expected in zip(output.sequences, alone.sequences, strict=True):
            same(one, expected)
    assert text.sampler._engine.restarts == 0
    assert not text.sampler._engine.in_flight


async def test_the_engine_makes_steps_while_a_grammar_computes(text: Any) -> None:
    """However long a token of it takes: here its process stands still."""
    import os
    import signal

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
    output = await slow
    assert [len(said) for said in spelled(text, output)] == [200]


async def test_a_request_that_is_cancelled_ends_its_process(text: Any) -> None:
    task = asyncio.create_task(
        text.sampler.sample(constrained(text, Grammar("regex", "[ab]{3000}", "f"), 1, max_tokens=3000))
    )
    masks = text.sampler._engine.built.grammar_masks
    while not masks._matchers:
        await asyncio.sleep(0.01)
    (matcher,) = masks._matchers.values()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert matcher._process == -1
    deadline = time.monotonic() + 60
    while matcher.fileno() in masks._matchers and time.monotonic() < deadline:
        await text.sampler.sample(constrained(text, COLOURS, 1))
    assert not masks._matchers or matcher not in masks._matchers.values()


async def test_a_matcher_that_finds_no_token_ends_its_request_with_the_reason(text: Any) -> None:
    dead = Grammar("grammar", 'root ::= "a" never\nnever ::= "b" never', "structured_outputs.grammar")
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.grammar: "):
        await text.sampler.sample(constrained(text, dead, 1, max_tokens=40))
