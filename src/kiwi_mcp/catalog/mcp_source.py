"""What MCP servers offered, read from the store as items; one that is not accepted cannot be called."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import OpenedItem
from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.catalog.source import ItemSource, ServerSnapshot, read_cache, write_cache
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.cards import TEXT_LIMIT, Card, described
from kiwi_mcp.domain.errors import DefinitionChanged, DefinitionNew, KiwiError, Unavailable
from kiwi_mcp.domain.items import Location, Source, Tool, ToolFile
from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.domain.mcp import MAX_DIFF, Definition, OfferKind, ServerKey, ServerRecord, manifest_of, name_of, written
from kiwi_mcp.manifest.files import MISSING, FileStamp, are_fresh, read_file, stamp_of, write_whole
from kiwi_mcp.manifest.signatures import sha256_hex
from kiwi_mcp.manifest.type_specs import TypeSpecs
from kiwi_mcp.store.database import within
from kiwi_mcp.store.mcp_definitions import DefinitionSummary, McpDefinitions

PUBLISHED = "registry"
"""The space of a server without a manifest in a folder."""

_KEPT = 4_096
_GLANCE, _ANSWER = 2.0, 10.0
"""For how many seconds a store may be silent: when every call looks whether there is news, and when it is asked."""
_MAX_BYTES = 4_000_000
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)
"""The errors that a malformed definition may cause. It is left out, and all other definitions are found."""
_UNACCEPTED = frozenset({"changed", "new"})
_ASKED_BY: Mapping[str, AbstractSet[OfferKind]] = {
    "mcp_tool_name": {"tool"},
    "mcp_prompt_name": {"prompt"},
    "mcp_resource_uri": {"resource", "template"},
}
"""The words of a manifest that ask a server for something, and for which kinds of things."""
_SAVE_SHARE, _FEW = 200, 500
_Made: TypeAlias = tuple[str, DefinitionSummary]
"""What an entry is made from: the version of a server, and one state of something that it offers."""
T = TypeVar("T")


class _Seen(Struct, frozen=True):
    """The marks of all servers that the store knows, the paths of their manifests, and which of those are gone."""

    marks: Mapping[ServerKey, tuple[str, str]]
    paths: Sequence[str]
    gone: AbstractSet[str]


class McpSource(ItemSource):
    """The items of the servers of a space, the project's first; none while the store cannot be read."""

    name: Source = "mcp"

    def __init__(self, definitions: Callable[[], McpDefinitions | None], space: Space) -> None:
        self._definitions = definitions
        self._spaces = (str(space.project_ai), str(space.user), PUBLISHED)
        self.home = "\n".join(self._spaces)
        self._copies = space.cache / "mcp"
        self._marks: Mapping[ServerKey, str] = {}
        self._mark: str | None = None
        self._seen: _Seen | None = None
        self._servers: Mapping[ServerKey, ServerRecord] = {}
        self._named: dict[str, Sequence[Card]] = {}
        self._found: dict[str, tuple[ServerRecord, Definition]] = {}
        self._opened: dict[str, OpenedItem] = {}
        self._entries: Sequence[Card] | None = None
        self._made: dict[ServerKey, dict[_Made, Card]] = {}
        self._place = (
            space.cache / "catalog" / f"mcp-{sha256_hex(self.home.encode(errors='surrogateescape'))[:32]}.json"
        )
        self._offered: Mapping[ServerKey, ServerSnapshot] | None = None
        self._generation = 0

    @property
    def mark(self) -> str:
        """The marks of all servers: the store gives each a new one whenever anything about it changes."""
        if self.fault:
            return ""
        if self._mark is None:
            listed = "\n".join(f"{key.space}\t{key.server}\t{mark}" for key, mark in self._marks.items())
            self._mark = sha256_hex(listed.encode(errors="surrogateescape"))
        return self._mark

    @property
    def is_empty(self) -> bool:
        """Whether no server is known, as of the last look."""
        return not self._servers

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many things each server that is known offers or once did, as of the last look, by its name."""
        known = (self._asked(lambda store: store.sizes()) if self._servers else None) or {}
        return {key.server: known.get(key, 0) for key in self._servers}

    def sync(self, sheets: TypeSpecs) -> int:  # noqa: ARG002 - sources have one port
        """Notice whether any process added, removed or listed a server."""
        try:
            with within(_GLANCE):
                definitions = self._definitions()
                marks = self._visible(definitions.marks()) if definitions else {}
                if marks is not self._marks and marks != self._marks:
                    servers = definitions.servers() if definitions else ()
                    self._begin_anew(marks, servers)
            self.fault = None
        except KiwiError as fault:
            self._fail(fault)
        return self._generation

    def entries(self) -> Sequence[Card]:
        """Return everything that is offered."""
        if self.fault:
            return ()
        if self._entries is None:
            known = self._offered
            if known is None:
                known = dict(read_cache(self._place, list[tuple[ServerKey, ServerSnapshot]]) or ())
            offered = self._asked(partial(self._offered_now, known))
            if offered is None:
                return ()
            self._entries = [entry for one in offered.values() for entry in one.entries]
            self._offered = offered
            # Writing costs as much as there are items: a few are read again instead, and so is a change or two of many.
            new = sum(len(one.entries) for key, one in offered.items() if known.get(key) is not one)
            if new * _SAVE_SHARE > len(self._entries) > _FEW:
                write_cache(self._place, [*offered.items()])
        return self._entries

    def _offered_now(
        self, known: Mapping[ServerKey, ServerSnapshot], store: McpDefinitions
    ) -> Mapping[ServerKey, ServerSnapshot]:
        found: dict[ServerKey, ServerSnapshot] = {}
        for key in self._servers:
            mark, before = self._marks[key], known.get(key)
            if before is None or before.mark != mark:
                before = ServerSnapshot(mark, tuple(self._listed(key, store)))
            found[key] = before
        return found

    def named(self, ref: Ref) -> Sequence[Card]:
        """Return the entries with a name: those that the owner accepted first, then by the names of the servers."""
        if self.fault or not self._servers or ref.source not in {None, "mcp"}:
            return ()
        if ref.name not in self._named:
            known = self._asked(lambda store: store.named(ref.name))
            if known is None:
                return ()
            if len(self._named) >= _KEPT:
                self._named.clear()
                self._found.clear()
            entries: list[Card] = []
            for key, definition in known:
                server = self._servers.get(key)
                if server is not None and definition.state != "gone":
                    with suppress(*_UNREADABLE):
                        entries.append(entry_of_definition(definition, server))
                        self._found[entries[-1].path] = (server, definition)
            self._named[ref.name] = sorted(entries, key=lambda entry: (not is_accepted(entry), entry.namespace))
        return self._named[ref.name]

    def gone(self, ref: Ref) -> Sequence[str]:
        """Return the servers that once offered something of a name, and do so no more."""
        known = self._asked(lambda store: store.named(ref.name)) or ()
        asked = (key for key, one in known if one.state == "gone" and key in self._servers)
        return [key.server for key in asked if ref.is_from("mcp", key.server)]

    def names(self) -> Iterable[str]:
        """Return the names of the offered items."""
        return {entry.tool_id for entry in self.entries()}

    def notes(self, tool: Tool) -> Sequence[str]:
        """Return a note if the last request to a server failed."""
        offering = [one for key, one in self._servers.items() if key.server == tool.origin.namespace]
        return [f"{one.key.server} could not be asked: {one.fault}" for one in offering if one.fault]

    def open(self, entry: Card) -> OpenedItem | None:
        """Return an item in full, with its manifest written out as a file that can be read and copied."""
        known = self._opened.get(entry.path)
        if known is None or not are_fresh(known.stamps):
            self.named(Ref(entry.tool_id))
            found = self._found.get(entry.path)
            if found is None:  # a change was seen since the entry was given
                return None
            if len(self._opened) >= _KEPT:
                self._opened.clear()
            known = self._opened[entry.path] = self._open(*found)
        return known

    def looks_at(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the manifests of the servers, which `sync` looks for."""
        return (self._seen.paths if self._seen else ()), ()

    def drift(self, links: Sequence[Tool]) -> Iterator[str]:
        """Yield the differences between a manifest in a folder and the definition that its MCP server offers.

        Refuse the item if the server or the definition is not the one that the owner accepted.
        """
        item = links[0]
        if len(links) < 2 or not _asked_for(item):  # noqa: PLR2004 - it and its server
            return
        server = next((one for one in self._servers.values() if one.executor == _unversioned(links[1])), None)
        if server is None:
            return
        name = server.key.server
        if links[1].digest != server.digest:
            fault = DefinitionChanged(item.identity, server=name, tool_id=item.id, diff="")
            fault.message = (
                f"The manifest of the MCP server {name!r} changed since it was accepted, so {item.id!r} is not run."
            )
            fault.suggestion = (
                f"Look at it (`kiwi mcp diff {name}`). If it is right, the owner types `kiwi mcp accept {name}`."
            )
            raise fault
        known = self._asked(lambda store: store.of(server.key)) if not item.origin.server and server.seen_at else ()
        offered = [one for one in known or () if one.state != "gone"]
        asked = {(as_text(item.manifest.config.get(word)), kind) for word, kinds in _ASKED_BY.items() for kind in kinds}
        for one in offered:
            if (one.name, one.kind) in asked and one.state != "accepted":
                identity = f"mcp/{name}/{one.tool_id}"
                if one.state == "new":
                    raise DefinitionNew(identity, server=name, tool_id=one.tool_id)
                diff = one.difference_within(MAX_DIFF, f"`kiwi mcp diff {name} {one.tool_id}` shows them")
                raise DefinitionChanged(identity, server=name, tool_id=one.tool_id, diff=diff)
        if known:
            yield from _drift(item, server, offered)

    def is_meant(self, server: Tool) -> bool:
        """Whether the owner added or accepted a server as it is."""
        return any(
            one.executor == _unversioned(server) and one.digest == server.digest and bool(one.words)
            for one in self._servers.values()
        )

    def _visible(self, marks: Mapping[ServerKey, tuple[str, str]]) -> Mapping[ServerKey, str]:
        """Return the servers of this space that still have a manifest; of one name, the first that names resolve to."""
        before = self._seen if self._seen is not None and self._seen.marks is marks else None
        paths = before.paths if before else [path for _, path in marks.values() if path]
        gone = {path for path in paths if stamp_of(path) == MISSING}
        if before and before.gone == gone:
            return self._marks
        self._seen = _Seen(marks, paths, gone)
        seen: dict[str, ServerKey] = {}
        for space in self._spaces:
            for key, (_, path) in marks.items():
                if key.space == space and path not in gone:
                    seen.setdefault(key.server, key)
        return {key: marks[key][0] for key in sorted(seen.values(), key=lambda key: key.server)}

    def _begin_anew(self, marks: Mapping[ServerKey, str], servers: Iterable[ServerRecord]) -> None:
        known = {one.key: one for one in servers}
        self._marks, self._mark = marks, None
        self._servers = {key: known[key] for key in marks if key in known}
        self._generation += 1
        self._entries = None
        for kept in (self._named, self._found, self._opened):
            kept.clear()

    def _fail(self, fault: KiwiError) -> None:
        self._seen = None
        if self.fault is None:
            self._begin_anew({}, ())
        self.fault = fault

    def _asked(self, question: Callable[[McpDefinitions], T]) -> T | None:
        """Return the answer of the store if it has one; it may fail in the middle, and then it holds nothing either."""
        try:
            with within(_ANSWER):
                definitions = self._definitions()
                return question(definitions) if definitions else None
        except Unavailable as fault:
            self._fail(fault)
            return None

    def _listed(self, key: ServerKey, store: McpDefinitions) -> Iterator[Card]:
        """Yield an entry for each item that a server offers. Unchanged items keep their entry."""
        server, before = self._servers[key], self._made.pop(key, {})
        made = self._made[key] = {}
        for sketch, read in store.sketches(key):
            if sketch.state != "gone":
                with suppress(*_UNREADABLE):
                    what = (server.version, sketch)
                    yield made.setdefault(what, before.get(what) or entry_of_definition(read(), server))

    def _open(self, server: ServerRecord, definition: Definition) -> OpenedItem:
        manifest = manifest_of(definition, server)
        data = (json.dumps(written(manifest, server), indent=2, ensure_ascii=False) + "\n").encode(errors="replace")
        digest = sha256_hex(data)
        base = self._copies / digest
        path = base / "tools" / server.key.server / f"{definition.tool_id}.yaml"
        if definition.state == "changed":
            more = f"`kiwi mcp diff {server.key.server} {definition.tool_id}` shows them"
            difference = definition.difference_within(MAX_DIFF, more)
            manifest = replace(manifest, extra={**manifest.extra, "difference": difference})
        tool = Tool(
            replace(manifest, written=written(manifest, server)),
            Location("mcp", path, path.parent, server.key.server, base),
            (ToolFile(path.name, digest, len(data)),),
            definition.shown_digest,
            integrity=definition.state,
        )
        return OpenedItem(tool, ((str(path), _laid_out(path, data)),))


