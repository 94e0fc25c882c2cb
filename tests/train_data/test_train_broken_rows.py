"""A broken file: every bad row is listed with line, field and reason before training, and `skip_bad` goes on."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_local.client.train.examples import BadRows
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows
from tinker_local.types import InvalidRequestError

Q: Any = {"role": "user", "content": "What?"}
A: Any = {"role": "assistant", "content": "That."}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
GOOD = {"messages": [Q, A]}


def called(**function: Any) -> dict[str, Any]:
    """A row whose only answer is a call."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}", **function}}
    return {"messages": [Q, {"role": "assistant", "tool_calls": [call]}], "tools": TOOLS}


def picture(**part: Any) -> dict[str, Any]:
    """A row with a picture in its question."""
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}, A]}


def data(text: str) -> dict[str, Any]:
    return picture(type="image_url", image_url={"url": text})


BROKEN: list[tuple[Any, str, str]] = [
    ('{"messages": [', "", "not JSON: Expecting value at character 15"),
    ("[1, 2]", "", "must be a JSON object"),
    (b'{"prompt": "\xff", "completion": "b"}', "", "byte 12 of the line is not UTF-8"),
    ('{"prompt": "a", "prompt": "b", "completion": "c"}', "", "the field 'prompt' twice"),
    ('{"prompt": "a", "completion": "c", "score": NaN}', "", "NaN is not JSON"),
    ("[" * 100_000, "", "nested too deeply"),
    ({"question": "What?", "answer": "That."}, "", "neither messages, nor prompt .* question: write prompt and"),
    ({"conversations": [{"from": "human", "value": "a"}]}, "conversations[0]", "no answer"),
    ({"conversations": [{"from": "function_call", "value": "{}"}]}, "conversations[0].from", "write messages, with"),
    ({"conversations": [{"from": "human", "value": 7}]}, "conversations[0].value", "must be a text"),
    ({"conversations": [{"from": "human", "value": "a", "loss": 1}]}, "conversations[0].loss", "is not known"),
    ({"conversations": "a"}, "", "neither messages"),
    ({"instruction": "a", "input": "b"}, "", "instruction: output, which goes with it, is missing"),
    ({"instruction": "a", "input": "b", "output": " "}, "output", "the answer is empty"),
    ({"instruction": "a", "input": 7, "output": "b"}, "input", "must be a text"),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "history", r"must be a list of pairs \[question, answer"),
    ({"messages": "What?"}, "messages", "must be a list of messages, not a text"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": [Q]}, "messages[0]", "no answer"),
    ({"messages": [A]}, "messages[0]", "an answer is the first message"),
    ({"messages": [Q, A, Q]}, "messages[2]", "must be the assistant's, not of user"),
    ({"messages": [Q, A, A]}, "messages[2]", "an answer follows another answer"),
    ({"messages": [Q, {"role": "assistant", "content": " \n"}]}, "messages[1].content", "the answer is empty"),
    ({"messages": [Q, {"role": "assistant"}]}, "messages[1].content", "missing"),
    ({"messages": [{"role": "human", "content": "a"}, A]}, "messages[0].role", "must be system, .* not 'human'"),
    ({"messages": [{"content": "a"}, A]}, "messages[0].role", "missing"),
    ({"messages": [{**Q, "text": "b"}, A]}, "messages[0].text", "is not known; a message has role, content"),
    ({"messages": [{"role": "user", "content": 7}, A]}, "messages[0].content", "a text or a list of parts, not a num"),
    ({"messages": [{"role": "user", "content": "a\ud800"}, A]}, "messages[0].content", r"U\+D800, half of a surr"),
    ({"messages": [Q, {**A, "weight": 0.5}]}, "messages[1].weight", "must be 0 .* or 1, not 0.5"),
    ({"messages": [Q, {**A, "weight": 0}]}, "messages[1]", "every answer of the row has the weight 0"),
    ({"messages": [Q, A], "completion": "b"}, "messages", r"not clear which .* or completion \(with prompt\)"),
    ({"messages": [Q, A], "chosen": [Q, A, Q, A], "rejected": [Q, A]}, "messages", "leave out .*, or chosen"),
    ({"messages": [Q, A], "prompt": "Why?"}, "prompt", "not the text of one that is the user's; leave out"),
    ({"prompt": "a"}, "completion", "missing, and prompt is there"),
    ({"prompt": "a", "completion": "  "}, "completion", "the answer is empty"),
    ({"prompt": "", "completion": "b"}, "prompt", "is empty"),
    ({"prompt": "a", "completion": "b", "label": False}, "label", r"\(KTO\) are not trained"),
    ({"chosen": "a b", "rejected": "a c"}, "prompt", "missing: write the text .* begin with the same 2 characters"),
    ({"chosen": "Human: a", "rejected": "Human: b"}, "prompt", "missing: write the text"),
    ({"prompt": "a", "completion": [Q, A]}, "prompt", "is a text, so completion must be a text, too, or a list"),
    ({"prompt": "a", "chosen": [A], "rejected": "b"}, "rejected", "must both be texts, or both be lists"),
    ({"prompt": "a", "chosen": [Q, A], "rejected": [Q, {**A, "content": "b"}]}, "prompt", "is a text that no message"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "", "another kind than the rows before it"),
    ({"chosen": [Q, A]}, "rejected", "missing, and chosen is there"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "rejected", "is equal to chosen"),
    ({"chosen": [Q, A], "rejected": [{**Q, "content": "Who?"}, A]}, "prompt", "do not begin with the same messages"),
    (called(arguments="{at: 1}"), "messages[1].tool_calls[0].function.arguments", "a text that is not JSON"),
    (called(arguments='{"at": 1, "at": 2}'), "messages[1].tool_calls[0].function.arguments", "field 'at' twice"),
    (called(arguments='{"at": NaN}'), "messages[1].tool_calls[0].function.arguments", "NaN or infinite"),
    (called(arguments='{"at": 1e999}'), "messages[1].tool_calls[0].function.arguments", "NaN or infinite"),
    ({"messages": [Q, A], "tools": '[{"a": 1, "a": 2}]'}, "tools", "field 'a' twice"),
    (called(arguments="[1]"), "messages[1].tool_calls[0].function.arguments", "the text of one, not a list"),
    (called(name="see"), "messages[1].tool_calls[0].function.name", "'see' is not one of the tools"),
    ({"messages": [Q, A], "tools": {"name": "look"}}, "tools", "must be a list of tools"),
    ({"messages": [Q, A], "tools": [{"name": "look"}]}, "tools[0]", 'must be {"type": "function"'),
    ({"messages": [Q, A], "tools": TOOLS * 2}, "tools", "'look' is there twice"),
    (
        {"messages": [Q, A], "tools": [{"type": "function", "function": {"name": "a", "parameters": {"b": "\ud800"}}}]},
        "tools[0].function.parameters",
        "half of a surrogate pair",
    ),
    (called(arguments='{"a":' * 70 + "1" + "}" * 70), "messages[1].tool_calls[0].function.arguments", "64 levels"),
    ({"messages": [Q, {"role": "tool", "content": "1"}, A]}, "messages[1]", "a tool's, and no call is before it"),
    (
        {"messages": [Q, {"role": "assistant", "tool_calls": [CALL]}, Q, A]},
        "messages[2]",
        "follows a call, so it must be a tool's result",
    ),
    (
        {"messages": [Q, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1",
         "tool_call_id": "c2"}, A]},
        "messages[2].tool_call_id",
        "'c2' is not the id of a call before it",
    ),
    (picture(type="image", image="../secret.png"), "messages[0].content[1].image", "is not a file below"),
    (picture(type="image", image="leads_out.png"), "messages[0].content[1].image", "is not a file below"),
    (picture(type="image", image="text.png"), "messages[0].content[1].image", "no picture that can be read"),
    (picture(type="image", image="drawn.png"), "messages[0].content[1].image", "is PostScript, a program that draws"),
    (picture(type="image"), "messages[0].content[1]", "number 1 without a path, URL or bytes, and images has 0"),
    ({"messages": [Q, A], "images": ["red.png"]}, "images", "has 1 pictures, and 0 parts"),
    (picture(type="video", video="a.mp4"), "messages[0].content[1].type", "must be text, image or image_url"),
    (data("https://pictures.example/a.png?key=secret"), "messages[0].content[1].image_url.url", "URLs are off"),
    (data("http://user:secret@[::1/a.png"), "messages[0].content[1].image_url.url", "a URL: Invalid IPv6 URL"),
    (data("data:image/png;base64,###"), "messages[0].content[1].image_url.url", "not base64"),
    (data("data:image/png;base64,AAAA"), "messages[0].content[1].image_url.url", "no picture that can be read"),
    ({"messages": [Q, {"role": "assistant", "content": "long " * 2000}]}, "messages[1]", "tokens, at most 4096 fit"),
    (
        {"messages": [Q, {**A, "reasoning_content": "hm"}]},
        "messages[1].reasoning_content",
        "shows no thoughts; write them into content",
    ),
    ({"messages": [Q, A], "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "no variable"),
]  # fmt: skip
"""A row, or a line as it is; the field that is named, and what the reason says."""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Good rows on the odd lines, one of `BROKEN` on each even one."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text.png").write_text("no picture")
    (folder / "drawn.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    (folder / "leads_out.png").symlink_to(tmp_path / "secret.png")
    lines = []
    for row, _, _ in BROKEN:
        line = row if isinstance(row, str | bytes) else json.dumps(row)
        lines += [json.dumps(GOOD).encode(), line if isinstance(line, bytes) else line.encode()]
    path = folder / "broken.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def test_every_bad_row_is_listed_with_its_line_its_field_and_a_reason(
    broken: Path, renderer_of: Callable[..., Renderer]
) -> None:
    with pytest.raises(BadRows) as raised:
        read_rows(broken, renderer=renderer_of(), most_tokens=4096)
    problems = raised.value.problems
    assert raised.value.rows == 2 * len(BROKEN)
    lines = [2 * at + 2 for at in range(len(BROKEN))]
    assert [problem.place for problem in problems] == [f"broken.jsonl line {line}" for line in lines]
    for problem, (row, field, reason) in zip(problems, BROKEN, strict=True):
        assert problem.field == field, (row, problem)
        assert re.search(reason, problem.reason), (row, problem)
    assert len(BROKEN) >= 20


