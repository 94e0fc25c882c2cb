"""What bases in fewer bits cost: the formulas of the benchmark against float64, its outliers, and all of it on a tiny
model."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "precision_quality.py"


@pytest.fixture
def small() -> Any:
    """A model in the proportions of a large one, in float32."""
    from measurements import precision_text

    return precision_text.random_model(128)


def test_kl_and_nats_are_those_of_whole_distributions(small: Any) -> None:
    from measurements import precision_text

    ids = torch.arange(3, 40)
    rows = precision_text.log_probabilities(small, ids)
    others = precision_text.log_probabilities(precision_text.packed(small, "int4"), ids)
    assert rows.shape == (36, 4096)
    p, q = (each.double().softmax(-1).numpy() for each in (rows, others))
    assert precision_text.divergence(rows, others).numpy() == pytest.approx((p * np.log(p / q)).sum(-1), abs=1e-6)
    assert precision_text.divergence(rows, rows).abs().max() == 0
    expected = -np.log([p[place, token] for place, token in enumerate(ids[1:].tolist())]).mean()
    assert precision_text.nats(rows, ids) == pytest.approx(expected, abs=1e-5)


def test_outliers_leave_the_dense_function_as_it_is_and_not_the_packed_one(small: Any) -> None:
    from measurements import precision_text

    ids, channels = torch.arange(3, 40), [1, 70]
    before = precision_text.log_probabilities(small, ids)
    packed = precision_text.log_probabilities(precision_text.packed(precision_text.random_model(128), "int4"), ids)
    precision_text.put_outliers(small, 64, channels)
    query = small.model.layers[0].self_attn.q_proj.weight.abs()
    assert query[:, channels].mean() > 32 * query[:, [2, 71]].mean()
    # To the bit: powers of two, though kernels may add in another order.
    assert torch.allclose(precision_text.log_probabilities(small, ids), before, rtol=0, atol=1e-5)
    outlying = precision_text.log_probabilities(precision_text.packed(small, "int4"), ids)
    assert (outlying - before).abs().mean() > 2 * (packed - before).abs().mean()


def test_errors_of_matrices_are_by_their_norms(small: Any) -> None:
    from measurements import precision_text
    from tinker_local.backend.weights.packed import packable_modules

    modules = [module for _, module in packable_modules(small.model)]
    dense = [module.weight.double().numpy() for module in modules]
    found = precision_text.of_matrices(small)
    precision_text.packed(small, "int8")
    packed = [module.weight.double().numpy() for _, module in packable_modules(small.model)]
    apart = [np.linalg.norm(a - b) for a, b in zip(dense, packed, strict=True)]
    whole = math.sqrt(sum(each**2 for each in apart) / sum(np.linalg.norm(each) ** 2 for each in dense))
    assert found["int8"]["all"] == pytest.approx(whole, rel=1e-4)
    worst = max(each / np.linalg.norm(matrix) for each, matrix in zip(apart, dense, strict=True))
    assert found["int8"]["largest"] == pytest.approx(worst, rel=1e-4)
    # Normal numbers in a group of 128 are as far from their codes as those of this model, which are normal.
    assert found["int8"]["normal"] == pytest.approx(whole, rel=0.1)


def test_differences_are_paired_and_have_students_interval() -> None:
    from harness import precision_tables

    middle, low, high = precision_tables.interval([1.0, 2.0, 3.0])
    # t(0.975, 2) = 4.30265, standard error 1 / sqrt(3)
    assert (middle, low, high) == pytest.approx((2.0, 2.0 - 2.484138, 2.0 + 2.484138), abs=1e-5)
    assert precision_tables.interval([1.0]) == (1.0, -math.inf, math.inf)
    one, other = np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])
    assert precision_tables.distance(one, other) == pytest.approx({"cosine": 2**-0.5, "relative": 1.0, "norms": 2**0.5})


def test_texts_are_real_and_those_that_are_there(tmp_path: Path) -> None:
    from harness import precision_tables

    folder = tmp_path / "model"
    folder.mkdir()
    without = precision_tables.texts(folder)
    assert set(without) == {"Python's documentation", "this project's pages"}
    (folder / "LICENSE").write_text("a licence")
    questions = tmp_path / "easy-vqa" / "train"
    questions.mkdir(parents=True)
    (questions / "questions.json").write_text(json.dumps([["what is it?", "a disc", 0]]))
    with_all = precision_tables.texts(folder)
    assert with_all["Apache License 2.0"] == "a licence"
    assert with_all["easy-vqa's questions"] == "what is it? a disc"


@pytest.mark.more
def test_all_of_it_runs_on_a_tiny_model(tmp_path: Path) -> None:
    """Numbers of each part, also when parts run one after the other; engines compute with what the codes stand for."""
    name = tmp_path / "found"
    for only in ("text,outliers", "engines"):
        subprocess.run([sys.executable, BENCHMARK, name, "--tiny", "--only", only], check=True, capture_output=True)
    found = json.loads(name.with_suffix(".json").read_text())["parts"]
    assert found.keys() == {"text", "outliers", "engines.int8", "engines.int4", "engines.dense", "gradients"}
    kl = {base: np.mean([text[base]["kl"] for text in found["text"]["texts"].values()]) for base in ("int8", "int4")}
    assert 0 < kl["int8"] < kl["int4"] / 10
    by_base = found["gradients"]["new"]
    assert by_base["int8"]["cosine"] > 0.99 > by_base["int4"]["cosine"]
    for base in ("dense", "int8", "int4"):
        part = found[f"engines.{base}"]
        assert len(part["after"]) == 2
        assert max(part["after"]) < part["before"]  # it learns
        assert part["samples"]["largest"] < 1e-4  # sampler and trainer
    assert len(found["engines.dense"]["moved"]["int4"]) == 2
    page = name.with_suffix(".md").read_text()
    for title in ("## Perplexity and KL", "## Outlier channels", "## Gradients of the adapter", "## SFT", "## Samples"):
        assert title in page
