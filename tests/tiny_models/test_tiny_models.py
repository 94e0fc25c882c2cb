"""The tiny models load like published checkpoints and are the same on every machine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tinker_local.backend.tiny_models import (
    COLOUR_WORDS,
    DIGIT_WORDS,
    TEXT_FAMILIES,
    TextShape,
    make_tiny_text_model,
    make_tiny_vl_model,
)
from tinker_local.backend.tiny_models.marks import QWEN, VOCAB_SIZE

VISION_FAMILIES = ("qwen3_vl", "qwen2_vl", "qwen2_5_vl", "gemma3")
QUESTION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two plus 2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": [{"type": "text", "text": "And 3?"}]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "text": make_tiny_text_model(root / "text"),
        "text_untied": make_tiny_text_model(root / "text_untied", tie_word_embeddings=False),
        "qwen3_vl": make_tiny_vl_model(root / "qwen3_vl"),
        "qwen2_vl": make_tiny_vl_model(root / "qwen2_vl", family="qwen2_vl"),
        "qwen2_5_vl": make_tiny_vl_model(root / "qwen2_5_vl", family="qwen2_5_vl"),
        "gemma3": make_tiny_vl_model(root / "gemma3", family="gemma3"),
        **{name: make_tiny_text_model(root / name, family=name) for name in TEXT_FAMILIES if name != "qwen3"},
    }


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_seed_writes_the_same_bytes_and_leaves_the_random_state_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    assert content(make_tiny_text_model(tmp_path / "text")) == content(folders["text"])
    assert content(make_tiny_vl_model(tmp_path / "vl")) == content(folders["qwen3_vl"])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    other, first = content(make_tiny_text_model(tmp_path / "text", seed=1)), content(folders["text"])
    assert other.pop("model.safetensors") != first.pop("model.safetensors")
    assert other == first


def test_an_occupied_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        make_tiny_text_model(folders["qwen3_vl"])
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="exists already"):
        make_tiny_vl_model(tmp_path / "file")


def test_shapes_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_dim is 16"):
        TextShape(head_dim=16)
    with pytest.raises(ValueError, match="num_heads"):
        TextShape(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="64 != 128"):
        make_tiny_vl_model(tmp_path / "new", family="qwen2_5_vl", text=TextShape(hidden_size=64))
    assert not (tmp_path / "new").exists()


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, tinker_local.backend.tiny_models; print({'torch', 'transformers', 'tokenizers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_answer_words_and_digits_are_single_tokens(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["text"])
    for word in (*DIGIT_WORDS, *COLOUR_WORDS):
        assert len(tokenizer.encode(word)) == 1, word
        assert len(tokenizer.encode(" " + word)) == 1, word
    assert all(len(tokenizer.encode(digit)) == 1 for digit in "0123456789")


def test_every_token_id_decodes_and_text_survives_a_round_trip(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["text"])
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.convert_ids_to_tokens(token_id) is not None for token_id in range(VOCAB_SIZE))
    text = "Hello, Wörld! 42 is\n\n  the answer: 你好 🙂\tdon't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_added_tokens_are_single_ids_and_only_special_ones_are_skipped(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["text"])
    for name, special in QWEN.added:
        token_ids = tokenizer.encode(name)
        assert len(token_ids) == 1
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == ("" if special else name)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_has_qwens_format(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["text"])
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two plus 2?<|im_end|>\n"
        "<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [{"type": "image"}, {"type": "text", "text": "What"}, {"type": "image_url", "image_url": {"url": "x"}}]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False) == (
        f"<|im_start|>user\n{image}What{image}<|im_end|>\n"
    )


def test_chat_template_renders_tools_and_their_results(folders: dict[str, Path]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    text = load_tokenizer(folders["text"]).apply_chat_template(messages, tools=[tool], tokenize=False)
    assert '\n{"type": "function", "function": {"name": "add"}}\n</tools><|im_end|>\n' in text
    assert 'assistant\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n' in text
    response = "<tool_response>\n{}\n</tool_response>"
    assert text.endswith(f"user\n{response.format(2)}\n{response.format(3)}<|im_end|>\n")


@pytest.mark.parametrize("name", ["text", "text_untied"])
def test_text_model_loads_and_its_greedy_choice_is_clear(folders: dict[str, Path], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[name])
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name == "text")
    assert model.generation_config.eos_token_id == load_tokenizer(folders[name]).encode("<|im_end|><|endoftext|>")
    inputs = load_tokenizer(folders[name])("What is this?", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3
    assert 1 < logits.std() < 4


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_model_and_processors_load_and_the_image_matters(folders: dict[str, Path], family: str) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folders[family])
    processor = AutoProcessor.from_pretrained(folders[family])
    image_processor = AutoImageProcessor.from_pretrained(folders[family])
    logits = []
    for colour in ("red", "blue"):
        image = Image.new("RGB", (80, 48), colour)
        message = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}
        inputs = processor.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        wanted = 16 if family == "gemma3" else image_processor.get_number_of_image_patches(48, 80, {}) // 4
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == wanted
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.1


CHATS = {
    "llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be brief.\n\nHi[/INST]",
    "gemma2": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_template_has_the_familys_format_and_its_marks_are_single_tokens(
    folders: dict[str, Path], name: str
) -> None:
    tokenizer = load_tokenizer(folders[name])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == CHATS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode("Hi") == [tokenizer.bos_token_id, *tokenizer.encode("Hi", add_special_tokens=False)]
    assert len(tokenizer) == VOCAB_SIZE


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
TWO_PLAIN_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("llama", "rope_parameters", PLAIN_ROPE),
        ("mistral", "sliding_window", None),
        ("gemma2", "sliding_window", 4096),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2", "query_pre_attn_scalar", 32),
        ("gemma3_text", "sliding_window", 4096),
        ("gemma3_text", "rope_parameters", TWO_PLAIN_ROPES),
    ],
)
def test_what_is_special_about_a_family_matters_within_40_tokens(
    folders: dict[str, Path], family: str, setting: str, value: Any
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    prompt = torch.arange(5, 45)[None]
    logprobs = []
    for changed in (False, True):
        config = AutoConfig.from_pretrained(folders[family])
        if changed:
            setattr(config, setting, value)
        model = AutoModelForCausalLM.from_pretrained(folders[family], config=config, attn_implementation="eager")
        with torch.no_grad():
            logprobs.append(model(prompt).logits[0].log_softmax(-1))
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.1
