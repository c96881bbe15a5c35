"""Chat templates of Qwen, Llama and Gemma with the constructs of the published ones, retyped with short prompts.

What decides how a template behaves is kept: which keys of a message it reads, how it joins arguments, what it refuses,
and which earlier messages it shows differently once others follow. Texts that people or models read are shortened.
"""

from __future__ import annotations

_QWEN_TOOLS = r"""
{%- macro tool_list() %}
{{- "\n\n# Tools\n\nYou may call functions. Their signatures are between <tools></tools>:\n<tools>" }}
{%- for tool in tools %}
{{- "\n" }}
{{- tool | tojson }}
{%- endfor %}
{{- "\n</tools>\n\nWrite each call as JSON between <tool_call></tool_call>:\n<tool_call>\n" }}
{{- '{"name": <function-name>, "arguments": <arguments>}\n</tool_call>' }}
{%- endmacro %}
"""
_QWEN_RESULTS = r"""
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\n<tool_response>\n' }}
{{- message.content }}
{{- '\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
{{- '<|im_end|>\n' }}
{%- endif %}
"""

QWEN25 = (
    _QWEN_TOOLS
    + r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0]['role'] == 'system' %}
{{- messages[0]['content'] }}
{%- else %}
{{- 'You are a helpful assistant.' }}
{%- endif %}
{{- tool_list() + '<|im_end|>\n' }}
{%- else %}
{%- if messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and
    not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}
{{- '\n' + message.content }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{{- '\n<tool_call>\n{"name": "' }}
{{- tool_call.name }}
{{- '", "arguments": ' }}
{{- tool_call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
"""
    + _QWEN_RESULTS
    + r"""
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
)
"""Qwen2.5: ChatML with a default system message and JSON tool calls, whose arguments must be a mapping."""

QWEN3 = (
    _QWEN_TOOLS
    + r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content }}
{%- endif %}
{{- tool_list() + '<|im_end|>\n' }}
{%- else %}
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and
    not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}
{%- set ns.last_query_index = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}
{%- set content = message.content %}
{%- else %}
{%- set content = '' %}
{%- endif %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning_content = message.reasoning_content %}
{%- else %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_query_index %}
{%- if loop.last or (not loop.last and reasoning_content) %}
{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
{{- content.lstrip('\n') }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- endif %}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
{%- if (loop.first and content) or (not loop.first) %}
{{- '\n' }}
{%- endif %}
{%- if tool_call.function %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{{- '<tool_call>\n{"name": "' }}
{{- tool_call.name }}
{{- '", "arguments": ' }}
{%- if tool_call.arguments is string %}
{{- tool_call.arguments }}
{%- else %}
{{- tool_call.arguments | tojson }}
{%- endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
"""
    + _QWEN_RESULTS
    + r"""
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}
"""
)
"""Qwen3: thinking before the last user message is dropped; arguments may be a mapping or JSON text."""

QWEN3_CODER = r"""
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
{%- set tools = [] %}
{%- endif %}
{%- if system_message is defined %}
{{- "<|im_start|>system\n" + system_message }}
{%- else %}
{%- if tools is iterable and tools | length > 0 %}
{{- "<|im_start|>system\nYou are a helpful assistant." }}
{%- endif %}
{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
{{- "\n\n# Tools\n\nYou have these functions:\n\n<tools>" }}
{%- for tool in tools %}
{%- if tool.function is defined %}
{%- set tool = tool.function %}
{%- endif %}
{{- "\n<function>\n<name>" ~ tool.name ~ "</name>" }}
{%- if tool.description is defined %}
{{- '\n<description>' ~ (tool.description | trim) ~ '</description>' }}
{%- endif %}
{{- '\n<parameters>' }}
{%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined and
    tool.parameters.properties is mapping %}
{%- for param_name, param_fields in tool.parameters.properties|items %}
{{- '\n<parameter>\n<name>' ~ param_name ~ '</name>' }}
{%- if param_fields.type is defined %}
{{- '\n<type>' ~ (param_fields.type | string) ~ '</type>' }}
{%- endif %}
{{- '\n</parameter>' }}
{%- endfor %}
{%- endif %}
{{- '\n</parameters>\n</function>' }}
{%- endfor %}
{{- "\n</tools>\n\nWrite a call like this:\n\n<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n" }}
{{- '</parameter>\n</function>\n</tool_call>' }}
{%- endif %}
{%- if system_message is defined or (tools is iterable and tools | length > 0) %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
{%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable and
    message.tool_calls | length > 0 %}
{{- '<|im_start|>' + message.role }}
{%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
{{- '\n' + message.content | trim + '\n' }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}
{%- endif %}
{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
{%- if tool_call.arguments is defined %}
{%- for args_name, args_value in tool_call.arguments|items %}
{{- '<parameter=' + args_name + '>\n' }}
{%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and
    args_value is not string) else args_value | string %}
{{- args_value }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{%- endif %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "user" or message.role == "system" or message.role == "assistant" %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "tool" %}
{%- if loop.previtem and loop.previtem.role != "tool" %}
{{- '<|im_start|>user\n' }}
{%- endif %}
{{- '<tool_response>\n' }}
{{- message.content }}
{{- '\n</tool_response>\n' }}
{%- if not loop.last and loop.nextitem.role != "tool" %}
{{- '<|im_end|>\n' }}
{%- elif loop.last %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""Qwen3-Coder: one tag per argument of a tool call; arguments must be a mapping."""

LLAMA3_FIRST = r"""
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim +
    '<|eot_id|>' %}
{%- if loop.index0 == 0 %}
{%- set content = bos_token + content %}
{%- endif %}
{{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
"""Llama 3 8B Instruct: neither tools nor calls are shown, and nothing is refused."""

LLAMA3 = r"""
{{- bos_token }}
{%- if custom_tools is defined %}
{%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
{%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
{%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}
{%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
{{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
{%- if messages | length != 0 %}
{%- set first_user_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}
{{- raise_exception("Tools need a first user message.") }}
{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
{{- 'You may call these functions. Answer a call with JSON in the form {"name": function name, "parameters": ' }}
{{- "dictionary of arguments}. Do not use variables.\n\n" }}
{%- for t in tools %}
{{- t | tojson(indent=4) }}
{{- "\n\n" }}
{%- endfor %}
{{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("One tool call at a time.") }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}
{{- tool_call.arguments | tojson }}
{{- "}" }}
{{- "<|eot_id|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
"""Llama 3.1 to 3.3: a date, tools in the first user message, one call per answer, trimmed contents, results as JSON."""

GEMMA = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if (message['role'] == 'assistant') %}
{%- set role = 'model' %}
{%- else %}
{%- set role = message['role'] %}
{%- endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
"""Gemma and Gemma 2: strict alternation of user and model, no system role, no tools, trimmed contents."""

GEMMA3 = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}
{%- set first_user_prefix = messages[0]['content'] + '\n\n' %}
{%- else %}
{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' %}
{%- endif %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set first_user_prefix = "" %}
{%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}
{%- if (message['role'] == 'assistant') %}
{%- set role = "model" %}
{%- else %}
{%- set role = message['role'] %}
{%- endif %}
{{- '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
{%- if message['content'] is string %}
{{- message['content'] | trim }}
{%- elif message['content'] is iterable %}
{%- for item in message['content'] %}
{%- if item['type'] == 'image' %}
{{- '<start_of_image>' }}
{%- elif item['type'] == 'text' %}
{{- item['text'] | trim }}
{%- endif %}
{%- endfor %}
{%- else %}
{{- raise_exception("Invalid content type") }}
{%- endif %}
{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
"""Gemma 3: the system message opens the first user turn."""

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
"""Qwen2.5-VL: a default system message, a placeholder for each image, and no tools."""

GEMMA4 = r"""
{%- macro value(argument) -%}
{%- if argument is string -%}<|"|>{{ argument }}<|"|>
{%- elif argument is boolean -%}{{ 'true' if argument else 'false' }}
{%- elif argument is mapping -%}{ {{- pairs(argument) -}} }
{%- elif argument is sequence -%}
[{%- for item in argument -%}{{ value(item) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ argument }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(arguments) -%}
{%- for key, item in arguments | dictsort -%}{{ key }}:{{ value(item) }}{{ ',' if not loop.last }}{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set opened = messages[0].role == 'system' -%}
{%- if enable_thinking or tools or opened -%}
{{- '<|turn>system\n' + ('<|think|>\n' if enable_thinking else '') -}}
{{- messages[0].content | trim if opened else '' -}}
{%- for tool in tools or () -%}
<|tool>declaration:{{ tool.function.name }}{ {{- pairs(tool.function.parameters) -}} }<tool|>
{%- endfor -%}
{{- '<turn|>\n' -}}
{%- endif -%}
{%- set rows = messages[1:] if opened else messages -%}
{%- set ns = namespace(user=-1, last='', turn='') -%}
{%- for row in rows -%}{%- if row.role == 'user' -%}{%- set ns.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for row in rows -%}
{%- if row.role != 'tool' -%}
{%- set ns.last = '' -%}
{%- if row.role != 'assistant' or ns.turn != 'assistant' -%}
{{- '<|turn>' + ('model' if row.role == 'assistant' else row.role) + '\n' -}}
{%- endif -%}
{%- set ns.turn = row.role -%}
{%- if row.reasoning_content and row.tool_calls and loop.index0 > ns.user -%}
{{- '<|channel>thought\n' + row.reasoning_content + '\n<channel|>' -}}
{%- endif -%}
{%- for call in row.tool_calls or () -%}
{{- '<|tool_call>call:' + call.function.name }}{ {{- pairs(call.function.arguments) -}} }<tool_call|>
{%- set ns.last = 'call' -%}
{%- endfor -%}
{%- if row.tool_calls -%}
{%- set scan = namespace(open=true) -%}
{%- for result in rows[loop.index0 + 1:] -%}
{%- set scan.open = scan.open and result.role == 'tool' -%}
{%- if scan.open -%}
<|tool_response>response:{{ result.name }}{value:{{ value(result.content) }}}<tool_response|>
{%- set ns.last = 'result' -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- row.content | trim -}}
{%- if ns.last == 'call' -%}<|tool_response>
{%- elif ns.last != 'result' or row.content -%}{{- '<turn|>\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.last -%}
{{- '<|turn>model\n' + ('' if enable_thinking else '<|channel>thought\n<channel|>') -}}
{%- endif -%}
"""
"""Gemma 4: results continue the model's turn, the text of an answer with calls comes after their results, and a final
answer's thinking is left out."""
