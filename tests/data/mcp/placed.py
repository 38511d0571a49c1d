"""An MCP server without any library that can run from any folder: `python placed.py FOLDER [PORT]`.

With a port it is reached over streamable HTTP on the loopback address, and prints the port that it got; without one
over its standard streams. `offers.json` in its folder says what it offers, and is read anew for every request. It
notes each start in `starts` and each call in `calls`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])


def note(file: str, line: object) -> None:
    with (FOLDER / file).open("a") as notes:
        notes.write(f"{line}\n")


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    note("calls", name)
    match name:
        case "fail":
            return {"content": [{"type": "text", "text": "no voice today"}], "isError": True}
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(60)
        case "memory_read":
            file = {"path": arguments["path"], "content": (FOLDER / arguments["path"]).read_text()}
            return {"content": [{"type": "text", "text": json.dumps(file)}], "structuredContent": file}
        case "announce":
            (FOLDER / "offers.json").write_text(json.dumps(arguments["offers"]))
            say({"method": "notifications/tools/list_changed"})
    greeting = {"greeting": f"Hello {arguments.get('who', 'you')}"}
    return {"content": [{"type": "text", "text": json.dumps(greeting)}], "structuredContent": greeting}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    offers, params = json.loads((FOLDER / "offers.json").read_text()), message.get("params") or {}
    match message["method"]:
        case "initialize":
            info = {"name": "placed", "version": offers.get("version", "1.0.0")}
            can = {"tools": {"listChanged": True}}
            result = {"protocolVersion": params["protocolVersion"], "capabilities": can, "serverInfo": info}
        case "tools/list":
            result = {"tools": offers["tools"]}
        case "tools/call":
            result = call(params["name"], params.get("arguments") or {})
        case _:
            return {"id": message["id"], "error": {"code": -32601, "message": "Method not found"}}
    return {"id": message["id"], "result": result}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


class Door(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"jsonrpc": "2.0", **answer(message)}).encode() if "id" in message else b""
        self.send_response(200 if body else 202)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own signature
        """Say nothing."""


def main() -> None:
    note("starts", os.getpid())
    if len(sys.argv) > 2:
        with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Door) as server:
            sys.stdout.write(f"{server.server_port}\n")
            sys.stdout.flush()
            server.serve_forever()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            say(answer(message))


if __name__ == "__main__":
    main()
