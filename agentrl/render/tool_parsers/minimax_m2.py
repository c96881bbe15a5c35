"""Tool calls of MiniMax M2: ``<minimax:tool_call>`` with a tag per call and per argument."""

from __future__ import annotations

from typing import Any

from agentrl.render.tool_parsers.contract import ToolSchemas
from agentrl.render.tool_parsers.invoke_tags import InvokeMarks, InvokeTagParser, ValueReader
from agentrl.render.tool_parsers.typed_value import typed_value

MARKS = InvokeMarks(block="minimax:tool_call")


def _read_value(tools: ToolSchemas) -> ValueReader:
    def read(text: str, string: str | None, key: str, name: str, number: int) -> Any:
        return typed_value(text, key, name, tools, number)

    return read


parse = InvokeTagParser(MARKS, _read_value)
