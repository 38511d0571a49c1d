"""Catalogs: which items a request is answered from, by the project that it names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space
from kiwi_mcp.kernel.aside import Aside, kept_for
from kiwi_mcp.kernel.offers import Offering
from kiwi_mcp.kernel.places import no_project_space, project_space
from kiwi_mcp.kernel.requests import (
    ExecuteRequest,
    HelpRequest,
    LoadRequest,
    McpRequest,
    SearchRequest,
    SecretsRequest,
)
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.registry import Registry

_OF_PROJECT = "project/"
"""How the full names of items begin that are of one project."""
Anywhere: TypeAlias = SearchRequest | LoadRequest | ExecuteRequest | HelpRequest | McpRequest | SecretsRequest
"""What can be asked without a project: it is answered from what is there in every one."""


class Catalogs:
    """The catalogs of one kernel; `project` is the one of requests that name none.

    `near` and `far` look through catalogs beside the loop: what is published may be far, and nobody who looks for what
    is here waits for it.
    """

    def __init__(self, project: Path | None, user: Path, cache: Path, store: Store) -> None:
        self.project = project
        self._user = user
        self._cache = cache
        self._store = store
        self._catalogs: dict[Space, Catalog] = {}
        self._offerings: dict[Space, Offering] = {}
        self._definitions: Definitions | None = None
        self.near, self.far = Aside(self._made), Aside(self._made)

    def space(self, project_path: str | None) -> Space:
        """Return the space of a project; it is refused that there is none."""
        return project_space(project_path, self.project, user=self._user, cache=self._cache)

    def space_if_any(self, project_path: str | None) -> Space:
        """Return the space of a project, or of what belongs to none where no project is known."""
        is_known = project_path is not None or self.project is not None
        return self.space(project_path) if is_known else no_project_space(self._user, self._cache)

    def space_for(self, request: Anywhere) -> Space:
        """Return the space that a request is about."""
        if _is_about_a_project(request):
            return self.space(request.project_path)
        return self.space_if_any(request.project_path)

    def of(self, project_path: str | None) -> Catalog:
        """Return the catalog of a project."""
        return kept_for(self._catalogs, self.space(project_path), self._made)

    def answering(self, request: Anywhere) -> Catalog:
        """Return the catalog of a request's project, or of what belongs to none where no project is known."""
        return kept_for(self._catalogs, self.space_for(request), self._made)

    def unnamed(self) -> Catalog:
        """Return the catalog of requests that name no project."""
        return kept_for(self._catalogs, self.space_if_any(None), self._made)

    def offering(self, project_path: str | None) -> Offering:
        """Return what clients see without searching, in a project or where none is known."""
        return kept_for(self._offerings, self.space_if_any(project_path), lambda space: Offering(self._made(space)))

    def kept(self) -> Iterable[Catalog]:
        """Return the catalogs that the loop has used."""
        return self._catalogs.values()

    def definitions(self) -> Definitions:
        """Return what is remembered of MCP servers."""
        return self._definitions_in(self._store.registry())

    async def stand_still(self) -> None:
        """Wait for what is being done beside the loop, and do nothing else."""
        await self.near.aclose()
        await self.far.aclose()

    def clear(self) -> None:
        """Keep no catalog any longer."""
        self._catalogs.clear()
        self._offerings.clear()

    def _made(self, space: Space) -> Catalog:
        return Catalog(space, registry=self._store.registry, definitions=self._definitions_if_any)

    def _definitions_if_any(self) -> Definitions | None:
        """Return what is remembered of MCP servers; a store that was never used is not made to find out."""
        registry = self._store.registry_if_any()
        return self._definitions_in(registry) if registry else None

    def _definitions_in(self, registry: Registry) -> Definitions:
        known = self._definitions
        if known is None or known.database is not registry.database:
            known = self._definitions = Definitions(registry.database, registry.actor.name)
        return known


def _is_about_a_project(request: Anywhere) -> bool:
    """Whether a request names the project's own items, so that it has to say which project that is."""
    match request:
        case SearchRequest():
            return request.source == "project"
        case LoadRequest():
            return "project" in (request.source, request.destination) or request.item_id.startswith(_OF_PROJECT)
        case ExecuteRequest():
            return (request.item_id or "").startswith(_OF_PROJECT)
        case _:
            return False
