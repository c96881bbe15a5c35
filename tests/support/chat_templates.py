"""Chat templates with the structure of well-known model families, for tests without a download."""

from __future__ import annotations

_QWEN_TOOLS = r"""
{%- macro tool_list() %}
{{- '\n\n# Tools\n\nYou may call functions. Their signatures are between <tools></tools>:\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nWrite each call as JSON between <tool_call></tool_call>:\n<tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <arguments>}\n</tool_call>' }}
{%- endmacro %}
{%- macro json_calls(message, separator) %}
{%- for call in message.tool_calls %}
{%- set function = call.function if call.function else call %}
{{- ('\n' if separator or not loop.first else '') + '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- (function.arguments if function.arguments is string else function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- macro tool_response(message, first, last) %}
{{- '<|im_start|>user' if first else '' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if last else '' }}
{%- endmacro %}
"""

QWEN25 = (
    _QWEN_TOOLS
    + r"""
{%- set opening = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + opening + (tool_list() if tools else '') + '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- tool_response(message, loop.first or loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' + ('\n' + message.content if message.content else '') }}
{{- json_calls(message, true) + '<|im_end|>\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}
"""
)
"""ChatML with a default system message and JSON tool calls."""

QWEN3 = (
    _QWEN_TOOLS
    + r"""
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- if opening or tools %}
{{- '<|im_start|>system\n' + (opening + tool_list() if tools else opening) + '<|im_end|>\n' }}
{%- endif %}
{%- set memory = namespace(last_query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set memory.last_query = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- tool_response(message, loop.first or loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > memory.last_query and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}
{{- content }}
{%- endif %}
{{- json_calls(message, content | length > 0) + '<|im_end|>\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}
"""
)
"""ChatML that drops thinking before the last user message, with JSON tool calls."""

QWEN3_CODER = r"""
{%- macro functions() %}
{{- '\n\n# Tools\n\nYou have these functions:\n\n<tools>' }}
{%- for tool in tools %}
{{- '\n<function>\n<name>' + tool.function.name + '</name>\n<description>' + tool.function.description }}
{{- '</description>\n<parameters>' + (tool.function.parameters | tojson) + '</parameters>\n</function>' }}
{%- endfor %}
{{- '\n</tools>\n\nWrite a call like this:\n\n<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n' }}
{{- '</parameter>\n</function>\n</tool_call>' }}
{%- endmacro %}
{%- set opening = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\n' + opening + (functions() if tools else '') + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' + ('\n' + message.content | trim + '\n' if message.content else '') }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}
"""
"""ChatML with one tag per argument of a tool call."""

LLAMA3 = r"""
{%- macro header(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro %}
{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- set opening = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- header('system') + 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' }}
{{- opening + '<|eot_id|>' }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in turns %}
{%- if loop.first and tools %}
{{- header('user') + 'You may call these functions. Answer a call with JSON in the form ' }}
{{- '{"name": function name, "parameters": dictionary of arguments}. Do not use variables.\n\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
{%- set function = message.tool_calls[0].function %}
{{- header('assistant') + '{"name": "' + function.name + '", "parameters": ' + (function.arguments | tojson) }}
{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- header('ipython') + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- header(message.role) + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{{- header('assistant') if add_generation_prompt else '' }}
"""
"""Headers between special tokens, a date, tools in the first user message, trimmed contents, tool results as JSON."""

GEMMA = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{{- '<start_of_turn>model\n' if add_generation_prompt else '' }}
"""
"""Strict alternation of user and model, no system role, no tools, trimmed contents."""

QWEN25_VL = r"""
{%- macro show(content) %}
{%- if content is string %}
{{- content }}
{%- else %}
{%- for part in content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' if loop.first and message.role != 'system' else '' }}
{{- '<|im_start|>' + message.role + '\n' + show(message.content) + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}
"""
"""ChatML with a default system message, a placeholder for each image, and no tools."""
