"""Grammars in vLLM: random weights spell what they say, other requests stay the same, and bad ones do no harm."""

import asyncio
import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.sampling.sampler import DrawnTokens, SampleWork
from tinker_local.backend.threads import Who
from tinker_local.backend.vllm_engine import grammar_process
from tinker_local.backend.vllm_engine.grammar_process import GrammarProcess
from tinker_local.backend.vllm_engine.grammar_server import Limits
from tinker_local.backend.vllm_engine.vllm_sampler import VLLMSampler
from tinker_local.types import InvalidRequestError, SampledSequence, SampleOutput, SamplingParams
from transformers import AutoTokenizer

from tests.sampling.sampling_answers import TEXT

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["colour", "counts", "good"],
    "additionalProperties": False,
}
COLOURS = Grammar.of_json("choice", ["red", "green", "grey"], "structured_outputs.choice")
NUMBER = Grammar("regex", r"-?[0-9]{2,5}\.[05]", "structured_outputs.regex")
# Ambiguous patterns for many properties: xgrammar takes minutes for them with a vocabulary of 150,000.
PATTERNS: Any = {
    "type": "object",
    "properties": {
        f"k{i}": {"type": "string", "pattern": f"^[a-z{chr(0x4E00 + i)}]{{1,{i + 3}}}[^q{i}]*([a-z]+)*$"}
        for i in range(400)
    },
    "required": [f"k{i}" for i in range(400)],
}


def json_grammar(schema: Any) -> Grammar:
    return Grammar.of_json("json", schema, "response_format.json_schema.schema")


def constrained(served: Any, grammar: Grammar | None, num_samples: int = 4, **options: Any) -> SampleWork:
    settings: Any = {"max_tokens": 300, "temperature": 1.0, "seed": 1} | options
    drawn = settings.pop("drawn", None)
    topk = settings.pop("topk_sample_logprobs", 0)
    return SampleWork(
        served.prompt(TEXT),
        None,
        SamplingParams(**settings),
        num_samples,
        grammar=grammar,
        drawn=drawn,
        topk_sample_logprobs=topk,
    )


def spelled(served: Any, output: SampleOutput) -> list[str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(served.folder)
    return [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in output.sequences]


def same(one: SampledSequence, other: SampledSequence) -> None:
    """Up to rounding: grammars are compiled in threads, so requests meet in batches of other sizes."""
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.mutation(
    "grammar-not-given-to-vllm", "_first_params", "        structured_outputs=_structured_outputs(work.grammar),\n", ""
)
async def test_random_weights_spell_what_the_grammar_says(text: Any) -> None:
    ebnf = Grammar("grammar", 'root ::= "(" digit ("," digit)* ")"\ndigit ::= [0-9]', "structured_outputs.grammar")
    schema, colours, numbers, lists = await asyncio.gather(
        *(text.sampler.sample(constrained(text, one)) for one in (json_grammar(SCHEMA), COLOURS, NUMBER, ebnf))
    )
    for said in spelled(text, schema):
        jsonschema.validate(json.loads(said), SCHEMA)
    assert set(spelled(text, colours)) <= {"red", "green", "grey"}
    assert all(re.fullmatch(NUMBER.text, said) for said in spelled(text, numbers))
    assert len(set(spelled(text, numbers))) > 1
    assert all(re.fullmatch(r"\([0-9](,[0-9])*\)", said) for said in spelled(text, lists))
    assert {sequence.stop_reason for sequence in (*schema.sequences, *colours.sequences)} == {"stop"}


async def test_greedy_samples_and_streams_follow_it_too(text: Any) -> None:
    given: list[DrawnTokens] = []
    greedy, streamed = await asyncio.gather(
        text.sampler.sample(constrained(text, COLOURS, 1, temperature=0.0)),
        text.sampler.sample(constrained(text, NUMBER, 1, drawn=given.append)),
    )
    assert spelled(text, greedy)[0] in ("red", "green", "grey")
    assert [token for part in given for token in part.tokens] == streamed.sequences[0].tokens.tolist()
    assert re.fullmatch(NUMBER.text, spelled(text, streamed)[0])


async def test_other_requests_in_the_batch_are_the_same(text: Any) -> None:
    free = constrained(text, None, 2, seed=5, max_tokens=24, stop=(), topk_sample_logprobs=3)
    beside = [constrained(text, None, 4, seed=9, max_tokens=24, stop=()), json_grammar(SCHEMA)]
    plain, _ = await asyncio.gather(text.sampler.sample(free), text.sampler.sample(beside[0]))
    mixed, _ = await asyncio.gather(
        text.sampler.sample(free), text.sampler.sample(constrained(text, beside[1], 4, seed=9))
    )
    for one, other in zip(plain.sequences, mixed.sequences, strict=True):
        same(one, other)
        assert one.topk_logprobs is not None
        assert other.topk_logprobs is not None
        np.testing.assert_array_equal(one.topk_logprobs.token_ids, other.topk_logprobs.token_ids)
        np.testing.assert_allclose(one.topk_logprobs.logprobs, other.topk_logprobs.logprobs, rtol=0, atol=1e-5)


async def test_logprobs_are_those_of_the_tokens_that_it_allows(text: Any) -> None:
    work = constrained(text, COLOURS, 3, temperature=0.7, topk_sample_logprobs=8)
    tokenizer: Any = AutoTokenizer.from_pretrained(text.folder)
    for sequence in (await text.sampler.sample(work)).sequences:
        so_far = ""
        logits = text.hf.logits(work.prompt, sequence.tokens.tolist())[work.prompt.length - 1 : -1]
        topk = sequence.topk_logprobs
        assert topk is not None
        for row, token, logprob, ids, values in zip(
            logits, sequence.tokens, sequence.logprobs, topk.token_ids, topk.logprobs, strict=True
        ):
            if so_far in ("red", "green", "grey"):  # what ends it: one of Qwen's two
                allowed = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "<|endoftext|>")]
            else:
                allowed = [
                    other
                    for other in range(len(tokenizer))
                    if other not in tokenizer.all_special_ids
                    and any(word.startswith(so_far + tokenizer.decode([other])) for word in ("red", "green", "grey"))
                ]
            expected = (row[allowed] / 0.7).log_softmax(-1)
            text.same(np.asarray(logprob), expected[allowed.index(int(token))].numpy(), 1 / 0.7)
            found = {int(one): value for one, value in zip(ids, values, strict=True) if value > -np.inf}
            assert found.keys() <= set(allowed)
            so_far += tokenizer.decode([int(token)], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (json_grammar({"type": "colour"}), "response_format.json_schema.schema: .*colour"),
        (
            json_grammar({"type": "number", "multipleOf": 3}),
            "response_format.json_schema.schema: multipleOf at #: cannot",
        ),
        (json_grammar({"$ref": "#/$defs/none"}), "response_format.json_schema.schema: "),
        (Grammar("regex", "(a", "structured_outputs.regex"), "structured_outputs.regex: .*parenthesis"),
        (Grammar("grammar", "root ::= ", "structured_outputs.grammar"), "structured_outputs.grammar: "),
        (Grammar("structural_tag", '{"a": 1}', "structured_outputs.structural_tag"), "structural_tag: "),
    ],
)
async def test_a_bad_grammar_is_refused_by_its_field_and_the_engine_lives_on(
    text: Any, grammar: Grammar, reason: str
) -> None:
    beside = asyncio.create_task(text.sampler.sample(constrained(text, COLOURS, 2)))
    with pytest.raises(InvalidRequestError, match=reason):
        await text.sampler.sample(constrained(text, grammar))
    assert set(spelled(text, await beside)) <= {"red", "green", "grey"}
    assert text.sampler._engine.restarts == 0


