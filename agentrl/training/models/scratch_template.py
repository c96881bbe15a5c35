"""The chat template of scratch models: ChatML as Qwen writes it, in a form that never rewrites history.

Every message renders alone and for good: thinking is kept, each tool result is its own turn, and there is no default
system prompt. Appending a message therefore only ever appends text.
"""

CHAT_TEMPLATE = """\
{%- macro tool_list() -%}
{{- '# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '\\nTo call one, answer with\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' -}}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
{{- '<|im_start|>system\\n' + tool_list() + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set text = message.content -%}
{%- else -%}
{%- set text = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- endif -%}
{%- if message.role == 'system' -%}
{{- '<|im_start|>system\\n' + text -}}
{%- if tools and loop.first -%}{{- '\\n\\n' + tool_list() -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' -}}{%- endif -%}
{{- text -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n' if text or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
