"""Templates that are rendered quickly give what transformers' give, and may read no more."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_local.client.rl import quick_templates
from tinker_local.types.processor_templates import processor_template

from tests.rl import chat_templates

TEMPLATES = {name: value for name, value in vars(chat_templates).items() if name.isupper() and "{" in str(value)}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " s "},
    {"role": "user", "content": "<tool_response>a</tool_response>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb", "items": "c", "tool_calls": []},
    {"role": "user", "content": "{{ c }}\n"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_models["tiny/vision"])


@pytest.fixture(scope="module")
def both(tokenizer: Any) -> Callable[..., tuple[Any, Any]]:
    """What transformers makes of a template, and what we do; or the type and words of what they raise."""

    def outcome(render: Callable[[], str]) -> Any:
        try:
            return render()
        except Exception as error:
            return type(error), str(error)

    def both(source: str, messages: Any = TALK, generate: bool = True, **variables: Any) -> tuple[Any, Any]:
        assert quick_templates.can_render(tokenizer, variables)
        return outcome(
            lambda: tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, chat_template=source, **variables
            )
        ), outcome(lambda: quick_templates.rendered(tokenizer, source, messages, generate, variables))

    return both


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_that_of_transformers(both: Callable[..., tuple[Any, Any]], name: str) -> None:
    for end in range(1, len(TALK) + 1):
        for generate in (True, False):
            theirs, ours = both(TEMPLATES[name], TALK[:end], generate, enable_thinking=False)
            assert theirs == ours


def test_the_text_of_a_processors_template_with_tools_is_that_of_transformers(
    both: Callable[..., tuple[Any, Any]], tiny_models: dict[str, Path]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é<": 1}}}]
    source = processor_template(str(tiny_models["tiny/vision"]))
    assert source
    theirs, ours = both(source, TALK, tools=tools)
    assert theirs == ours
    assert '"name": "f"' in ours


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].role",
        "messages[0].items",  # a method, which hides the entry
        "messages[2].items()",
        "messages[0].nothing",
        "messages[0].nothing.more",
        "messages[0].nothing is defined",
        "messages[0].update({'a': 1})",
        "messages[0].clear",
        "messages.append(1)",
        "messages.__class__",
        "messages[0].__class__",
        "messages[0]['__class__']",
        "''.__class__.__mro__",
        "'a'.upper()",
        "'a'.format",
        "'a{}'.format('b')",
        "'{0.__class__}'.format(1)",
        "'{a}'.format_map({'a': 2})",
        "'a,b'.split(',')[1].strip().replace('b', 'c')",
        "'a'.nothing",
        "namespace(a=1).a",
        "namespace(a=1).b",
        "namespace(a=1).__init__",
        "namespace(f='{0.__class__}'.format).f(1)",
        "cycler('a').next()",
        "raise_exception('no')",
        "messages | tojson",
        "bos_token is defined",
        "documents",
        "tools",
        "range(3) | list",
        "range(10 ** 9)",
    ],
)
def test_a_template_may_read_what_it_may_read_of_transformers(
    both: Callable[..., tuple[Any, Any]], expression: str
) -> None:
    theirs, ours = (re.sub("0x[0-9a-f]+", "", str(each)) for each in both("{{ " + expression + " }}"))
    assert ours == theirs  # but for addresses of functions that are made for each reading
    for attribute in ("loop.first", "loop.nextitem.role", "loop.cycle('a', 'b')", "loop.__class__", "loop._index"):
        theirs, ours = both("{% for message in messages %}{{ " + attribute + " }}{% endfor %}")
        assert ours == theirs


def test_marks_of_answers_are_left_to_transformers_and_text_is_the_same(both: Callable[..., tuple[Any, Any]]) -> None:
    theirs, ours = both("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    assert theirs == ours


@pytest.mark.parametrize("variables", [{"padding": True}, {"documents": []}, {"tools": [len]}])
def test_what_transformers_takes_for_itself_is_left_to_it(tokenizer: Any, variables: dict[str, Any]) -> None:
    assert not quick_templates.can_render(tokenizer, variables)


def test_a_tokenizer_with_its_own_way_is_left_to_it(tokenizer: Any) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *given: Any, **more: Any) -> str:
            return "own"

    assert not quick_templates.can_render(object.__new__(Own), {})
