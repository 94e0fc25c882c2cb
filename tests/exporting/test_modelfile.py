"""The Modelfile that stands beside a GGUF file: Ollama's template renders what the model's own does, or is left out."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.exporting.modelfile import Message, read_turns, write_modelfile
from transformers import AutoTokenizer

FILES = Path(__file__).parents[2] / ".test-files"

TALK: list[Message] = [
    {"role": "user", "content": "What is {{ 2 }} + 2?\nSay."},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": 'And "that" + 1?'},
]


def tokenizer_in(name: str) -> tuple[Path, Any]:
    folder = FILES / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no {folder}: python scripts/fetch_test_files.py")
    return folder, AutoTokenizer.from_pretrained(folder)


def as_go(template: str, system: str, messages: Sequence[Message]) -> str:
    """What Go's text/template makes of such a template: branches by role in one range, and text. Ollama puts the
    Modelfile's system message first where a conversation has none."""
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    found = re.fullmatch(r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.DOTALL)
    assert found is not None
    branches = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', found[1])
    assert branches[0] == ""
    texts = dict(zip(branches[1::2], branches[2::2], strict=True))
    out = []
    for message in messages:
        before, after = texts[message["role"]].split("{{ .Content }}")
        out += [before, message["content"], after]
    text = "".join([*out, found[2]])
    return text.replace('{{ "{{" }}', "{{")


def modelfile(folder: Path, tmp_path: Path) -> tuple[bool, str]:
    """Written for the tokenizer in `folder`."""
    merged = tmp_path / "merged"
    shutil.copytree(folder, merged, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "out").mkdir()
    written = write_modelfile(tmp_path / "out", "model-bf16.gguf", merged)
    return written, (tmp_path / "out" / "Modelfile").read_text()


def quoted(text: str, instruction: str) -> str:
    found = re.search(rf'^{instruction} """(.*?)"""$', text, re.DOTALL | re.MULTILINE)
    return "" if found is None else found[1]


@pytest.mark.more
@pytest.mark.parametrize("name", ["smollm2", "tokenizer-qwen3", "tokenizer-llama3_1"])
def test_ollamas_template_renders_what_the_models_own_does(name: str, tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_in(name)
    written, text = modelfile(folder, tmp_path)
    assert written
    template, system = quoted(text, "TEMPLATE"), quoted(text, "SYSTEM")
    for messages in (TALK, TALK[:1], [{"role": "system", "content": "Be brief."}, *TALK]):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        begins_itself = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        if begins_itself:  # llama.cpp puts it first
            expected = expected.removeprefix(tokenizer.bos_token)
        assert as_go(template, system, messages) == expected


def test_the_system_message_that_a_template_inserts_is_the_modelfiles(tmp_path: Path) -> None:
    folder, _ = tokenizer_in("smollm2")
    _, text = modelfile(folder, tmp_path)
    assert quoted(text, "SYSTEM") == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert 'PARAMETER stop "<|im_end|>"' in text.splitlines()


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tokenizer-qwen3",
            "# That one leaves the thoughts of earlier answers out of the prompt; here they stay in it.",
        ),
        ("tokenizer-llama3_1", "# That one strips blanks around each message; here they stay."),
    ],
)
def test_what_the_models_own_template_does_besides_is_said(name: str, words: str, tmp_path: Path) -> None:
    folder, _ = tokenizer_in(name)
    assert words in modelfile(folder, tmp_path)[1].splitlines()


@pytest.mark.more
def test_a_template_that_puts_the_system_message_into_the_users_is_left_out(tmp_path: Path) -> None:
    folder, _ = tokenizer_in("tokenizer-gemma3")
    written, text = modelfile(folder, tmp_path)
    assert not written
    assert "TEMPLATE" not in "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "# No TEMPLATE" in text


def test_a_template_that_counts_messages_is_left_out() -> None:
    _, tokenizer = tokenizer_in("smollm2")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['role'] +", "message['role'] + loop.index|string +"
    )
    assert read_turns(tokenizer) is None


def test_settings_of_the_model_become_parameters(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_in("smollm2")
    merged = tmp_path / "with settings"
    shutil.copytree(folder, merged, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [2, 0], "repetition_penalty": 1.1}
    (merged / "generation_config.json").write_text(json.dumps(settings))
    _, text = modelfile(merged, tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("PARAMETER")]
    assert lines == [
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "<|endoftext|>"',
        "PARAMETER temperature 0.6",
        "PARAMETER top_p 0.95",
        "PARAMETER top_k 20",
    ]
    assert tokenizer.decode([0]) == "<|endoftext|>"
