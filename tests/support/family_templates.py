"""Chat templates with the rules of the families that have notations of their own, for tests without a download."""

from __future__ import annotations

MISTRAL = r"""
{{- bos_token }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' if messages[0].role == 'system' else '' }}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' if tools else '' }}
{%- for message in turns %}
{%- if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
"""
"""Version 13 of Mistral's format: system prompt and tools first, calls as name and arguments, no header of answers."""

MISTRAL_V3 = r"""
{{- bos_token }}
{%- set opening = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set memory = namespace(last_user=-1) %}
{%- for message in turns %}
{%- if message.role == 'user' %}{%- set memory.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- set last = loop.index0 == memory.last_user %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' if last and tools else '' }}
{{- '[INST] ' + (opening if last else '') + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids of calls have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids of calls have nine characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""
"""Version 3: system prompt and tools move to the last user message, calls are a JSON array with ids."""

GLM45 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\n# Tools\n\nYou may call functions. Their signatures are between <tools></tools>:\n<tools>\n' }}
{%- for tool in tools %}{{- (tool | tojson(ensure_ascii=False)) + '\n' }}{%- endfor %}
{{- '</tools>\n\nWrite a call like this:\n<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n' }}
{{- '<arg_value>{value}</arg_value>\n</tool_call>' }}
{%- endif %}
{%- set memory = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set memory.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|user|>\n' + message.content }}
{%- if enable_thinking is defined and not enable_thinking and not message.content.endswith('/nothink') %}
{{- '/nothink' }}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>\n<think>' + (message.reasoning_content | trim if message.reasoning_content and
    loop.index0 > memory.last_user else '') + '</think>' }}
{{- '\n' + message.content | trim if message.content | trim else '' }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' else '' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}
{{- '<|system|>\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}
"""
"""Roles as special tokens and no end of turn; thinking before the last user message is dropped."""

_DEEPSEEK_OPENING = r"""
{%- set opening = namespace(text='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set opening.text = opening.text + ('\n\n' if opening.text else '') + message.content %}
{%- endif %}
{%- endfor %}
{{- bos_token + opening.text }}
"""

DEEPSEEK_V3 = (
    _DEEPSEEK_OPENING
    + r"""
{%- set state = namespace(tool=false) %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set state.tool = false %}
{{- '<｜User｜>' + message.content + ('<｜Assistant｜>' if not loop.last else '') }}
{%- elif message.role == 'assistant' %}
{%- set state.tool = false %}
{{- message.content.split('</think>')[-1] if '</think>' in message.content else message.content }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- (call.function.arguments | tojson) + '\n```<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{%- set state.tool = true %}
{{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '\n' }}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- endif %}
{%- endfor %}
{{- '<｜Assistant｜>' if add_generation_prompt and not state.tool else '' }}
"""
)
"""Roles as special tokens, calls with fenced JSON; after results the answer begins without a header."""

