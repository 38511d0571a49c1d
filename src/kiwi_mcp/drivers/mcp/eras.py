"""The two eras of the protocol: which one a server speaks, found out by asking, remembered, and healed when it changes.

Since 2026-07-28 a server answers `server/discover` and keeps no session; before, a conversation began with
`initialize`. The era a server had last is tried first, then the other one on the same connection.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import anyio
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from pydantic import ValidationError

from kiwi_mcp.drivers.mcp.server import Server

Era: TypeAlias = Literal["modern", "legacy"]

_PROBE = 10.0
"""How long a server may take to answer `server/discover`, in seconds; some old ones never answer what is new."""
_SHARE = 0.4
"""How much of the time to start the probe may use up at most."""


class Eras:
    """The era of each server, by its identity."""

    def __init__(self) -> None:
        self._known: dict[str, Era] = {}

    def remember(self, identity: str, era: Era) -> None:
        """Note the era of a server."""
        self._known[identity] = era

    def of(self, identity: str) -> Era | None:
        """Return the era that a server had last, if it is known."""
        return self._known.get(identity)

    async def greet(self, session: ClientSession, server: Server) -> Era:
        """Begin a conversation in the era that both sides speak."""
        tried = self._order(server)
        faults: list[Exception] = []
        for era in tried:
            try:
                await _begin(session, era, min(_PROBE, server.startup_timeout * _SHARE))
            except (MCPError, ValidationError, RuntimeError, TimeoutError) as fault:
                # A code does not tell a connection that was closed from a refusal: older servers refuse what is new
                # with the same one. On a closed connection the other era fails at once.
                faults.append(fault)
                # A slow server that answers the probe after all is modern from then on, and says so.
                if _names_other_versions(fault) and era == "legacy" and len(tried) == len(faults):
                    tried.append("modern")
            else:
                self.remember(server.identity, era)
                return era
        raise faults[-1]

    def _order(self, server: Server) -> list[Era]:
        if server.transport == "sse":  # the transport is older than the new era, and some servers hang on the probe
            return ["legacy"]
        return ["legacy", "modern"] if self.of(server.identity) == "legacy" else ["modern", "legacy"]


async def _begin(session: ClientSession, era: Era, probe: float) -> None:
    if era == "legacy":
        await session.initialize()
        return
    with anyio.fail_after(probe):
        await session.discover()


def _names_other_versions(fault: Exception) -> bool:
    return isinstance(fault, MCPError) and fault.code == UNSUPPORTED_PROTOCOL_VERSION
