"""Rows are read quickly, and are exactly what the plain way makes of them: each text of the template encoded whole."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker_local.client.train import rows as reading
from tinker_local.client.train.examples import Example, Preference
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import read_rows

from tests.real_tokenizers.conftest import Real

WORDS = ["the", "of", "and", "to", "in", "is", "you", "it", "for", "was", "with", "that", "(", ")", "{", "}"]
WORDS += ["né", "你好", "👩\u200d🚀", "1234", "x²", "Ende.", "```py\n", "\n\n", "\t"]
ROWS = 700


def text(draw: random.Random, most: int = 30) -> str:
    words = draw.choices(WORDS, k=draw.randint(1, most))
    return draw.choice(("", " ", "\n")) + " ".join(["so", *words]) + draw.choice(("", " ", "\n\n"))


def talk(draw: random.Random) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": text(draw)} for _ in range(draw.randint(1, 5)) for role in ("user", "assistant")]
    return [{"role": "system", "content": text(draw)}, *turns] if draw.random() < 0.5 else turns


def plainly(tokenizer: Any, messages: Sequence[Mapping[str, Any]], given: int = 0) -> list[tuple[list[int], list[int]]]:
    """Tokens and weights of each datum: every text by Hugging Face's template and encoded whole, token by token."""
    data: list[tuple[list[int], list[int]]] = []
    end = _end_of_turn(tokenizer)
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or at < given:
            continue
        prompt = tokenizer.apply_chat_template(list(messages[:at]), tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(list(messages[: at + 1]), tokenize=False)
        assert whole.startswith(prompt)
        before = tokenizer.encode(prompt, add_special_tokens=False)
        answer = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
        answer = answer[: answer.index(end) + 1]
        if data and before[: len(data[-1][0])] == data[-1][0]:
            tokens, weights = data.pop()
            weights = weights + [0] * (len(before) - len(tokens))
        else:
            weights = [0] * len(before)
        data.append((before + answer, weights + [1] * len(answer)))
    return data


def _end_of_turn(tokenizer: Any) -> int:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zebra"}]
    behind = tokenizer.apply_chat_template(turns, tokenize=False).partition("zebra")[2]
    return int(tokenizer.encode(behind.strip(), add_special_tokens=False)[0])


def data_of(found: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
    data = []
    for example in found:
        inputs = example.datum.loss_fn_inputs
        targets, weights = inputs["target_tokens"].tolist(), inputs["weights"].tolist()
        tokens = [*example.datum.model_input.to_ints(), int(targets[-1])]
        assert tokens[1:] == targets
        assert (example.length, example.trained) == (len(tokens), sum(weights))
        data.append((tokens, [0, *map(int, weights)]))
    return data


def written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["qwen3", "llama3", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Of templates that rewrite earlier turns, that write the date, and that append."""
    if request.param == "smollm2":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(request.getfixturevalue("small_model"))
    from tests.real_tokenizers.conftest import real_one

    return real_one(request.param).tokenizer


def test_thousands_of_rows_are_what_the_plain_way_makes_of_them(tokenizer: Any, tmp_path: Path) -> None:
    draw = random.Random(11)
    talks = [talk(draw) for _ in range(ROWS)]
    rows = read_rows(
        written(tmp_path, [{"messages": each} for each in talks]), renderer=Renderer(tokenizer), most_tokens=4096
    )
    assert len(rows) == ROWS
    for at, each in enumerate(talks):
        found = rows.examples(at)
        assert not isinstance(found, Preference)
        assert rows.lengths(at) == [(example.length, example.trained) for example in found]
        assert data_of(found) == plainly(tokenizer, each), each


def test_pairs_are_what_the_plain_way_makes_of_them(tokenizer: Any, tmp_path: Path) -> None:
    draw = random.Random(12)
    talks = [talk(draw) for _ in range(100)]
    rows = read_rows(
        written(
            tmp_path,
            [
                {"prompt": each[:-1], "chosen": each[-1:], "rejected": [{**each[-1], "content": f"no {text(draw)}"}]}
                for each in talks
            ],
        ),
        renderer=Renderer(tokenizer),
        most_tokens=4096,
    )
    for at in range(len(talks)):
        pair, raw = rows.examples(at), rows.raw(at)
        assert isinstance(pair, Preference)
        for side, name in ((pair.chosen, "chosen"), (pair.rejected, "rejected")):
            given = len(raw["prompt"])
            assert data_of([side]) == plainly(tokenizer, [*raw["prompt"], *raw[name]], given)


@pytest.mark.parametrize("together", [1, 3, 1000])
def test_how_many_rows_are_read_together_changes_nothing(
    qwen3: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Some rows are bad, and are found to be so at different stages; they are listed in the order of the file."""
    draw = random.Random(13)
    rows: list[dict[str, Any]] = [{"messages": talk(draw)} for _ in range(20)]
    rows[3] = {"messages": [{"role": "user", "content": "no answer"}]}
    rows[7] = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows[9] = {
        "messages": [*talk(draw), {"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 9999}]
    }
    path = written(tmp_path, rows)

    def read() -> Any:
        return read_rows(path, renderer=Renderer(qwen3.tokenizer), most_tokens=600, skip_bad=True)

    once = read()
    monkeypatch.setattr(reading, "ROWS_TOGETHER", together)
    told: list[tuple[int, int]] = []
    again = read_rows(
        path,
        renderer=Renderer(qwen3.tokenizer),
        most_tokens=600,
        skip_bad=True,
        progress=lambda done, of: told.append((done, of)),
    )
    assert told == [(at + 1, 20) for at in range(20)]
    assert [problem.place for problem in once.skipped] == [
        "data.jsonl line 4",
        "data.jsonl line 8",
        "data.jsonl line 10",
    ]
    assert (again.skipped, again.digest, again.tokens) == (once.skipped, once.digest, once.tokens)
