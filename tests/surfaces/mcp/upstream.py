"""An MCP server without any library, with answers that contain more than text; tests put it behind Kiwi."""

from __future__ import annotations

import json
import sys
from typing import Any

PIXEL = "iVBORw0KGgo="
ALL: list[dict[str, Any]] = [
    {"type": "text", "text": "a picture", "annotations": {"audience": ["user"]}, "_meta": {"mine": 1}},
    {"type": "image", "data": PIXEL, "mimeType": "image/png"},
    {"type": "audio", "data": "UklGRg==", "mimeType": "audio/wav"},
    {"type": "resource_link", "uri": "test://pixel", "name": "pixel"},
    {"type": "resource", "resource": {"uri": "test://pixel", "mimeType": "image/png", "blob": PIXEL}},
]
EMPTY = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "draw", "description": "Draws", "inputSchema": EMPTY, "annotations": {"readOnlyHint": True}},
    {"name": "measure", "inputSchema": EMPTY, "outputSchema": {"type": "object", "required": ["width"]}},
    {"name": "fail", "description": "Fails", "inputSchema": EMPTY},
    {"name": "refuse", "description": "Refuses", "inputSchema": EMPTY},
]
PROMPTS = [{"name": "look", "description": "Looks", "arguments": [{"name": "at", "required": True}]}]
CAPABILITIES: dict[str, Any] = {"tools": {}, "prompts": {}, "resources": {}, "completions": {}}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:  # noqa: PLR0912 - a case a request
    match method:
        case "initialize":
            info = {"name": "upstream", "version": "1.0.0"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": CAPABILITIES, "serverInfo": info}
        case "tools/list":
            return {"tools": TOOLS}
        case "prompts/list":
            return {"prompts": PROMPTS}
        case "resources/list":
            return {"resources": [{"uri": "test://pixel", "name": "pixel", "mimeType": "image/png"}]}
        case "resources/templates/list":
            return {"resourceTemplates": [{"uriTemplate": "test://row/{number}/end", "name": "row"}]}
        case "tools/call" if params["name"] == "draw":
            return {"content": ALL, "_meta": {"yours": 2}}
        case "tools/call" if params["name"] == "measure":
            return {"content": [{"type": "text", "text": '{"width": 1}'}], "structuredContent": {"width": 1}}
        case "tools/call" if params["name"] == "fail":
            return {"content": [{"type": "text", "text": "No paint"}, ALL[1]], "isError": True}
        case "prompts/get":
            text = {"type": "text", "text": f"Look at {params['arguments']['at']}"}
            return {"description": "Looks", "messages": [{"role": "assistant", "content": text}, _said(ALL[1])]}
        case "resources/read" if params["uri"] == "test://pixel":
            return {"contents": [{"uri": params["uri"], "mimeType": "image/png", "blob": PIXEL}]}
        case "resources/read" if params["uri"].startswith("test://row/7"):
            return {"contents": [{"uri": params["uri"], "text": params["uri"]}]}
        case "completion/complete":
            return {"completion": {"values": [f"{params['argument']['value']}!", params["ref"]["type"]]}}
        case _:
            return None


def _said(content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(message["method"], message.get("params") or {})
        refusal = {"error": {"code": -32002 if message["method"] == "resources/read" else -32601, "message": "No"}}
        reply = {"jsonrpc": "2.0", "id": message["id"], **({"result": result} if result else refusal)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
