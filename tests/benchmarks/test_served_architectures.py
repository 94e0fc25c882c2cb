"""The table of all architectures: what a row says, how tiny models are made, and reasons of refusals that it showed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import served_architectures
from measurements import tiny_architectures
from served_architectures import in_a_child, outcome, table
from tinker_local.backend import BackendOptions
from tinker_local.backend.models.load_engines import check_model
from tinker_local.backend.rendering.rendered_input import ImageTokens
from tinker_local.backend.vllm_engine.vllm_images import VLLMImages
from tinker_local.types import UnsupportedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SERVED = {"kind": "reads", "model_type": "a", "outcome": "served", "trained": "autograd", "rows": "packed"}
NUMBERS = {"loss": 1e-16, "gradient": 1e-15, "sampler": 1e-6, "peft": 1e-6, "merged": 1e-6}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.01])
@pytest.mark.parametrize("column", NUMBERS)
def test_a_row_with_a_large_difference_is_not_one_that_is_served(column: str, wrong: float) -> None:
    assert outcome(SERVED | NUMBERS) == "served"
    assert outcome(SERVED | NUMBERS | {column: wrong}) == "differs"
    assert outcome({**SERVED, "outcome": "refused", "reason": "why"}) == "refused"
    assert outcome({"reason": "it died"}) == "fails"


def test_the_table_counts_outcomes_and_gives_reasons() -> None:
    refused = {"kind": "reads", "model_type": "b", "outcome": "refused", "reason": "its layers are round"}
    text = table({"a": SERVED | NUMBERS, "b": refused})
    assert "Read text: 1 served, 1 refused" in text
    assert "b, refused: its layers are round" in text
    assert "1e-16" in text


def test_a_process_that_dies_or_takes_too_long_is_a_row_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dies(name: str, say: Any) -> None:
        say("trained", "autograd")
        os._exit(7) if name == "dies" else os.read(os.pipe()[0], 1)

    monkeypatch.setattr(served_architectures, "of_row", dies)
    monkeypatch.setattr(served_architectures, "SECONDS", 1.0)
    with (tmp_path / "log").open("w") as log:
        found = in_a_child("dies", log.fileno())
        assert outcome(found) == "fails"
        assert found["trained"] == "autograd"
        assert "ended with status" in found["reason"]
        late = in_a_child("waits", log.fileno())
    assert outcome(late) == "fails"
    assert late["reason"] == "ended at its limit of 1 s"


def test_a_shrunk_config_has_a_layer_of_each_kind() -> None:
    config = {
        "num_hidden_layers": 6,
        "layer_types": ["sliding"] * 4 + ["full"] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "hidden_size": 4096,
        "head_dim": None,
        "text_config": {"model_type": "mamba2", "vocab_size": 50000, "num_heads": 128},
        "image_token_id": 7,
    }
    found = tiny_architectures.shrunk(config, {"tied": True}, {"image_token_id": 9})
    assert found["layer_types"] == ["sliding", "sliding", "full"]
    assert found["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert found["num_hidden_layers"] == 3
    assert found["hidden_size"] == 4 * found["head_dim"]
    assert found["text_config"] == {"model_type": "mamba2", "vocab_size": 512, "num_heads": 8, "head_dim": 32}
    assert found["image_token_id"] == 9
    assert found["tied"] is True


@pytest.mark.more
def test_a_row_is_measured_and_kept_and_not_measured_again(tmp_path: Path) -> None:
    """Experts, whose matrices the reference changes in a way apart."""
    command = [
        sys.executable,
        "served_architectures.py",
        "--rows",
        str(tmp_path / "rows"),
        "--log",
        str(tmp_path / "l"),
    ]
    command += ["--only", "qwen3_moe", "--out", str(tmp_path / "out")]
    subprocess.run(command, cwd=BENCHMARKS, check=True, capture_output=True)
    ((name, found),) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert name == "qwen3_moe"
    assert outcome(found) == "served"
    assert found["trained"] == "written-out"
    (text,) = (tmp_path / "out").glob("*.txt")
    assert "Read text: 1 served" in text.read_text()


REASONS = {
    "shieldgemma2": "transformers' Gemma3Model makes masks with block_sequence_ids",
    "step3p7": "has 8 routed experts",
    "emu3": "transformers makes no processor of its files",
    "mamba": "needs its layers at model.layers",
}


@pytest.mark.more
@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_served_is_refused_for_what_it_is(name: str, tmp_path: Path) -> None:
    folder = tiny_architectures.make(name, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=REASONS[name]):
        check_model(str(folder), BackendOptions())


@pytest.mark.more
def test_a_class_of_vllm_that_takes_videos_alone_is_said_to_take_no_images(tmp_path: Path) -> None:
    folder = tiny_architectures.make("llava_next_video", tmp_path / "model")
    with pytest.raises(UnsupportedError, match="vLLM's LlavaNextVideoForConditionalGeneration takes no images"):
        VLLMImages(str(folder), "float32", ImageTokens(None, 7, None))
