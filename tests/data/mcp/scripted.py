"""An MCP server without any library that offers the content of a file: `python scripted.py OFFERS.json`.

The file is read anew for every request, so that what it offers can change while it runs. It notes each start.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

OFFERS = Path(sys.argv[1])


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(message: dict[str, Any], offers: dict[str, Any]) -> dict[str, Any] | None:
    params = message.get("params") or {}
    match message.get("method"):
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}, "prompts": {}, "resources": {}, "completions": {}},
                "serverInfo": {"name": "scripted", "version": offers.get("version", "1.2.0")},
                "instructions": "Be kind",
            }
        case "tools/list":
            return {"tools": offers.get("tools", [])}
        case "prompts/list":
            return {"prompts": offers.get("prompts", [])}
        case "resources/list":
            return {"resources": offers.get("resources", [])}
        case "resources/templates/list":
            return {"resourceTemplates": offers.get("templates", [])}
        case "prompts/get":
            words = f"Greet {params['arguments']['who']}"
            return {"messages": [{"role": "user", "content": {"type": "text", "text": words}}]}
        case "completion/complete":
            return {"completion": {"values": [params["argument"]["value"] + "nn"]}}
        case "resources/read":
            return {"contents": [{"uri": params["uri"], "text": f"about {params['uri']}"}]}
        case "tools/call":
            if params["name"] == "announce":
                OFFERS.write_text(json.dumps({**offers, **params["arguments"]["offers"]}))
                say({"method": "notifications/tools/list_changed"})
            said = {"by": offers.get("by", ""), "tool": params["name"], "key": os.environ.get("KEY", "")}
            given = params.get("arguments") or {}
            return {"content": [], "structuredContent": {**said, "given": {**given, "offers": None}}}
        case _:
            return None


def main() -> None:
    with OFFERS.with_suffix(".starts").open("a") as notes:
        notes.write(f"{os.getpid()}\n")
    offers = json.loads(OFFERS.read_text())
    if offers.get("dies"):
        sys.exit(f"no licence for {os.environ.get('KEY', 'anybody')}")
    for line in sys.stdin:
        message = json.loads(line)
        result = answer(message, json.loads(OFFERS.read_text()))
        if "id" in message:
            refusal = {"code": -32601, "message": "Method not found"}
            say({"id": message["id"], **({"result": result} if result is not None else {"error": refusal})})


if __name__ == "__main__":
    main()