def refuse_unaccepted(tool: Tool) -> None:
    """Refuse to run what an MCP server offers unless it is exactly what the owner accepted."""
    if not tool.origin.server or tool.integrity == "accepted":
        return
    server = tool.origin.namespace
    if tool.integrity == "changed":
        diff = as_text(tool.manifest.extra.get("difference"))
        raise DefinitionChanged(tool.identity, server=server, tool_id=tool.id, diff=diff)
    raise DefinitionNew(tool.identity, server=server, tool_id=tool.id)


def is_accepted(entry: Card) -> bool:
    """Whether the owner has accepted what a server offers, as it is."""
    return not entry.tags or entry.tags[-1] not in _UNACCEPTED


def entry_of_definition(definition: Definition, server: ServerRecord) -> Card:
    """Return the entry of something a server offers; its path is its identity, since it is in no folder."""
    manifest = manifest_of(definition, server)
    flags = (definition.state,) if definition.state != "accepted" else ()
    return Card(
        source="mcp",
        namespace=server.key.server,
        path=f"mcp/{server.key.server}/{definition.tool_id}@{manifest.version}",
        kind="tools",
        tool_id=definition.tool_id,
        version=manifest.version,
        tool_type=manifest.tool_type,
        name=manifest.name,
        description=manifest.description[:TEXT_LIMIT],
        category=manifest.category,
        tags=(*manifest.tags, *flags),
        parameters=described(manifest.parameters.get("properties")),
        modified=datetime.fromisoformat(definition.seen_at).timestamp() if definition.seen_at else 0.0,
        server=server.key.server,
    )