DEEPSEEK_V31 = (
    _DEEPSEEK_OPENING
    + r"""
{{- '\n\n## Tools\nYou have these tools:\n' if tools else '' }}
{%- for tool in tools or [] %}{{- '\n' + (tool.function | tojson) + '\n' }}{%- endfor %}
{{- '\nCall them with <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments' if tools else '' }}
{{- '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' if tools else '' }}
{%- set state = namespace(user=false) %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set state.user = true %}
{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜></think>' if state.user else '' }}
{%- set state.user = false %}
{{- message.content.split('</think>', 1)[-1] if '</think>' in message.content else message.content }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson) }}
{{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and state.user %}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""
)
"""Calls with bare JSON; a mark after the header says whether the answer thinks, and thinking is always dropped."""

DEEPSEEK_V32 = r"""
{%- set dsml = '｜DSML｜' %}
{%- set memory = namespace(last_user=-1, calls=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set memory.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- set own = messages[0].content if messages[0].role == 'system' else '' %}
{{- own + ('\n\n' if own and tools else '') }}
{%- if tools %}
{{- '## Tools\nCall tools with a "<' + dsml + 'function_calls>" block of "<' + dsml + 'invoke>" tags:\n<functions>\n' }}
{%- for tool in tools %}{{- (tool.function | tojson(ensure_ascii=False)) + '\n' }}{%- endfor %}
{{- '</functions>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{{- '<think>' if loop.index0 == memory.last_user and thinking else '</think>' }}
{%- elif message.role == 'assistant' %}
{%- set memory.calls = message.tool_calls | length %}
{{- (message.reasoning_content or '') + '</think>' if thinking and loop.index0 > memory.last_user else '' }}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\n\n<' + dsml + 'function_calls>\n' if loop.first else '\n' }}
{{- '<' + dsml + 'invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<' + dsml + 'parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- (value if value is string else value | tojson(ensure_ascii=False)) + '</' + dsml + 'parameter>' }}
{{- '' if loop.last else '\n' }}
{%- endfor %}
{{- '\n</' + dsml + 'invoke>' + ('\n</' + dsml + 'function_calls>' if loop.last else '') }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{%- if not memory.calls %}{{- raise_exception('a result without a call') }}{%- endif %}
{%- set first = loop.previtem.role != 'tool' %}
{%- set last = loop.last or loop.nextitem.role != 'tool' %}
{{- ('\n\n<function_results>' if first else '') + '\n<result>' + message.content + '</result>' }}
{{- '\n</function_results>\n\n' + ('<think>' if thinking and loop.index0 >= memory.last_user else '</think>')
    if last else '' }}
{%- endif %}
{%- endfor %}
"""
"""Tags marked as DSML, each argument with its kind; thinking is kept between tool results only."""

_KIMI_HEAD = r"""
{%- macro head(message) %}
{{- '<|im_' + ('system' if message.role == 'tool' else message.role) + '|>' + (message.name or message.role) }}
{{- '<|im_middle|>' }}
{%- endmacro %}
{%- macro calls(message) %}
{%- for call in message.tool_calls %}
{{- '<|tool_calls_section_begin|>' if loop.first else '' }}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) }}
{{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
{%- endfor %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson(separators=(',', ':'))) + '<|im_end|>' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}
{%- endif %}
"""

KIMI_K2 = (
    _KIMI_HEAD
    + r"""
{%- for message in messages %}
{{- head(message) }}
{{- '## Return of ' + message.tool_call_id + '\n' if message.role == 'tool' else '' }}
{{- message.content + calls(message) + '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' }}
"""
)
"""Roles as special tokens, a default system prompt, ids that hold the tool's name."""

KIMI_K2_THINKING = (
    _KIMI_HEAD
    + r"""
{%- set memory = namespace(last_plain=-1) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}{%- set memory.last_plain = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- head(message) }}
{{- '## Return of ' + message.tool_call_id + '\n' if message.role == 'tool' else '' }}
{%- if message.role == 'assistant' %}
{%- set old = loop.index0 <= memory.last_plain %}
{{- '<think>' + ('' if old else message.reasoning_content or '') + '</think>' }}
{%- endif %}
{{- message.content + calls(message) + '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' }}
"""
)
"""The same with thinking, which is kept until the model answers without a call."""

GPT_OSS = r"""
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if opening else messages %}
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{{- '\nCalls to these tools must go to the commentary channel: \'functions\'.' if tools else '' }}
{{- '<|end|>' }}
{%- if opening or tools %}
{{- '<|start|>developer<|message|>' + ('# Instructions\n\n' + opening + '\n\n' if opening else '') }}
{%- for tool in tools or [] %}
{{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' if loop.first else '' }}
{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: ' }}
{{- (tool.function.parameters | tojson) + ') => any;\n\n' + ('} // namespace functions' if loop.last else '') }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set state = namespace(call=none, last_final=-1) %}
{%- for message in turns %}
{%- if message.role == 'assistant' and not message.tool_calls %}
{%- set state.last_final = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in turns %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set thought = message.thinking or message.content %}
{%- if thought and loop.index0 > state.last_final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
{%- endif %}
{%- set state.call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + state.call.name + '<|channel|>commentary json<|message|>' }}
{{- (state.call.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- set state.call = none %}
{%- elif message.role == 'tool' %}
{%- if state.call is none %}{{- raise_exception('a result without a call') }}{%- endif %}
{{- '<|start|>functions.' + state.call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt else '' }}
"""
"""Harmony: channels, one call per message, results as JSON; thinking is dropped once a final answer follows it."""

MINIMAX_M2 = r"""
{%- set opening = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- ']~!b[]~b]system\n' + opening }}
{%- if tools %}
{{- '\n\n# Tools\nYou may call tools. Their schemas:\n<tools>\n' }}
{%- for tool in tools %}{{- '<tool>' + (tool.function | tojson(ensure_ascii=False)) + '</tool>\n' }}{%- endfor %}
{{- '</tools>\n\nWrite calls like this:\n<minimax:tool_call>\n<invoke name="tool">\n' }}
{{- '<parameter name="argument">value</parameter>\n</invoke>\n</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\n' }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set memory = namespace(last_user=-1) %}
{%- for message in turns %}
{%- if message.role == 'user' %}{%- set memory.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in turns %}
{%- if message.role == 'assistant' %}
{{- ']~b]ai\n' }}
{%- if message.reasoning_content and loop.index0 > memory.last_user %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\n<minimax:tool_call>\n' if loop.first else '' }}
{{- '<invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson(ensure_ascii=False)) }}
{{- '</parameter>\n' }}
{%- endfor %}
{{- '</invoke>\n' + ('</minimax:tool_call>' if loop.last else '') }}
{%- endfor %}
{{- '[e~[\n' }}
{%- elif message.role == 'tool' %}
{{- ']~b]tool' if loop.previtem.role != 'tool' else '' }}
{{- '\n<response>' + message.content + '</response>' }}
{{- '[e~[\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- else %}
{{- ']~b]' + message.role + '\n' + message.content + '[e~[\n' }}
{%- endif %}
{%- endfor %}
{{- ']~b]ai\n<think>\n' if add_generation_prompt else '' }}
"""
"""Roles after a special token, thinking opened by the prompt and kept after the last user message only."""

LLAMA4 = r"""
{%- macro header(role) %}{{- '<|header_start|>' + role + '<|header_end|>\n\n' }}{%- endmacro %}
{{- bos_token }}
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if opening or tools %}
{{- header('system') + opening }}
{%- if tools %}
{{- '\nCall functions with [function(argument=value, ...)] and nothing else. The functions:\n' + (tools | tojson) }}
{%- endif %}
{{- '<|eot|>' }}
{%- endif %}
{%- for message in turns %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- header('assistant') + '[' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + '=' + (value | tojson) + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ')' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- header('ipython') + (message.content | tojson) + '<|eot|>' }}
{%- else %}
{{- header(message.role) + message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{{- header('assistant') if add_generation_prompt else '' }}
"""
"""Headers between special tokens, calls as a Python list, trimmed contents."""