def test_the_message_of_bad_rows_counts_them_and_shows_the_first(
    broken: Path, renderer_of: Callable[..., Renderer]
) -> None:
    with pytest.raises(BadRows) as raised:
        read_rows(broken, renderer=renderer_of(), most_tokens=4096)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{len(BROKEN)} of {2 * len(BROKEN)} rows cannot be used:"
    assert lines[1] == "broken.jsonl line 2: not JSON: Expecting value at character 15 of the line"
    assert lines[-1] == f"... and {len(BROKEN) - 20} more problems"
    assert len(str(raised.value)) < 8000  # also where a field is long


def test_a_message_does_not_hold_the_key_in_a_url(broken: Path, renderer_of: Callable[..., Renderer]) -> None:
    with pytest.raises(BadRows) as raised:
        read_rows(broken, renderer=renderer_of(), most_tokens=4096)
    assert "pictures.example/a.png" in "".join(map(str, raised.value.problems))
    assert "secret" not in "".join(str(each) for each in raised.value.problems if "example" in str(each))


def test_bad_rows_are_left_out_if_asked_and_the_others_stay(broken: Path, renderer_of: Callable[..., Renderer]) -> None:
    rows = read_rows(broken, renderer=renderer_of(), most_tokens=4096, skip_bad=True)
    assert len(rows) == len(BROKEN)
    assert len({problem.place for problem in rows.skipped}) == len(BROKEN)
    assert [rows.place(at) for at in (0, 1)] == ["broken.jsonl line 1", "broken.jsonl line 3"]
    assert [rows.raw(at) for at in range(len(rows))] == [GOOD] * len(BROKEN)


def test_all_problems_of_one_row_are_found(rows_of: Callable[..., FileRows]) -> None:
    row = {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b", "weight": 3}], "tools": 2}
    with pytest.raises(BadRows) as raised:
        rows_of(row)
    fields = ["messages[0].content", "messages[1].weight", "tools"]
    assert [problem.field for problem in raised.value.problems] == fields
    assert raised.value.problems[0].place == "data.jsonl line 1"


def test_a_file_in_which_every_row_is_bad_cannot_be_skipped(rows_of: Callable[..., FileRows]) -> None:
    with pytest.raises(BadRows, match="2 of 2 rows cannot be used"):
        rows_of({"messages": [Q]}, {"messages": [A]}, skip_bad=True)


def test_a_file_without_rows_is_refused(rows_of: Callable[..., FileRows]) -> None:
    with pytest.raises(InvalidRequestError, match="has no rows"):
        rows_of()
