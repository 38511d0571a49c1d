"""The kernel as visitors use it: each call is made in the name, and with the rights, of whoever sent its request."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.errors import PolicyDenied
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.requests import (
    Action,
    ExecuteRequest,
    InitRequest,
    LoadRequest,
    McpRequest,
    MigrateRequest,
    RegistryRequest,
    Request,
)
from kiwi_mcp.surfaces.gateway.visitors import Visitor

visiting: ContextVar[Visitor | None] = ContextVar("visiting", default=None)
"""Who has sent the request that is being answered.

The SDK hands it on to all that is done for a request, and so does every task: also one that goes on after it.
"""
_READING: frozenset[Action] = frozenset({"run", "validate", "why", "versions", "diff", "verify", "list"})
"""The actions that leave every item as it is."""


class VisitedKernel(Kernel):
    """A kernel that knows who calls it, so that runs stand under their names and are seen by nobody else.

    One with a project serves that project alone, unless it `is_wide`.
    """

    def __init__(self, project: Path | None = None, *, user: Path | None = None, is_wide: bool = False) -> None:
        super().__init__(project, user=user, is_owner=False, surface="gateway")
        self._only = None if is_wide or project is None else project.resolve()

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NOBODY) -> Answer:
        """Answer one verb."""
        visitor = visiting.get()
        return await super().call(verb, payload, replace(caller, name=visitor.principal if visitor else ""))

    def check(self, request: Request) -> None:
        """Refuse what a visitor may not do, and other projects than the one that is served."""
        super().check(request)
        if self._only is not None and any(path != self._only for path in _paths(request)):
            raise PolicyDenied(
                "This server is for another project.",
                suggestion="Leave out `project_path`; the owner starts it with `kiwi up --any-project` for others.",
            )
        visitor = visiting.get()
        if _is_authoring(request) and not (visitor is not None and visitor.can_author):
            raise PolicyDenied(
                "This token may use items, and not change them.",
                suggestion="Ask the owner for one that may: `kiwi up token add NAME --tools --author`.",
            )


def _paths(request: Request) -> Iterator[Path]:
    """Yield the folders that a request names, as they really are."""
    for word in ("project_path", "path"):
        if isinstance(text := getattr(request, word, None), str) and "\0" not in text:
            yield Path(text).resolve()


def _is_authoring(request: Request) -> bool:
    """Whether a request changes items, or brings them here or elsewhere."""
    match request:
        case ExecuteRequest():
            return request.action not in _READING
        case LoadRequest():
            return request.destination is not None
        case RegistryRequest():
            return request.action != "show"
        case McpRequest():
            return request.action not in {"list", "diff", "refresh"}
        case InitRequest() | MigrateRequest():
            return True
        case _:
            return False
