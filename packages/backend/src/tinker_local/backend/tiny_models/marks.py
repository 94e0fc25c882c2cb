"""Special tokens and chat templates of the families, as their instruct models have them."""

from dataclasses import dataclass

VOCAB_SIZE = 512
"""Token ids in all: 256 bytes, the merges, then the added tokens. Each id below it decodes to something."""

END_OF_TEXT = "<|endoftext|>"
IM_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"

NUM_ADDED = 26
"""Added tokens of each tokenizer; they have the highest ids."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A family's special tokens and chat template.

    `added`: name and whether special, in the order of their ids; reserved tokens fill them up to `NUM_ADDED`, and with
    more of them the vocabulary is larger. `bos`:
    None if prompts begin without one. `stops`: tokens that end a generation; the first one is the tokenizer's EOS.
    `named`: what the tokenizer calls some of them, beyond the usual.
    """

    chat_template: str
    added: tuple[tuple[str, bool], ...]
    bos: str | None
    stops: tuple[str, ...]
    pad: str
    tokenizer_class: str = "PreTrainedTokenizerFast"
    named: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        reserved = [(f"<|reserved_special_token_{index}|>", True) for index in range(NUM_ADDED - len(self.added))]
        object.__setattr__(self, "added", (*self.added, *reserved))

    @property
    def vocab_size(self) -> int:
        """Token ids in all."""
        return VOCAB_SIZE - NUM_ADDED + len(self.added)

    def token_id(self, name: str) -> int:
        """The id of an added token."""
        return VOCAB_SIZE - NUM_ADDED + [token for token, _ in self.added].index(name)


# In the order of Qwen3's ids. Ordinary tokens survive `skip_special_tokens`.
_QWEN_TOKENS: tuple[tuple[str, bool], ...] = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (IM_END, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    (VISION_START, True),
    (VISION_END, True),
    ("<|vision_pad|>", True),
    (IMAGE_PAD, True),
    (VIDEO_PAD, True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

# One template for text and images: content is a string, or a list of parts {"type": "text" | "image" | "image_url" |
# "video", ...}. Tool results are user turns, neighbouring ones in one turn, as in Qwen's templates.
_CHATML = r"""
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content or [] -%}
      {%- if part.type in ('image', 'image_url') or 'image' in part -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' or 'video' in part -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if has_system -%}{{- render(messages[0].content) -}}{%- endif -%}
  {%- if tools -%}
    {{- '\n\n' if has_system -}}
    {{- '# Tools\n\nCall a function by its JSON name and arguments within <tool_call></tool_call>.\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>' -}}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}

{%- for message in (messages[1:] if has_system else messages) -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + render(message.content) + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + render(message.content) -}}
    {%- for tool_call in message.tool_calls or [] -%}
      {%- set call = tool_call.function or tool_call -%}
      {{- '\n' if message.content or not loop.first -}}
      {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
      {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".lstrip()

QWEN = Marks(
    _CHATML,
    _QWEN_TOKENS,
    bos=None,
    stops=(IM_END, END_OF_TEXT),
    pad=END_OF_TEXT,
    tokenizer_class="Qwen2Tokenizer",
)

_LLAMA3 = r"""
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
""".lstrip()

LLAMA3 = Marks(
    _LLAMA3,
    tuple(
        (f"<|{name}|>", True)
        for name in (
            "begin_of_text",
            "end_of_text",
            "finetune_right_pad_id",
            "start_header_id",
            "end_header_id",
            "eom_id",
            "eot_id",
            "python_tag",
        )
    ),
    bos="<|begin_of_text|>",
    stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    pad="<|finetune_right_pad_id|>",
)

# These two have no turn of the system: its text precedes the first question.
_MISTRAL = r"""
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{{- bos_token -}}
{%- for message in (messages[1:] if system else messages) -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate: user, assistant, user, ...') -}}
  {%- elif message.role == 'user' -%}
    {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' -}}
  {%- else -%}
    {{- ' ' + message.content + eos_token -}}
  {%- endif -%}
{%- endfor -%}
""".lstrip()

MISTRAL = Marks(
    _MISTRAL,
    (("<unk>", True), ("<s>", True), ("</s>", True), ("[INST]", True), ("[/INST]", True), ("<pad>", True)),
    bos="<s>",
    stops=("</s>",),
    pad="<pad>",
)

_GEMMA = r"""
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{{- bos_token -}}
{%- for message in (messages[1:] if system else messages) -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate: user, assistant, user, ...') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
  {{- (system if loop.first else '') + (message.content | trim) + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
""".lstrip()

_GEMMA_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<pad>", True),
    ("<eos>", True),
    ("<bos>", True),
    ("<unk>", True),
    ("<start_of_turn>", True),
    ("<end_of_turn>", True),
)

GEMMA = Marks(
    _GEMMA,
    _GEMMA_TOKENS,
    bos="<bos>",
    stops=("<eos>", "<end_of_turn>"),
    pad="<pad>",
)

# An image is one mark, which the processor makes two line breaks, the mark, the image, its end and two line breaks.
_GEMMA3 = r"""
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content | trim -}}
  {%- else -%}
    {%- for part in content -%}
      {{- '<start_of_image>' if part.type == 'image' else part.text | trim -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{%- set system = render(messages[0].content) + '\n\n' if messages[0].role == 'system' else '' -%}
{{- bos_token -}}
{%- for message in (messages[1:] if system else messages) -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate: user, assistant, user, ...') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
  {{- (system if loop.first else '') + render(message.content) + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
""".lstrip()

IMAGE_START = "<start_of_image>"
IMAGE_END = "<end_of_image>"
IMAGE_SOFT = "<image_soft_token>"

GEMMA3 = Marks(
    _GEMMA3,
    (
        *_GEMMA_TOKENS,
        (IMAGE_START, True),
        (IMAGE_END, True),
        (IMAGE_SOFT, True),
        # Runs of line breaks are tokens, which vLLM looks up by these names.
        *(("\n" * count, False) for count in range(1, 5)),
    ),
    bos="<bos>",
    stops=("<eos>", "<end_of_turn>"),
    pad="<pad>",
    named=(("boi_token", IMAGE_START), ("eoi_token", IMAGE_END), ("image_token", IMAGE_SOFT)),
)

_HARMONY = r"""
{%- for message in messages -%}
  {{- '<|start|>' + message.role -}}
  {%- if message.role == 'assistant' -%}{{- '<|channel|>final' -}}{%- endif -%}
  {{- '<|message|>' + message.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
""".lstrip()

GPT_OSS = Marks(
    _HARMONY,
    tuple(
        (f"<|{name}|>", True)
        for name in (
            "startoftext",
            "endoftext",
            "return",
            "constrain",
            "channel",
            "start",
            "end",
            "message",
            "call",
        )
    ),
    bos=None,
    stops=("<|return|>", "<|endoftext|>", "<|call|>"),
    pad="<|endoftext|>",
)
