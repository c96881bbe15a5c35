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
}
TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in RESULTS]


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
        return {"result": {"tools": TOOLS}}
    if method == "tools/call":
        return {"result": RESULTS[parameters["name"]]}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            told = {"jsonrpc": "2.0", "id": request["id"], **answer(request["method"], request.get("params") or {})}
            print(json.dumps(told), flush=True)
