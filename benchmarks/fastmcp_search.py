"""FastMCP's own search over the tools of a file, by the protocol of `discovery_adapter.py`; runs where FastMCP is.

It stands before a server that has all tools, named as a server of servers names them, and is asked without a transport.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fastmcp import FastMCP  # type: ignore[import-not-found] # it is in an environment of its own
from fastmcp.server.providers import Provider  # type: ignore[import-not-found] # as above
from fastmcp.server.transforms.search import BM25SearchTransform  # type: ignore[import-not-found] # as above
from fastmcp.tools import Tool  # type: ignore[import-not-found] # as above

_SIGNS = re.compile(r"[^A-Za-z0-9_-]+")
_TOP = 10


class Many(Provider):  # type: ignore[misc] # as above
    """Gives many tools at once: adding them one by one takes time that grows with those that are there."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = tools

    async def _list_tools(self) -> Sequence[Tool]:
        return self._tools


def read(path: Path) -> dict[str, Tool]:
    """Return the tools of a file by their ids; a name that is taken gets a number."""
    tools: dict[str, Tool] = {}
    numbers: dict[str, int] = {}
    for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
        response = json.loads(line)
        name = _SIGNS.sub("_", f"{response['source']}_{response['name']}")
        number = numbers[name] = numbers.get(name, 0) + 1
        texts = response.get("parameters") or {}
        properties = {word: {"type": "string", "description": text} for word, text in texts.items()}
        tools[response["id"]] = Tool(
            name=name if number == 1 else f"{name}_{number}",
            description=response["description"],
            parameters={"type": "object", "properties": properties},
        )
    return tools


async def answer(path: Path) -> None:
    """Answer what arrives on stdin."""
    logging.disable(logging.WARNING)  # which it gives for each name that is long
    tools = read(path)
    ids = {tool.name: given for given, tool in tools.items()}
    server = FastMCP("bench", providers=[Many([*tools.values()])])
    server.add_transform(BM25SearchTransform(max_results=_TOP))
    await server.call_tool("search_tools", {"query": "begin"})
    print("READY", flush=True)
    for line in sys.stdin:
        found = await server.call_tool("search_tools", {"query": json.loads(line)["query"]})
        shown = json.loads(found.content[0].text) if found.content else []
        print(json.dumps([ids[one["name"]] for one in shown]), flush=True)


if __name__ == "__main__":
    asyncio.run(answer(Path(sys.argv[1])))
