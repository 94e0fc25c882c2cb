"""The chat template of the tiny models, in the format of Qwen's instruct models (no thinking)."""

# One template for text and images: content is a string, or a list of parts {"type": "text" | "image" | "image_url" |
# "video", ...}. Tool results are user turns, neighbouring ones in one turn, as Qwen has it.
CHAT_TEMPLATE = r"""
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