def _laid_out(path: Path, data: bytes) -> FileStamp:
    """Write a file whole unless it is there already, and return its stamp."""
    try:
        known = read_file(path, limit=_MAX_BYTES) if stamp_of(str(path)) != MISSING else None
        if known is not None and known.data == data:
            return known.stamp
        write_whole(path, data)
    except OSError as error:
        raise Unavailable(
            f"What MCP servers offer cannot be written to {path.parent}: {error.strerror}.",
            suggestion="Make room there, give yourself write access, or name another cache in XDG_CACHE_HOME.",
        ) from error
    return stamp_of(str(path))


def _unversioned(tool: Tool) -> str:
    return tool.identity.partition("@")[0]


def _asked_for(item: Tool) -> AbstractSet[str]:
    """Return the server's own names of what an item asks for."""
    return {as_text(item.manifest.config.get(word)) for word in _ASKED_BY} - {""}


def _drift(item: Tool, server: ServerRecord, offered: Sequence[Definition]) -> Iterator[str]:
    config, wanted = item.manifest.config, _asked_for(item)
    live = next((one for one in offered if {one.name, name_of(one.kind, one.offered)} & wanted), None)
    if live is None:
        if "mcp_resource_uri" not in config:  # a server need not list every address it can read
            yield f"{server.key.server} offers no {', '.join(sorted(wanted))} any more, which {item.id} asks it for"
        return
    schema = manifest_of(replace(live, accepted=None), server).parameters
    known, is_open = as_object(schema.get("properties")), schema.get("additionalProperties") is not False
    sent = as_object(item.manifest.parameters.get("properties"))
    if not is_open or known:
        for name in sorted(sent.keys() - known.keys()):
            yield f"{item.id} sends {name!r}, which {live.name} of {server.key.server} does not have"
    for name in sorted({as_text(one) for one in as_list(schema.get("required"))} - sent.keys()):
        yield f"{live.name} of {server.key.server} requires {name!r}, which {item.id} does not send"
