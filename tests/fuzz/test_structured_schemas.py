"""Random schemas: what a grammar of one allows is JSON of the schema, by `jsonschema`, or the schema is refused."""

import json
import random
import secrets
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import xgrammar  # type: ignore[import-not-found]
from tinker_local.backend.rendering.structured.json_schema import SchemaError, grammar_of
from transformers import AutoTokenizer

from tests.conftest import TEXT
from tests.fuzz.random_schemas import Schemas, Walker


@contextmanager
def deep_stack() -> Iterator[ThreadPoolExecutor]:
    """A thread for texts that are nested so deep that `jsonschema` needs more than Python's 1,000 frames."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 29)
    sys.setrecursionlimit(100_000)
    try:
        with ThreadPoolExecutor(1) as thread:
            yield thread
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)


def faults(folder: Path, seed: int, count: int) -> tuple[int, int]:
    """How many of `count` schemas were followed, and how many texts of them were right."""
    with deep_stack() as thread:
        return thread.submit(_faults, folder, seed, count).result()


def _faults(folder: Path, seed: int, count: int) -> tuple[int, int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    walker = Walker(vocabulary, tokenizer.eos_token_id)
    followed = texts = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        schema = Schemas(rng).whole()
        judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            judge.check_schema(schema)
            compiled = compiler.compile_grammar(grammar_of(schema))
        except (jsonschema.SchemaError, SchemaError):
            continue
        followed += 1
        for _ in range(4):
            text = walker.text(compiled, rng)
            if text is not None:
                judge(schema).validate(json.loads(text.decode()))
                texts += 1
    return followed, texts


def test_what_random_schemas_allow_is_json_of_them(tiny_models: dict[str, Path]) -> None:
    assert faults(tiny_models[TEXT], 0, 150)[1] > 300
    seed = secrets.randbelow(2**32)
    print(f"faults(folder, seed={seed}, count=100)")
    assert faults(tiny_models[TEXT], seed, 100)[1] > 50


@pytest.mark.more
def test_what_many_random_schemas_allow_is_json_of_them(tiny_models: dict[str, Path]) -> None:
    seed = secrets.randbelow(2**32)
    print(f"faults(folder, seed={seed}, count=4000)")
    assert faults(tiny_models[TEXT], seed, 4000)[1] > 4000


def test_a_text_that_is_nested_deep_is_judged_too() -> None:
    text = "[" * 1200 + "]" * 1200
    judge = jsonschema.Draft202012Validator({"items": {"anyOf": [{"allOf": [{"$ref": "#"}]}]}, "type": "array"})
    with deep_stack() as thread:
        thread.submit(lambda: judge.validate(json.loads(text))).result()
