"""Text that comes in pieces is the text of all tokens at once, up to the first stop."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_local.backend.rendering import text as module
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.text import TextSoFar

from tests.conftest import TEXT, few


def as_bytes(tokens: Sequence[int]) -> str:
    """Each token is a byte."""
    return bytes(tokens).decode("utf-8", "replace")


def pieces(decode: Any, tokens: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    so_far = TextSoFar(decode, stops)
    return [so_far.add((token,), last=at == len(tokens) - 1) for at, token in enumerate(tokens)]


@settings(max_examples=few(300), deadline=None)
@given(
    st.lists(st.sampled_from([*"ab 你é😀".encode(), 0xFF, 0xC3, 0xE4]) | st.integers(0, 255), min_size=1, max_size=60)
)
def test_bytes_of_any_kind_become_the_text_of_all_at_once(tokens: list[int]) -> None:
    assert "".join(pieces(as_bytes, tokens)) == as_bytes(tokens)


@settings(max_examples=few(200), deadline=None)
@given(st.text("abc", min_size=1, max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_and_never_shows_a_part_of_it(text: str, stops: list[str]) -> None:
    expected = text
    for end in range(1, len(text) + 1):
        if found := [at for stop in stops if (at := text[:end].find(stop)) >= 0]:
            expected = text[: min(found)]
            break
    assert "".join(pieces(as_bytes, list(text.encode()), stops)) == expected


def test_bytes_that_never_become_text_are_not_decoded_again_and_again() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return as_bytes(tokens)

    shown = pieces(decode, [0xE4] * 500)
    assert "".join(shown) == "\ufffd" * 500
    assert longest <= 3 * module.MOST_UNREAD


@settings(max_examples=few(100), deadline=None)
@given(st.data())
def test_tokens_of_a_tokenizer_become_the_text_of_all_at_once(tiny_models: dict[str, Path], data: Any) -> None:
    text = HFText.load(str(tiny_models[TEXT]))
    assert text is not None
    tokens = data.draw(st.lists(st.integers(0, 511), min_size=1, max_size=40))
    assert "".join(pieces(text.decode, tokens)) == text.decode(tokens)


def test_threads_may_share_a_tokenizer_whose_file_truncates(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Dropping the truncation while another thread encodes would raise "Already borrowed"."""
    shutil.copytree(tiny_models[TEXT], tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(settings))
    text = HFText.load(str(tmp_path / "model"))
    assert text is not None

    def render(_: int) -> str:
        prompt = text.prompt("what is in this image? " * 200)
        return text.decode(prompt.to_tokens().tolist())

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(render, range(64))) == {"what is in this image? " * 200}
