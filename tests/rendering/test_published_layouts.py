"""A picture in a chat, with the files of templates and processors laid out as families publish them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.families import family_of
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.rendering.text import ChatMessage, ToolCall
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.client.rl import Chat
from tinker_local.client.rl.chat import ChatTemplateError
from tinker_local.client.rl.environment import Message
from tinker_local.types import EncodedTextChunk, InvalidRequestError
from tinker_local.types.processor_templates import processor_template

from tests.rendering.conftest import Pictures, Rendering

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")

TEXT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Of a language model with tools, which joins texts."""


def write(path: Path, **changed: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | changed))


def taken_out(folder: Path) -> str:
    """The template that a tiny model has in `chat_template.jinja`, which is gone afterwards."""
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    return template


def as_qwen25_vl(folder: Path) -> None:
    """Qwen2.5-VL: the tokenizer has the template of its language model."""
    write(folder / "chat_template.json", chat_template=taken_out(folder))
    write(folder / "tokenizer_config.json", chat_template=TEXT_TEMPLATE)


def as_qwen3_vl(folder: Path) -> None:
    """Qwen3-VL and Gemma 3: both files have the same."""
    template = taken_out(folder)
    write(folder / "chat_template.json", chat_template=template)
    write(folder / "tokenizer_config.json", chat_template=template)


def processor_alone(folder: Path) -> None:
    """Qwen2-VL's and LLaVA's first files."""
    write(folder / "chat_template.json", chat_template=taken_out(folder))


def in_the_tokenizer(folder: Path) -> None:
    write(folder / "tokenizer_config.json", chat_template=taken_out(folder))


def in_the_processors_settings(folder: Path) -> None:
    """transformers 4.43 to 4.45."""
    write(folder / "processor_config.json", chat_template=taken_out(folder))


def saved_again(folder: Path) -> None:
    """By transformers 5: the image processor is part of `processor_config.json`."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (folder / file).unlink(missing_ok=True)
    processor.save_pretrained(folder)
    assert (folder / "processor_config.json").exists()


def slow_image_processor(folder: Path) -> None:
    """The name that the processor's class had before transformers 5, of Qwen2-VL's to Qwen3-VL's."""
    path = folder / "preprocessor_config.json"
    name = json.loads(path.read_text()).get("image_processor_type", "")
    write(path, image_processor_type=f"{name.removesuffix('Fast')}Fast" if name else "Qwen2VLImageProcessorFast")


LAYOUTS: Sequence[Callable[[Path], None]] = (
    as_qwen25_vl,
    as_qwen3_vl,
    processor_alone,
    in_the_tokenizer,
    in_the_processors_settings,
    saved_again,
    slow_image_processor,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny_vl_model(root / kind, family=kind) for kind in KINDS}


