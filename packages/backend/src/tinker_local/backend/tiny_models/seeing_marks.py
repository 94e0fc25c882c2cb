"""Special tokens and chat templates of the architectures in `seeing_models.py`, as their instruct models have them."""

import json
import re
from collections.abc import Mapping

from tinker_local.backend.tiny_models.marks import Marks

_TEMPLATE = r"""
{%- set turns = TURNS -%}
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {{- IMAGE if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- START -}}
{%- for message in messages -%}
  {%- if message.role not in turns -%}{{- raise_exception('no turn of the role ' + message.role) -}}{%- endif -%}
  {{- turns[message.role][0] + render(message.content) + turns[message.role][1] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ANSWER -}}{%- endif -%}
""".lstrip()


def chat(image: str, turns: Mapping[str, tuple[str, str]], answer: str, start: str = "") -> str:
    """A template of chats. `image`: what stands for one in a turn. `turns`: for each role what is around its text.
    `answer`: what asks for one. `start`: before the first turn."""
    texts = {"TURNS": {role: list(around) for role, around in turns.items()}, "IMAGE": image}
    texts |= {"START": start, "ANSWER": answer}
    return re.sub("|".join(texts), lambda found: json.dumps(texts[found[0]], ensure_ascii=False), _TEMPLATE)


def _special(*names: str) -> tuple[tuple[str, bool], ...]:
    return tuple((name, True) for name in names)


