"""Text of published tokenizers, streamed at any place, and the bytes of its tokens."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from tinker_local.backend.rendering.renderer import ModelRenderer
from tinker_local.backend.rendering.text import ChatMessage, TextSoFar
from tinker_local.types import InvalidRequestError
from tinker_local.types.control_tokens import special_tokens

from tests.real_tokenizers.conftest import Real, real_one

SAID = (
    "Hi 👩‍🚀 🇨🇭, né, ne\u0301 und Ζ\u0306: 你好，世界 𠜎! 𒀀𒀁𒀂𒀃𒀄 ก็ \u200d\U0001f9ff ᚠᛇᚻ x\ufffdy "
    "\U000e0041 <0xE4> \x00\x7f\r\n\t  end \u0338\u0338 مرحبا שלום 한국어"
)


def streamed(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], cuts: Sequence[int]) -> str:
    """The text of `tokens` that come in pieces, which end at `cuts`."""
    so_far, ends = TextSoFar(decode, ()), (*cuts, len(tokens))
    pieces = itertools.pairwise((0, *ends))
    return "".join(so_far.add(tokens[start:end], last=end == len(tokens)) for start, end in pieces)


def test_a_text_is_the_same_streamed_with_a_split_at_every_token(real: Real) -> None:
    tokens = real.text_ids(SAID)
    assert any("\ufffd" in real.text.token(token) for token in tokens)
    whole = real.text.decode(tokens)
    assert whole == real.tokenizer.decode(tokens)
    assert streamed(real.text.decode, tokens, range(1, len(tokens))) == whole
    for cut in range(len(tokens) + 1):
        assert streamed(real.text.decode, tokens, [cut]) == whole, cut


def test_tokens_that_are_no_text_are_the_same_streamed_at_any_places(real: Real) -> None:
    """Bytes that are not UTF-8, by tokens that are parts of characters; and special tokens."""
    draw = random.Random(7)
    every = len(real.tokenizer)
    parts = [token for token in range(0, every, 7) if "\ufffd" in real.text.token(token)]
    special = real.tokenizer.convert_tokens_to_ids(list(real.structure))
    assert len(parts) > 10
    for _ in range(150):
        kinds = draw.choices((parts, special, range(every)), (6, 1, 3), k=draw.randrange(1, 40))
        tokens = [draw.choice(kind) for kind in kinds]
        cuts = sorted(draw.sample(range(len(tokens)), draw.randrange(len(tokens))))
        for decode in (real.text.decode, real.text.decode_all):
            for ends in (range(1, len(tokens)), cuts):
                assert streamed(decode, tokens, ends) == decode(tokens), tokens


def test_the_bytes_of_tokens_are_those_of_their_text(real: Real) -> None:
    tokens = real.text_ids(SAID)
    assert b"".join(map(real.text.token_bytes, tokens)) == real.text.decode(tokens).encode()
    marks = real.tokenizer.convert_tokens_to_ids(list(real.structure))
    assert [real.text.token_bytes(token).decode() for token in marks] == list(real.structure)


def test_every_token_has_its_bytes(real: Real) -> None:
    """Alone each is what its bytes are, where they are text, and each byte has a token."""
    single = set()
    for token in (*range(600), *range(600, len(real.tokenizer), 9)):
        parts = real.text.token_bytes(token)
        assert parts
        if len(parts) == 1:
            single.add(parts)
        if token < 600 or "\ufffd" in real.text.token(token):
            assert parts.decode("utf-8", "replace") == real.tokenizer.decode([token]), token
    assert len(single) >= 243, "UTF-8 has no other bytes"


def test_a_text_of_all_characters_of_a_block_has_its_tokens_bytes(real: Real) -> None:
    for start in (0x80, 0x0900, 0x1F300, 0x20000):
        said = "".join(map(chr, range(start, start + 128)))
        tokens = real.text_ids(said)
        assert b"".join(map(real.text.token_bytes, tokens)) == real.text.decode(tokens).encode(), hex(start)


def test_a_token_is_special_if_decoding_leaves_it_out(real: Real) -> None:
    special = {*real.tokenizer.convert_tokens_to_ids([*special_tokens(real.tokenizer)])}
    assert special
    for token in (*special, *range(600), *real.text_ids(SAID)):
        assert real.text.is_special(token) == (token in special), token


@pytest.mark.parametrize("cut", ["<", "<|", "<start"])
def test_a_stop_in_the_middle_of_tokens_ends_a_streamed_text(real: Real, cut: str) -> None:
    said = f"👩‍🚀 你好{cut}end 你好"
    tokens = real.text_ids(said)
    for stops in ([cut], ["好" + cut, "never"]):
        so_far = TextSoFar(real.text.decode, stops)
        pieces = [so_far.add([token], last=at == len(tokens) - 1) for at, token in enumerate(tokens)]
        assert "".join(pieces) == said[: said.index(stops[0])]
        assert so_far.stopped == stops[0]


def test_rows_of_the_embedding_that_are_no_token_are_no_text(real: Real) -> None:
    """Published models have more of them than tokens, and random weights draw them."""
    beyond = range(len(real.tokenizer), real.vocab_size)
    assert all(real.text.token_bytes(token) == b"" for token in beyond)
    tokens = [token for row in beyond[:20] for token in (row, *real.text_ids("né"))]
    assert real.text.decode(tokens) == streamed(real.text.decode, tokens, range(1, len(tokens)))


def test_a_token_beyond_the_embedding_is_refused_in_a_prompt_and_text_in_a_message() -> None:
    """Gemma 3's models without vision share the tokenizer of those with it, whose last token is an image's."""
    real = real_one("gemma3")
    renderer = ModelRenderer(real.vocab_size)
    with pytest.raises(InvalidRequestError, match="262144"):
        renderer.render(real.text.prompt("a <image_soft_token>"), "prompt")
    asked = real.text.chat([ChatMessage("user", ("a <image_soft_token>",))], {}, go_on=False)
    assert renderer.render(asked, "prompt").length > 5
