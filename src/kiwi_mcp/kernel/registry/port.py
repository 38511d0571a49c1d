"""Remotes: any place that holds published versions, behind four methods; databases and folders are two kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Actor, Event, Published, Release, VersionName
from kiwi_mcp.store.layout import Layout
from kiwi_mcp.store.registry import Registry


class Remote(Protocol):
    """A place that versions are copied from and to. What it gives is checked by whoever keeps it."""

    @property
    def key(self) -> str:
        """A stable name, without a password, under which is remembered how far it was read."""

    async def events(self, after: int = 0) -> Sequence[Event]:
        """Return what happened there since an event, oldest first; one without a log tells all it holds."""

    async def history(self, tool_id: str) -> Sequence[Event]:
        """Return what happened there to the items of one name, oldest first; unlisted ones are told too."""

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions with all their files; one that is not there, or not to be seen, is an error."""

    async def write(self, releases: Sequence[Release], marks: Sequence[Event]) -> Sequence[Published]:
        """Add versions, executors first, then say again what was said of versions; what is there already stays."""

    async def aclose(self) -> None:
        """Let go of what was opened."""


class RegistryRemote:
    """A registry in a database.

    `is_own` says that it is the user's own store, which takes copies of any namespace; to a shared one an actor
    publishes in their namespaces alone.
    """

    def __init__(
        self, registry: Registry, key: str, *, is_own: bool = False, close: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self._registry = registry
        self._is_own = is_own
        self._close = close

    async def events(self, after: int = 0) -> Sequence[Event]:
        """Return the log since an event, as far as the actor may see it."""
        return await asyncio.to_thread(lambda: [*all_events(self._registry, after)])

    async def history(self, tool_id: str) -> Sequence[Event]:
        """Return what the log says of one name."""
        return await asyncio.to_thread(lambda: [*_pages(partial(self._registry.history, tool_id), 0)])

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions, verified by the store."""
        return await asyncio.to_thread(read_named, self._registry, names)

    async def write(self, releases: Sequence[Release], marks: Sequence[Event]) -> Sequence[Published]:
        """Publish in one transaction, then apply the marks."""
        registry = self._registry
        if self._is_own:
            names = [*(release.name for release in releases), *(mark.name for mark in marks)]
            registry = registry.as_seen_by(joined(registry.actor, {name.namespace for name in names}))
        return await asyncio.to_thread(write_all, registry, releases, marks)

    async def aclose(self) -> None:
        """Close the database, if it was opened for this remote."""
        if self._close is not None:
            await asyncio.to_thread(self._close)


class FolderRemote:
    """A folder in OCI image layout."""

    def __init__(self, layout: Layout, key: str) -> None:
        self.key = key
        self._layout = layout

    @property
    def is_there(self) -> bool:
        """Whether the folder holds a layout, be it an empty one."""
        return self._layout.is_there

    async def events(self, after: int = 0) -> Sequence[Event]:  # noqa: ARG002 - a folder keeps no order of events
        """Return what the index says, all of it."""
        return await asyncio.to_thread(self._layout.events)

    async def history(self, tool_id: str) -> Sequence[Event]:
        """Return what the index says of one name."""
        return [event for event in await self.events() if event.name.tool_id == tool_id]

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions."""
        return await asyncio.to_thread(self._layout.read, names)

    async def write(self, releases: Sequence[Release], marks: Sequence[Event]) -> Sequence[Published]:
        """Add artifacts, and replace the index last."""
        return await asyncio.to_thread(self._layout.write, releases, marks)

    async def aclose(self) -> None:
        """Do nothing: a folder is not held open."""


def all_events(registry: Registry, after: int) -> Iterator[Event]:
    """Give the whole log since an event, which the store gives in pages."""
    return _pages(registry.events, after)


def _pages(ask: Callable[[int], Sequence[Event]], after: int) -> Iterator[Event]:
    while page := ask(after):
        yield from page
        after = page[-1].seq


def read_named(registry: Registry, names: Sequence[VersionName]) -> Sequence[Release]:
    """Return versions by their names; what is not there and what must not be seen are told in the same words."""
    ids: dict[VersionName, str] = {}
    for namespace, tool_id in dict.fromkeys((name.namespace, name.tool_id) for name in names):
        ids |= {listed.name: listed.id for listed in registry.named(tool_id, namespace=namespace)}
    if missing := [str(name) for name in names if name not in ids]:
        raise not_held(missing)
    return registry.read([ids[name] for name in names])


def not_held(missing: Sequence[str]) -> NotFound:
    """Return the answer for versions that a registry does not hold, or does not show."""
    return NotFound(
        f"The registry holds no {', '.join(missing[:10])}{' and others' if len(missing) > 10 else ''}.",  # noqa: PLR2004 - ten fit in a sentence
        suggestion="Check the namespace, the name and the version.",
        missing=list(missing),
    )


def write_all(registry: Registry, releases: Sequence[Release], marks: Iterable[Event]) -> Sequence[Published]:
    """Publish versions and say again what was said, as the registry's actor: all of it, or nothing."""
    return registry.publish(releases, tuple(marks))


def joined(actor: Actor, namespaces: Iterable[str]) -> Actor:
    """Return the same actor as a member of further namespaces, but never of the one that belongs to Kiwi."""
    further = sorted({*namespaces} - {BUILTIN_NAMESPACE})
    return replace(actor, namespaces=tuple(dict.fromkeys((*actor.namespaces, *further))))
