"""Rows of JSON lines, Parquet and saved data sets: exactly what was written, found again by number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest
from tinker_local.client.train.examples import BadRows
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows
from tinker_local.client.train.sources import RowError, Source, open_source
from tinker_local.types import InvalidRequestError

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"answer {at}"}]}
    for at in range(5)
]


def all_of(source: Source) -> list[dict[str, Any]]:
    return [dict(source.row(at)) for at in range(len(source))]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(data: bytes | str, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_line_ends_at_a_line_feed_and_at_nothing_else(write: Callable[..., Path], separator: str) -> None:
    rows = [{"prompt": f"a{separator}b", "completion": "c"}, {"prompt": "d", "completion": "e"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert separator in text
    assert all_of(open_source(write(text))) == rows


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\r"])
def test_other_control_characters_make_one_bad_row_and_not_two_halves(
    write: Callable[..., Path], separator: str
) -> None:
    source = open_source(write(f'{{"prompt": "a{separator}b", "completion": "c"}}\n{json.dumps(ROWS[1])}'))
    assert len(source) == 2
    with pytest.raises(RowError, match="line 1: not JSON: Invalid control character"):
        source.row(0)
    assert source.row(1) == ROWS[1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False], ids=["with a last line end", "without"])
def test_line_ends_byte_order_marks_and_blank_lines(write: Callable[..., Path], end: str, last: bool) -> None:
    lines = [json.dumps(ROWS[0]), "", " \t", json.dumps(ROWS[1]), json.dumps(ROWS[2])]
    source = open_source(write("\ufeff" + end.join(lines) + (end if last else "")))
    assert all_of(source) == ROWS[:3]
    assert [source.place(at) for at in range(3)] == [f"data.jsonl line {line}" for line in (1, 4, 5)]


def test_lines_longer_than_what_is_read_at_once(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_local.client.train.sources._READ_BYTES", 7)
    assert all_of(open_source(write("\n".join(map(json.dumps, ROWS))))) == ROWS


def test_a_file_that_changes_while_it_is_read_is_refused(write: Callable[..., Path]) -> None:
    path = write("\n".join(map(json.dumps, ROWS)))
    source = open_source(path)
    assert source.row(0) == ROWS[0]
    with path.open("a") as file:
        file.write("\n{}")
    with pytest.raises(InvalidRequestError, match=r"data\.jsonl has changed since it was opened"):
        source.row(0)


def test_an_array_and_other_files_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"one JSON object a line, not an array .* must be named \.json"):
        open_source(write(json.dumps(ROWS)))
    with pytest.raises(InvalidRequestError, match=r"data.csv must be .jsonl .*, .parquet, or a folder"):
        open_source(write("a,b", "data.csv"))
    with pytest.raises(InvalidRequestError, match="there is no"):
        open_source(tmp_path / "nothing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequestError, match=r"a folder must hold a saved data set, or \.jsonl files"):
        open_source(tmp_path / "empty")


@pytest.mark.parametrize("text", [json.dumps(ROWS), json.dumps(ROWS, indent=2), "\ufeff[]", " [ ]\n"])
def test_a_json_array_has_its_objects_as_rows(write: Callable[..., Path], text: str) -> None:
    source = open_source(write(text, "data.json"))
    assert all_of(source) == json.loads(text.removeprefix("\ufeff"))
    if len(source):
        assert source.place(4) == "data.json row 5"


def test_a_json_file_of_lines_is_read_as_lines(write: Callable[..., Path]) -> None:
    assert all_of(open_source(write("\n".join(map(json.dumps, ROWS)), "data.json"))) == ROWS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is not JSON: Expecting value"),
        ('[{"a": 1},]', "is not JSON: Expecting value.* column 11"),
        ('[{"a": 1} {"a": 2}]', r"is not JSON: Expecting ',' or '\]'.* column 11"),
        ('[{"a": 1}', r"is not JSON: Expecting ',' or '\]'"),
        ('[{"a": 1}] x', "is not JSON: Extra data behind the array"),
        (b'[{"a": "\xff"}]', "byte 8 of data.json is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_array_that_is_not_json_is_refused_as_a_whole(
    write: Callable[..., Path], text: str | bytes, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        open_source(write(text, "data.json"))


@pytest.mark.parametrize(
    ("element", "words"),
    [("7", "must be a JSON object"), ('{"a": 1, "a": 2}', "the field 'a' twice"), ('{"a": NaN}', "NaN is not JSON")],
)
def test_a_bad_row_of_an_array_is_one_bad_row(write: Callable[..., Path], element: str, words: str) -> None:
    source = open_source(write(f"[{json.dumps(ROWS[0])}, {element}, {json.dumps(ROWS[1])}]", "data.json"))
    with pytest.raises(RowError, match=f"data.json row 2: .*{words}"):
        source.row(1)
    assert source.row(2) == ROWS[1]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.jsonl.zst", "data.zip"])
def test_a_compressed_file_is_to_be_unpacked(write: Callable[..., Path], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is compressed; unpack it first"):
        open_source(write(b"\x1f\x8b", name))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_told_once_and_not_for_each_line(write: Callable[..., Path], encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    with pytest.raises(
        InvalidRequestError, match=r"data\.jsonl is in UTF-16, as PowerShell writes it; save it as UTF-8"
    ):
        open_source(write((mark + json.dumps(ROWS[0])).encode(encoding)))


def test_a_folder_of_the_hub_with_several_splits_is_refused(tmp_path: Path) -> None:
    """It would train on the test set, which comes first by name."""
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002-9aef0a"):
        (folder / f"{name}.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(InvalidRequestError, match=f"set has none of them; {folder} has some"):
        open_source(tmp_path / "set")
    with pytest.raises(InvalidRequestError, match="has files of the splits test, train; name one file, or a folder"):
        open_source(folder)
    (folder / "test-00000-of-00001.jsonl").unlink()
    assert len(open_source(folder)) == 2


def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, rows in (("b.jsonl", ROWS[2:]), ("a.jsonl", ROWS[:2])):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    source = open_source(folder)
    assert all_of(source) == ROWS
    assert [source.place(at) for at in (0, 2)] == ["a.jsonl line 1", "b.jsonl line 1"]


@pytest.mark.parametrize("form", ["parquet", "parquet files", "saved", "one split"])
def test_parquet_and_saved_data_sets_have_the_rows_that_were_written(tmp_path: Path, form: str) -> None:
    data = datasets.Dataset.from_list(ROWS)
    path = tmp_path / "data"
    if form.startswith("parquet"):
        path.mkdir()
        data.select(range(3)).to_parquet(path / "a.parquet")
        data.select(range(3, 5)).to_parquet(path / "b.parquet")
        source = open_source(path)
        if form == "parquet":
            data.to_parquet(path / "c.parquet")
            source = open_source(path / "c.parquet")
            assert source.place(4) == "c.parquet row 5"
    elif form == "saved":
        data.save_to_disk(path)
        source = open_source(path)
        assert source.folder == path
    else:
        datasets.DatasetDict({"train": data}).save_to_disk(path)
        source = open_source(path)
    assert all_of(source) == ROWS


def test_a_data_set_with_several_splits_asks_which(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "data")
    with pytest.raises(InvalidRequestError, match="has the splits test, train; name the folder of one"):
        open_source(tmp_path / "data")
    assert all_of(open_source(tmp_path / "data" / "test")) == [ROWS[1]]


def test_a_selection_in_another_order_stays_as_it_was_saved(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).select([3, 0]).save_to_disk(tmp_path / "data")
    assert all_of(open_source(tmp_path / "data")) == [ROWS[3], ROWS[0]]


def test_no_code_beside_the_data_runs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    for name in ("data.py", "__init__.py", "dataset.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert all_of(open_source(folder)) == ROWS
    assert not (tmp_path / "ran").exists()


CALLS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        ]
    }
    for name, arguments in (("look", {"at": 1}), ("find", {"what": "b"}))
]


def test_fields_that_arrow_adds_to_objects_are_left_out(tmp_path: Path, renderer_of: Callable[..., Renderer]) -> None:
    """In a column, all objects have the same fields: a text part has `image: null`."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "red.png"}}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [parts[0]]}]}
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "data")
    assert all_of(open_source(tmp_path / "data")) == [row]


