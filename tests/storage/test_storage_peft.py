"""A checkpoint folder is what PEFT loads, tensor by tensor and in its effect."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from tinker_local.backend.adapters.adapter import LORA_ALPHA, AdapterState
from tinker_local.backend.storage import Store
from tinker_local.types import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.storage.store_states import make_record, make_state

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=False,
        )
    ).eval()


@pytest.mark.parametrize("targets", [TARGETS, (*TARGETS, "lm_head")])
def test_peft_loads_a_checkpoint_folder(tmp_path: Path, targets: tuple[str, ...]) -> None:
    tokens = torch.arange(10)[None]
    model = get_peft_model(tiny_qwen3(), PeftConfig(r=4, lora_alpha=LORA_ALPHA, target_modules=list(targets)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    names = [name for name in get_peft_model_state_dict(model) if ".lora_" in name]
    tensors = {name: get_peft_model_state_dict(model)[name].numpy() for name in names}
    assert len(tensors) == 2 * (7 * 2 + ("lm_head" in targets))
    state = AdapterState("tiny", LoraConfig(rank=4), targets, tensors)
    expected = model(tokens).logits

    store = Store(tmp_path)
    written = store.write_checkpoint(make_record("a", kind="sampler_weights"), state, overwrite=False)
    base = tiny_qwen3()
    plain = base(tokens).logits
    loaded = PeftModel.from_pretrained(base, store.checkpoint_folder(written))
    store.close()
    found = get_peft_model_state_dict(loaded)
    assert all(torch.equal(found[name], torch.tensor(tensor)) for name, tensor in tensors.items())
    assert torch.equal(loaded(tokens).logits, expected)
    assert not torch.allclose(plain, expected, atol=1e-3)


def test_folder_names_the_base_model_as_the_run_asked_for_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for kind in ("weights", "sampler_weights", "external_weights"):
        record = make_record("a", kind=kind, base_model="org/other-name")
        written = store.write_checkpoint(record, make_state(1, optimizer=False), overwrite=False)
        config = json.loads((store.checkpoint_folder(written) / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "org/other-name"
    store.close()
