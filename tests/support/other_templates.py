"""Chat templates of LFM2, with the constructs of the published ones, retyped; see `support.chat_templates`."""

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