_IM = {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")}
_IM_ANSWER = "<|im_start|>assistant\n"

VICUNA = Marks(
    chat("<image>\n", {"system": ("", " "), "user": ("USER: ", " "), "assistant": ("ASSISTANT: ", " ")}, "ASSISTANT:"),
    _special("<unk>", "<s>", "</s>", "<pad>", "<image>"),
    bos="<s>",
    stops=("</s>",),
    pad="<pad>",
    named=(("image_token", "<image>"),),
)

LLAVA_MISTRAL = Marks(
    chat(
        "<image>\n",
        {"system": ("<<SYS>>\n", "\n<</SYS>>\n\n"), "user": ("[INST] ", " [/INST]"), "assistant": (" ", "</s>")},
        "",
    ),
    VICUNA.added,
    bos="<s>",
    stops=("</s>",),
    pad="<pad>",
    named=VICUNA.named,
)
"""Of LLaVA-NeXT on Mistral, whose marks of turns are text."""

INTERNVL = Marks(
    chat("<IMG_CONTEXT>\n", _IM, _IM_ANSWER),
    _special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    bos=None,
    stops=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    tokenizer_class="Qwen2Tokenizer",
    named=(
        ("start_image_token", "<img>"),
        ("end_image_token", "</img>"),
        ("context_image_token", "<IMG_CONTEXT>"),
        ("video_token", "<video>"),
    ),
)

PIXTRAL = Marks(
    chat(
        "[IMG]",
        {
            "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            "user": ("[INST]", "[/INST]"),
            "assistant": ("", "</s>"),
        },
        "",
        start="<s>",
    ),
    _special(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "<pad>",
        "[IMG]",
        "[IMG_BREAK]",
        "[IMG_END]",
    ),
    bos="<s>",
    stops=("</s>",),
    pad="<pad>",
    named=(("image_token", "[IMG]"), ("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")),
)

_IDEFICS = {role: (f"{role.capitalize()}: ", "<end_of_utterance>\n") for role in ("system", "user", "assistant")}


def _tiles(name: str, most: int) -> tuple[tuple[str, bool], ...]:
    """Marks of rows and columns, for grids of at most `most` tiles per side."""
    sides = range(1, most + 1)
    return _special(*(name.format(row=row, column=column) for row in sides for column in sides))


IDEFICS3 = Marks(
    chat("<image>", _IDEFICS, "Assistant:", start="<|begin_of_text|>"),
    (
        *_special("<|begin_of_text|>", "<|end_of_text|>", "<end_of_utterance>", "<|finetune_right_pad_id|>"),
        *_special("<fake_token_around_image>", "<image>", "<global-img>"),
        *_tiles("<row_{row}_col_{column}>", 4),
    ),
    bos="<|begin_of_text|>",
    stops=("<end_of_utterance>", "<|end_of_text|>"),
    pad="<|finetune_right_pad_id|>",
    named=(("image_token", "<image>"), ("fake_image_token", "<fake_token_around_image>")),
)

SMOLVLM = Marks(
    chat("<image>", _IDEFICS, "Assistant:", start="<|im_start|>"),
    (
        *_special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>"),
        *_special("<fake_token_around_image>", "<image>", "<global-img>"),
        *_tiles("<row_{row}_col_{column}>", 4),
    ),
    bos=None,
    stops=("<end_of_utterance>", "<|im_end|>"),
    pad="<|im_end|>",
    named=(
        ("image_token", "<image>"),
        ("fake_image_token", "<fake_token_around_image>"),
        ("global_image_token", "<global-img>"),
        ("end_of_utterance_token", "<end_of_utterance>"),
    ),
)

_GLM = {"system": ("<|system|>\n", ""), "user": ("<|user|>\n", ""), "assistant": ("<|assistant|>\n", "")}

GLM4V = Marks(
    chat("<|begin_of_image|><|image|><|end_of_image|>", _GLM, "<|assistant|>\n", start="[gMASK]<sop>"),
    (
        *_special("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *_special("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
        *_special("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
        *(
            (name, False)
            for name in ("<think>", "</think>", "<answer>", "</answer>", "<|begin_of_box|>", "<|end_of_box|>")
        ),
    ),
    bos=None,
    stops=("<|endoftext|>", "<|user|>"),
    pad="<|endoftext|>",
)

LFM2_VL = Marks(
    chat("<image>", _IM, _IM_ANSWER, start="<|startoftext|>"),
    (
        *_special("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *_special("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *_tiles("<|img_row_{row}_col_{column}|>", 4),
    ),
    bos="<|startoftext|>",
    stops=("<|im_end|>",),
    pad="<|pad|>",
    named=(
        ("image_token", "<image>"),
        ("image_start_token", "<|image_start|>"),
        ("image_end_token", "<|image_end|>"),
        ("image_thumbnail", "<|img_thumbnail|>"),
    ),
)

PALIGEMMA = Marks(
    # It was trained on no chats; the processor puts the images before the text, and a line break behind it.
    chat("<image>", {"user": ("", "")}, ""),
    (
        *_special("<pad>", "<eos>", "<bos>", "<unk>", "<image>"),
        ("\n", False),  # which vLLM looks up by its name
        # Places and outlines, which its processor adds to a tokenizer without them.
        *((f"<loc{place:0>4}>", False) for place in range(1024)),
        *((f"<seg{outline:0>3}>", False) for outline in range(128)),
    ),
    bos="<bos>",
    stops=("<eos>",),
    pad="<pad>",
    named=(("image_token", "<image>"),),
)

GEMMA4 = Marks(
    chat(
        "<|image|>",
        {
            "system": ("<|turn>system\n", "<turn|>\n"),
            "user": ("<|turn>user\n", "<turn|>\n"),
            "assistant": ("<|turn>model\n", "<turn|>\n"),
        },
        "<|turn>model\n",
        start="<bos>",
    ),
    (
        *_special("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        *_special("<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
    ),
    bos="<bos>",
    stops=("<eos>", "<turn|>"),
    pad="<pad>",
    named=(
        ("boi_token", "<|image>"),
        ("eoi_token", "<image|>"),
        ("image_token", "<|image|>"),
        ("boa_token", "<|audio>"),
        ("eoa_token", "<audio|>"),
        ("audio_token", "<|audio|>"),
    ),
)

LLAVA_ONEVISION = Marks(
    chat(
        "<image>\n",
        {role: (f"<|im_start|>{role} ", "<|im_end|>") for role in ("system", "user", "assistant")},
        "<|im_start|>assistant\n",
    ),
    _special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    bos=None,
    stops=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    tokenizer_class="Qwen2Tokenizer",
    named=(("image_token", "<image>"), ("video_token", "<video>")),
)

_COHERE = {
    role: (f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
    for role, name in {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}.items()
}

COHERE2_VISION = Marks(
    chat("<|IMG_PATCH|>", _COHERE, "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", start="<BOS_TOKEN>"),
    (
        *_special("<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        *_special("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        *_special("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>"),
    ),
    bos="<BOS_TOKEN>",
    stops=("<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"),
    pad="<PAD>",
    named=(
        ("image_token", "<|IMG_PATCH|>"),
        ("boi_token", "<|START_OF_IMG|>"),
        ("eoi_token", "<|END_OF_IMG|>"),
        ("img_line_break_token", "<|IMG_LINE_BREAK|>"),
    ),
)

GRANITE_VISION = Marks(
    chat(
        "<image>\n",
        {role: (f"<|{role}|>\n", "\n") for role in ("system", "user", "assistant")},
        "<|assistant|>\n",
    ),
    _special("<|end_of_text|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|start_of_role|>", "<image>"),
    bos=None,
    stops=("<|end_of_text|>",),
    pad="<|end_of_text|>",
    named=(("image_token", "<image>"),),
)
"""Its marks of turns are text."""

LLAMA4 = Marks(
    chat(
        "<|image|>",
        {role: (f"<|header_start|>{role}<|header_end|>\n\n", "<|eot|>") for role in ("system", "user", "assistant")},
        "<|header_start|>assistant<|header_end|>\n\n",
        start="<|begin_of_text|>",
    ),
    (
        *_special("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad|>", "<|header_start|>"),
        *_special("<|header_end|>", "<|eom|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"),
        *_special("<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    bos="<|begin_of_text|>",
    stops=("<|eot|>", "<|eom|>", "<|end_of_text|>"),
    pad="<|finetune_right_pad|>",
    named=(("image_token", "<|image|>"),),
)
