"""Two data sets as people have them: pictures with questions, and conversations with tools."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest
from tinker_local.client.train.examples import BadRows, Example
from tinker_local.client.train.media import MediaRules
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import read_rows
from tinker_local.client.train.sources import open_source

from tests.train_data.conftest import trained_texts

VQA = Path(__file__).parents[2] / ".test-files" / "easy-vqa" / "train"


@pytest.fixture
def questions(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of forty of its questions, in OpenAI's form."""
    if not (VQA / "questions.json").is_file():
        pytest.skip("no easy-vqa in .test-files; run scripts/fetch_test_files.py")
    asked = json.loads((VQA / "questions.json").read_text())[:40]
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"images/{picture}.png"}},
                        {"type": "text", "text": question},
                    ],
                },
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer, picture in asked
    ]


def test_pictures_with_questions(
    tmp_path: Path, questions: list[dict[str, Any]], renderer_of: Callable[..., Renderer]
) -> None:
    (tmp_path / "images").symlink_to(VQA / "images")
    path = tmp_path / "vqa.jsonl"
    path.write_text("\n".join(map(json.dumps, questions)))
    renderer = renderer_of()
    with pytest.raises(BadRows, match="is not a file below"):  # the link leads elsewhere
        read_rows(path, renderer=renderer, most_tokens=500)
    rows = read_rows(path, renderer=renderer, media=MediaRules(folders=[VQA]), most_tokens=500)
    assert len(rows) == len(questions)
    for at, row in enumerate(questions):
        (example,) = rows.examples(at)  # type: ignore[misc]
        assert isinstance(example, Example)
        assert trained_texts(example, renderer.tokenizer) == [f"{row['messages'][1]['content']}<|im_end|>"]
        pictures = [chunk for chunk in example.datum.model_input.chunks if hasattr(chunk, "data")]
        name = row["messages"][0]["content"][0]["image_url"]["url"]
        assert [chunk.data for chunk in pictures] == [(VQA / name).read_bytes()]
        assert rows.raw(at) == row


CITIES = ("Bern", "Zürich", "東京", "São Paulo")


def weather(city: str, days: int) -> dict[str, Any]:
    """A conversation with a call, its result, and an answer."""
    arguments = json.dumps({"city": city, "days": days}, ensure_ascii=False)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    function = {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
    return {
        "messages": [
            {"role": "system", "content": "You know the weather."},
            {"role": "user", "content": f"How is {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"days": [20 + days] * days})},
            {"role": "assistant", "content": f"{20 + days} °C in {city}."},
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "You are welcome."},
        ],
        "tools": [{"type": "function", "function": function}],
    }


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_conversations_with_tools(tmp_path: Path, renderer_of: Callable[..., Renderer], form: str) -> None:
    """The same data from each kind of file; arguments are JSON text, so Arrow has nothing to add to them."""
    written = [weather(city, days) for days, city in enumerate(CITIES)]
    path = tmp_path / f"tools.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, written)))
    elif form == "parquet":
        datasets.Dataset.from_list(written).to_parquet(path)
    else:
        datasets.Dataset.from_list(written).save_to_disk(path)
    renderer = renderer_of()
    rows = read_rows(path, renderer=renderer, most_tokens=4096)
    source = open_source(path)
    for at, (city, row) in enumerate(zip(CITIES, written, strict=True)):
        found = rows.examples(at)
        texts = [text for example in found for text in trained_texts(example, renderer.tokenizer)]  # type: ignore[union-attr]
        arguments = row["messages"][2]["tool_calls"][0]["function"]["arguments"]
        assert len(texts) == 3
        assert json.dumps(json.loads(arguments), ensure_ascii=False) in texts[0]
        assert "weather" in texts[0]
        assert texts[1:] == [f"{20 + at} °C in {city}.<|im_end|>", "You are welcome.<|im_end|>"]
        assert json.loads(json.dumps(source.row(at)))["tools"] == row["tools"]