def text_of(folder: Path) -> tuple[HFText, int]:
    """The model's text codec, and the id that marks an image."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    images = family_of(config.model_type, "").vision.tokens(config)  # type: ignore[union-attr]
    text = HFText.load(str(folder), images)
    assert text is not None
    return text, images.pad


def flat(chunks: Sequence[Any], pad: int) -> list[int]:
    return [
        token
        for chunk in chunks
        for token in (list(chunk.tokens) if hasattr(chunk, "tokens") else [pad] * chunk.expected_tokens)
    ]


@pytest.mark.rotated(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_has_the_tokens_of_the_processor(
    tiny: dict[str, Path], tmp_path: Path, pictures: Pictures, kind: str, layout: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(tiny[kind], tmp_path / kind)
    layout(folder)
    rendering = Rendering(folder)
    picture = pictures.noise(96, 64)
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "image": picture}]
    asked = [{"role": "user", "content": parts}]
    processor = rendering.processor
    told = processor.apply_chat_template(
        asked,
        chat_template=processor.chat_template or processor.tokenizer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
    )
    wanted = told["input_ids"][0].tolist()
    text, pad = text_of(folder)
    chunk = pictures.chunk(picture, expected_tokens=wanted.count(pad))
    prompt = text.chat([ChatMessage("user", ("What is this?", chunk))], {}, go_on=False)
    assert flat(prompt.chunks, pad) == wanted
    # The renderer counts positions by vLLM's and by transformers' processor; both read this layout.
    assert rendering.renderer.render(prompt, "prompt").token_ids.tolist() == wanted
    chat = Chat(
        processor.tokenizer,
        processor.image_processor,
        template=processor_template(str(folder)),
        image_token=processor.tokenizer.convert_ids_to_tokens(pad),
    )
    if kind != "gemma3":  # a program puts the text around its images itself
        content, images = chat.content(Message("user", ("What is this?", picture), {}), "m")
        assert flat(chat.chunks(chat.render([content]), images), pad) == wanted


def test_tools_that_only_the_language_models_template_has_are_rendered_with_pictures_in_place(
    tiny: dict[str, Path], tmp_path: Path, pictures: Pictures
) -> None:
    folder = shutil.copytree(tiny["qwen2_5_vl"], tmp_path / "model")
    processors = '{%- for message in messages %}{{ "<|im_start|>" }}{%- endfor %}'
    write(folder / "chat_template.json", chat_template=processors)
    (folder / "chat_template.jinja").unlink()
    write(folder / "tokenizer_config.json", chat_template=TEXT_TEMPLATE)
    text, pad = text_of(folder)
    chunk = pictures.chunk(pictures.noise(56, 56), expected_tokens=4)
    message = ChatMessage("user", ("a<|image_pad|>", chunk, "b"))
    found = text.chat([message], {}, go_on=False, functions=[{"name": "look", "parameters": {}}])
    assert [chunk.expected_tokens for chunk in found.chunks if not isinstance(chunk, EncodedTextChunk)] == [4]
    tokens = np.array(flat(found.chunks, pad))
    assert (tokens == pad).sum() == 4  # the one that the message spells is text
    written = text.decode_all(tokens.tolist())
    assert "Tools: " in written
    assert "a<|image_pad|><|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>b<|im_end|>" in written
    with pytest.raises(InvalidRequestError, match="writes 0 images where 1"):  # without tools it is the processor's
        text.chat([message], {}, go_on=False)


def test_calls_and_results_of_tools_that_no_template_has_are_refused(tiny: dict[str, Path]) -> None:
    text, _ = text_of(tiny["gemma3"])
    hi, call = ChatMessage("user", ("hi",)), ToolCall("1", "look", "{}")
    with pytest.raises(InvalidRequestError, match="this model's chat template has no calls of the assistant"):
        text.chat([hi, ChatMessage("assistant", (), (call,))], {}, go_on=False)
    with pytest.raises(InvalidRequestError, match="this model's chat template has no results of tools"):
        text.chat([hi, ChatMessage("tool", ("it rains",), answers=("1", "look"))], {}, go_on=False)


def test_gemmas_pictures_in_the_text_of_a_template_with_tools(
    tiny: dict[str, Path], tmp_path: Path, pictures: Pictures
) -> None:
    folder = shutil.copytree(tiny["gemma3"], tmp_path / "model")
    as_qwen25_vl(folder)
    text, pad = text_of(folder)
    chunk = pictures.chunk(pictures.noise(56, 56), expected_tokens=4)
    found = text.chat([ChatMessage("user", ("a", chunk))], {}, go_on=False, functions=[{"name": "look"}])
    tokens = flat(found.chunks, pad)
    assert tokens.count(pad) == 4
    assert "Tools: " in text.decode_all(tokens)


def test_a_program_that_uses_tools_is_told_that_the_processors_template_has_none(tiny: dict[str, Path]) -> None:
    tokenizer = Rendering(tiny["qwen2_5_vl"]).processor.tokenizer
    bare = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="has no tools"):
        Chat(tokenizer, template=bare, options={"tools": [{"name": "look"}]})
    with pytest.raises(ChatTemplateError, match="has no tool_calls"):
        Chat(tokenizer, template=bare).render([{"role": "assistant", "content": "", "tool_calls": [{}]}])


def test_a_template_is_found_where_the_tokenizer_came_from(tiny: dict[str, Path], tmp_path: Path) -> None:
    """`use_served_names` redirects the loaders of names that are folders of the server."""
    folder = shutil.copytree(tiny["qwen2_5_vl"], tmp_path / "copy")
    as_qwen25_vl(folder)
    tokenizer = Rendering(folder).processor.tokenizer
    info = SimpleNamespace(model_data=SimpleNamespace(tokenizer_id=str(folder)))
    client: Any = SimpleNamespace(get_info=lambda: info, get_tokenizer=lambda: tokenizer)
    assert Chat.of(client)._template == json.loads((folder / "chat_template.json").read_text())["chat_template"]
