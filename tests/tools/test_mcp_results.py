"""Results of MCP servers as text: nothing of the structured content is lost, and what is repeated is said once."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mcp")

from agentrl.tools.mcp_results import result_text, result_value
from mcp import types


def written(*texts, structured):
    content = [types.TextContent(type="text", text=text) for text in texts]
    return result_text(types.CallToolResult(content=content, structuredContent=structured))


@pytest.mark.parametrize(
    ("text", "structured"),
    [
        ("2026-05-14: 3 items, total 250", {"total": 25, "page": 2}),
        ("Found 12 results", {"count": 1, "ok": "Found"}),
        ("true 3 ok", {"success": True, "n": 3, "status": "ok"}),
        ("3 items", {"items": ["3", "items"]}),
        ("a 2, b 1", {"a": 1, "b": 2}),
        ("0 rows", {"rows": False}),
        ("-3 degrees", {"degrees": 3}),
        ('{"rows": 31}', {"rows": 3}),
        ('{"rows": 1}', {"rows": True}),
        ('{"rows": [3, 4]}', {"rows": [3]}),
        ('{"rows": [4, 3]}', {"rows": [3, 4]}),
        ('{"row": {"name": "fern"}}', {"name": "fern"}),
        ('Found {"rows": 3}', {"rows": 3, "name": "fern"}),
        ("fern moss", {"result": ["fern", "moss", "ivy"]}),
        ("fernery", {"result": "fern"}),
        ("[" * 5_000, {"rows": 3}),
        ("list_projects returned 2 item(s).", {"items": [{"id": 2}, {"id": 1}]}),
        ("", {"result": None}),
    ],
)
def test_structured_content_that_a_text_does_not_repeat_is_added(text, structured):
    assert written(text, structured=structured) == "\n".join(filter(None, [text, json.dumps(structured)]))


@pytest.mark.parametrize(
    ("texts", "structured"),
    [
        (['{"rows": 3,\n "name": "Farn \\u00e4"}'], {"name": "Farn ä", "rows": 3}),
        (['{"rows": 3, "more": [1]}'], {"rows": 3.0}),
        (['Here it is:\n```json\n{"rows": [{"a": null}]}\n```'], {"rows": [{"a": None}]}),
        (["{x} [y] then", '{"rows": 3} as asked'], {"rows": 3}),
        (["3 rows"], {"rows": 3}),
        (["rows: 3\nname: red fern\nfresh: true"], {"rows": 3, "name": "red fern", "fresh": True}),
        (["fern", "moss"], {"result": ["fern", "moss"]}),
        (["1", '{"a": 2}'], {"result": [1, {"a": 2}]}),
        (['["fern", "moss"]'], {"result": ["fern", "moss"]}),
        (["12"], {"result": 12}),
        (["12"], {"result": "12"}),
        (["A longer text: of 3 lines."], {"result": "A longer text: of 3 lines."}),
    ],
)
def test_structured_content_that_a_text_repeats_is_said_once(texts, structured):
    assert written(*texts, structured=structured) == "\n".join(texts)


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="


@pytest.mark.parametrize(
    ("structured", "added"),
    [
        ({"result": [{"type": "text", "text": "a"}, {"type": "image", "data": PIXEL}]}, []),
        ({"page": 2, "image": f"data:image/png;base64,{PIXEL}"}, ['{"page": 2}']),
        ({"image": {"type": "image", "data": PIXEL}, "none": None}, ['{"none": null}']),
        ({"type": 1, "data": {"n": [2]}}, ['{"type": 1, "data": {"n": [2]}}']),
    ],
)
def test_structured_content_does_not_repeat_images(structured, added):  # claude-code#70280
    image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
    content = [{"type": "text", "text": "a"}, image]
    parts = result_value(types.CallToolResult.model_validate({"content": content, "structuredContent": structured}))
    assert [parts[0], *parts[2:]] == ["a", *added]
    assert parts[1].media_type == "image/png"


def test_images_that_models_cannot_read_become_a_notice():  # gg-framework#31
    content = [{"type": "image", "data": "PHN2Zy8+", "mimeType": "image/svg+xml"}]
    assert result_value(types.CallToolResult.model_validate({"content": content})) == "[image: image/svg+xml]"
