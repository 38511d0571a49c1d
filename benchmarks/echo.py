"""An MCP server that costs as little as one in Python can: it echoes a text, over its pipes or over HTTP.

Usage: echo.py [--http | --tools N | --listing FILE]; over HTTP it prints the port that it took. N tools are N of the
same kind; those of a file are told as it tells them, and echo their first argument.
"""

from __future__ import annotations

import json
import sys
from asyncio import BaseTransport, Protocol, Transport, get_running_loop, run
from collections.abc import Mapping
from typing import IO

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_ECHO = {
    "name": "echo",
    "description": "Say the text again",
    "inputSchema": _SCHEMA,
    "annotations": {"readOnlyHint": True},  # so that nobody is asked before it is called over HTTP
}
_TOOLS = [_ECHO]
_NEWEST = "2025-11-25"


def answer(line: bytes) -> bytes:
    """Return the reply to one message; empty where it wants none."""
    message = json.loads(line)
    if "id" not in message or "method" not in message:
        return b""
    said = {"jsonrpc": "2.0", "id": message["id"]}
    match message["method"]:
        case "tools/call":
            (text, *_) = message["params"]["arguments"].values()
            said["result"] = {"content": [{"type": "text", "text": text}]}
        case "initialize":
            said["result"] = _greeting(message["params"])
        case "tools/list":
            said["result"] = {"tools": _TOOLS}
        case "ping":
            said["result"] = {}
        case _:
            said["error"] = {"code": -32601, "message": "Method not found"}
    return json.dumps(said).encode()


def _greeting(params: Mapping[str, object]) -> dict[str, object]:
    return {
        "protocolVersion": min(str(params["protocolVersion"]), _NEWEST),
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "echo", "version": "1.0.0"},
    }


def over_pipes(lines: IO[bytes], said: IO[bytes]) -> None:
    """Answer line by line until there are no more."""
    for line in lines:
        if reply := answer(line):
            said.write(reply + b"\n")
            said.flush()


class Http(Protocol):
    """One connection: as much of HTTP as clients that behave need."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._transport: Transport | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """Keep what replies go to."""
        assert isinstance(transport, Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
        self._waiting += data
        while (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._waiting[:end]).lower()
            whole = end + 4 + int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self._waiting) < whole:
                return
            body = bytes(self._waiting[end + 4 : whole])
            del self._waiting[:whole]
            assert self._transport is not None
            self._transport.write(_reply(head, body))


def _reply(head: bytes, body: bytes) -> bytes:
    if not head.startswith(b"post "):
        return b"HTTP/1.1 405 Method Not Allowed\r\nallow: POST\r\ncontent-length: 0\r\n\r\n"
    if not (reply := answer(body)):
        return b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(reply), reply)


async def over_http() -> None:
    """Answer on a port of this machine until the process is ended."""
    server = await get_running_loop().create_server(Http, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--http"]:
            run(over_http())
        case ["--tools", number]:
            _TOOLS += [{**_ECHO, "name": f"echo_{one}"} for one in range(1, int(number))]
        case ["--listing", file]:
            with open(file, encoding="utf-8") as listing:  # noqa: PTH123 - a server that imports as little as it can
                _TOOLS[:] = json.load(listing)
    over_pipes(sys.stdin.buffer, sys.stdout.buffer)
