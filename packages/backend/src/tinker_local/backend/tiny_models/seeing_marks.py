"""Special tokens and chat templates of the architectures in `seeing_models.py`, as their instruct models have them."""

import json
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
    template = _TEMPLATE
    for name, text in texts.items():
        template = template.replace(name, json.dumps(text, ensure_ascii=False))
    return template


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
