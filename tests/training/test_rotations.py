"""What attention makes of positions is compared at every one: between engines, and with transformers' own layers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.model.decoders.written_out import take_layers
from tinker_local.backend.training.rotations import Rotate, Rotations, compare_rotations
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import UnsupportedError

from tests.families.test_other_families import OWN, tiny

LIMIT, LAYERS, PAIRS = 5000, 6, 8
FLOAT32 = 2.0**-23


def rotate(
    wrong: Sequence[int] = (), layer: int = 3, rows: int = LIMIT, factor: float = 1.0, begins: int = LIMIT
) -> Rotate:
    """An engine that turns each pair of numbers by an angle; in `layer` by another one at positions `wrong`. Its table
    has so many `rows`, and queries get longer by `factor` where it `begins`."""

    def rotated(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        found = {}
        for each in range(LAYERS) if layers is None else layers:
            angles = positions[0][:, None] * 0.5 ** np.arange(PAIRS)
            if each == layer:
                angles = angles + np.isin(positions[0], wrong)[:, None]
            turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
            turned[positions[0] >= rows] = np.nan
            lengths = np.where(positions[0] >= begins, factor, 1.0)[:, None].astype(np.float32)
            found[each] = np.stack([turned * lengths, turned])
        return found

    return rotated


@pytest.mark.parametrize("position", [1, 127, 2048, 3001, LIMIT - 1])
def test_one_position_that_differs_in_all_layers_is_found_among_all(position: int) -> None:
    def wrong(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        return {each: rotate([position], each)([each], positions)[each] for each in layers or range(LAYERS)}

    found = compare_rotations(rotate(), wrong, LIMIT, FLOAT32)
    assert found.differing is not None
    assert found.differing.position == position
    assert not found.differing.missing_in_second
    assert compare_rotations(rotate(), rotate(), LIMIT, FLOAT32).differing is None


def test_a_layer_that_differs_from_some_position_on_is_named_among_those_that_do_not() -> None:
    found = compare_rotations(rotate(), rotate(range(1234, LIMIT), layer=4), LIMIT, FLOAT32)
    assert found.differing is not None
    assert (found.differing.position, found.differing.layer) == (1234, 4)


def test_the_end_of_a_table_and_the_first_longer_query_are_known() -> None:
    found = compare_rotations(rotate(), rotate(rows=700), LIMIT, FLOAT32)
    assert found.differing is not None
    assert (found.differing.position, found.differing.missing_in_second) == (700, True)
    both = rotate(factor=1.07, begins=4096)
    found = compare_rotations(both, both, LIMIT, FLOAT32)
    assert (found.differing, found.scaled) == (None, 4096)
    found = compare_rotations(both, rotate(), LIMIT, FLOAT32)
    assert found.differing is not None
    assert found.differing.position == 4096


def test_layers_that_one_engine_alone_knows_are_told() -> None:
    def fewer(layers: Sequence[int] | None, positions: npt.NDArray[np.int64]) -> Rotations:
        return {each: found for each, found in rotate()(layers, positions).items() if each}

    found = compare_rotations(rotate(), fewer, 100, FLOAT32)
    assert (found.layers, found.missing) == (LAYERS - 1, [0])
    assert found.in_words(100) == "rotary positions of layers but 0 compared at all 100"
    assert compare_rotations(rotate(), lambda *_: {}, 100, FLOAT32).in_words(100) == "rotary positions not compared"


def scaled_queries(out: Path) -> Path:
    """Ministral 3, whose queries are multiplied by 1 + beta log(1 + floor(position / 64))."""
    folder = tiny("ministral3", out)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("decoder", ["written-out", "autograd"])
def test_queries_that_grow_with_their_position_are_trained_as_transformers_computes_them(
    decoder: Any, tmp_path: Path
) -> None:
    folder = scaled_queries(tmp_path / "model")
    trainer = HFTrainer(TrainerConfig(str(folder), name="tiny", decoder=decoder))
    ids = np.random.default_rng(1).integers(20, 380, 256).astype(np.int32)
    found = trainer.logprobs(None, RenderedInput(ids))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def test_queries_that_do_not_grow_are_refused_where_transformers_makes_them_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_layers, "query_scale", lambda attention: None)
    folder = scaled_queries(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="from position 64 on, queries or keys of layer 0 differ from transform"):
        HFTrainer(TrainerConfig(str(folder), name="tiny", decoder="written-out"))
    assert "autograd" in HFTrainer(TrainerConfig(str(folder), name="tiny")).trains
    short = HFTrainer(TrainerConfig(str(folder), name="tiny", decoder="written-out", max_context_length=64))
    assert short.max_context_length == 64


def test_what_is_measured_follows_the_frequencies_of_each_kind_of_layer(tmp_path: Path) -> None:
    """Every other layer of SmolLM3 has no positions."""
    assert OWN["smollm3"] == {"no_rope_layers": [1, 0]}
    trainer = HFTrainer(TrainerConfig(str(tiny("smollm3", tmp_path / "model")), name="tiny"))
    found = trainer.rotations(None, np.tile(np.arange(256), (3, 1)))
    assert found.keys() == {0, 1}
    turned, still = (found[layer] / np.abs(found[layer][:, :1]).max() for layer in (0, 1))
    assert np.abs(turned - turned[:, :1]).max() > 1
    np.testing.assert_array_equal(still, np.broadcast_to(still[:, :1], still.shape))
