"""A row token by token: the mask that is shown is the mask that is trained."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from rich.console import Console
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows
from tinker_local.client.train.show import print_row, shown_row, shown_tokens, summary

from tests.rl import chat_templates as templates

TALK: Any = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "né 你好\x1b[2J\n👩‍🚀"}]


@pytest.fixture
def renderer(renderer_of: Callable[..., Renderer]) -> Renderer:
    return renderer_of(templates.CHATML)


def printed(rows: FileRows, renderer: Renderer, **how: Any) -> str:
    out = io.StringIO()
    print_row(rows, 0, renderer.tokenizer, Console(file=out, width=20, **how))
    return out.getvalue()


def test_tokens_are_those_of_the_datum_with_its_weights(rows_of: Callable[..., FileRows], renderer: Renderer) -> None:
    """Bytes of one character are shown together, and each token once."""
    (example,) = rows_of({"messages": TALK}, renderer=renderer).examples(0)  # type: ignore[misc]
    tokens = shown_tokens(example, renderer.tokenizer)
    text = f"<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n{TALK[1]['content']}<|im_end|>"
    assert "".join(token.text for token in tokens) == text
    trained = [token.text for token in tokens if token.trained]
    assert "".join(trained) == f"{TALK[1]['content']}<|im_end|>"
    assert "好" in trained
    assert not any("\ufffd" in token.text for token in tokens)


def test_without_colours_trained_tokens_are_in_brackets_and_a_row_cannot_steer_the_terminal(
    rows_of: Callable[..., FileRows], renderer: Renderer
) -> None:
    found = printed(rows_of({"messages": TALK}, renderer=renderer), renderer)
    lines = found.splitlines()
    assert lines[0].startswith("data.jsonl line 1: ")
    assert lines[1:4] == ["<|im_start|>user⏎", "a?<|im_end|>⏎", "<|im_start|>assistant⏎"]
    assert "[né]" in found or "[n][é]" in found
    assert "[<|im_end|>]" in found
    assert "\x1b" not in found
    assert "\\x1b" in found


def test_with_colours_trained_tokens_are_green_and_others_are_not(
    rows_of: Callable[..., FileRows], renderer: Renderer
) -> None:
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "one two"}]}
    rows = rows_of(row, renderer=renderer)
    text = shown_row(rows.examples(0), renderer.tokenizer)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert "green" in styles["<|im_end|>"]  # the last of this text is trained
    assert not any("green" in style for token, style in styles.items() if token in ("<|im_start|>", "user", "a", "?"))
    assert "\x1b[" in printed(rows, renderer, force_terminal=True, color_system="standard")
    assert "\x1b[" not in printed(rows, renderer, force_terminal=True, no_color=True).replace("\x1b[1m", "").replace(
        "\x1b[0m", ""
    )


def test_pictures_and_long_prompts_are_short(
    tmp_path: Path, rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    PIL.Image.new("RGB", (56, 84)).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "word " * 500}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "one"}]}
    rows = rows_of(row)
    text = shown_row(rows.examples(0), renderer_of().tokenizer, colour=False).plain
    assert "<picture, 6 positions>" in text
    assert "tokens ... " in text
    assert len(text) < 1000


def test_both_answers_of_a_pair_are_shown(rows_of: Callable[..., FileRows], renderer: Renderer) -> None:
    rows = rows_of({"prompt": "a", "chosen": " b", "rejected": " c"}, renderer=renderer)
    (length, trained), _ = rows.lengths(0)
    text = shown_row(rows.examples(0), renderer.tokenizer, colour=False).plain
    assert f"line 1, 1 of 2 chosen: {trained} of {length} tokens trained" in text
    assert f"line 1, 2 of 2 rejected: {trained} of {length} tokens trained" in text


def test_the_summary_counts_rows_sequences_and_trained_tokens(tmp_path: Path, renderer: Renderer) -> None:
    rows: list[Any] = [{"prompt": "a", "completion": "b"}, {"prompt": "a b c", "completion": "d"}, {"prompt": "a"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_rows(path, renderer=renderer, most_tokens=50, skip_bad=True)
    lengths = [found.lengths(at)[0] for at in range(2)]
    tokens, trained = (sum(pair[which] for pair in lengths) for which in (0, 1))
    assert summary(found).splitlines() == [
        f"2 rows, 2 sequences of {lengths[0][0]} to {lengths[1][0]} tokens; {trained} of {tokens} tokens are trained "
        f"({100 * trained / tokens:.1f} %)",
        "1 bad rows are left out",
    ]
    assert (found.tokens, found.trained, found.longest, found.data) == (tokens, trained, lengths[1][0], 2)
