"""Writes `prepared.json`, what stage one answers with: `python -m kiwi_mcp.surfaces.mcp.prepare`.

Every text in it is the answer that the SDK itself gave to the request, so the two stages cannot differ in wording.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import OfferKind
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.tasks import Tasks
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.changes import Changes
from kiwi_mcp.surfaces.mcp.menu import ONLY_META_TOOLS
from kiwi_mcp.surfaces.mcp.rehearsal import ENVELOPE, answer, handshake, tool_lists
from kiwi_mcp.surfaces.mcp.server import McpServer, build_server

PREPARED = Path(__file__).with_name("prepared.json")


class NoKernel:
    """Stands where a kernel would, for an owner who prefers nothing of their own."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Never called."""
        raise NotImplementedError(verb, payload, caller)

    async def offers(self) -> Offers:
        """Return the meta-tools."""
        return ONLY_META_TOOLS

    def offers_mark(self) -> str:
        """Return that nothing changes."""
        return ""

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        """Never called."""
        raise NotImplementedError(item_id, argument, value, known)

    def offered(self, name: str, kind: OfferKind) -> Offer | None:
        """Never called."""
        raise NotImplementedError(name, kind)

    def tasks(self) -> Tasks:
        """Never called."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Hold nothing."""


async def prepared() -> Mapping[str, Mapping[str, str]]:
    """Return the SDK's answers to the opening of a conversation, by era and method."""
    server = _server()
    greetings = {one: await answer(server, "initialize", handshake(one)) for one in HANDSHAKE_PROTOCOL_VERSIONS}
    return {
        "versions": {"modern": LATEST_MODERN_VERSION},
        "initialize": {**greetings, "else": greetings[LATEST_HANDSHAKE_VERSION]},
        "legacy": {"ping": await answer(server, "ping", {}, is_legacy=True)},
        "modern": {"server/discover": await answer(server, "server/discover", ENVELOPE)},
        "tools": await tool_lists(server),
    }


def _server() -> McpServer:
    kernel = NoKernel()
    calls = Calls(kernel.tasks, task_after=lambda: 0.0, principal=lambda _: "")
    return build_server(kernel, calls=calls, changes=Changes(kernel))


def main() -> None:
    """Write the file anew, in one piece."""
    text = json.dumps(asyncio.run(prepared()), ensure_ascii=False, indent=1) + "\n"
    draft = PREPARED.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(PREPARED)
    sys.stderr.write(f"wrote {PREPARED.name}\n")


if __name__ == "__main__":
    main()
