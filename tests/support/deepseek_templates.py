"""Chat templates of DeepSeek, with the constructs of the published ones, retyped; see `support.chat_templates`."""

from __future__ import annotations

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
    "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + "
    "'\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'"
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
{%- if enable_thinking is defined %}
{%- set thinking = enable_thinking %}
{%- else %}
{%- set thinking = false %}
{%- endif %}
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
<{{ dsml_token }}parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">{{ value
if value is string else (value | tojson(ensure_ascii=False)) }}</{{ dsml_token }}parameter>
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

DEEPSEEK_V4 = DEEPSEEK_V32.replace("}}function_calls>", "}}tool_calls>")
"""The calls of DeepSeek V4, which differ from those of V3.2 in the name of the tag around them."""
