"""Exports have the hosted service's tensor names. They equal what was trained, both merged into the base's files by the
rule of the cookbook's exporters, and loaded by PEFT as docs/futures-and-exports.md describes."""

import json
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tinker_local.backend.adapters.adapter import AdapterState
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer_config import TrainerConfig

from tests.float64 import Exact
from tests.training.test_lora_equals_peft import peft_logprobs

UNTIED = ("qwen3_untied", "qwen2_5_vl", "qwen3_vl_untied")
TIED = ("qwen3", "qwen2_5_vl_tied", "qwen3_vl")
KEY_MAPPING = {r"^model\.(?=layers\.)": "model.language_model.", r"^model\.unembed_tokens": "lm_head"}
"""Of the documentation, for vision-language models."""
TEXT_KEY_MAPPING = {r"^model\.unembed_tokens": "lm_head"}


def base_tensor(module: str, base: Collection[str]) -> str:
    """Which tensor of the base's files `base` an exported module changes: the text model lies at `model.`, in files of
    some vision-language models at `model.language_model.`; the unembedding is `lm_head`, or else the embedding."""
    if module == "model.unembed_tokens":
        module = "lm_head" if "lm_head.weight" in base else "model.embed_tokens"
    if any(name.startswith("model.language_model.") for name in base):
        module = module.replace("model.", "model.language_model.")
    return f"{module}.weight"


def deltas(state: AdapterState, base: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The update that the export adds to tensors of the base: (alpha / r) B A."""
    config = state.peft_config()
    found = {}
    for name, a in state.tensors.items():
        if name.endswith(".lora_A.weight"):
            b = state.tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[base_tensor(module, base)] = config["lora_alpha"] / config["r"] * (b @ a)
    return found


def merge(path: Path, state: AdapterState, out: Path, *, new_head: bool = False) -> Path:
    """The model at `path` with the export in its weights; with `new_head` a tied one is untied, and its input embedding
    is as it was."""
    shutil.copytree(path, out)
    tensors = load_file(path / "model.safetensors")
    changes = deltas(state, tensors)
    assert len(changes) * 2 == len(state.tensors)
    for name, delta in changes.items():
        merged = tensors[name] + delta  # KeyError: no such tensor
        tensors["lm_head.weight" if new_head and name.endswith("embed_tokens.weight") else name] = merged
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    if new_head:
        config = json.loads((out / "config.json").read_text())
        for part in (config, config.get("text_config", {})):
            part["tie_word_embeddings"] = False
        (out / "config.json").write_text(json.dumps(config))
    return out


def inputs_for(name: str, make: Any) -> list[RenderedInput]:
    images = [make.input(30, [(3, (4, 6)), (12, (4, 4))])] if "vl" in name else []
    return [make.input(11), make.input(24), *images]


def logprobs(trainer: HFTrainer, adapter: str | None, inputs: list[RenderedInput]) -> np.ndarray:
    return np.concatenate([trainer.logprobs(adapter, tokens) for tokens in inputs])


@pytest.mark.parametrize("name", UNTIED)
def test_merged_export_of_an_untied_model_is_what_was_trained(
    name: Any, trainer: Any, model_path: Any, make: Any, add_adapter: Any, tmp_path: Path
) -> None:
    ours, inputs = trainer(name), inputs_for(name, make)
    add_adapter(ours, "a")
    state = ours.export("a")
    merged = HFTrainer(
        TrainerConfig(str(merge(model_path(name), state, tmp_path / "m")), name="m", dtype="float32", device="cpu")
    )
    trained = logprobs(ours, "a", inputs)
    assert np.abs(trained - logprobs(ours, None, inputs)).max() > 0.5
    Exact(ours).assert_near("a", inputs, trained, logprobs(merged, None, inputs))


@pytest.mark.parametrize("name", TIED)
def test_merged_export_of_a_tied_model_differs_by_its_input_embedding_alone(
    name: Any, trainer: Any, model_path: Any, make: Any, add_adapter: Any, tmp_path: Path
) -> None:
    ours, inputs = trainer(name), inputs_for(name, make)
    add_adapter(ours, "a")
    add_adapter(ours, "no head", train_unembed=False)

    def merged(adapter: str, **options: bool) -> np.ndarray:
        folder = merge(model_path(name), ours.export(adapter), tmp_path / f"{adapter} {options}", **options)
        return logprobs(HFTrainer(TrainerConfig(str(folder), name="m", dtype="float32", device="cpu")), None, inputs)

    trained = logprobs(ours, "a", inputs)
    assert np.abs(merged("a") - trained).max() > 1e-2
    exact = Exact(ours)
    exact.assert_near("a", inputs, trained, merged("a", new_head=True))
    exact.assert_near("no head", inputs, logprobs(ours, "no head", inputs), merged("no head"))


@pytest.mark.parametrize("name", [*UNTIED, *TIED])
def test_export_is_loaded_by_peft_as_documented(
    name: Any, trainer: Any, model_path: Any, make: Any, add_adapter: Any, tmp_path: Path
) -> None:
    ours = trainer(name)
    add_adapter(ours, "a")
    write_adapter(tmp_path, ours.export("a"))
    auto = transformers.AutoModelForImageTextToText if "vl" in name else transformers.AutoModelForCausalLM

    def load(**options: Any) -> Any:
        return peft.PeftModel.from_pretrained(auto.from_pretrained(model_path(name)).eval(), str(tmp_path), **options)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        if name == "qwen3_untied":
            model = load()
        else:
            model = load(key_mapping=KEY_MAPPING if "vl" in name else TEXT_KEY_MAPPING)
    datum = make.datum(24)
    datum = replace(datum, target_tokens=np.roll(datum.input.token_ids, -1).astype(np.int64))
    found = peft_logprobs(model, datum).detach().numpy()[:-1]
    Exact(ours).assert_near("a", [datum.input], ours.logprobs("a", datum.input), found)
    loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert len(loaded) == len(ours.export("a").tensors)
    if name != "qwen3_untied":
        with pytest.warns(UserWarning, match="Found missing adapter keys"):  # PEFT warns about what it does not load
            load()


@pytest.mark.parametrize("config", [{}, {"train_attn": False, "train_mlp": False}, {"train_unembed": False}])
@pytest.mark.parametrize("name", [*UNTIED, *TIED])
def test_export_is_the_capture_by_other_names(name: Any, config: Any, trainer: Any, add_adapter: Any) -> None:
    ours = trainer(name)
    add_adapter(ours, "a", **config)
    export, capture = ours.export("a"), ours.capture("a", optimizer=False)
    assert (export.lora_config, export.step, export.optimizer) == (capture.lora_config, 0, None)
    for (hosted, array), (own, expected) in zip(export.tensors.items(), capture.tensors.items(), strict=True):
        renamed = own.replace("model.language_model.", "model.")
        assert hosted == (renamed.replace(".lm_head.", ".model.unembed_tokens.") if name in TIED else renamed)
        np.testing.assert_array_equal(array, expected)
    assert all("language_model" not in module for module in export.target_modules)
