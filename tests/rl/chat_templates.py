"""Chat templates that behave like those of the model families, in the special tokens of the tiny models.

A template is one line per statement here; `jinja` joins the lines, so that only `\\n` in a string is a line break.
"""


def jinja(text: str) -> str:
    return "".join(line.strip() for line in text.splitlines())


_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

_PARTS = (
    r"""
{% macro show(content) %}
{% if content is string %}{{ content }}
{% else %}
{% for part in content %}
{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}
{% endfor %}
{% endif %}
{% endmacro %}
"""
).replace("IMAGE", _IMAGE)

DEFAULT_SYSTEM = jinja(
    _PARTS
    + r"""
{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' + show(message.content) + '<|im_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)
"""Qwen2.5-VL: adds a system message."""

CHATML = jinja(
    r"""
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)
"""The plain format of language models."""

BOS, HEADER, END_HEADER, EOT = "<|quad_start|>", "<|box_start|>", "<|box_end|>", "<|object_ref_end|>"

TRIMMED_HEADERS = jinja(
    _PARTS
    + r"""
{% for message in messages %}
{% if loop.first %}{{ '<|quad_start|>' }}{% endif %}
{{ '<|box_start|>' + message.role + '<|box_end|>\n\n' + show(message.content) | trim + '<|object_ref_end|>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|box_start|>assistant<|box_end|>\n\n' }}{% endif %}
"""
)
"""Llama 3: a BOS, headers, trimmed contents, an end of turn that is not the tokenizer's EOS."""

ROLE_MODEL = jinja(
    r"""
{{ '<|quad_start|>' }}
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<|box_start|>' + role + '\n' + message.content | trim + '<|object_ref_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|box_start|>model\n' }}{% endif %}
"""
)
"""Gemma: the assistant is "model", no system, strict alternation."""

INST = jinja(
    r"""
{{ '<|quad_start|>' }}
{% for message in messages %}
{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + ' <|im_end|>' }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""
)
"""Mistral, Llama 2: no token ends a user's turn; a reply has a space in front and behind, then EOS."""

NO_END = jinja(
    _PARTS
    + r"""
{% for message in messages %}
{{ message.role | upper + ': ' + show(message.content) + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
)
"""Plain text: nothing ends a turn but a line break."""

NEXT_HEADER_ENDS = jinja(
    r"""
{{ '<|quad_start|>' }}
{% for message in messages %}
{{ {'user': '<|box_start|>', 'assistant': '<|box_end|>', 'tool': '<|object_ref_start|>'}[message.role] }}
{{ '\n' + message.content }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|box_end|>\n' }}{% endif %}
"""
)
"""GLM-4: a reply ends where the next header begins; that header's token is what the model samples."""

PARTS_ALONE = jinja(
    r"""
{% for message in messages %}
{{ message.role | upper + ': ' }}
{% for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\n' }}{% endfor %}
{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}
{{ '<|im_end|>' if message.role == 'assistant' else ' ' }}
{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
)
"""LLaVA: content must be a list of parts; images come first, then all text in one."""

THINKING = jinja(
    r"""
{% set found = namespace(last_query=messages | length - 1, searching=true) %}
{% for message in messages[::-1] %}
{% if found.searching and message.role == 'user' %}
{% set found.searching = false %}{% set found.last_query = messages | length - 1 - loop.index0 %}
{% endif %}
{% endfor %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% set content = message.content %}{% set thought = '' %}
{% if '</think>' in content %}
{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{% set content = content.split('</think>')[-1].lstrip('\n') %}
{% endif %}
{{ '<|im_start|>assistant\n' }}
{% if loop.index0 > found.last_query and (loop.last or thought) %}
{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{% else %}{{ content }}
{% endif %}
{{ '<|im_end|>\n' }}
{% elif message.role == 'tool' %}
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{% else %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% if opens_thought %}{{ '<think>\n' }}{% endif %}
{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{% endif %}
"""
)
"""Qwen3: thoughts stay behind the last query and are dropped before it; `enable_thinking` and, as in its thinking-only
models, `opens_thought`."""

DROPS_EVERY_THOUGHT = jinja(
    r"""
{{ '<|quad_start|>' }}
{% for message in messages %}
{% if message.role == 'assistant' %}{{ '<|box_end|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}
{% else %}{{ '<|box_start|>' + message.content }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|box_end|><think>\n' }}{% endif %}
"""
)
"""DeepSeek-R1: a generation prompt that opens a thought, and a history without thoughts, the last reply's too."""

COUNTS_MESSAGES = "{{ messages | length }} " + CHATML
"""Its beginning changes with every message, and keeps its length."""

FORGETS_REPLIES = jinja(
    r"""
{% for message in messages %}
{% if message.role != 'assistant' or loop.last %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}{% endif %}
{% endfor %}
"""
)
CUTS_REPLIES = jinja(
    r"""
{% for message in messages %}
{{ '<|im_start|>' + (message.content[:12] if message.role == 'assistant' else message.content) + '<|im_end|>' }}
{% endfor %}
"""
)
"""Short replies are shown, MARK too."""

WRITES_REPLIES_ANEW = jinja(
    r"""
{% for message in messages %}
{{ '<|im_start|>' + (message.content | upper if message.role == 'assistant' else message.content) + '<|im_end|>' }}
{% endfor %}
"""
)

NO_IMAGES = jinja(
    r"""
{% for message in messages %}
{% if message.content is not string %}{{ raise_exception('This model sees no images') }}{% endif %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)

HIDES_OLD_IMAGES = jinja(
    r"""
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' }}
{% if message.content is string %}{{ message.content }}
{% else %}
{% for part in message.content %}
{% if part.type != 'image' %}{{ part.text }}
{% elif loop.last %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{% endif %}
{% endfor %}
{% endif %}
{{ '<|im_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
)
"""Shows an image only at the end of a message."""

CONTINUING = {
    "default system": DEFAULT_SYSTEM,
    "trimmed headers": TRIMMED_HEADERS,
    "no end": NO_END,
    "parts alone": PARTS_ALONE,
}
"""Templates that take images and extend by prefix."""
