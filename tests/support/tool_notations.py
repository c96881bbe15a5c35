"""How the families write tool calls: valid ones, and ways to get them wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call to be written."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A family's way to write calls."""

    write_calls: Callable[[Sequence[tuple[str, str]]], str]
    """From names and written arguments to what stands in the answer."""
    write_arguments: Callable[[Mapping[str, Any]], str]
    closing: str
    """The last mark of an answer with calls."""
    broken_arguments: str
    """Arguments that cannot be read; ``{}`` stands for words."""
    mistyped_arguments: str
    """Arguments of which one has another type than the tool asks for."""
    joint: str = ""
    """Between two answers that each hold a call."""
    before: str = "{}"
    """How text is written before calls."""
    plain_text: str = "{}"
    """How an answer without calls is written."""
    after_text: str = "{}"
    """How text is written after calls."""

    def write(self, calls: Sequence[Call], *, before: str = "", after: str = "") -> str:
        """An answer with calls, and text around them."""
        written = self.write_calls([(call.name, self.write_arguments(call.arguments)) for call in calls])
        opening = self.before.format(before) if before else ""
        return opening + written + (self.after_text.format(after) if after else "")

    def plain(self, text: str) -> str:
        """An answer without calls."""
        return self.plain_text.format(text)

    def cut(self, call: Call) -> str:
        """An answer that was cut amid the arguments of its call."""
        arguments = self.write_arguments(call.arguments)
        whole = self.write_calls([(call.name, arguments)])
        return whole[: whole.index(arguments) + (2 * len(arguments)) // 3]

    def broken(self, words: str) -> str:
        """A call whose arguments cannot be read."""
        return self.write_calls([("put", self.broken_arguments.replace("{}", words))])

    def mistyped(self, words: str) -> str:
        """A call with an argument of another type."""
        return self.write_calls([("put", self.mistyped_arguments.replace("{}", words))])


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_BROKEN_JSON = '{"what": "{}", "count": }'
_MISTYPED_JSON = '["{}"]'


def _each(form: str, between: str = "", around: str = "{}") -> Callable[[Sequence[tuple[str, str]]], str]:
    """Calls written one after the other: ``%NAME``, ``%ARGS``, ``%INDEX`` are filled in; ``{}`` in `around` is them."""

    def write(calls: Sequence[tuple[str, str]]) -> str:
        written = [
            form.replace("%NAME", name).replace("%INDEX", str(index)).replace("%ARGS", arguments)
            for index, (name, arguments) in enumerate(calls)
        ]
        return around.replace("{}", between.join(written))

    return write


def _tags(form: str, between: str = "\n") -> Callable[[Mapping[str, Any]], str]:
    """Arguments as one tag each; ``%KEY``, ``%VALUE`` and ``%KIND`` are filled in."""

    def write(arguments: Mapping[str, Any]) -> str:
        return between.join(
            form.replace("%KEY", key)
            .replace("%KIND", "true" if isinstance(value, str) else "false")
            .replace("%VALUE", _text(value))
            for key, value in arguments.items()
        )

    return write


def _keywords(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_DSML_PARAMETER = '<｜DSML｜parameter name="%KEY" string="%KIND">%VALUE</｜DSML｜parameter>'
_GLM_ARGUMENT = "<arg_key>%KEY</arg_key>\n<arg_value>%VALUE</arg_value>"
_CODER_PARAMETER = "<parameter=%KEY>\n%VALUE\n</parameter>"
_MINIMAX_PARAMETER = '<parameter name="%KEY">%VALUE</parameter>'
_THOUGHT = "<|channel|>analysis<|message|>I think.<|end|>"
_HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.%NAME <|constrain|>json<|message|>%ARGS<|call|>"


def _gemma(arguments: Mapping[str, Any]) -> str:
    return ",".join(f"{key}:{_gemma_value(value)}" for key, value in arguments.items())


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return f"{{{_gemma(value)}}}"
    return f"[{','.join(map(_gemma_value, value))}]" if isinstance(value, list) else json.dumps(value)


NOTATIONS: Mapping[str, Notation] = {
    "hermes": Notation(
        write_calls=_each('<tool_call>\n{"name": "%NAME", "arguments": %ARGS}\n</tool_call>', "\n"),
        write_arguments=_json,
        closing="\n</tool_call>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
        joint="\n",
        before="{}\n",
        after_text="\n{}",
    ),
    "llama3_json": Notation(
        write_calls=_each('{"name": "%NAME", "parameters": %ARGS}', "; "),
        write_arguments=_json,
        closing="}",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
        joint="; ",
        before="{}\n",
        after_text="\n{}",
    ),
    "qwen3_coder": Notation(
        write_calls=_each("<tool_call>\n<function=%NAME>\n%ARGS\n</function>\n</tool_call>", "\n"),
        write_arguments=_tags(_CODER_PARAMETER),
        closing="\n</tool_call>",
        broken_arguments="<parameter=what>\n{}\n</param>",
        mistyped_arguments="<parameter=count>\n{}\n</parameter>",
        joint="\n",
        before="{}\n",
        after_text="\n{}",
    ),
    "mistral": Notation(
        write_calls=_each("[TOOL_CALLS]%NAME[ARGS]%ARGS"),
        write_arguments=_json,
        closing="}",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
        after_text="\n{}",
    ),
    "mistral_v3": Notation(
        write_calls=_each('{"name": "%NAME", "arguments": %ARGS}', ", ", "[TOOL_CALLS] [{}]"),
        write_arguments=_json,
        closing="]",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
        after_text="\n{}",
    ),
    "glm": Notation(
        write_calls=_each("<tool_call>%NAME\n%ARGS\n</tool_call>", "\n"),
        write_arguments=_tags(_GLM_ARGUMENT),
        closing="\n</tool_call>",
        broken_arguments="<arg_key>what</arg_key>\n<arg_value>{}</arg>",
        mistyped_arguments="<arg_key>count</arg_key>\n<arg_value>{}</arg_value>",
        joint="\n",
        before="{}\n",
        after_text="\n{}",
    ),
    "deepseek_v3": Notation(
        write_calls=_each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%NAME\n```json\n%ARGS\n```<｜tool▁call▁end｜>", "\n", _DEEPSEEK
        ),
        write_arguments=_json,
        closing="<｜tool▁calls▁end｜>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
    ),
    "deepseek_v3.1": Notation(
        write_calls=_each("<｜tool▁call▁begin｜>%NAME<｜tool▁sep｜>%ARGS<｜tool▁call▁end｜>", "", _DEEPSEEK),
        write_arguments=_json,
        closing="<｜tool▁calls▁end｜>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
    ),
    "deepseek_v3.2": Notation(
        write_calls=_each(
            '<｜DSML｜invoke name="%NAME">\n%ARGS\n</｜DSML｜invoke>',
            "\n",
            "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
        ),
        write_arguments=_tags(_DSML_PARAMETER),
        closing="\n</｜DSML｜function_calls>",
        broken_arguments='<｜DSML｜parameter name="what" string="true">{}</｜DSML｜param>',
        mistyped_arguments='<｜DSML｜parameter name="count" string="false">{}</｜DSML｜parameter>',
        joint="\n\n",
        before="{}\n\n",
        after_text="\n\n{}",
    ),
    "deepseek_v4": Notation(
        write_calls=_each(
            '<｜DSML｜invoke name="%NAME">\n%ARGS\n</｜DSML｜invoke>',
            "\n",
            "<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>",
        ),
        write_arguments=_tags(_DSML_PARAMETER),
        closing="\n</｜DSML｜tool_calls>",
        broken_arguments='<｜DSML｜parameter name="what" string="true">{}</｜DSML｜param>',
        mistyped_arguments='<｜DSML｜parameter name="count" string="false">{}</｜DSML｜parameter>',
        joint="\n\n",
        before="{}\n\n",
        after_text="\n\n{}",
    ),
    "gemma4": Notation(
        write_calls=_each("<|tool_call>call:%NAME{%ARGS}<tool_call|>", "", "{}"),
        write_arguments=_gemma,
        closing="<tool_call|>",
        broken_arguments='what:<|"|>{}',
        mistyped_arguments="count:{}",
    ),
    "lfm2": Notation(
        write_calls=_each("%NAME(%ARGS)", ", ", "<|tool_call_start|>[{}]<|tool_call_end|>"),
        write_arguments=_keywords,
        closing="<|tool_call_end|>",
        broken_arguments="what='{}', count=",
        mistyped_arguments="{}",
    ),
    "seed_oss": Notation(
        write_calls=_each("<seed:tool_call>\n<function=%NAME>\n%ARGS\n</function>\n</seed:tool_call>", "\n"),
        write_arguments=_tags("<parameter=%KEY>%VALUE</parameter>"),
        closing="\n</seed:tool_call>",
        broken_arguments="<parameter=what>{}</param>",
        mistyped_arguments="<parameter=count>{}</parameter>",
        joint="\n",
        before="{}\n",
        after_text="\n{}",
    ),
    "apertus": Notation(
        write_calls=_each('{"%NAME": %ARGS}', ", ", "<|tools_prefix|>[{}]<|tools_suffix|>"),
        write_arguments=_json,
        closing="<|tools_suffix|>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
    ),
    "kimi_k2": Notation(
        write_calls=_each(
            "<|tool_call_begin|>functions.%NAME:%INDEX<|tool_call_argument_begin|>%ARGS<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        ),
        write_arguments=_json,
        closing="<|tool_calls_section_end|>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
    ),
    "gpt_oss": Notation(
        write_calls=lambda calls: _THOUGHT + _each(_HARMONY_CALL)(calls),
        write_arguments=_json,
        closing="<|call|>",
        broken_arguments=_BROKEN_JSON,
        mistyped_arguments=_MISTYPED_JSON,
        before="<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        plain_text=_THOUGHT + "<|start|>assistant<|channel|>final<|message|>{}<|return|>",
        after_text="<|start|>assistant<|channel|>final<|message|>{}<|return|>",
        joint="<|start|>assistant",
    ),
    "minimax_m2": Notation(
        write_calls=_each(
            '<invoke name="%NAME">\n%ARGS\n</invoke>', "\n", "<minimax:tool_call>\n{}\n</minimax:tool_call>"
        ),
        write_arguments=_tags(_MINIMAX_PARAMETER),
        closing="\n</minimax:tool_call>",
        broken_arguments='<parameter name="what">{}</param>',
        mistyped_arguments='<parameter name="count">{}</parameter>',
        joint="\n",
        before="{}\n",
        after_text="\n{}",
    ),
    "llama4": Notation(
        write_calls=_each("%NAME(%ARGS)", ", ", "[{}]"),
        write_arguments=_keywords,
        closing="]",
        broken_arguments="what='{}', count=",
        mistyped_arguments="{}",
        joint="; ",
        before="{}\n",
        after_text="\n{}",
    ),
}
"""Notations by family."""
