"""Data files of a few rows, and renderers of the tiny models."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest
from tinker_local.client.train.examples import Example
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows

MOST = 4096


@pytest.fixture(scope="session")
def renderer_of(tiny_models: dict[str, Path]) -> Callable[..., Renderer]:
    """The tiny vision model's; Qwen3-VL's format if no `template` is given."""
    from tinker_local.types.processor_templates import processor_template
    from transformers import AutoImageProcessor, AutoTokenizer

    path = tiny_models["tiny/vision"]
    tokenizer, processor = AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path)
    own = processor_template(str(path))

    def make(template: str | None = None, *, sees: bool = True, **options: Any) -> Renderer:
        return Renderer(tokenizer, processor if sees else None, template=template or own, options=options)

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` makes of Parquet files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def rows_of(tmp_path: Path, renderer_of: Callable[..., Renderer]) -> Callable[..., FileRows]:
    """Rows, written as JSON lines and read again."""

    def read(*rows: Mapping[str, Any], renderer: Renderer | None = None, **settings: Any) -> FileRows:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        settings = {"most_tokens": MOST, **settings}
        return read_rows(path, renderer=renderer or renderer_of(), **settings)

    return read


def masked(example: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of an example in runs, and whether they are trained; a picture is "<N>" for its N positions."""
    tokens: list[int | str] = []
    for chunk in example.datum.model_input.chunks:
        tokens += list(chunk.tokens) if hasattr(chunk, "tokens") else [f"<{chunk.length}>"] + [""] * (chunk.length - 1)
    targets = example.datum.loss_fn_inputs["target_tokens"].tolist()
    weights = [0.0, *example.datum.loss_fn_inputs["weights"].tolist()]
    tokens.append(int(targets[-1]))
    assert len(tokens) == len(weights) == example.length
    assert all(token == target for token, target in zip(tokens[1:], targets, strict=True) if isinstance(token, int))
    assert {*weights} <= {0.0, 1.0}
    assert sum(weights) == example.trained
    runs: list[tuple[list[int | str], bool]] = []
    for token, weight in zip(tokens, weights, strict=True):
        if not runs or runs[-1][1] != bool(weight):
            runs.append(([], bool(weight)))
        runs[-1][0].append(token)
    return [(_text(run, tokenizer), trained) for run, trained in runs]


def _text(run: Sequence[int | str], tokenizer: Any) -> str:
    return "".join(
        str(tokenizer.decode(list(group))) if is_token else "".join(map(str, group))
        for is_token, group in groupby(run, key=lambda token: isinstance(token, int))
    )


def trained_texts(example: Example, tokenizer: Any) -> list[str]:
    """The trained runs of an example."""
    return [text for text, trained in masked(example, tokenizer) if trained]
