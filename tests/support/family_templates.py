"""Chat templates of families with notations of their own, with the constructs of the published ones, retyped.

Prompts are short. What decides how a template behaves is kept: which keys of a message it reads, how it joins arguments,
what it refuses, and which earlier messages it shows differently once others follow.
"""

from __future__ import annotations

_ALTERNATION = r"""
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("Roles must alternate user/assistant, except for calls and results.") }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
"""

MISTRAL = (
    r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if tools is defined and tools is not none and tools|length > 0 %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
"""
    + _ALTERNATION
    + r"""
{%- for message in loop_messages %}
{%- if message['role'] == 'user' %}
{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message['role'] == 'assistant' %}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] is iterable and message['content'] | length > 0 %}
{%- for block in message['content'] %}{{- block['text'] }}{%- endfor %}
{%- endif %}
{%- if message['tool_calls'] is defined and message['tool_calls'] is not none and message['tool_calls']|length > 0 %}
{%- for tool in message['tool_calls'] %}
{%- set arguments = tool['function']['arguments'] %}
{%- if arguments is not string %}
{%- set arguments = arguments|tojson|safe %}
{%- elif arguments == '' %}
{%- set arguments = '{}' %}
{%- endif %}
{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
{%- endfor %}
{%- endif %}
{{- eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS]' + message['content']|string + '[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Only user, assistant and tool roles are supported, got ' + message['role']) }}
{%- endif %}
{%- endfor %}
{#- Thinking stands between [THINK] and [/THINK] in the content. -#}
"""
)
"""Version 13 (Magistral, Devstral): system prompt and tools first, calls as name and arguments, no header of answers."""

_MISTRAL_TOOLS = r"""
{%- macro available_tools() %}
{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}
{%- set tool = tool.function %}
{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}
{{- '"' + key + '": "' + val + '"' }}
{%- else %}
{{- '"' + key + '": ' + val|tojson }}
{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}
{%- endfor %}
{{- "}}" }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
{%- endfor %}
{{- "[/AVAILABLE_TOOLS]" }}
{%- endmacro %}
"""

MISTRAL_V3 = (
    _MISTRAL_TOOLS
    + r"""
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
{%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
"""
    + _ALTERNATION
    + r"""
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}
{{- available_tools() }}
{%- endif %}
{%- if loop.last and system_message is defined %}
{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
{%- else %}
{{- "[INST] " + message["content"] + "[/INST]" }}
{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}
{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message["role"] == "assistant" %}
{{- " " + message["content"]|trim + eos_token}}
{%- elif message["role"] == "tool" %}
{%- if message.content is defined and message.content.content is defined %}
{%- set content = message.content.content %}
{%- else %}
{%- set content = message.content %}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception("Only user and assistant roles are supported.") }}
{%- endif %}
{%- endfor %}
"""
)
"""Version 3: the system prompt moves to a last user message, tools to the last user's; calls are a JSON array with ids."""

MISTRAL_V7 = (
    _MISTRAL_TOOLS
    + r"""
{%- set today = strftime_now("%Y-%m-%d") %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set system_message = "The current date is " + today + "." %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
{%- set tools = none %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}
{{- available_tools() }}
{%- endif %}
{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message["role"] == "tool_calls" or message.tool_calls is defined %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}
{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length < 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length >= 9! (1)" + tool_call.id) }}
{%- endif %}
{{- ', "id": "' + tool_call.id[-9:] + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}
{{- message['content'] + eos_token }}
{%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
{%- if not message.tool_call_id is defined or message.tool_call_id|length < 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length >= 9! (2)" + message.tool_call_id) }}
{%- endif %}
{{- '"call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception("Only user and assistant roles are supported.") }}
{%- endif %}
{%- endfor %}
"""
)
"""Version 7 (Mistral Small 3.1): a system prompt with the day, tools before the last user message, the same calls."""

GLM45 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools -%}
<|system|>
# Tools

You may call functions. Their signatures are between <tools></tools>:
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>

Write a call like this:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{%- macro visible_text(content) -%}
{%- if content is string -%}
{{- content }}
{%- elif content is iterable and content is not mapping -%}
{%- for item in content -%}
{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
{%- endfor -%}
{%- else -%}
{{- content }}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and
    not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
{%- set reasoning_content = m.reasoning_content %}
{%- else %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
{%- set tc = tc.function %}
{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
{{- '<|observation|>' }}
{%- endif %}
{{- '\n<tool_response>\n' }}
{{- m.content }}
{{- '\n</tool_response>' }}
{%- else -%}
<|observation|>{% for tr in m.content %}

<tool_response>
{{ tr.output if tr.output is defined else tr }}
</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""
"""Roles as special tokens and no end of turn; arguments must be a mapping; earlier thinking is dropped."""

_DEEPSEEK_OPENING = r"""
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{%- endif %}
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true,
    is_last_user=false) %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- if ns.is_first_sp %}
{%- set ns.system_prompt = ns.system_prompt + message['content'] %}
{%- set ns.is_first_sp = false %}
{%- else %}
{%- set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}
{%- endif %}
{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
"""
_DEEPSEEK_RESULTS = r"""
{%- if message['role'] == 'tool' %}
{%- set ns.is_last_user = false -%}
{%- set ns.is_tool = true -%}
{%- if ns.is_output_first %}
{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- set ns.is_output_first = false %}
{%- else %}
{{- '\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endif %}
{%- endfor -%}
{%- if ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>' }}
{%- endif %}
"""

DEEPSEEK_V3 = (
    _DEEPSEEK_OPENING
    + r"""
{%- if tools %}
{{- "\n\n# Tools\n\nYou may call functions. Their signatures are between <tools></tools>:\n<tools>" }}
{%- for tool in tools %}
{{- "\n" }}
{{- tool | tojson }}
{%- endfor %}
{{- "\n</tools>\n\nWrite calls like this:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n" }}
{{- "```json\narguments\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>" }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false -%}
{%- set ns.is_first = false -%}
{%- set ns.is_last_user = true -%}
{{- '<｜User｜>' + message['content'] + '<｜Assistant｜>'}}
{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- set ns.is_last_user = false -%}
{%- if ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>'}}
{%- endif %}
{%- set ns.is_first = false %}
{%- set ns.is_tool = false -%}
{%- set ns.is_output_first = true %}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}
{%- if message['content'] is not none %}{{- message['content'] }}{%- endif %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- set ns.is_first = true -%}
{%- else %}
{{- '\n' }}
{%- endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n' + '```json' + '\n' +
    tool['function']['arguments']|tojson + '\n' + '```' + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
{%- set ns.is_last_user = false -%}
{%- if ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- set ns.is_tool = false -%}
{%- else %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endif %}
"""
    + _DEEPSEEK_RESULTS
    + r"""
{%- if add_generation_prompt and not ns.is_last_user and not ns.is_tool %}
{{- '<｜Assistant｜>' }}
{%- endif %}
"""
)
"""The template that servers bring for DeepSeek V3 and R1 with tools: calls with fenced JSON."""

_DEEPSEEK_CALL = (
    "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + "
    "tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'"
)
DEEPSEEK_R1 = (
    _DEEPSEEK_OPENING
    + r"""
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false -%}
{{- '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' + CALL }}
{%- set ns.is_first = true -%}
{%- else %}
{{- '\n' + CALL }}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- set ns.is_tool = false -%}
{%- else %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endif %}
""".replace("CALL", _DEEPSEEK_CALL)
    + _DEEPSEEK_RESULTS
    + r"""
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""
)
"""DeepSeek R1 and its distilled models, first template: no tools; calls only where the content is null; the end of an
answer is written after its second call only; arguments are joined as text."""

DEEPSEEK_V3_JOINED = (
    _DEEPSEEK_OPENING
    + r"""
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false -%}
{{- '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' + CALL }}
{%- set ns.is_first = true -%}
{%- else %}
{{- '\n' + CALL }}
{%- endif %}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.is_tool %}
{{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- set ns.is_tool = false -%}
{%- else %}
{{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endif %}
""".replace("CALL", _DEEPSEEK_CALL)
    + _DEEPSEEK_RESULTS
    + r"""
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
)
"""DeepSeek V3, mended: calls are shown whatever the content is, which is shown as a second answer unless it is null."""

_DEEPSEEK_V31_START = r"""
{%- if not thinking is defined %}
{%- if enable_thinking is defined %}{%- set thinking = enable_thinking %}{%- else %}{%- set thinking = false %}{%- endif %}
{%- endif %}
"""
_DEEPSEEK_V31_TOOLS = r"""
{%- if tools is defined and tools is not none %}
{{- '\n\n## Tools\nYou have these tools:\n' }}
{%- for tool in tools %}
{{- '\n### ' + tool.function.name + '\nDescription: ' + tool.function.description + '\n\nParameters: ' +
    (tool.function.parameters | tojson) + '\n' }}
{%- endfor %}
{{- '\nCall them with <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
"""
_DEEPSEEK_V31_MESSAGES = r"""
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false -%}
{%- set ns.is_first = false -%}
{%- set ns.is_last_user = true -%}
{{- '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- if ns.is_last_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}
{%- set ns.is_last_user = false -%}
{%- set ns.is_first = false %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}
{%- if message['content'] is none %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- else %}
{{- message['content'] + '<｜tool▁calls▁begin｜>' }}
{%- endif %}
{%- set ns.is_first = true -%}
{%- endif %}
{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + ARGUMENTS + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
{%- if ns.is_last_user %}
{{- '<｜Assistant｜>' }}
{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}
{%- endif %}
{%- endif %}
{%- set ns.is_last_user = false -%}
{%- if ns.is_tool %}
{{- message['content'] + '<｜end▁of▁sentence｜>' }}
{%- set ns.is_tool = false -%}
{%- else %}
{%- set content = message['content'] -%}
{%- if '</think>' in content %}
{%- set content = content.split('</think>', 1)[1] -%}
{%- endif %}
{{- content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}
{%- set ns.is_last_user = false -%}
{%- set ns.is_tool = true -%}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
{{- '<｜Assistant｜>' }}
{%- if not thinking %}{{- '</think>' }}{%- else %}{{- '<think>' }}{%- endif %}
{%- endif %}
"""
DEEPSEEK_V31 = (
    _DEEPSEEK_V31_START
    + _DEEPSEEK_OPENING
    + _DEEPSEEK_V31_TOOLS
    + _DEEPSEEK_V31_MESSAGES.replace("ARGUMENTS", "tool['function']['arguments']|tojson")
)
"""The template that servers bring for DeepSeek V3.1 with tools. A mark after the header says whether the answer thinks,
and earlier thinking is always dropped."""

DEEPSEEK_V31_JOINED = (
    _DEEPSEEK_V31_START
    + _DEEPSEEK_OPENING
    + _DEEPSEEK_V31_MESSAGES.replace("ARGUMENTS", "tool['function']['arguments']")
)
"""DeepSeek V3.1 as published: no tools, and arguments joined as text."""

DEEPSEEK_V32 = r"""
{%- set enable_thinking = thinking | default(true) -%}
{%- set bos_token = "<｜begin▁of▁sentence｜>" -%}
{%- set eos_token = "<｜end▁of▁sentence｜>" -%}
{%- set dsml_token = "｜DSML｜" -%}
{%- macro render_tools(tools) -%}
## Tools{{- "\n\n" -}}Call tools with a "<{{ dsml_token }}function_calls>" block like this:
<{{ dsml_token }}function_calls>
<{{ dsml_token }}invoke name="$FUNCTION_NAME">
<{{ dsml_token }}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{ dsml_token }}parameter>
</{{ dsml_token }}invoke>
</{{ dsml_token }}function_calls>
<functions>
{%- for tool in tools -%}
{{ "\n" }}{{ tool.function | tojson(ensure_ascii=False) }}
{%- endfor -%}
{{ "\n" }}</functions>
{%- endmacro -%}
{%- macro encode_arguments_to_dsml(tool_call) -%}
{%- set arguments = tool_call.function.arguments -%}
{%- if arguments is mapping -%}
{%- for key, value in arguments.items() -%}
{%- if not loop.first -%}{{ "\n" }}{%- endif -%}
<{{ dsml_token }}parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">{{ value if value is string
else (value | tojson(ensure_ascii=False)) }}</{{ dsml_token }}parameter>
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set last_user_index = namespace(value=-1) -%}
{%- for msg in messages -%}
{%- if msg.role in ["user", "developer"] -%}{%- set last_user_index.value = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{ bos_token }}
{%- set has_system = messages|length > 0 and messages[0].role == "system" -%}
{%- if has_system -%}
{{ messages[0].get('content', '') }}
{%- if tools -%}{{ "\n\n" }}{{ render_tools(tools) }}{{ "\n" }}{%- endif -%}
{%- elif tools -%}
{{ render_tools(tools) }}{{ "\n" }}
{%- endif -%}
{%- set start_idx = 1 if has_system else 0 -%}
{%- for message in messages[start_idx:] -%}
{%- set msg_index = loop.index0 + start_idx -%}
{%- if message.role == "user" -%}
<｜User｜>{{ message.content }}<｜Assistant｜>
{%- if msg_index == last_user_index.value and enable_thinking -%}<think>{%- else -%}</think>{%- endif -%}
{%- elif message.role == "tool" -%}
{%- set prev_assistant_idx = namespace(value=-1) -%}
{%- for i in range(msg_index - 1, -1, -1) -%}
{%- if messages[i].role != "tool" and prev_assistant_idx.value == -1 -%}
{%- set prev_assistant_idx.value = i -%}
{%- endif -%}
{%- endfor -%}
{%- set tool_call_order = msg_index - prev_assistant_idx.value -%}
{%- set assistant_msg = messages[prev_assistant_idx.value] -%}
{%- if tool_call_order == 1 -%}{{ "\n\n" }}<function_results>{%- endif -%}
{{ "\n" }}<result>{{ message.content }}</result>
{%- if tool_call_order == (assistant_msg.get('tool_calls', []) | length) -%}
{{ "\n" }}</function_results>
{%- if msg_index >= last_user_index.value and enable_thinking -%}
{{ "\n\n" }}<think>
{%- else -%}
{{ "\n\n" }}</think>
{%- endif -%}
{%- endif -%}
{%- elif message.role == "assistant" -%}
{%- if enable_thinking and msg_index > last_user_index.value -%}
{{ message.get('reasoning_content', '') }}</think>
{%- endif -%}
{{ message.get('content', '') }}
{%- if message.get('tool_calls') -%}
{{ "\n\n" }}<{{ dsml_token }}function_calls>
{%- for tool_call in message.tool_calls -%}
{{ "\n" }}<{{ dsml_token }}invoke name="{{ tool_call.function.name }}">{{ "\n" }}
{{- encode_arguments_to_dsml(tool_call) -}}{{ "\n" }}</{{ dsml_token }}invoke>
{%- endfor -%}
{{ "\n" }}</{{ dsml_token }}function_calls>
{%- endif -%}
{{ eos_token }}
{%- endif -%}
{%- endfor -%}
"""
"""Tags marked as DSML, each argument with its kind; a block of results is closed after as many as there were calls."""

KIMI_K2_FIRST = r"""
{%- if tools -%}
{{- '<|im_system|>tool_declare<|im_middle|>' -}}
{{- tools | tojson -}}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and messages[0]['role'] != 'system' -%}
{{ '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}
{%- endif -%}
{%- if message['role'] == 'system' -%}
{{ '<|im_system|>system<|im_middle|>' }}
{%- elif message['role'] == 'user' -%}
{{ '<|im_user|>user<|im_middle|>' }}
{%- elif message['role'] == 'assistant' -%}
{{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- elif message['role'] == 'tool' -%}
{{ '<|im_system|>tool<|im_middle|>' }}
{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] + '<|im_end|>' -}}
{%- else -%}
{%- for content in message['content'] -%}
{{ content['text'] }}
{%- endfor -%}
{{ '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif -%}
"""
"""Kimi K2, first template: tools are shown, calls are not."""

_KIMI_MACROS = r"""
{%- macro set_roles(message) -%}
{%- set role_name =  message.get('name') or  message['role'] -%}
{%- if message['role'] == 'user' -%}
<|im_user|>{{role_name}}<|im_middle|>
{%- elif message['role'] == 'assistant' -%}
<|im_assistant|>{{role_name}}<|im_middle|>
{%- else -%}
<|im_system|>{{role_name}}<|im_middle|>
{%- endif -%}
{%- endmacro -%}
{%- macro render_toolcalls(message) -%}
<|tool_calls_section_begin|>
{%- for tool_call in message['tool_calls'] -%}
{%- set formatted_id = tool_call['id'] -%}
<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}
{{- tool_call['function']['arguments'] }}{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson() }}<|im_end|>
{%- endif -%}
{%- if messages|length == 0 or messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
"""

KIMI_K2 = (
    _KIMI_MACROS
    + r"""
{%- for message in messages -%}
{{ set_roles(message) }}
{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
{%- if message['content'] -%}{{ message['content'] }}{%- endif -%}
{{ render_toolcalls(message) }}
{%- elif message['role'] == 'tool' -%}
## Return of {{ message.tool_call_id }}{{ '\n' + message['content'] }}
{%- elif message['content'] is string -%}
{{ message['content'] }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
)
"""Roles as special tokens, a default system prompt, ids that hold the tool's name."""

KIMI_K2_THINKING = (
    _KIMI_MACROS
    + r"""
{%- macro one(message, thought) -%}
{{ set_roles(message) }}
{%- if message['role'] == 'assistant' -%}
<think>{{ thought }}</think>{{ message['content'] }}
{%- if message.get('tool_calls') -%}{{ render_toolcalls(message) }}{%- endif -%}
{%- elif message['role'] == 'tool' -%}
## Return of {{ message.tool_call_id }}{{ '\n' + message['content'] }}
{%- elif message['content'] is not none -%}
{{ message['content'] }}
{%- endif -%}
<|im_end|>
{%- endmacro -%}
{%- set ns = namespace(last_non_tool_call_assistant_msg=-1) -%}
{%- for idx in range(messages|length-1, -1, -1) -%}
{%- if messages[idx]['role'] == 'assistant' and not messages[idx].get('tool_calls') -%}
{%- set ns.last_non_tool_call_assistant_msg = idx -%}
{%- break -%}
{%- endif -%}
{%- endfor -%}
{%- set hist_msgs = messages[:ns.last_non_tool_call_assistant_msg+1] -%}
{%- set suffix_msgs = messages[ns.last_non_tool_call_assistant_msg+1:] -%}
{%- for message in hist_msgs -%}{{ one(message, '') }}{%- endfor -%}
{%- for message in suffix_msgs -%}{{ one(message, message.get('reasoning_content', '')) }}{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
)
"""The same with thinking, which is kept until the model answers without a call."""

GPT_OSS = r"""
{%- macro render_tool_namespace(namespace_name, tools) -%}
{{- "## " + namespace_name + "\n\n" }}
{{- "namespace " + namespace_name + " {\n\n" }}
{%- for tool in tools %}
{%- set tool = tool.function %}
{{- "// " + tool.description + "\n" }}
{{- "type "+ tool.name + " = " }}
{%- if tool.parameters and tool.parameters.properties %}
{{- "(_: {\n" }}
{%- for param_name, param_spec in tool.parameters.properties.items() %}
{{- param_name }}
{%- if param_name not in (tool.parameters.required or []) -%}
{{- "?" }}
{%- endif -%}
{{- ": " + (param_spec.type if param_spec.type is string else "any") + ",\n" }}
{%- endfor %}
{{- "}) => any;\n\n" }}
{%- else -%}
{{- "() => any;\n\n" }}
{%- endif -%}
{%- endfor %}
{{- "} // namespace " + namespace_name }}
{%- endmacro -%}
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n" }}
{{- "Knowledge cutoff: 2024-06\n" }}
{{- "Current date: " + strftime_now("%Y-%m-%d") + "\n\n" }}
{%- if reasoning_effort is not defined %}
{%- set reasoning_effort = "medium" %}
{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\n\n" }}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools -%}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif -%}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
{%- set developer_message = messages[0].content %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set developer_message = "" %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
{{- "<|start|>developer<|message|>" }}
{%- if developer_message %}
{{- "# Instructions\n\n" }}
{{- developer_message }}
{%- endif %}
{%- if tools -%}
{{- "\n\n" }}
{{- "# Tools\n\n" }}
{{- render_tool_namespace("functions", tools) }}
{%- endif -%}
{{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
{%- if message.role == 'assistant' -%}
{%- if "content" in message %}
{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}
{{- raise_exception("A message has channel tags in its content.") }}
{%- endif %}
{%- endif %}
{%- if "tool_calls" in message %}
{%- set future_final_message = namespace(found=false) %}
{%- for future_message in loop_messages[loop.index:] %}
{%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
{%- set future_final_message.found = true %}
{%- endif %}
{%- endfor %}
{%- set tool_call = message.tool_calls[0] %}
{%- if tool_call.function %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{%- if message.content and message.thinking %}
{{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
{%- elif message.content and not future_final_message.found %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
{%- elif message.thinking and not future_final_message.found %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant to=" }}
{{- "functions." + tool_call.name + "<|channel|>commentary " }}
{{- (tool_call.content_type if tool_call.content_type is defined else "json") + "<|message|>" }}
{{- tool_call.arguments|tojson }}
{{- "<|call|>" }}
{%- set last_tool_call.name = tool_call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if "thinking" in message %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
{%- else %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- set last_tool_call.name = none %}
{%- endif %}
{%- elif message.role == 'tool' -%}
{%- if last_tool_call.name is none %}
{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
{%- endif %}
{{- "<|start|>functions." + last_tool_call.name }}
{{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
{%- elif message.role == 'user' -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|start|>assistant" }}
{%- endif -%}
"""
"""Harmony: channels, one call per message, results as JSON; thinking is dropped once a final answer follows it."""

MINIMAX_M2 = r"""
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- set toolcall_end_token = '</minimax:tool_call>' -%}
{%- macro render_tool_namespace(namespace_name, tool_list) -%}
{%- for tool in tool_list -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}
{%- endmacro -%}
{%- macro visible_text(content) -%}
{%- if content is string -%}
{{ content }}
{%- elif content is iterable and content is not mapping -%}
{%- for item in content -%}
{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
{%- endfor -%}
{%- else -%}
{{- content }}
{%- endif -%}
{%- endmacro -%}
{%- set system_message = none -%}
{%- set conversation_messages = messages -%}
{%- if messages and messages[0].role == "system" -%}
{%- set system_message = messages[0] -%}
{%- set conversation_messages = messages[1:] -%}
{%- endif -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in conversation_messages %}
{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{{- ']~!b[' ~ ']~b]system' ~ '\n' }}
{{- visible_text(system_message.content) if system_message and system_message.content else
    "You are a helpful assistant." }}
{%- if tools -%}
{{- '\n\n' ~ '# Tools' ~ '\n' ~ 'You may call tools. Their schemas:' ~ '\n' }}
{{- '\n' ~ '<tools>' ~ '\n' }}
{{- render_tool_namespace("functions", tools) }}
{{- '</tools>' ~ '\n\n' }}
{{- 'Write calls like this:' ~ '\n' }}
{{- '\n' ~ toolcall_begin_token }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
...
</invoke>
{{- '\n' ~ toolcall_end_token }}
{%- endif -%}
{{- '[e~[\n' }}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in conversation_messages -%}
{%- if message.role == 'assistant' -%}
{{- ']~b]ai' ~ '\n' }}
{%- set reasoning_content = '' %}
{%- set content = visible_text(message.content) %}
{%- if message.reasoning_content is string %}
{%- set reasoning_content = message.reasoning_content %}
{%- else %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].strip('\n').split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].strip('\n') %}
{%- endif %}
{%- endif %}
{%- if reasoning_content and loop.index0 > ns.last_user_index -%}
{{- '<think>' ~ '\n' ~ reasoning_content ~ '\n' ~ '</think>' ~ '\n\n' }}
{%- endif -%}
{%- if content -%}
{{- content }}
{%- endif -%}
{%- if message.tool_calls -%}
{{- '\n' ~ toolcall_begin_token ~ '\n' }}
{%- for tool_call in message.tool_calls -%}
{%- if tool_call.function %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{{- '<invoke name="' + tool_call.name + '">' }}
{% set _args = tool_call.arguments %}
{%- for k, v in _args.items() %}
{{- '\n<parameter name="' + k + '">' }}
{{- v | tojson(ensure_ascii=False) if v is not string else v }}
{{- '</parameter>' }}
{%- endfor %}
{{- '\n</invoke>' ~ '\n' }}
{%- endfor -%}
{{- toolcall_end_token}}
{%- set last_tool_call.name = message.tool_calls[-1].function.name -%}
{%- else -%}
{%- set last_tool_call.name = none -%}
{%- endif -%}
{{- '[e~[' ~ '\n' }}
{%- elif message.role == 'tool' -%}
{%- if last_tool_call.name is none -%}
{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!") }}
{%- endif -%}
{%- if loop.first or (conversation_messages[loop.index0 - 1].role != 'tool') -%}
{{- ']~b]tool' }}
{%- endif -%}
{%- if message.content is string -%}
{{- '\n<response>' }}
{{- message.content }}
{{- '</response>' }}
{%- else -%}
{%- for tr in message.content -%}
{{- '\n<response>' ~ tr ~ '\n</response>' }}
{%- endfor -%}
{%- endif -%}
{%- if loop.last or (conversation_messages[loop.index0 + 1].role != 'tool') -%}
{{- '[e~[\n' -}}
{%- endif -%}
{%- elif message.role == 'user' -%}
{{- ']~b]user' ~ '\n' }}
{{- visible_text(message.content) }}
{{- '[e~[' ~ '\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}
{%- endif -%}
"""
"""Roles after a special token, thinking opened by the prompt and kept after the last user message only; arguments must be
a mapping, and a result must follow a call."""

_LLAMA4_MESSAGES = r"""
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or ('tool_calls' in message and
    message.tool_calls|length != 0 )) %}
{{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for content in message['content'] %}{{- content['text'] | trim }}{%- endfor %}
{%- endif %}
{{- "<|eot|>" }}
{%- elif 'tool_calls' in message %}
{{- '<|header_start|>assistant<|header_end|>\n\n' -}}
CALLS
{{- "<|eot|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|header_start|>ipython<|header_end|>\n\n" }}
{%- if message.content is string %}
{{- message.content | tojson }}
{%- endif %}
{{- "<|eot|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|header_start|>assistant<|header_end|>\n\n' }}
{%- endif %}
"""

LLAMA4 = (
    r"""
{{- bos_token }}
{%- if not tools is defined %}
{%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}
{%- set system_message = "" %}
{%- endif %}
{%- if system_message or tools is not none %}
{{- "<|header_start|>system<|header_end|>\n\n" + system_message }}
{%- if tools is not none %}
{{- "\nUse the exact format [func_name1(param1=value1, param2=value2), func_name2(...)]. The functions:\n" }}
{{- tools | tojson(indent=4) }}
{%- endif %}
{{- "<|eot|>" }}
{%- endif %}
"""
    + _LLAMA4_MESSAGES.replace(
        "CALLS",
        r"""
{%- if message['content'] is string %}
{{- message['content'] }}
{%- endif %}
{{- "[" }}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{{- tool_call.name + '(' -}}
{%- for param in tool_call.arguments %}
{{- param + '="' -}}
{{- "%s" | format(tool_call.arguments[param]) -}}
{{- '"' -}}
{% if not loop.last %}, {% endif %}
{%- endfor %}
{{- ')' -}}
{% if not loop.last %}, {% endif %}
{%- endfor %}
{{- "]" }}
""",
    )
)
"""The template that servers bring for Llama 4: calls as a Python list, each argument between quotation marks."""

LLAMA4_JSON = (
    r"""
{{- bos_token }}
{%- if not tools is defined %}
{%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{{- "<|header_start|>system<|header_end|>\n\n" + messages[0]['content']|trim + "<|eot|>" }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- if not tools is none %}
{%- set first_user_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{{- '<|header_start|>user<|header_end|>\n\n' -}}
{{- 'Answer a call with JSON in the form {"name": function name, "parameters": dictionary of arguments}.\n\n' }}
{%- for t in tools %}
{{- t | tojson(indent=4) }}
{{- "\n\n" }}
{%- endfor %}
{{- first_user_message + "<|eot|>" }}
{%- endif %}
"""
    + _LLAMA4_MESSAGES.replace(
        "CALLS",
        r"""
{{- '<|python_start|>' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- endif %}
{{- '<|python_end|>' }}
{%- for tool_call in message.tool_calls %}
{{- '{"name": "' + tool_call.function.name + '", ' }}
{{- '"parameters": ' }}
{{- tool_call.function.arguments | tojson }}
{{- "}" }}
{%- endfor %}
""",
    )
)
"""Llama 4 as published: tools in the first user message, calls as JSON after a block of Python marks."""
