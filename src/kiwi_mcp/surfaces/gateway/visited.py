"""The kernel as visitors use it: each call is made in the name of the one whose request it belongs to."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel

visiting: ContextVar[str] = ContextVar("visiting", default="")
"""Who has sent the request that is being answered.

The SDK hands it on to all that is done for a request, and so does every task: also one that goes on after it.
"""


class VisitedKernel(Kernel):
    """A kernel that knows who calls it, so that runs stand under their names and are seen by nobody else."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NOBODY) -> Answer:
        """Answer one verb."""
        return await super().call(verb, payload, replace(caller, name=visiting.get()))
