"""The code driver: to execute the item `code` is to run a program in a thread of its own."""

from __future__ import annotations

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers.thread import ThreadItem


class CodeItem(ThreadItem):
    """Runs a program; each of its calls passes every gate of its own."""

    driver = "code"
    verb = "code_tools"

    def request(self, plan: Plan, space: Space) -> JsonObject:
        """Return the request that starts the program."""
        return {"action": "run", "arguments": plan.inputs}


create_driver = CodeItem
