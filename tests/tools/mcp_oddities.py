"""A program: an MCP server with tools that answer in every way that servers do. Each entry of `TOOLS` is one."""

from __future__ import annotations

import asyncio
import os
import sys

import mcp.types as types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server


def text(value):
    return types.TextContent(type="text", text=value)


def answer(*content, **more):
    return types.CallToolResult(content=list(content), **more)


ANYTHING = {"type": "object", "properties": {}}
COUNTED = {"type": "object", "properties": {"rows": {"type": "integer"}}, "required": ["rows"]}
PIECES = (
    types.ImageContent(type="image", data="aGk=", mimeType="image/png"),
    types.AudioContent(type="audio", data="aGk=", mimeType="audio/wav"),
    types.EmbeddedResource(
        type="resource", resource=types.TextResourceContents(uri="file:///a.txt", text="first line")
    ),
    types.EmbeddedResource(
        type="resource",
        resource=types.BlobResourceContents(uri="file:///b.csv", mimeType="text/csv", blob="YSxi"),
    ),
    types.EmbeddedResource(
        type="resource",
        resource=types.BlobResourceContents(uri="file:///c.pdf", mimeType="application/pdf", blob="aGk="),
    ),
    types.ResourceLink(type="resource_link", name="report", uri="file:///d.md", description="Of May."),
)

RESULTS = {
    "structured": answer(structuredContent={"rows": 3, "name": "fern"}),
    "repeated": answer(text('{\n  "rows": 3\n}'), structuredContent={"rows": 3}),
    "summary": answer(text("3 plants found"), structuredContent={"plants": ["fern", "moss", "ivy"]}),
    "wrapped": answer(text("fern"), text("moss"), structuredContent={"result": ["fern", "moss"]}),
    "empty": answer(),
    "dangling": answer(text("3 rows"), structuredContent={"rows": 3}),
    "broken": answer(text("many rows"), structuredContent={"rows": "many"}),
    "unstructured": answer(text("no rows here")),
    "pieces": answer(*PIECES),
    "refusal": answer(text("the shelf is full"), text("try again later"), isError=True),
    "structured_refusal": answer(structuredContent={"error": "the shelf is full"}, isError=True),
    "silent_refusal": answer(isError=True),
}
ERRORS = {
    "internal": MCPError(-32603, "File /shelf/moss not found", "it was eaten"),
    "own_code": MCPError(-32042, "sign in first"),
    "implementation": MCPError(-32000, "Database is locked"),
    "invalid": MCPError(-32602, "Invalid arguments: thing"),
}
LONG = "a_tool_with_a_name_that_is_much_longer_than_any_model_format_takes_today"
NAMES = ("shelf.put/one", "shelf/put.one", LONG)
DANGLING = {"type": "object", "properties": {"rows": {"$ref": "#/$defs/Rows"}}}
OUTPUTS = {"broken": COUNTED, "unstructured": COUNTED, "dangling": DANGLING}
TOOLS = [
    types.Tool(name=name, inputSchema=ANYTHING, outputSchema=OUTPUTS.get(name))
    for name in (*RESULTS, *ERRORS, *NAMES, "slow", "die")
] + [
    types.Tool(
        name="put",
        inputSchema={"type": "object", "properties": {"key": {"type": "string"}, "value": True}, "required": ["value"]},
    )
]


async def list_tools(context, parameters):
    """Answer with three tools a page, and an empty cursor at the end as some servers do."""
    start = int(parameters.cursor or 0) if parameters else 0
    end = start + 3
    return types.ListToolsResult(tools=TOOLS[start:end], nextCursor=str(end) if end < len(TOOLS) else "")


async def call_tool(context, parameters):
    name = parameters.name
    if name in ERRORS:
        raise ERRORS[name]
    if name == "die":
        print("the shelf fell down", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "slow":
        await asyncio.Event().wait()
    if name == "put":
        return answer(text(f"stored {parameters.arguments['value']!r}"))
    return answer(text(f"this is {name}")) if name in NAMES else RESULTS[name]


async def main():
    if "--mute" in sys.argv:
        await asyncio.Event().wait()
    on_list = list_tools
    if "--endless" in sys.argv:

        async def on_list(context, parameters):
            return types.ListToolsResult(tools=TOOLS[:1], nextCursor="again")

    if "--none" in sys.argv:

        async def on_list(context, parameters):
            return types.ListToolsResult(tools=[])

    if "--unlisted" in sys.argv:

        async def on_list(context, parameters):
            await asyncio.Event().wait()

    server = Server("oddities", on_list_tools=on_list, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
