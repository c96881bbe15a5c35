"""Chat templates of LFM2, Apertus and Seed-OSS, retyped like those of `support.chat_templates`."""

from __future__ import annotations

LFM25 = r"""
{{- bos_token -}}
{%- set keep = preserve_thinking | default(false) -%}
{%- macro quoted(value) -%}
{%- if value is string -%}{{- "'" + value + "'" -}}
{%- elif value is mapping -%}{{- value | tojson -}}
{%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{%- macro written(calls) -%}
{%- set list = namespace(calls=[]) -%}
{%- for call in calls -%}
{%- set given = namespace(parts=[]) -%}
{%- for name, value in call["function"]["arguments"].items() -%}
{%- set given.parts = given.parts + [name + "=" + quoted(value)] -%}
{%- endfor -%}
{%- set list.calls = list.calls + [call["function"]["name"] + "(" + (given.parts | join(", ")) + ")"] -%}
{%- endfor -%}
{{- "<|tool_call_start|>[" + (list.calls | join(", ")) + "]<|tool_call_end|>" -}}
{%- endmacro -%}
{%- set ns = namespace(system="", user=-1) -%}
{%- if messages[0]["role"] == "system" -%}
{%- set ns.system = messages[0]["content"] -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{%- set ns.system = ns.system + ("\n\n" if ns.system else "") + "Today's date: " + strftime_now("%Y-%m-%d") -%}
{%- set ns.system = ns.system + "\n\nList of tools: " + (tools | tojson) -%}
{%- endif -%}
{%- if ns.system -%}{{- "<|im_start|>system\n" + ns.system + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
{%- if message["role"] == "user" -%}{%- set ns.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\n" -}}
{%- if message.role == "assistant" -%}
{%- if message.thinking is defined and (keep or loop.index0 > ns.user) -%}
{{- "<think>" + message.thinking + "</think>" -}}
{%- endif -%}
{%- if message.content is defined -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls is defined -%}{{- written(message.tool_calls) -}}{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- else -%}
{{- (message["content"] or "") + "<|im_end|>\n" -}}
{%- endif -%}
{%- endfor -%}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" -}}
"""
"""LFM2.5: strings between quotes, without escapes; the model decides whether it thinks."""

LFM2 = r"""
{{- bos_token -}}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
{%- set ns.system = messages[0]["content"] -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{%- set ns.system = ns.system + ("\n" if ns.system else "") + "List of tools: <|tool_list_start|>[" -%}
{%- for tool in tools -%}
{%- set ns.system = ns.system + (tool | tojson) + (", " if not loop.last else "") -%}
{%- endfor -%}
{%- set ns.system = ns.system + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system -%}{{- "<|im_start|>system\n" + ns.system + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
{%- set content = message["content"] or "" -%}
{%- if message["role"] == "tool" -%}
{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
{%- endif -%}
{{- "<|im_start|>" + message["role"] + "\n" + content + "<|im_end|>\n" -}}
{%- endfor -%}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" -}}
"""
"""LFM2, first template: calls are not shown."""

APERTUS = r"""
{{- bos_token -}}
{%- set ns = namespace(in_assistant=false, in_tool=false) -%}
{%- if messages[0].role == 'system' -%}
{{- '<|system_start|>' + messages[0].content + '<|system_end|>' -}}
{%- set rows = messages[1:] -%}
{%- else -%}
{{- '<|system_start|>You are Apertus.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|system_end|>' -}}
{%- set rows = messages -%}
{%- endif -%}
{{- '<|developer_start|>Deliberation: ' + ('enabled\n' if enable_thinking else 'disabled\n') -}}
{%- if tools -%}
{{- 'Tool Capabilities:\n' -}}
{%- for tool in tools -%}
{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: ' -}}
{{- (tool.function.parameters | tojson) + ') => any;\n' -}}
{%- endfor -%}
{%- else -%}
{{- 'Tool Capabilities: disabled' -}}
{%- endif -%}
{{- '<|developer_end|>' -}}
{%- for message in rows -%}
{%- if message.role == 'user' -%}
{{- ']' if ns.in_tool else '' -}}
{{- '<|assistant_end|>' if ns.in_assistant else '' -}}
{%- set ns.in_tool = false -%}
{%- set ns.in_assistant = false -%}
{{- '<|user_start|>' + message.content + '<|user_end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '' if ns.in_assistant else '<|assistant_start|>' -}}
{%- set ns.in_assistant = true -%}
{%- if message.content is string -%}
{{- (']' if ns.in_tool else '') + message.content -}}
{%- set ns.in_tool = false -%}
{%- elif message.content is mapping and 'blocks' in message.content -%}
{%- for block in message.content.blocks -%}
{{- ('<|inner_prefix|>' + block.text + '<|inner_suffix|>') if block.type == 'thoughts' else block.text -}}
{%- endfor -%}
{%- else -%}
{{- raise_exception('Invalid assistant content') -}}
{%- endif -%}
{%- if message.tool_calls -%}
{{- '<|tools_prefix|>[' -}}
{%- for call in message.tool_calls -%}
{{- '{"' + call.function.name + '": ' + call.function.arguments + '}' + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']<|tools_suffix|>' -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- (', ' if ns.in_tool else '[') + message.content -}}
{%- set ns.in_tool = true -%}
{%- endif -%}
{%- endfor -%}
{{- ']' if ns.in_tool else '' -}}
{{- '<|assistant_start|>' if add_generation_prompt else '' -}}
"""
"""Apertus: an answer ends only before the next user message, and after its calls with their closing mark; thoughts are
shown only in content of blocks."""

SEED_OSS = r"""
{%- set bos_token = '<seed:bos>' -%}
{%- set eos_token = '<seed:eos>' -%}
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{%- if system_message is defined %}{{ bos_token + "system\n" + system_message }}
{%- elif tools %}{{ bos_token + "system\nYou may call functions." }}
{%- endif %}
{%- for item in tools or [] %}


Function:
def {{ item.function.name }}({{ item.function.parameters.properties | join(", ") }}):
    {{ item.function.description | trim }}
{%- endfor %}
{%- if system_message is defined or tools %}{{ eos_token }}{% endif %}
{%- if thinking_budget is defined and thinking_budget == 0 %}
{{- bos_token + "system\nYour thinking budget is 0." + eos_token }}
{%- endif %}
{%- for message in loop_messages %}
{%- if message.role == "assistant" %}
{{- bos_token + message.role }}
{%- if message.reasoning_content is string and message.reasoning_content | trim %}
{{- "\n<seed:think>" + message.reasoning_content | trim + "</seed:think>" }}
{%- endif %}
{%- if message.content is string and message.content | trim %}
{{- "\n" + message.content | trim + ("\n" if message.tool_calls else "") }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- "\n<seed:tool_call>\n<function=" + call.function.name + ">\n" }}
{%- for name, value in call.function.arguments | items %}
{{- "<parameter=" + name + ">" + (value if value is string else value | string) + "</parameter>\n" }}
{%- endfor %}
{{- "</function>\n</seed:tool_call>" }}
{%- endfor %}
{{- eos_token }}
{%- else %}
{{- bos_token + message.role + "\n" + message.content + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token + "assistant\n" }}
{%- if thinking_budget is defined and thinking_budget == 0 %}{{ "<seed:think><seed:cot_budget_reflect>" }}{% endif %}
{%- endif %}
"""
"""Seed-OSS: the thinking is switched off with a budget of 0."""
