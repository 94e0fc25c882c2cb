"""The bytes of tokens are together those of their text, whatever the tokenizer's vocabulary is made of."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_local.backend.hosting.openai_answers import Asked, Choice, offsets_in
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.rendered_input import ReadPrompt
from tinker_local.backend.rendering.text import TextSoFar
from tinker_local.backend.sampling.sampler import DrawnTokens
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SAID = "né <0xE4> 你好 👩‍🚀 a▁b \ufffd"


def byte_level() -> HFText:
    """Each letter of its vocabulary is a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return HFText(PreTrainedTokenizerFast(tokenizer_object=bpe))


def byte_fallback(*, strip: bool = False) -> HFText:
    """A few letters, and bytes for others. `strip`: no blank at the beginning of a text, as in Llama 2's decoder."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "好", "\ufffd"]
    bpe = Tokenizer(
        models.BPE({text: index for index, text in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    bpe.normalizer = normalizers.Replace(" ", "▁")
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return HFText(PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>"))


def streamed(text: HFText, pieces: Sequence[Sequence[int]]) -> str:
    so_far = TextSoFar(text.decode, ())
    return "".join(so_far.add(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces))


@pytest.mark.parametrize(
    ("text", "written"),
    [(byte_level(), SAID), (byte_fallback(), SAID.replace("▁", " "))],
    ids=["byte level", "byte fallback"],
)
def test_bytes_of_tokens_are_those_of_their_text(text: HFText, written: str) -> None:
    tokens = text.prompt(SAID).to_tokens().tolist()
    assert text.decode(tokens) == written
    assert any("\ufffd" in text.token(token) for token in tokens)
    assert b"".join(map(text.token_bytes, tokens)) == written.encode()


def test_every_byte_has_its_token() -> None:
    for text in (byte_level(), byte_fallback()):
        found = {text.token_bytes(token) for token in range(263) if text._tokenizer.convert_ids_to_tokens(token)}
        assert found >= {bytes([byte]) for byte in range(256)}


def test_tokens_keep_the_blank_that_a_decoder_drops_at_the_beginning() -> None:
    text = byte_fallback(strip=True)
    tokens = text.prompt("a b é").to_tokens().tolist()
    assert [text.token(token) for token in tokens] == ["a", " ", "b", " ", "é"]
    assert b"".join(map(text.token_bytes, tokens)) == text.decode(tokens).encode()


@given(st.lists(st.sampled_from([*"aé好你😀".encode(), 0xFF, 0xC3]) | st.integers(0, 255), max_size=40), st.data())
def test_bytes_that_follow_a_character_do_not_take_it_back(said: list[int], data: st.DataObject) -> None:
    text = byte_fallback()
    tokens = [byte + 1 for byte in said]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)))))
    pieces = [tokens[start:end] for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True)]
    assert streamed(text, pieces) == text.decode(tokens)
    assert bytes(said).decode(errors="ignore") == text.decode(tokens).replace("\ufffd", "")


def test_bytes_that_are_characters_are_decoded_as_hugging_face_does() -> None:
    text = byte_fallback()
    tokens = text.prompt("né 你 👩 a▁b").to_tokens().tolist()
    assert text.decode(tokens) == text._tokenizer.decode(tokens)
    wide = [byte + 1 for byte in "▁".encode()]
    assert text.decode([*wide, 0xFF + 1]) == "▁\ufffd"
    assert text.decode([0, *wide]) == "▁"
    assert text.decode_all([0, 0xE4 + 1]) == "<unk>\ufffd"


READ = ReadPrompt(np.array([0x61 + 1], np.int32), ())


def drawn(tokens: Sequence[int], others: Sequence[int] = ()) -> DrawnTokens:
    likeliest = tuple(((token, -1.0), *((other, -2.0) for other in others or tokens[:1])) for token in tokens)
    return DrawnTokens(0, tuple(tokens), (-1.0,) * len(tokens), likeliest, "length")


def logprobs_of(text: HFText, tokens: Sequence[int], *, chat: bool, others: Sequence[int] = ()) -> Any:
    """Of an answer of OpenAI's API with these tokens. `others`: beside each; the first token, if there are none."""
    asked = Asked(chat, "a", (), 1, 1, False)
    return Choice(asked, text, 0, READ).add(drawn(tokens, others), whole=True)[1]


def test_parts_of_characters_are_told_apart_in_logprobs() -> None:
    text = byte_level()
    tokens = text.prompt("a你é").to_tokens().tolist()
    content = logprobs_of(text, tokens, chat=True)["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in "a你é".encode()]
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [entry["bytes"] for entry in content]
    given = logprobs_of(text, tokens, chat=False)
    assert given["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "你é".encode())]
    assert given["text_offset"] == [0, 1, 1, 1, 2, 2]
    assert [len(others) for others in given["top_logprobs"]] == [1, 2, 2, 2, 2, 2]
    cut = [*tokens[:3], tokens[0]]  # the character never ends
    assert text.decode(cut) == "a\ufffda"
    assert logprobs_of(text, cut, chat=False)["text_offset"] == [0, 1, 1, 2]


def test_all_alternatives_are_there_also_of_one_text() -> None:
    """In Llama 2's vocabulary, "a" is a token and so is its byte."""
    text = byte_fallback()
    letter, byte = text.prompt("a").to_tokens().tolist()[0], 0x61 + 1
    assert text.token(letter) == text.token(byte) == "a"
    (top,) = logprobs_of(text, [letter], chat=False, others=[byte, 0x62 + 1])["top_logprobs"]
    assert top == {"a": -1.0, f"token_id:{byte}": -2.0, "b": -2.0}


def test_offsets_are_those_of_the_text_that_is_shown() -> None:
    """Without special tokens, and with the blank that a decoder drops at the beginning of a text: this is none."""
    text = byte_fallback(strip=True)
    text._tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    text = HFText(text._tokenizer)
    tokens = text.prompt(" a<mark> b<mark>é你").to_tokens().tolist()
    shown = Choice(Asked(False, "a", (), 1, 1, False), text, 0, READ).add(drawn(tokens), whole=True)[0].text
    found = logprobs_of(text, tokens, chat=False)
    assert shown == " a bé你"
    assert found["tokens"] == [
        " ",
        "a",
        "<mark>",
        " ",
        "b",
        "<mark>",
        "é",
        *(f"bytes:\\x{b:02x}" for b in "你".encode()),
    ]
    assert found["text_offset"] == [0, 1, 2, 2, 3, 4, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("said", "tokens", "expected"),
    [
        ("a bé你", ["<s>", " a", " b", "é", b"\xe4\xbd", b"\xa0"], [0, 0, 1, 3, 4, 4]),
        (" a", ["<s>", " ", " a", "</s>"], [0, 0, 1, 2]),
        ("", ["<s>"], [0]),
        ("<s>a", ["<s>", "<s>", "a"], [0, 3, 3]),
        ("cafe\u0301 is open", ["ca", "f", "é", " is", " open"], [0, 2, 3, 5, 8]),
    ],
)
def test_offsets_of_a_prompt_leave_out_what_its_tokenizer_adds(
    said: str, tokens: list[str | bytes], expected: list[int]
) -> None:
    parts = [(token.encode() if isinstance(token, str) else token, token in ("<s>", "</s>")) for token in tokens]
    assert offsets_in(said, parts) == expected
