"""Texts that are encoded in pieces have the tokens that the tokenizer makes of the whole."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tinker_local.client.rl import token_pieces
from tinker_local.client.rl.token_pieces import TokenPieces
from tinker_local.types.control_tokens import control_tokens

from tests.real_tokenizers.conftest import Real

TEXTS = (
    "né \u241f 你好",
    "a  b\n\n",
    "\tx",
    "1 2 3",
    " ",
    "\n",
    "x",
    "İ ß",
    "👩‍🚀",
    "e\u0301",
    "0" * 40,
    "\r\n ",
    "▁a ▁",
)


def plain(tokenizer: Any, text: str) -> list[int]:
    """What Hugging Face's tokenizer makes of a text."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def mixed(draw: random.Random, marks: list[str]) -> str:
    """Texts and marks in any order."""
    return "".join(draw.choice(draw.choice((TEXTS, marks))) for _ in range(draw.randint(1, 9)))


def test_a_text_in_pieces_has_the_tokens_of_the_whole(real: Real) -> None:
    tokenizer, draw = real.tokenizer, random.Random(5)
    marks = [*real.structure]
    pieces = TokenPieces(tokenizer, marks, marks)
    texts = [mixed(draw, marks) for _ in range(400)]
    pieces.ahead((text, False) for text in texts[:200])
    assert len(pieces._marks) >= 4  # else it would encode wholes, and this would say nothing
    for text in texts:
        assert pieces.encode(text, False) == plain(tokenizer, text), text


def test_what_follows_a_mark_has_the_tokens_that_it_has_there(real: Real) -> None:
    tokenizer, draw = real.tokenizer, random.Random(6)
    marks = [*real.structure]
    pieces = TokenPieces(tokenizer, marks, marks)
    for text in (mixed(draw, marks) for _ in range(200)):
        assert pieces.encode(text, True) == plain(tokenizer, marks[0] + text)[1:], text


def test_pieces_that_were_forgotten_are_encoded_again(qwen3: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pieces, "REMEMBERED", 50)
    draw, marks = random.Random(7), [*qwen3.structure]
    pieces = TokenPieces(qwen3.tokenizer, marks, marks)
    texts = [mixed(draw, marks) for _ in range(60)]
    for text in texts * 2:
        pieces.ahead([(text, False)])
        assert pieces.encode(text, False) == plain(qwen3.tokenizer, text)
        assert len(pieces._known) + len(pieces._older) < 80


def with_token(real: Real, token: Any, **settings: Any) -> Any:
    """The tokenizer with one more added token."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.path)
    tokenizer.add_tokens([AddedToken(token, **{"normalized": False, **settings})])
    return tokenizer


@pytest.mark.parametrize(
    ("token", "settings"),
    [
        ("<cut>", {"lstrip": True}),
        ("<cut>", {"rstrip": True}),
        ("<cut>", {"single_word": True}),
        ("<cut>", {"normalized": True}),
    ],
)
def test_a_token_that_takes_what_stands_around_it_is_not_cut_at(qwen3: Real, token: str, settings: Any) -> None:
    tokenizer = with_token(qwen3, token, **settings)
    pieces = TokenPieces(tokenizer, [token, "<|im_end|>"], [token])
    assert {*pieces._marks} == {"<|im_end|>"}
    for text in (f"a  {token}  b", f"a{token}b", f"<|im_end|> {token} <|im_end|>\n"):
        assert pieces.encode(text, False) == plain(tokenizer, text)


@pytest.mark.parametrize("other", ["<|im_end|>\n", "x<|im_end|>", "y<|im"])
def test_a_mark_that_a_longer_token_may_hide_is_not_cut_at(qwen3: Real, other: str) -> None:
    tokenizer = with_token(qwen3, other)
    pieces = TokenPieces(tokenizer, ["<|im_end|>", "<|im_start|>"], ["<|im_end|>"])
    assert "<|im_end|>" not in pieces._marks
    for text in ("a<|im_end|>\nb", "x<|im_end|>b", "y<|im_end|>", "y<|im_start|>"):
        assert pieces.encode(text, False) == plain(tokenizer, text)


def test_another_threads_truncation_and_padding_do_not_count(qwen3: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = TokenPieces(qwen3.tokenizer, ["<|im_end|>"], ["<|im_end|>"])
    wanted = plain(qwen3.tokenizer, "one two three four")
    qwen3.tokenizer("x", truncation=True, max_length=2, padding="max_length")
    assert pieces.encode("one two three four", False) == wanted
    qwen3.tokenizer("x", split_special_tokens=True)
    assert pieces.encode("one two three<|im_end|>", False)[-1] == qwen3.tokenizer.convert_tokens_to_ids("<|im_end|>")
    qwen3.tokenizer("x")


def test_a_tokenizer_with_an_encode_of_its_class_is_asked_for_each_text(qwen3: Real) -> None:
    class Own(type(qwen3.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **how: Any) -> list[int]:
            return [len(text)]

    tokenizer = Own.from_pretrained(qwen3.path)
    pieces = TokenPieces(tokenizer, ["<|im_end|>"], [])
    assert pieces._marks == {}
    assert pieces.encode("four<|im_end|>", False) == [14]


@pytest.fixture
def chats() -> Callable[..., Any]:
    from tinker_local.client.rl import Chat

    return Chat


def test_a_chat_cuts_at_the_marks_that_its_template_writes(chatting: Real, chats: Callable[..., Any]) -> None:
    """And not at all of Gemma's six thousand, with which cutting would be slow."""
    chat = chats(chatting.tokenizer)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = chat.render(talk, generate=True)
    used = {name for name in control_tokens(chatting.tokenizer) if name in text}
    assert used <= {*chat._pieces._marks}
    assert len(chat._pieces._marks) < 100
    chat.encode_ahead([(text, False)])
    assert chat.encode(text) == plain(chatting.tokenizer, text)
