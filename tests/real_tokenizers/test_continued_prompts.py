"""Prompts that continue what was sampled, with published tokenizers and chat templates."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tinker_local.backend.rendering.continued import Rendering, continued
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.text import ChatMessage, ToolCall

from tests.real_tokenizers.conftest import FILES

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED = ChatMessage("user", ("How is the weather?",))


def rendering(folder: str, **variables: Any) -> Rendering:
    path = FILES / folder
    if not (path / "tokenizer.json").exists():
        pytest.skip(f"no {folder} in .test-files; run scripts/fetch_test_files.py")
    text = HFText.load(str(path))
    assert text is not None
    return Rendering(text, variables, [], {"go_on": False, "as_tokens": (), "no_thoughts": False})


def end_of_turn(given: Rendering) -> int:
    """The special token that the template writes behind a reply."""
    said = [given.items([ASKED, ChatMessage("assistant", (text,)), ASKED]) for text in ("0", "1")]
    pairs = zip(reversed(said[0]), reversed(said[1]), strict=False)
    tail = []
    for one, other in pairs:
        if one != other:
            break
        tail.append(one)
    token = tail[-1]
    assert isinstance(token, int)
    return token


@pytest.mark.parametrize("folder", ["tokenizer-qwen3", "tokenizer-llama3_1", "tokenizer-gemma3"])
def test_a_reply_in_other_tokens_than_the_templates_stays_as_it_was_sampled(folder: str) -> None:
    given = rendering(folder)
    prompt = given.items([ASKED])
    end = end_of_turn(given)
    letters = [token for letter in "sunny" for token in given.codec.prompt(letter).to_tokens().tolist()[-1:]]
    sampled = [*letters, end]
    messages = [ASKED, ChatMessage("assistant", ("sunny",)), ChatMessage("user", ("And now?",))]
    found = continued(given, messages, 1, prompt, sampled)
    fresh = given.items(messages)
    assert found is not None
    assert found[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert found != fresh  # the template's own text has fewer tokens for the reply
    assert given.codec.decode_all(found) == given.codec.decode_all(fresh)


def test_a_call_written_again_is_not_written_into_the_prompt_again() -> None:
    given = replace(rendering("tokenizer-qwen3"), functions=[TOOL])
    prompt, end = given.items([ASKED]), end_of_turn(given)
    call = '<tool_call>\n{"name":"look","arguments":{"at":  1}}\n</tool_call>'
    sampled = [*given.codec.prompt(call).to_tokens().tolist(), end]
    calls = (ToolCall("a", "look", json.dumps({"at": 1}, indent=2)),)
    result = ChatMessage("tool", ("rain",), (), ("a", "look"))
    found = continued(given, [ASKED, ChatMessage("assistant", (), calls), result], 1, prompt, sampled)
    assert found is not None
    assert found[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert given.codec.decode_all(found[len(prompt) + len(sampled) :]).startswith("\n<|im_start|>user\n<tool_response>")


def test_thoughts_that_the_template_drops_are_no_continuation_unless_they_are_kept() -> None:
    given = rendering("tokenizer-qwen3")
    prompt, end, text = given.items([ASKED]), end_of_turn(given), "<think>\nhm\n</think>\n\nsunny"
    sampled = [*given.codec.prompt(text).to_tokens().tolist(), end]
    messages = [ASKED, ChatMessage("assistant", (text,)), ChatMessage("user", ("And now?",))]
    assert continued(given, messages, 1, prompt, sampled) is None
    kept = continued(given, messages, 1, prompt, sampled, even_rewritten=True)
    assert kept is not None
    assert kept[: len(prompt) + len(sampled)] == [*prompt, *sampled]
