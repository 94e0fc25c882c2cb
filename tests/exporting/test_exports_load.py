"""What `export_checkpoint` writes loads in PEFT, transformers and vLLM as it is, and computes what was trained."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tinker_cookbook.weights import build_hf_model
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.base_model import find_base
from tinker_local.backend.exporting.merged_model import write_merged
from tinker_local.backend.exporting.trained import find_checkpoint, read_trained
from tinker_local.backend.models.agreement import with_random_b
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import ApiError, InternalError, InvalidRequestError, LoraConfig

from tests.exporting.conftest import Tuned, asked, hf_logprobs, load
from tests.families.test_mixed_layers import mixed

pytestmark = pytest.mark.more

FAMILIES = ("qwen3", "qwen3_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "gemma3")
EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "qwen3_next", "lfm2_moe")
"""Text models with routed experts, beside the first."""
TIED = ("lfm2_moe",)
"""Of these, those whose LM head vLLM takes for the embedding."""
Make = Callable[..., Tuned]


@pytest.mark.parametrize("layout", ["checkpoint", "exported"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_an_export_without_a_key_mapping_and_computes_what_was_trained(
    tuned: Make, tmp_path: Path, family: str, layout: str
) -> None:
    trained = tuned(family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exported = export_checkpoint(getattr(trained, layout), tmp_path / "a", to="peft", base=str(trained.model))
    assert not [each for each in caught if "tie_word_embeddings" in str(each.message)]  # it says so itself
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
    trained.assert_near(hf_logprobs(model, asked(trained.model)))


@pytest.mark.mutation(
    "merged-into-the-tied-embedding",
    "write_merged.tensors",
    "if name in changed else tensor\n",
    "if name in changed else (_added(trained, HEAD, tensor) if untied and name == head else tensor)\n",
    cases=("qwen3-True",),
)
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *((family, tied) for family in FAMILIES for tied in (True, False)),
        ("qwen3_moe", False),
        ("qwen3_vl_moe", True),
        ("qwen3_5_moe", False),
        ("gpt_oss", False),
        *((family, family in TIED) for family in EXPERTS),
    ],
)
def test_merged_model_computes_what_was_trained(tuned: Make, tmp_path: Path, family: str, tied: bool) -> None:
    """With a head that was trained, which must not change a tied embedding."""
    trained = tuned(family, tied)
    layout = trained.exported if family == "gpt_oss" else trained.checkpoint  # with other names than the model's
    exported = export_checkpoint(layout, tmp_path / "m", to="merged", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.agrees
    assert [each.partition(", and so")[0] for each in exported.warnings] == (["vLLM"] if family in TIED else [])
    model = load(tmp_path / "m")
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    trained.assert_near(hf_logprobs(model, asked(tmp_path / "m")))
    transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    assert str(trained.model) in card
    assert "differ by" in card


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
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
    trained.assert_near(hf_logprobs(model, asked(trained.model)))
    assert "vision tower" in (tmp_path / "o" / "README.md").read_text()


@pytest.mark.parametrize("to", ["merged", "peft"])
def test_the_card_names_the_pictures_that_were_trained_on(tuned: Make, tmp_path: Path, to: Any) -> None:
    """As the program said for its run, or for the checkpoint."""
    trained = tuned("qwen3_vl")
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained.checkpoint, folder)
    said = {"tinker_local.prompt_order": "text-first", "tinker_local.picture_side": "32"}
    described = {"training_run": {"user_metadata": said}, "user_metadata": {"tinker_local.picture_side": "64"}}
    (folder / "checkpoint.json").write_text(json.dumps(described))
    for given, line in (
        (folder, "- trained with pictures after the text and pictures of at most 64 pixels a side\n"),
        (trained.checkpoint, ""),
    ):
        export_checkpoint(given, tmp_path / "o", to=to, base=str(trained.model), check=False)
        card = (tmp_path / "o" / "README.md").read_text()
        assert line in card
        assert ("trained with" in card) == bool(line)
        shutil.rmtree(tmp_path / "o")


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


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_the_cookbooks_merge_of_experts_is_what_was_trained(tuned: Make, tmp_path: Path, family: str) -> None:
    trained = tuned(family, False)
    folders = {"base_model": trained.model, "adapter_path": trained.exported, "output_path": tmp_path / "m"}
    build_hf_model(**{name: str(folder) for name, folder in folders.items()})
    trained.assert_near(hf_logprobs(load(tmp_path / "m"), asked(trained.model)))


def test_layers_that_predict_several_tokens_at_once_stay_as_they_are(tuned: Make, tmp_path: Path) -> None:
    """Published Qwen3.5 models have them, with names that end like those of the other layers."""
    trained = tuned("qwen3_5_moe", False)
    shutil.copytree(trained.model, tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    start = "model.language_model.layers.0.mlp"
    drafts = {name: name.replace(start, "mtp.layers.0.mlp") for name in tensors if name.startswith(start)}
    tensors |= {draft: tensors[name].clone() for name, draft in drafts.items()}
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    base = find_base(str(tmp_path / "base"), "--base")
    (tmp_path / "m").mkdir()
    write_merged(tmp_path / "m", read_trained(find_checkpoint(str(trained.checkpoint), tmp_path), base))
    merged = load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(merged[draft], tensors[draft]) for draft in drafts.values())
    changed = {name.removeprefix(f"{start}.") for name in drafts if not torch.equal(merged[name], tensors[name])}
    assert changed == {
        *("experts.gate_up_proj", "experts.down_proj"),
        *(f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


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


@pytest.mark.rotated(3)
@pytest.mark.parametrize(
    ("family", "tied", "head", "vision"),
    [
        ("qwen3", True, True, False),
        ("qwen3_vl", True, True, False),
        ("qwen2_vl", True, False, False),
        ("qwen2_5_vl", True, False, False),
        ("qwen3_5", True, True, False),
        ("gemma3", True, False, False),
        ("qwen3_5_moe", False, True, False),
        ("gpt_oss", False, False, False),
        *((family, family in TIED, family in ("mixtral", "lfm2_moe"), False) for family in EXPERTS),
        ("qwen3_vl", True, True, True),
        ("qwen2_vl", True, False, True),
        ("qwen2_5_vl", True, False, True),
        ("qwen3_5", True, True, True),
    ],
)
def test_vllm_as_it_is_computes_what_was_trained(
    tuned: Make, tmp_path: Path, family: str, tied: bool, head: bool, vision: bool
) -> None:
    """Experts on a CPU with this project's operators, since vLLM has none there."""
    trained = tuned(family, tied, head, vision)
    exported = export_checkpoint(trained.checkpoint, tmp_path / "v", to="vllm", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.library == "vLLM"
    assert exported.checked.agrees, str(exported.checked)
    assert exported.checked.effect > (0.05 if family == "gemma3" else 0.1)
    assert exported.checked.images == (family not in ("qwen3", "gpt_oss", *EXPERTS))


def test_a_head_is_exported_for_the_vllm_that_takes_it(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3_5")
    export_checkpoint(trained.checkpoint, tmp_path / "v", to="vllm", base=str(trained.model), check=False)
    card = (tmp_path / "v" / "README.md").read_text()
    assert "vllm serve" in card
    assert "vLLM 0.32 or newer" in card


def test_vllm_is_refused_what_it_would_not_take(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen2_5_vl")
    with pytest.raises(InvalidRequestError, match="--to merged"):
        export_checkpoint(trained.checkpoint, tmp_path / "v", to="vllm", base=str(trained.model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "checkpoint") for family in ("qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss", *EXPERTS)),
        ("qwen3_vl_moe", "exported"),
    ],
)
def test_peft_loads_experts_and_computes_what_was_trained(
    tuned: Make, tmp_path: Path, family: str, layout: str
) -> None:
    """All experts of a layer are one parameter there, and gate and up another's two halves."""
    trained = tuned(family, family in TIED, family not in TIED)  # PEFT would merge a tied head into the embedding
    exported = export_checkpoint(getattr(trained, layout), tmp_path / "a", to="peft", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.agrees
    assert exported.warnings == ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(load(trained.model), str(tmp_path / "a")).eval()
    assert not [each for each in caught if "missing adapter keys" in str(each.message)]
    trained.assert_near(hf_logprobs(model, asked(trained.model)))
    merged = model.merge_and_unload()
    trained.assert_near(hf_logprobs(merged, asked(trained.model)))
    card = (tmp_path / "a" / "README.md").read_text()
    assert "PEFT from 0.19.1" in card
    assert "vllm serve" not in card


def test_peft_takes_no_mlp_for_experts(tmp_path: Path) -> None:
    """Of Qwen3-MoE with a layer without experts: PEFT would take targets of its MLP for those of experts."""
    model = mixed(tmp_path / "model", vision=False, fields={"mlp_only_layers": [0]})
    trainer = HFTrainer(TrainerConfig(str(model), name="tiny", dtype="float32", device="cpu"))
    trainer.create_adapter("a", LoraConfig(rank=4, seed=1))
    trainer.load_adapter("a", with_random_b(trainer.capture("a", optimizer=False)))
    (tmp_path / "c").mkdir()
    write_adapter(tmp_path / "c", trainer.capture("a", optimizer=False))
    exported = export_checkpoint(tmp_path / "c", tmp_path / "p", to="peft", base=str(model))
    assert exported.checked is not None
    assert exported.checked.agrees
    kept = load_file(tmp_path / "p" / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(load(model), str(tmp_path / "p")).state_dict()
    mlp = [name for name in kept if ".layers.0.mlp." in name]
    assert len(mlp) == 6
    for name in mlp:
        assert torch.equal(theirs[name.replace(".weight", ".default.weight")], kept[name])


def test_experts_alone_are_exported_for_peft(tuned: Make, tmp_path: Path) -> None:
    """`target_modules` is empty then."""
    trained = tuned("qwen3_moe", False)
    shutil.copytree(trained.checkpoint, tmp_path / "c")
    config = json.loads((trained.checkpoint / "adapter_config.json").read_text())
    assert {"w1", "w2", "w3"} < set(config["target_modules"])
    (tmp_path / "c" / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["w1", "w2", "w3"]}))
    tensors = load_file(trained.checkpoint / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    save_file(kept, tmp_path / "c" / "adapter_model.safetensors", metadata={"format": "pt"})
    exported = export_checkpoint(tmp_path / "c", tmp_path / "a", to="peft", base=str(trained.model))
    assert exported.checked is not None
    assert exported.checked.effect > 0.1
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"] == []


def test_a_peft_that_has_experts_in_another_form_is_refused(
    tuned: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tuned("qwen3_moe", False)
    monkeypatch.setattr("tinker_local.backend.exporting.check_export.version", lambda name: "0.19.0")
    with pytest.raises(InvalidRequestError, match=r"peft 0\.19\.0 .* from 0\.19\.1"):
        export_checkpoint(trained.checkpoint, tmp_path / "p", to="peft", base=str(trained.model))
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(tuned: Make, tmp_path: Path) -> None:
    trained = tuned("qwen3")
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidRequestError, match=r"mine exists"):
        export_checkpoint(trained.checkpoint, tmp_path / "mine", to="peft", base=str(trained.model))
    assert list((tmp_path / "mine").iterdir()) == []


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
