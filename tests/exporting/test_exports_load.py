"""What `export_checkpoint` writes loads in PEFT, transformers and vLLM as it is, and computes what was trained."""

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.base_model import find_base
from tinker_local.backend.exporting.merged_model import write_merged
from tinker_local.backend.exporting.trained import find_checkpoint, read_trained
from tinker_local.types import ApiError, InternalError, InvalidRequestError

from tests.exporting.conftest import Tuned, asked, hf_logprobs, load

FAMILIES = ("qwen3", "qwen3_vl", "qwen2_5_vl", "qwen3_5")
Make = Callable[..., Tuned]


@pytest.mark.mutation(
    "exported-with-the-hosted-names",
    "exporting/trained.py",
    "{_own_name(name, base): np.asarray(array, np.float32)",
    "{name: np.asarray(array, np.float32)",
    cases=("qwen3_vl-exported",),
)
@pytest.mark.mutation(
    "parts-joined-off-the-diagonal",
    "exporting/joined_parts.py",
    "row, column = row + len(block), column + block.shape[1]",
    "row = row + len(block)",
    cases=("qwen3_5-checkpoint",),
)
@pytest.mark.parametrize("layout", ["checkpoint", "exported"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_an_export_without_a_key_mapping_and_computes_what_was_trained(
    tuned: Make, tmp_path: Path, family: str, layout: str
) -> None:
    trained = tuned(family)
    exported = export_checkpoint(getattr(trained, layout), tmp_path / "a", to="peft", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.agrees
    assert exported.checked.effect > 0.5
    assert exported.checked.images == (family != "qwen3")
    assert "merge_and_unload" in " ".join(exported.warnings)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    base = load(config["base_model_name_or_path"])  # resolves
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "a")).eval()
    assert not [each for each in caught if "missing adapter keys" in str(each.message)]
    np.testing.assert_allclose(hf_logprobs(model, asked(trained.model)), trained.expected, atol=1e-4, rtol=0)


@pytest.mark.mutation(
    "merged-into-the-tied-embedding",
    "merged_model.py",
    """yield name, changed[name](tensor) if name in changed else tensor
""",
    """yield name, changed[name](tensor) if name in changed else (
                        _added(trained, HEAD, tensor) if untied and name == head else tensor
                    )
""",
    cases=("qwen3-True",),
)
@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, tied) for family in FAMILIES for tied in (True, False)), ("qwen3_moe", False), ("qwen3_vl_moe", True)],
)
def test_merged_model_computes_what_was_trained(tuned: Make, tmp_path: Path, family: str, tied: bool) -> None:
    """With a head that was trained, which must not change a tied embedding."""
    trained = tuned(family, tied)
    exported = export_checkpoint(trained.checkpoint, tmp_path / "m", to="merged", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.agrees
    assert exported.warnings == ()
    model = load(tmp_path / "m")
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    np.testing.assert_allclose(hf_logprobs(model, asked(tmp_path / "m")), trained.expected, atol=1e-4, rtol=0)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    assert str(trained.model) in card
    assert "differ by" in card


@pytest.mark.mutation(
    "tower-merged-into-the-decoder",
    "exporting/merged_model.py",
    "start = vision.tower if vision is not None and base.family.in_tower(path) else base.family.decoder_path",
    "start = base.family.decoder_path",
    cases=("merged-qwen2_5_vl",),
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("to", ["merged", "peft"])
def test_a_vision_tower_that_was_trained_is_exported_with_the_rest(
    tuned: Make, tmp_path: Path, family: str, to: Any
) -> None:
    """From the layout of the hosted service, which has no names of the tower, and from a checkpoint."""
    trained = tuned(family, True, True, True)
    folder = trained.exported if to == "peft" else trained.checkpoint
    exported = export_checkpoint(folder, tmp_path / "o", to=to, base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.agrees
    base = find_base(str(trained.model), "--base")
    read = read_trained(find_checkpoint(str(folder), tmp_path), base)
    of_tower = [name for name in read.tensors if ".visual." in name]
    assert of_tower
    assert all(read.tensors[name].any() for name in of_tower)
    assert read.config.train_vision
    model = load(tmp_path / "o" if to == "merged" else trained.model)
    if to == "peft":
        model = peft.PeftModel.from_pretrained(model, str(tmp_path / "o")).eval()
    np.testing.assert_allclose(hf_logprobs(model, asked(trained.model)), trained.expected, atol=1e-4, rtol=0)
    assert "vision tower" in (tmp_path / "o" / "README.md").read_text()


def test_merged_model_in_several_files_is_the_same(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3_vl")
    base = find_base(str(trained.model), "--base")
    for name, limit in (("one", 2**30), ("many", 2**16)):
        (tmp_path / name).mkdir()
        write_merged(tmp_path / name, read_trained(find_checkpoint(str(trained.checkpoint), tmp_path), base), limit)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    inputs = asked(trained.model)
    one, many = (hf_logprobs(load(tmp_path / name), inputs) for name in ("one", "many"))
    assert np.array_equal(one, many)


def test_merged_model_keeps_the_dtype_of_its_base(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3")
    load(trained.model).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained(trained.model).save_pretrained(tmp_path / "base")
    exported = export_checkpoint(trained.checkpoint, tmp_path / "m", to="merged", base=str(tmp_path / "base"))
    assert exported.checked is not None
    assert exported.checked.dtype == "bfloat16"
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" in tensors


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "head", "vision"),
    [
        *(("qwen3", True, False), ("qwen3_vl", True, False), ("qwen2_5_vl", False, False), ("qwen3_5", True, False)),
        *(("qwen3_vl", True, True), ("qwen2_5_vl", False, True), ("qwen3_5", True, True)),
    ],
)
def test_vllm_as_it_is_computes_what_was_trained(
    tuned: Make, tmp_path: Path, family: str, head: bool, vision: bool
) -> None:
    trained = tuned(family, True, head, vision)
    exported = export_checkpoint(trained.checkpoint, tmp_path / "v", to="vllm", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.library == "vLLM"
    assert exported.checked.agrees, str(exported.checked)
    assert exported.checked.effect > 0.1
    assert exported.checked.images == (family != "qwen3")


def test_vllm_is_refused_what_it_would_not_take(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen2_5_vl")
    with pytest.raises(InvalidRequestError, match="--to merged"):
        export_checkpoint(trained.checkpoint, tmp_path / "v", to="vllm", base=str(trained.model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "message"),
    [("peft", "PEFT has no adapters of experts that share a factor"), ("vllm", "no adapters of experts on a CPU")],
)
def test_experts_are_refused_where_they_would_not_load(tuned: Make, tmp_path: Path, to: Any, message: str) -> None:
    trained = tuned("qwen3_moe", False)
    with pytest.raises(InvalidRequestError, match=message):
        export_checkpoint(trained.checkpoint, tmp_path / "v", to=to, base=str(trained.model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mutation("export-overwrites", "exporting/export.py", "if out.exists() or out.is_symlink():", "if False:")
def test_an_export_overwrites_nothing(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3")
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidRequestError, match=r"mine exists"):
        export_checkpoint(trained.checkpoint, tmp_path / "mine", to="peft", base=str(trained.model))
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.mutation("export-not-compared", "exporting/export.py", "if not checked.agrees:", "if False:")
def test_an_export_that_differs_from_what_was_trained_is_not_kept(
    tuned: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tuned("qwen3")
    monkeypatch.setattr("tinker_local.backend.exporting.merged_model.LORA_ALPHA", 16)
    with pytest.raises(InternalError, match=r"not what was trained: .* differ by"):
        export_checkpoint(trained.checkpoint, tmp_path / "m", to="merged", base=str(trained.model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", '{"peft_type": "LORA", "r": 4, "lora_alpha": 8}', "lora_alpha 32"),
        ("adapter_config.json", "no", "cannot be read"),
        ("adapter_model.safetensors", "no", "cannot be read"),
        ("adapter_model.safetensors.age", "", "age -d"),
    ],
)
def test_a_folder_that_is_no_adapter_of_the_base_is_refused(
    tuned: Make, tmp_path: Path, file: str, content: str, message: str
) -> None:
    trained = tuned("qwen3")
    copied = tmp_path / "copied"
    copied.mkdir()
    for each in trained.checkpoint.iterdir():
        (copied / each.name).write_bytes(each.read_bytes())
    (copied / file).write_text(content)
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        export_checkpoint(copied, tmp_path / "out", to="peft", base=str(trained.model))


def test_an_adapter_of_another_model_is_refused_by_name(tuned: Make, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="does not fit the base model"):
        export_checkpoint(tuned("qwen2").checkpoint, tmp_path / "o", to="peft", base=str(tuned("qwen3").model))
    with pytest.raises(ApiError, match="pass --base"):
        export_checkpoint(tuned("qwen3").checkpoint, tmp_path / "o", to="peft")


def test_names_of_files_suit_shells_and_hubs(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3")
    export_checkpoint(trained.checkpoint, tmp_path / "o", to="peft", base=str(trained.model))
    names = [name for _, folders, files in os.walk(tmp_path / "o") for name in (*folders, *files)]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    assert set(names) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
