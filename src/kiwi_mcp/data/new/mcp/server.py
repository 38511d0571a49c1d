"""An MCP server without packages: one JSON message per line, on standard input and output."""

import json
import sys

TOOL = {
    "name": "echo",
    "description": "Return a text as it is",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        server = {"name": "NAME", "version": "1.0.0"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": params["arguments"]["text"]}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:  # one without an id is a notification, and gets no answer
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
