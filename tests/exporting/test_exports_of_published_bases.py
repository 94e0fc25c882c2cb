"""Exports of adapters whose base is a published checkpoint in fewer bits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinker_local.backend.exporting.export import export_checkpoint

from tests.exporting.conftest import Tuned
from tests.published_checkpoints import Method, compressed, fp8, gptq, publish, scheme

Make = Callable[..., Tuned]
METHODS: dict[str, Callable[[], Method]] = {
    "gptq": lambda: gptq(4, 32, zeros=True, order=True, v2=True),
    "fp8": lambda: fp8((128, 128)),
    "w4a16": lambda: compressed(scheme("group", 4, group_size=32)),
}


def with_bias_of_zeros(file: Path) -> None:
    """As AutoGPTQ writes it where the model has none."""
    tensors = load_file(file)
    name = next(name for name in tensors if "mlp.up_proj" in name).rpartition(".")[0]
    save_file({**tensors, f"{name}.bias": torch.zeros(128).half()}, file, {"format": "pt"})


@pytest.mark.parametrize(("method", "family"), [("gptq", "qwen3"), ("fp8", "qwen3_vl"), ("w4a16", "qwen3_vl")])
def test_a_merged_model_has_the_numbers_of_the_codes_with_the_adapter(
    tuned: Make, tmp_path: Path, method: str, family: str
) -> None:
    """As an export of the same base that is not packed; the exports are compared with the trainer, too."""
    trained = tuned(family)
    packed, dense = publish(trained.model, tmp_path, METHODS[method]())
    (Path(packed) / "quantize_config.json").write_text("{}")
    with_bias_of_zeros(Path(packed) / "model.safetensors")
    merged = export_checkpoint(trained.checkpoint, tmp_path / "m", to="merged", base=packed)
    assert merged.checked is not None
    assert merged.checked.agrees
    assert merged.checked.effect > 0.5
    export_checkpoint(trained.checkpoint, tmp_path / "d", to="merged", base=dense, check=False)
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("m", "d"))
    assert found.keys() == expected.keys()
    in_layers = [name for name in found if "layers.0" in name and "proj" in name]
    assert all(torch.equal(found[name], expected[name]) for name in in_layers)
    assert {each.dtype for each in found.values()} == {torch.float32}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "m" / "quantize_config.json").exists()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "m").dtype == torch.float32
    card = (tmp_path / "m" / "README.md").read_text()
    assert "- the base is quantized (" in card
    assert "); here are the numbers that its codes stand for, in float32" in card


def test_an_adapter_for_peft_is_compared_on_the_numbers_of_its_base(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3")
    packed, _ = publish(trained.model, tmp_path, gptq(4, 32))
    exported = export_checkpoint(trained.checkpoint, tmp_path / "a", to="peft", base=packed)
    assert exported.checked is not None
    assert exported.checked.agrees
    card = (tmp_path / "a" / "README.md").read_text()
    assert "- for the quantized base (GPTQ in 4 bits, groups of 32), with activations" in card
    assert "- trained on a dense base, or by a server that did not record it" in card
    assert any("trained on a dense base, or by a server that did not" in each for each in exported.warnings)
    described = trained.checkpoint / "checkpoint.json"
    written = json.loads(described.read_text()) if described.exists() else {}
    described.write_text(json.dumps({**written, "base_precision": "gptq-int4-g32"}))
    same = export_checkpoint(trained.checkpoint, tmp_path / "b", to="peft", base=packed, check=False)
    assert not any("dense base" in each for each in same.warnings)
    card = (tmp_path / "b" / "README.md").read_text()
    assert "- trained on the quantized base (GPTQ in 4 bits, groups of 32), with activations" in card
    assert "a base in" not in card
