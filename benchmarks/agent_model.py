"""A model on loopback that answers at once: it calls a tool in every turn but the last. Prints its port.

The path of a request says what it does: `/RUN/TURNS/TOOL/v1/chat/completions` or `/RUN/TURNS/TOOL/v1/messages`. A run
is one conversation, and its requests are counted. It streams where the request asks for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter

_asked: Counter[str] = Counter()
_LAST = {"final_answer": ("final_answer", '{"answer": "Done."}')}
"""How a framework ends that does not end with text, by a word in the name of the run."""


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    while head := await _head(reader):
        path = head.split(b" ", 2)[1].decode()
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        body = await reader.readexactly(length)
        kind, data = _answer(path, is_stream=b'"stream":true' in body.replace(b" ", b""))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(data), data))
        await writer.drain()
    writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return b""


def _answer(path: str, *, is_stream: bool) -> tuple[bytes, bytes]:
    _, run, turns, tool, *_ = path.split("/")
    _asked[run] += 1
    number = _asked[run]
    call: tuple[str, str] | None = (tool, _arguments(tool, number))
    if number >= int(turns):
        call = next((one for word, one in _LAST.items() if word in run), None)
    if path.endswith("/messages"):
        return b"application/json", json.dumps(_message(number, call)).encode()
    if is_stream:
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(number, call))
        return b"text/event-stream", f"{lines}data: [DONE]\n\n".encode()
    return b"application/json", json.dumps(_completion(number, call)).encode()


def _arguments(tool: str, number: int) -> str:
    """Return arguments that differ from those of the last turns, since a loop detector asks about the same call."""
    if tool == "execute":
        return '{"item_id": "note", "item_type": "knowledge"' + " " * (number % 7) + "}"
    return json.dumps({"number": number % 7})


def _calls(number: int, call: tuple[str, str]) -> list[dict[str, object]]:
    return [{"id": f"call_{number}", "type": "function", "function": {"name": call[0], "arguments": call[1]}}]


def _completion(number: int, call: tuple[str, str] | None) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": None if call else "Done."}
    if call:
        message["tool_calls"] = _calls(number, call)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    about = {"id": f"c{number}", "object": "chat.completion", "created": 1, "model": "bench"}
    return {**about, "choices": [choice], "usage": usage}


def _chunks(number: int, call: tuple[str, str] | None) -> list[dict[str, object]]:
    about = {"id": f"c{number}", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
    delta: dict[str, object] = {"role": "assistant", "content": None if call else "Done."}
    if call:
        delta["tool_calls"] = [{"index": 0, **_calls(number, call)[0]}]
    end = "tool_calls" if call else "stop"
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return [
        {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
        {**about, "choices": [], "usage": usage},
    ]


def _message(number: int, call: tuple[str, str] | None) -> dict[str, object]:
    block: dict[str, object] = {"type": "text", "text": "Done."}
    if call:
        block = {"type": "tool_use", "id": f"call_{number}", "name": call[0], "input": json.loads(call[1])}
    return {
        "id": f"m{number}", "type": "message", "role": "assistant", "model": "bench", "content": [block],
        "stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 20},
    }  # fmt: skip


async def main() -> None:
    """Serve until it is ended."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
