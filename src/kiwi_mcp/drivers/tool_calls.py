"""Calls that a tool makes: a socket that its process is given, and the items that its manifest names.

The socket is the permission: it works for this process alone and only until the call of the tool has ended. Every
call over it is an ordinary call, with the rights of the caller of the tool.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec import Struct

from kiwi_mcp.data import FOLDER
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact, text_of
from kiwi_mcp.drivers import Dispatch
from kiwi_mcp.primitives.local_socket import connected_pair

CLIENT = str(FOLDER / "client")
"""The folder with the clients for bash, Python and Node."""
_MOST_CALLS, _DEEPEST, _AT_ONCE = 100, 4, 8
_LONGEST, _MOST_PAGES = 1_000_000, 100


class ToolCall(Struct, frozen=True):
    """One line of a tool: which item to call, and with which parameters."""

    item: str
    parameters: dict[str, Any] = {}
    id: Any = None
    """Comes back with the answer, for a tool that makes several calls at once."""
    is_plain: bool = False
    """Whether the answer is `ok RESULT` or `error MESSAGE`, for a shell."""


@asynccontextmanager
async def serving_calls(
    tool: Tool, items: tuple[str, ...], caller: Caller, dispatch: Dispatch, space: Space
) -> AsyncIterator[tuple[int, dict[str, str]]]:
    """Yield a descriptor with which a process calls items, and the variables that its clients read."""
    async with connected_pair(_LONGEST) as (reader, writer, theirs):
        project: JsonObject = {"project_path": str(space.project)} if space.project_ai.is_dir() else {}
        calls = _Calls(tool, items, dispatch, writer, caller.origin.tools, project)
        serving = asyncio.create_task(calls.serve(reader))
        path = f"{CLIENT}{os.pathsep}"
        try:
            yield theirs, {"KIWI_CALLS": str(theirs), "KIWI_CLIENT": CLIENT, "PATH": path}
        finally:
            serving.cancel()
            await asyncio.wait({serving})


class _Calls(Struct, eq=False):
    """The calls of one run of a tool."""

    tool: Tool
    items: tuple[str, ...]
    dispatch: Dispatch
    writer: asyncio.StreamWriter
    depth: int
    project: JsonObject
    made: int = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer lines until the process ends or sends something that is no call."""
        gate = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            try:
                while line := await reader.readline():
                    await gate.acquire()
                    group.create_task(self._answer(line)).add_done_callback(lambda _: gate.release())
            except ValueError:  # a line over the limit: where the next one begins is not known
                self._send({"error": "too_large", "message": f"A call has more than {_LONGEST:,} bytes."}, None)

    async def _answer(self, line: bytes) -> None:
        try:
            call = msgspec.json.decode(line, type=ToolCall)
        except (msgspec.DecodeError, RecursionError) as error:
            self._send({"error": "invalid_request", "message": f"A line that is no call: {error}"}, None)
            return
        try:
            answer = self._refusal(call) or await self._call(call)
        except KiwiError as error:
            answer = {"error": error.code, "message": f"{error.message} {error.suggestion}".strip()}
        self._send(answer, call)

    def _refusal(self, call: ToolCall) -> JsonObject | None:
        """Return why a call is not made, before any gate."""
        self.made += 1
        if call.item not in self.items or call.item in {self.tool.id, self.tool.identity}:
            named = ", ".join(self.items)
            text = f"{self.tool.id!r} may not call {call.item[:100]!r}: its manifest names {named} under `needs.items`."
            return {"error": "not_permitted", "message": text}
        if self.depth >= _DEEPEST:
            return {"error": "too_deep", "message": f"Tools call each other at most {_DEEPEST} deep."}
        if self.made > _MOST_CALLS // 4**self.depth:
            return {"error": "too_many", "message": f"One run makes at most {_MOST_CALLS // 4**self.depth} calls."}
        return None

    async def _call(self, call: ToolCall) -> JsonObject:
        request: JsonObject = {"action": "run", "item_id": call.item, "parameters": call.parameters, **self.project}
        content = as_object(await self.dispatch("execute", request))
        if content.get("error"):
            return {"error": as_text(content.get("code")), "message": as_text(content.get("message"))}
        handle = as_text(content.get("result_handle"))
        return {"result": await self._whole(handle) if handle else content.get("result")}

    async def _whole(self, handle: str) -> Json:
        """Return a result that an answer shows only the beginning of."""
        text, offset = "", 0
        for _ in range(_MOST_PAGES):
            request: JsonObject = {"item_type": "output", "item_id": handle, "offset": offset}
            page = as_object(await self.dispatch("load", request))
            text += as_text(page.get("content"))
            if not isinstance(following := page.get("next_offset"), int):
                break
            offset = following
        try:
            found: Json = msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
        return found

    def _send(self, answer: JsonObject, call: ToolCall | None) -> None:
        if call is not None and call.is_plain:
            error = answer.get("error")
            line = f"error {error}: {text_of(answer['message'])}" if error else f"ok {compact(answer['result'])}"
            self.writer.write(line.replace("\n", " ").encode() + b"\n")
        else:
            own: JsonObject = {"id": call.id} if call is not None and call.id is not None else {}
            self.writer.write(compact({**answer, **own}).encode() + b"\n")
