"""The port of a registry that versions are copied from and to; the own registry and a folder behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Actor, PublishResult, RegistryEvent, Release, VersionName
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout


class RemoteRegistry(Protocol):
    """A place that versions are copied from and to. The receiver checks what it returns."""

    @property
    def key(self) -> str:
        """A stable name, without a password."""

    @property
    def etag(self) -> str:
        """The state that `events` returned last; empty if the remote has no name for it."""

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:
        """Return all events, oldest first; none where the state is still the one that `unless` names."""

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the log entries about the items of one name, oldest first, including unlisted items."""

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return these versions with all their files; a version that is missing or hidden is an error."""

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Add versions, executors first, then apply the status events. Stored versions stay as they are."""

    async def aclose(self) -> None:
        """Close what was opened."""


class LocalRegistry:
    """A registry in a database; the user's own (`is_own`) takes copies of any namespace."""

    etag = ""

    def __init__(self, registry: Registry, key: str, *, is_own: bool = False) -> None:
        self.key = key
        self._registry = registry
        self._is_own = is_own

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:  # noqa: ARG002 - it is read as a whole
        """Return the log entries that the actor may see."""
        return await asyncio.to_thread(lambda: [*all_events(self._registry)])

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the log entries about one name."""
        return await asyncio.to_thread(lambda: [*all_events(self._registry, tool_id=tool_id)])

    async def read(self, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
        """Return these versions, verified by the store."""
        return await asyncio.to_thread(read_named, self._registry, names)

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Publish in one transaction, then apply the status events."""
        registry = self._registry
        if self._is_own:
            names = [*(release.name for release in releases), *(event.name for event in events)]
            registry = registry.as_seen_by(as_member_of(registry.actor, {name.namespace for name in names}))
        return await asyncio.to_thread(registry.publish, releases, events)

    async def aclose(self) -> None:
        """Do nothing: the database belongs to the store."""


class LayoutRemote:
    """A folder in OCI image layout."""

    etag = ""

    def __init__(self, layout: Layout, key: str) -> None:
        self.key = key
        self._layout = layout

    @property
    def is_there(self) -> bool:
        """Whether the folder holds a layout, be it an empty one."""
        return self._layout.is_there

    async def events(self, unless: str = "") -> Sequence[RegistryEvent]:  # noqa: ARG002 - a folder names no state
        """Return all events of the index."""
        return await asyncio.to_thread(self._layout.events)

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        """Return the events of the index about one name."""
        return [event for event in await self.events() if event.name.tool_id == tool_id]

    async def read(self, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
        """Return these versions."""
        return await asyncio.to_thread(self._layout.read, names)

    async def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent]
    ) -> Sequence[PublishResult]:
        """Add artifacts, and replace the index last."""
        return await asyncio.to_thread(self._layout.write, releases, events)

    async def aclose(self) -> None:
        """Do nothing: a folder needs no open handle."""


def all_events(registry: Registry, *, tool_id: str = "") -> Iterator[RegistryEvent]:
    """Yield all log entries: of what lists show, or of one name. The store returns them in pages."""
    ask, after = partial(registry.history, tool_id) if tool_id else registry.events, 0
    while page := ask(after):
        yield from page
        after = page[-1].seq


def read_named(registry: Registry, names: Sequence[VersionName]) -> Sequence[CheckedRelease]:
    """Return versions by their names. Missing versions and hidden versions give the same error."""
    ids: dict[VersionName, str] = {}
    for namespace, tool_id in dict.fromkeys(name.item for name in names):
        ids |= {listed.name: listed.id for listed in registry.named(tool_id, namespace=namespace)}
    if missing := [str(name) for name in names if name not in ids]:
        raise not_available(missing)
    return registry.read([ids[name] for name in names])


def not_available(missing: Sequence[str]) -> NotFound:
    """Return the error for versions that a registry does not have, or does not show."""
    return NotFound(
        f"The registry holds no {', '.join(missing[:10])}{' and others' if len(missing) > 10 else ''}.",  # noqa: PLR2004 - ten fit in a sentence
        suggestion="Check the namespace, the name and the version.",
        missing=list(missing),
    )


def as_member_of(actor: Actor, namespaces: Iterable[str]) -> Actor:
    """Return the same actor as a member of further namespaces, but never of the one that belongs to Kiwi."""
    further = sorted({*namespaces} - {BUILTIN_NAMESPACE})
    return replace(actor, namespaces=tuple(dict.fromkeys((*actor.namespaces, *further))))