def test_a_schema_that_refers_to_another_document_is_refused() -> None:
    here = {"$defs": {"$ref": {"type": "null"}}, "properties": {"a": [{"$ref": "#/$defs/$ref"}]}}
    assert json.loads(json_grammar(here).text) == here
    with pytest.raises(InvalidRequestError, match=r"schema: \$ref 'https://example.org/s' has to begin with '#'"):
        json_grammar({"anyOf": [{"properties": {"a": {"$ref": "https://example.org/s"}}}]})


@pytest.mark.more
async def test_a_grammar_that_is_too_much_is_killed_with_its_process_and_the_next_one_starts_again(text: Any) -> None:
    process = GrammarProcess(str(text.folder), 512, Limits(compile_seconds=1))
    try:
        with pytest.raises(InvalidRequestError, match=r"schema: .* take more than 1 s of processor time and 1 GiB"):
            await process.check(json_grammar(PATTERNS))
        await process.check(COLOURS)
        await process.check(NUMBER)
    finally:
        process.close()
    small = GrammarProcess(str(text.folder), 512, Limits(compile_bytes=2**20))
    try:
        with pytest.raises(InvalidRequestError, match=r"json_schema.schema: "):
            await small.check(json_grammar(PATTERNS))
    finally:
        small.close()


async def test_requests_that_follow_grammars_leave_places_for_other_owners(
    text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "REQUESTS", 4)
    monkeypatch.setattr(grammar_process, "REQUESTS_OF_OWNER", 3)
    process = GrammarProcess(str(text.folder), 512, Limits())
    try:
        alices = [asyncio.create_task(process.open(COLOURS, 1, Who("alice", "s"))) for _ in range(5)]
        bobs = await process.open(COLOURS, 1, Who("bob", "s"))
        done, waiting = await asyncio.wait(alices, timeout=0.2)
        while len(done) < 3:
            done, waiting = await asyncio.wait(alices, timeout=0.2)
        assert (len(done), len(waiting)) == (3, 2)
        for each in done:
            (await each).close()
        for each in waiting:
            (await each).close()
        bobs.close()
    finally:
        process.close()


@pytest.mark.more
async def test_an_engine_that_was_built_anew_follows_grammars(text: Any) -> None:
    thread = text.sampler._thread
    sampler = VLLMSampler(text.options, thread)
    try:
        assert set(spelled(text, await sampler.sample(constrained(text, COLOURS)))) <= {"red", "green", "grey"}

        def break_step(engine: Any) -> None:
            def step() -> None:
                raise RuntimeError("broken on purpose")

            engine.step = step

        await asyncio.wrap_future(thread.call(sampler._engine, break_step))
        with pytest.raises(Exception, match="broken on purpose"):
            await sampler.sample(constrained(text, NUMBER))
        assert set(spelled(text, await sampler.sample(constrained(text, COLOURS)))) <= {"red", "green", "grey"}
    finally:
        await sampler.close()
