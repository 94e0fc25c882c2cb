"""What an export says of an adapter that was trained on a base in fewer bits, and what it was compared with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.base_model import find_base
from tinker_local.backend.exporting.check_export import Reference, make_probe
from tinker_local.backend.exporting.trained import find_checkpoint, read_trained
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.backend.weights.precision import option_of, parts_of
from tinker_local.types import InvalidRequestError

from tests.exporting.conftest import Tuned

pytestmark = pytest.mark.more

Make = Callable[..., Tuned]


def described(tuned: Tuned, folder: Path, **fields: Any) -> Path:
    """The checkpoint in `folder`, with a server's description of it."""
    shutil.copytree(tuned.checkpoint, folder)
    (folder / "checkpoint.json").write_text(json.dumps({"base_model": "tiny/served", **fields}))
    return folder


IN_4_BITS = "a base in 4 bits (int4-curved{})"
WITH_HEAD = " with embedding and LM head in 8 bits (int8)"


@pytest.mark.parametrize(
    ("to", "precision", "told"),
    [
        ("merged", "int4-curved", IN_4_BITS),
        ("peft", "int4-curved", IN_4_BITS),
        ("merged", "int4-curved+head-int8", IN_4_BITS + WITH_HEAD),
        ("peft", "dense+head-int8", "a dense base" + WITH_HEAD),
    ],
)
def test_an_export_names_the_bits_of_the_base_and_how_far_it_is_from_it(
    tuned: Make, tmp_path: Path, to: Any, precision: str, told: str
) -> None:
    """Also those of embedding and LM head. It is made of the files, and compared with the base that these are."""
    trained = tuned("qwen3")
    checkpoint = described(trained, tmp_path / "c", base_precision=precision)
    exported = export_checkpoint(checkpoint, tmp_path / "o", to=to, base=str(trained.model))
    base = find_base(str(trained.model), "")
    adapter = read_trained(find_checkpoint(str(checkpoint), tmp_path), base)
    found = []
    layers, head = parts_of(precision)
    for weights in ((None, None), (option_of(layers), head)):
        reference = Reference(adapter, "cpu", *weights)
        found.append(reference.logprobs(make_probe(base).prompts)[0])
        reference.close()
    apart = np.abs(found[0] - found[1])
    assert apart.max() > 1e-3  # else this would show nothing
    assert exported.checked is not None
    assert exported.checked.agrees  # with the dense base
    card = (tmp_path / "o" / "README.md").read_text()
    assert (base.config.hidden_size, base.config.intermediate_size) == (64, 128)
    does = "was merged into" if to == "merged" else "is for"
    of_groups = told.format(", groups of 32")
    assert f"- trained on {of_groups}: it learned beside that rounding, and {does}" in card
    assert (
        f"; on {told.format('')}, where it was trained, the trainer's are {apart.max():.2g} nats from these at "
        f"most, {apart.mean():.2g} on average"
    ) in card
    assert "first weights" not in card
    [warning] = [each for each in exported.warnings if " bits " in each]
    assert "measure it before you rely on it" in warning


def test_an_export_names_a_base_that_no_server_makes_now(tuned: Make, tmp_path: Path) -> None:
    """In 4 bits of even steps. How far the trainer was there cannot be measured."""
    trained = tuned("qwen3")
    checkpoint = described(trained, tmp_path / "c", base_precision="int4")
    exported = export_checkpoint(checkpoint, tmp_path / "o", to="peft", base=str(trained.model))
    card = (tmp_path / "o" / "README.md").read_text()
    told = "a base in 4 bits of even steps (int4), as earlier servers made it"
    assert f"- trained on {told}: it learned beside that rounding, and is for the base" in card
    assert "where it was trained" not in card
    [warning] = [each for each in exported.warnings if "4 bits" in each]
    assert warning.startswith(f"the adapter was trained on {told}, and this is")


def test_an_export_names_the_base_on_which_its_first_weights_were_trained(tuned: Make, tmp_path: Path) -> None:
    """Of an adapter on a dense base, nothing."""
    trained = tuned("qwen3")
    for name, metadata, line in (
        ("plain", {}, ""),
        ("moved", {"tinker_local.began_on": "int8"}, "- its first weights were trained on a base in 8 bits (int8)\n"),
        (
            "imported",
            {"tinker_local.began_on": "elsewhere"},
            "- its first weights were imported, and trained elsewhere\n",
        ),
    ):
        checkpoint = described(trained, tmp_path / name, base_precision=None, user_metadata=metadata)
        out = tmp_path / f"{name}-export"
        exported = export_checkpoint(checkpoint, out, to="peft", base=str(trained.model), check=False)
        card = (out / "README.md").read_text()
        assert "- trained on a base" not in card
        assert line in card
        assert ("first weights" in card) == bool(metadata)
        assert not [each for each in exported.warnings if "bits" in each]


def test_a_description_with_a_precision_that_is_not_a_word_is_refused(tuned: Make, tmp_path: Path) -> None:
    checkpoint = described(tuned("qwen3"), tmp_path / "c", base_precision=4)
    with pytest.raises(
        InvalidRequestError, match=r"checkpoint.json: base_precision is 4, expected a word such as int4-curved$"
    ):
        find_checkpoint(str(checkpoint), tmp_path)


def test_the_groups_of_packed_experts_are_named(tmp_path: Path) -> None:
    """Rows of 96 numbers, in groups of 32, are of experts alone."""
    shape = TextShape(intermediate_size=256)
    path = make_tiny_text_model(tmp_path / "model", family="qwen3_moe", shape=shape)
    assert find_base(str(path), "").groups(8) == (128, 64, 32)
