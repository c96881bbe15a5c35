"""A program: an MCP server written by hand, which answers what the protocol's own packages never would."""

import json
import sys

RESULTS = {
    "no_content": {"structuredContent": {"rows": 3}},
    "empty": {},
    "null_content": {"content": None},
    "unknown_part": {"content": [{"type": "widget", "html": "<b>3 rows</b>"}]},
    "text_as_content": {"content": "3 rows"},
    "no_result": "3 rows",
    "fine": {"content": [{"type": "text", "text": "3 rows"}]},
    "cut_pair": {"content": [{"type": "text", "text": "fern \ud83c"}]},
    "latin_1": {"content": [{"type": "text", "text": "caf\udce9"}]},
    "null_flag": {"content": [{"type": "text", "text": "3 rows"}], "isError": None},
}
ERRORS = {
    "no_code": {"message": "the shelf is locked", "data": {"by": "Ann"}},
    "text_code": {"code": "-32602", "message": "no such plant"},
    "own_code": {"code": "E_LOCKED", "message": "the shelf is locked"},
    "only_text": "the shelf is full",
    "no_message": {"code": -32602, "detail": "no such plant"},
    "null_message": {"code": -32602, "message": None},
}
"""Errors of calls, in forms that JSON-RPC does not allow."""
FINE = {"result": {"content": [{"type": "text", "text": "3 rows"}]}}
LOCKED = {"error": {"code": -32603, "message": "the shelf is locked"}}
ANSWERS = {
    "no_version": {"jsonrpc": None, **FINE},
    "null_id": {"id": None, **LOCKED},
    "no_id": {"id": ..., **LOCKED},
    "nothing": {},
    "null_result": {"result": None},
    "null_error": {**FINE, "error": None},
    "both": {"result": None, **LOCKED},
}
"""Answers whose other fields break the protocol; ``...`` stands for a field that is left out."""
PLACE = {"place": {"type": "string"}}
SCHEMAS = {
    "nothing": {},
    "dialect": {"$schema": "http://json-schema.org/draft-07/schema#"},
    "untyped": {"properties": PLACE, "required": ["place"]},
    "empty_list": {"type": "object", "properties": [], "required": []},
    "nulls": {"type": "object", "properties": None, "required": None},
    "required_inside": {"type": "object", "properties": {**PLACE, "required": ["place"]}},
    "alternatives": {"anyOf": [{"type": "object", "properties": PLACE}, {"type": "object"}]},
    "text": {"type": "string"},
}
"""Schemas of tools that the protocol does not allow."""
TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in (*RESULTS, *ERRORS, *ANSWERS)]
ODD_TOOLS = [
    *({"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()),
    {"name": "missing", "description": None},
    {"name": "list_output", "inputSchema": {"type": "object"}, "outputSchema": {"type": "array"}},
    {"inputSchema": {"type": "object"}},
    None,
]


def answer(method: str, parameters: dict) -> dict:
    if method == "initialize":
        version = parameters["protocolVersion"]
        return {
            "result": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        }
    if method == "tools/list":
        return {"result": {"tools": ODD_TOOLS if "--odd" in sys.argv else TOOLS}}
    if method == "tools/call":
        if parameters["name"] in ERRORS:
            return {"error": ERRORS[parameters["name"]]}
        if parameters["name"] in ANSWERS:
            return ANSWERS[parameters["name"]]
        said = {"content": [{"type": "text", "text": json.dumps(parameters["arguments"])}]}
        return {"result": RESULTS.get(parameters["name"], said)}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


def pretty(told: object) -> str:
    return json.dumps(told, indent=2) + "\n"


def line(told: object) -> str:
    return json.dumps(told).replace("\\udce9", "\udce9") + "\n"


def nested(depth: int) -> str:
    return f'", "x": {"[" * depth}{"]" * depth}, "y": "'


NOTICE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "busy"}}
WRITERS = {
    "line": line,
    "pretty": pretty,
    "batch": lambda told: line([NOTICE, told]),
    "pretty batch": lambda told: pretty([NOTICE, told]),
    "batch of lines": lambda told: f"[\n{line(NOTICE).strip()},\n{line(told)}]\n",
    "two on a line": lambda told: line(NOTICE).strip() + line(told),
    "byte order mark": lambda told: "\ufeff" + line(told),
    "byte order mark, pretty": lambda told: "\ufeff" + pretty(told),
    "carriage returns": lambda told: pretty(told).replace("\n", "\r\n"),
    "raw line breaks": lambda told: json.dumps(told).replace("3 rows", "3\nrows") + "\n",
    "log": lambda told: f"[INFO] listening (1\n{{'a': [1\n\n{{\n  name: 'x'\n}}\n7\n{line({'id': 1})}{line(told)}",
    "log of answers": lambda told: f"sending {line(told)}{told!r}\n{line(told)}",
    "log before an answer": lambda told: f"[INFO] ready{line(told)}",
    "Python": lambda told: f"{told!r}\n",
    "cut": lambda told: line(told)[:-5] + "\n",
    "cut before others": lambda told: line(told)[:-5] + "\n" + line(NOTICE),
    "UTF-16": lambda told: line(told).encode("utf-16-le").decode("latin-1"),
    "frames": lambda told: f"Content-Length: {len(line(told)) - 1}\r\n\r\n{line(told).strip()}",
    "deep": lambda told: line(told).replace("3 rows", nested(10_000)),
    "quite deep": lambda told: line(told).replace("3 rows", nested(480)),
}
"""Ways to write an answer: ``--write NAME`` chooses one."""


if __name__ == "__main__":
    write = WRITERS[sys.argv[sys.argv.index("--write") + 1] if "--write" in sys.argv else "line"]
    for asked in sys.stdin:
        request = json.loads(asked)
        if "id" in request:
            told = {"jsonrpc": "2.0", "id": request["id"], **answer(request["method"], request.get("params") or {})}
            told = {key: value for key, value in told.items() if value is not ...}
            if "--text-ids" in sys.argv and told.get("id"):
                told["id"] = str(told["id"])
            only_calls = "--calls" in sys.argv and request["method"] != "tools/call"
            written = (line if only_calls else write)(told)
            sys.stdout.buffer.write(written.encode(errors="surrogateescape"))
            sys.stdout.flush()
