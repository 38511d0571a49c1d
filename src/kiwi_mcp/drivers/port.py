"""The port every driver fills: plan first, act afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan


class Driver(Protocol):
    """Judges an item, turns a chain and a caller's inputs into a plan, and a plan into an outcome.

    A driver is a module of this package with an object named `driver`.
    """

    async def check(self, chain: Chain, space: Space) -> tuple[Issue, ...]:
        """Return what is wrong with an item beyond its manifest: what only its own mechanism can tell."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Say exactly what will happen. Starts no process, opens no connection, writes nothing."""

    async def aclose(self) -> None:
        """Let go of what the driver keeps open between calls."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller
    ) -> Outcome:
        """Do what the plan says. What keeps it from starting is raised; whatever ran is an outcome."""