def test_arguments_that_arrow_may_have_changed_are_refused_and_json_is_not(
    tmp_path: Path, renderer_of: Callable[..., Renderer]
) -> None:
    """Of two calls with other arguments, Arrow makes {"at": 1, "what": null}, which may be what was meant."""
    datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path / "structs")
    with pytest.raises(BadRows) as raised:
        read_rows(tmp_path / "structs", renderer=renderer_of(), most_tokens=500)
    first = raised.value.problems[0]
    assert first.field == "messages[1].tool_calls[0].function.arguments.what"
    assert "store arguments as JSON text" in first.reason
    assert first.place == "structs row 1"
    same = [CALLS[0], CALLS[0]]
    datasets.Dataset.from_list(same).save_to_disk(tmp_path / "same")
    assert all_of(open_source(tmp_path / "same")) == same
    mixed = {"messages": [row["messages"] for row in CALLS]}
    datasets.Dataset.from_dict(mixed, on_mixed_types="use_json").save_to_disk(tmp_path / "json")
    assert [row["messages"] for row in all_of(open_source(tmp_path / "json"))] == mixed["messages"]


def test_content_of_mixed_types_is_read_from_json_lines_and_from_json_columns(tmp_path: Path) -> None:
    """Arrow has one type for a column; `datasets` stores such a column as JSON."""
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
        ]
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    datasets.Dataset.from_dict({"messages": [row["messages"]]}, on_mixed_types="use_json").to_parquet(
        tmp_path / "a.parquet"
    )
    assert all_of(open_source(tmp_path / "a.jsonl")) == all_of(open_source(tmp_path / "a.parquet")) == [row]


def test_the_same_rows_have_the_same_digest_and_others_have_not(rows_of: Callable[..., FileRows]) -> None:
    digests = [rows_of(*rows).digest for rows in (ROWS, ROWS, ROWS[::-1], ROWS[:4])]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_rows_of_a_file_that_does_not_fit_in_memory_are_not_held(write: Callable[..., Path]) -> None:
    """Of each line its offset stays: 16 bytes."""
    import tracemalloc

    line = json.dumps({"prompt": "a" * 10_000, "completion": "b"}) + "\n"
    path = write(line * 2000)
    tracemalloc.start()
    source = open_source(path)
    assert len(source) == 2000
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < path.stat().st_size / 50


def test_what_the_library_cannot_read_is_refused_in_words(write: Callable[..., Path], tmp_path: Path) -> None:
    cut_off, empty, saved = write(b"PAR1", "cut.parquet"), tmp_path / "empty.parquet", tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).select([]).to_parquet(str(empty))
    saved.mkdir()
    write("{}", "saved/state.json")
    for path in (cut_off, empty, saved):
        with pytest.raises(InvalidRequestError, match=rf"data: the library datasets cannot read .*/{path.name}"):
            open_source(path)
