"""Tool calls of DeepSeek V3.2: tags marked ``｜DSML｜``, each argument with a ``string`` attribute."""

from __future__ import annotations

from typing import Any

from agentrl.render.tool_parsers.contract import ToolSchemas
from agentrl.render.tool_parsers.invoke_tags import InvokeMarks, InvokeTagParser, ValueReader
from agentrl.render.tool_parsers.typed_value import typed_value, whole_json

MARKS = InvokeMarks(block="function_calls", prefix="｜DSML｜", string=' string="true|false"')


def _read_value(tools: ToolSchemas) -> ValueReader:
    def read(text: str, string: str | None, key: str, name: str, number: int) -> Any:
        if string is None:
            return typed_value(text, key, name, tools, number)
        return text if string == "true" else whole_json(text.strip(), f"{key!r} of {name} (tool call {number})")

    return read


parse = InvokeTagParser(MARKS, _read_value)
