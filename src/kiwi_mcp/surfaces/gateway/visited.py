"""The kernel as visitors use it: each call is made in the name, and with the rights, of whoever sent its request."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.errors import PolicyDenied
from kiwi_mcp.domain.identity import STRANGER
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import OfferKind
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.permission import Permission, all_in, all_of
from kiwi_mcp.kernel.places import user_space
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
from kiwi_mcp.policy.authority import OwnerAuthority
from kiwi_mcp.surfaces.gateway.tokens import Tokens
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
        space = user or user_space()
        authority = OwnerAuthority(space, Tokens(space).identify)
        super().__init__(project, user=space, is_owner=False, surface="gateway", authority=authority)
        self._only = None if is_wide or project is None else project.resolve()

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NOBODY) -> Answer:
        """Answer one verb."""
        return await super().call(verb, payload, visited_by(visiting.get(), caller))

    def acting(self) -> Caller:
        """Return the visitor whose request is being answered."""
        return visited_by(visiting.get(), NOBODY)

    def seen(self, offers: Offers) -> Offers:
        """Return the part of the offers that is for a visitor to know of."""
        permission = self._permission()
        if permission is None:
            return offers
        tools, prompts, resources, templates = (
            tuple(
                one for one in some if not one.identity or not (permission.fault or permission.is_hidden(one.identity))
            )
            for some in (offers.tools, offers.prompts, offers.resources, offers.templates)
        )
        named = replace(offers, servers=(), namespaces=()) if permission.fault else offers
        return replace(
            offers,
            tools=tools,
            prompts=prompts,
            resources=resources,
            templates=templates,
            servers=tuple(name for name in named.servers if not permission.is_hidden(all_of(name))),
            namespaces=tuple(name for name in named.namespaces if not permission.is_hidden(all_in(name))),
        )

    def offered(self, name: str, kind: OfferKind) -> Offer | None:
        """Return an item as clients see it, if it is for a visitor to know of."""
        offer, permission = super().offered(name, kind), self._permission()
        if offer is None or permission is None:
            return offer
        return None if permission.fault or permission.is_hidden(offer.identity) else offer

    def _permission(self) -> Permission | None:
        """Return what the rules let a visitor know of; None outside of a visit."""
        visitor = visiting.get()
        return None if visitor is None else Permission(self.catalog(), self.rights(self.acting()))

    def check(self, request: Request, caller: Caller) -> None:
        """Refuse what a visitor may not do, and other projects than the one that is served."""
        super().check(request, caller)
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


def visited_by(visitor: Visitor | None, caller: Caller) -> Caller:
    """Return a caller in the name of whoever has sent the request; without one, it is nobody whom rules know."""
    identity = visitor.identity if visitor else STRANGER
    name = visitor.principal if visitor else ""
    return replace(caller, name=name, identity=identity, is_owner=identity.kind == "owner")


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
