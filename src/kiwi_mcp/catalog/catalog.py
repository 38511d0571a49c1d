"""The catalog: every item a space can see, found by name, with its chain."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from heapq import nlargest
from itertools import pairwise
from typing import TypeAlias, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import OpenedItem
from kiwi_mcp.catalog.mcp_source import McpSource, is_accepted, refuse_unaccepted
from kiwi_mcp.catalog.references import (
    MAX_REFERENCES,
    Ref,
    Reference,
    circles_in,
    inheriting,
    references_in,
    required_servers,
    text_item,
)
from kiwi_mcp.catalog.registry_source import RegistrySource
from kiwi_mcp.catalog.release import BUILTIN
from kiwi_mcp.catalog.source import BrokenFile, FolderSource, ItemSource
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.cards import Card, part_of_card
from kiwi_mcp.domain.errors import (
    ChainCycle,
    ChainMistyped,
    ChainTooDeep,
    IntegrityMismatch,
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    MissingLink,
    NotFound,
    ToolNotFound,
    VersionNotFound,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS, SUBPROCESS, Chain, ItemType, ReferredItem, Source, Tool, TypeTraits
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Pin
from kiwi_mcp.manifest import markdown, permissions
from kiwi_mcp.manifest.files import Stamps, are_fresh
from kiwi_mcp.manifest.formats import formats_for
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.runtime import has_providers
from kiwi_mcp.manifest.trust import FILE_NAME as TRUST_FILE
from kiwi_mcp.manifest.trust import has_passed
from kiwi_mcp.manifest.type_specs import PROVIDERS, TypeSheets, TypeSpec, TypeSpecs, load_type_specs
from kiwi_mcp.primitives.file_watch import watch
from kiwi_mcp.primitives.http.addresses import local_network_host
from kiwi_mcp.store.mcp_definitions import McpDefinitions
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import MAX_LINKS

FOLDERS: tuple[Source, ...] = ("project", "user", "builtin")
"""The sources that are looked through at no cost."""

_KEPT_CHAINS = 4_096
MEMORY_ITEMS = ("directives", "knowledge", "skills")
"""The folders of the memory with items in them: no tool is in it."""
_LIKELY, _ALIKE = 50, 0.75
_ORDER: tuple[Source, ...] = get_args(Source)


class _Choice(Struct, frozen=True):
    """The item that answers to a name, those it hides, and the stamps all of this rests on."""

    opened: OpenedItem
    hidden: tuple[str, ...]
    stamps: Stamps
    rivals: tuple[str, ...] = ()
    """The full names of what several MCP servers offer under the name, where that is how it was asked for."""


class _Resolved(Struct, frozen=True):
    """A chain, and what it was made from."""

    chain: Chain
    stamps: Stamps
    generation: tuple[int, ...]
    sheets: TypeSpecs
    valid_until: str
    """When the first key that vouches for a link expires; empty where none does."""


class Unchanged(Struct, frozen=True):
    """An item or a chain that was found, and the state of all that it depends on."""

    found: Tool | Chain
    generation: int
    store_state: object
    valid_until: str


_Found = TypeVar("_Found", bound=Tool | Chain)
_Asked: TypeAlias = tuple[str, Source | None, ItemType | None, bool]
"""A reference, the source and the type that were asked for, and whether its chain was."""


class Catalog:
    """Every item of a space. Names resolve by the order of sources; built-in links are never replaced."""

    def __init__(
        self,
        space: Space,
        *,
        sheets: TypeSpecs | None = None,
        sources: Sequence[ItemSource] | None = None,
        registry: Callable[[], Registry] | None = None,
        definitions: Callable[[], McpDefinitions | None] | None = None,
        store_state: Callable[[], object] | None = None,
    ) -> None:
        """Make the catalog of a space.

        `store_state` gives another value whenever the store may have changed. With it, an item that was found is found
        again without a look at its files, as long as no watched file changed either.
        """
        self.space = space
        self._store_state = store_state
        self._seen: dict[_Asked, Tool | Chain] = {}
        self._unchanged: dict[_Asked, Unchanged] = {}
        own = TypeSheets(space.user / "types", space.project_ai / "types")
        self._sheets = own.now if sheets is None else lambda: sheets
        self._files = own.files
        self._sources = tuple(sources_of(space, registry, definitions) if sources is None else sources)
        self._by_name = {source.name: source for source in self._sources}
        self._servers = [source for source in self._sources if isinstance(source, McpSource)]
        self._builtin = [source for source in self._sources if SOURCE_TRAITS[source.name].is_built_in]
        # In the user's own folder, a request for the project's items means the user's.
        is_users = "user" in self._by_name and "project" not in self._by_name and "project" in space.sources
        self._stands_for: Mapping[Source | None, Source] = {"project": "user"} if is_users else {}
        self._chains: dict[tuple[str, ItemType | None], _Resolved] = {}
        self._searchable: dict[tuple[Source, str], tuple[Sequence[Card], Sequence[Card]]] = {}
        self._texts: dict[str, tuple[tuple[object, Card], Sequence[Card]]] = {}
        self._listed: dict[tuple[tuple[Source, str], ...], tuple[tuple[int, ...], Sequence[Card]]] = {}

    @property
    def sheets(self) -> TypeSpecs:
        """The type specs that apply in this space now."""
        return self._sheets()

    def find(self, ref: str, *, source: Source | None = None, item_type: ItemType | None = None) -> Tool:
        """Return the item a reference asks for; with a source, the one of that source, with a type, one of that type.

        A directive or knowledge is never an item of another type. `tool` may be said of everything: it means an item
        of another type where no tool has the name.
        """
        known = self.unchanged(ref, item_type, source, is_chain=False)
        if known is not None and isinstance(known.found, Tool):
            return known.found

        def look() -> tuple[Tool, Stamps, str]:
            self._sync(self.sheets)
            wanted = self._qualified(ref) if source is None else replace(Ref.parse(ref), source=source)
            choice = self._find(replace(wanted, item_type=item_type))
            return choice.opened.tool, choice.stamps, choice.opened.valid_until

        return self._look((ref, source, item_type, False), look)

    def resolve(self, ref: str, *, item_type: ItemType | None = None) -> Chain:
        """Return the item a reference asks for, with its executors; `item_type` is that of `find`."""
        known = self.unchanged(ref, item_type)
        if known is not None and isinstance(known.found, Chain):
            return known.found

        def look() -> tuple[Chain, Stamps, str]:
            resolved = self._resolve_now(ref, item_type)
            return resolved.chain, resolved.stamps, resolved.valid_until

        return self._look((ref, None, item_type, True), look)

    def unchanged(
        self, ref: str, item_type: ItemType | None, source: Source | None = None, *, is_chain: bool = True
    ) -> Unchanged | None:
        """Return what `resolve` gave, or without `is_chain` what `find` gave, if nothing it depends on has changed."""
        known = self._unchanged.get((ref, source, item_type, is_chain))
        if (
            known is None
            or self._store_state is None
            or known.generation != watch.generation()
            or known.store_state != self._store_state()
            or (known.valid_until and has_passed(known.valid_until))
        ):
            return None
        return known

    def _look(self, asked: _Asked, look: Callable[[], tuple[_Found, Stamps, str]]) -> _Found:
        """Return what a look finds. What is found twice is watched, and given again until something changes."""
        found, stamps, valid_until = look()
        state = self._store_state
        if state is None or state() != state():  # the store cannot tell that it did not change
            return found
        if self._seen.get(asked) is not found:
            if len(self._seen) >= _KEPT_CHAINS:
                self._seen.clear()
                self._unchanged.clear()
            self._seen[asked] = found
            return found
        looked = [source.looks_at() for source in self._sources]
        # What is in no file is in the store, which has a state.
        own = [path for path, _ in stamps if path.startswith("/")]
        generation = watch.watch(
            [*own, *(path for files, _ in looked for path in files)],
            [*self._files(), *(path for _, folders in looked for path in folders)],
        )
        entry = Unchanged(found, generation, state(), valid_until)
        if look()[0] is found:  # once more, now that it is watched
            self._unchanged[asked] = entry
        return found

    def _resolve_now(self, ref: str, item_type: ItemType | None) -> _Resolved:
        sheets = self.sheets
        generation = self._sync(sheets)
        known = self._chains.get((ref, item_type))
        is_same = known is not None and known.generation == generation and known.sheets is sheets
        if known and is_same and are_fresh(known.stamps) and not has_passed(known.valid_until):
            return known
        resolved = self._resolve(replace(self._qualified(ref), item_type=item_type), sheets, generation)
        if len(self._chains) >= _KEPT_CHAINS:
            self._chains.clear()
        self._chains[ref, item_type] = resolved
        return resolved

    def below(self, tool: Tool) -> Chain:
        """Return the chain of an item's executor, as seen from the item's own source."""
        sheets = self.sheets
        wanted = replace(Ref.parse(tool.manifest.executor or ""), item_type="tool")
        return self._resolve(wanted, sheets, self._sync(sheets), tool.origin.source).chain

    def references(self, tool: Tool) -> tuple[Sequence[ReferredItem], Sequence[Issue]]:
        """Return the items that an item names, directly or through others, and an issue for each that is not here."""
        sheets = self.sheets
        self._sync(sheets)
        found, issues = self._referred(tool, sheets)
        return [one for one, _ in found], [issue for issue, _ in issues]

    def all(self, sources: Collection[Source] = FOLDERS) -> Sequence[Card]:
        """Return every item of some sources, hidden ones too, by name; the same object as long as nothing changes."""
        return self.cards(self.sources(sources))

    def cards(self, asked: Sequence[ItemSource]) -> Sequence[Card]:
        """Return every item of some of its sources, as `all` does."""
        sheets = self.sheets
        generation = tuple(source.refresh(sheets) for source in asked)
        key = tuple((source.name, source.home) for source in asked)
        if key not in self._listed or generation != self._listed[key][0]:
            found = [entry for source in asked for entry in source.entries()]
            self._listed[key] = (generation, tuple(sorted(found, key=lambda entry: (entry.tool_id, entry.identity))))
        return self._listed[key][1]

    def searchable(self, source: ItemSource) -> Sequence[Card]:
        """Return the cards of a source as search reads them: a text also by its parts; the same object if unchanged."""
        cards = self.cards((source,))
        known = self._searchable.get((source.name, source.home))
        if known is None or known[0] is not cards:
            known = cards, tuple(one for card in cards for one in (card, *self._parts(source, card)))
            self._searchable[source.name, source.home] = known
        return known[1]

    def _parts(self, source: ItemSource, card: Card) -> Sequence[Card]:
        """Return a card for each part of a text, with its title in front; none for other items and for sealed ones."""
        sheet = self.sheets.get(card.tool_type)
        if sheet is None or "links" not in sheet.words or not SOURCE_TRAITS[card.source].is_editable:
            return ()
        stamp = source.stamp(card)
        known = self._texts.get(card.path)
        if known is None or known[0] != (stamp, card):
            try:
                opened = source.open(card)
                found = markdown.sections(markdown.body(text_item(opened.tool).text)) if opened else ()
            except KiwiError:  # it is listed among the broken files
                found = ()
            title = card.description.partition("\n")[0]
            parts = [part_of_card(card, at, f"{title}: {text}") for at, (_, text) in enumerate(found, 1)]
            known = self._texts[card.path] = (stamp, card), parts
        return known[1]

    def sources(self, names: Collection[Source]) -> Sequence[ItemSource]:
        """Return the sources that some names stand for here."""
        meant = {*names, *(self._stands_for.get(name) for name in names)}
        return [source for source in self._sources if source.name in meant]

    def generation(self, sources: Collection[Source]) -> tuple[int, ...]:
        """Return numbers that change when an item of some sources is seen to come or to go."""
        sheets = self.sheets
        return tuple(source.sync(sheets) for source in self.sources(sources))

    @property
    def has_servers(self) -> bool:
        """Whether there are MCP servers here with items that can be called."""
        for source in self._servers:
            source.sync(self.sheets)
        return any(not source.is_empty for source in self._servers)

    def servers(self) -> Sequence[str]:
        """Return the MCP servers that are known here and offer something, those that offer most first."""
        sizes: dict[str, int] = {}
        for source in self._servers:
            source.sync(self.sheets)
            sizes |= source.sizes
        return sorted(filter(sizes.get, sizes), key=lambda name: (-sizes[name], name))

    def meant_hosts(self, server: Tool) -> tuple[str, ...]:
        """Return the hosts beyond the public network that the owner meant by accepting an MCP server as it is."""
        host = local_network_host(as_text(server.manifest.config.get("url"))) if self.is_meant(server) else ""
        return (host,) if host else ()

    def is_meant(self, server: Tool) -> bool:
        """Whether the owner added or accepted an MCP server as it is, and so meant what its manifest asks for."""
        return any(source.is_meant(server) for source in self._servers)

    def faults(self) -> Sequence[KiwiError]:
        """Return why sources could not be asked when they last were, if any could not."""
        return [source.fault for source in self._sources if source.fault]

    def broken(self) -> Sequence[BrokenFile]:
        """Return the files that look like items and cannot be read, each with its error."""
        self._refresh()
        return [broken for source in self._sources for broken in source.broken()]

    def seen_broken(self, sources: Collection[Source]) -> Sequence[BrokenFile]:
        """Return those of some sources, as they were when these were last looked through."""
        return [broken for source in self.sources(sources) for broken in source.broken()]

    def shadows(self, tool: Tool) -> tuple[str, ...]:
        """Return one sentence for each item that answers to the same name and is not used."""
        ranked = [(home, entry) for home, entry in self._ranked(Ref(tool.id)) if isinstance(entry, Card)]
        if not ranked or ranked[0][1].identity != tool.identity:
            return ()
        used = ranked[0][1]
        return tuple(self._sentence(used, entry) for entry in _hiding(used, ranked, tool.digest))

    def version_warning(self, tool: Tool) -> JsonObject:
        """Return `version_warning` if a newer version of an item is in another source; it is never used by itself."""
        ranked = [entry for _, entry in self._ranked(Ref(tool.id, item_type=tool.item_type)) if isinstance(entry, Card)]
        used = next((entry for entry in ranked if entry.identity == tool.identity), None)
        others = [one for one in ranked if used and one.source != used.source and one.semver > used.semver]
        newer = max(others, key=lambda one: one.semver, default=None)
        return {"version_warning": f"{newer.identity} is newer than {tool.identity}, which is used"} if newer else {}

    def is_reserved(self, name: str) -> bool:
        """Whether the name is that of a built-in link, which no other item can replace."""
        return any(entry.tool_type in _link_types() for source in self._builtin for entry in source.named(Ref(name)))

    def is_shipped(self, name: str) -> bool:
        """Whether an item of that name ships with Kiwi."""
        return any(source.named(Ref(name)) for source in self._builtin)

    def near(self, name: str) -> Sequence[str]:
        """Return names that were perhaps meant."""
        wanted = name[:128].lower()
        parts = [wanted[at : at + 2] for at in range(len(wanted) - 1)]
        names = sorted({known for source in self._sources for known in source.names()})
        # Comparing closely is slow, so only names that share the most pairs of letters are compared.
        likely = nlargest(_LIKELY, names, key=lambda known: sum(part in known for part in parts))
        swapped = [known for known in likely if sorted(known.lower()) == sorted(wanted)]
        return swapped or difflib.get_close_matches(wanted, likely, n=3, cutoff=_ALIKE)

    def _qualified(self, text: str) -> Ref:
        """Return what a reference asks for: `server/name` is first an item of that MCP server, then a published item.

        This does not apply to executors: the executor of a published item is always a published item.
        """
        wanted = Ref.parse(text)
        if text.partition("@")[0].count("/") != 1:
            return wanted
        offered = replace(wanted, source="mcp")
        servers = (source for source in self._sources if SOURCE_TRAITS[source.name].is_offered)
        known = (entry for source in servers for entry in source.named(offered))
        return offered if any(entry.namespace == wanted.namespace for entry in known) else wanted

    def _sync(self, sheets: TypeSpecs) -> tuple[int, ...]:
        return tuple(source.sync(sheets) for source in self._sources)

    def _refresh(self) -> None:
        sheets = self.sheets
        for source in self._sources:
            source.refresh(sheets)

    def _resolve(
        self, wanted: Ref, sheets: TypeSpecs, generation: tuple[int, ...], home: Source = "project"
    ) -> _Resolved:
        choices = [self._find(wanted, home=home)]
        _refuse_ambiguous(choices[0])
        links: tuple[Tool, ...] = (choices[0].opened.tool,)
        while links[-1].manifest.executor:
            choice = self._find_executor(links)
            following = choice.opened.tool
            names = (*(link.id for link in links), following.id)
            if any(link.origin.path == following.origin.path for link in links):
                raise ChainCycle(names)
            if len(links) == MAX_LINKS:
                raise ChainTooDeep(names, limit=MAX_LINKS)
            choices.append(choice)
            links = (*links, following)
        for link in links:
            refuse_unaccepted(link)
        referred, absent = self._referred(links[0], sheets)
        choices += [choice for _, choice in referred]
        references = tuple(one for one, _ in referred)
        faults = [*unsound(links, sheets), *(issue for issue, is_required in absent if is_required)]
        faults += circles_in(links[0], references)
        try:
            links = (inheriting(links[0], references), *links[1:]) if not faults else links
        except InvalidManifest as error:
            faults += error.issues
        chain = Chain(
            links,
            traits_of(links, sheets),
            shadowed=tuple(sentence for choice in choices for sentence in choice.hidden),
            notes=(
                *(note for link in links for note in self._home(link).notes(link)),
                *self._absent_servers([links[0], *(one.tool for one in references)], sheets),
            ),
            drift=tuple(self._drift(links)),
            faults=tuple(faults),
            references=references,
            project=self.space.project,
        )
        stamps = tuple(stamp for choice in choices for stamp in choice.stamps)
        ends = [choice.opened.valid_until for choice in choices if choice.opened.valid_until]
        return _Resolved(chain, stamps, generation, sheets, min(ends, default=""))

    def _referred(
        self, tool: Tool, sheets: TypeSpecs
    ) -> tuple[list[tuple[ReferredItem, _Choice]], list[tuple[Issue, bool]]]:
        """Return what an item names, and what it names in vain, with whether it needs that."""
        found: dict[tuple[str, ItemType, str], tuple[ReferredItem, _Choice]] = {}
        absent: list[tuple[Issue, bool]] = []
        waiting = [tool]
        for one in waiting:
            for reference in references_in(one, sheets):
                choice = self._find_reference(reference, one)
                key = (reference.ref, reference.item_type, one.identity)
                if choice is None:
                    absent.append((reference.absent(), reference.is_required))
                elif key not in found and len(found) < MAX_REFERENCES:
                    named = choice.opened.tool
                    found[key] = ReferredItem(reference.ref, reference.item_type, one.identity, named), choice
                    if named.identity not in {seen.identity for seen in waiting}:
                        waiting.append(named)
        return list(found.values()), absent

    def _find_reference(self, reference: Reference, by: Tool) -> _Choice | None:
        """Return the item that a name in another item means: by name, by identity, or by category and name."""
        category, _, name = reference.ref.rpartition("/")
        forms, pin = [(reference.ref, ""), (name, category)], self.pin(by, reference.ref)
        if pin is not None and not pin.is_builtin:
            forms = [(f"registry/{pin.name}", "")]
        elif by.origin.is_published and not category:  # what was published with it is looked for first
            forms.insert(0, (f"registry/{by.origin.namespace}/{name}", ""))
        for text, home in forms:
            try:
                wanted = replace(Ref.parse(text), item_type=reference.item_type)
                choice = self._choose(wanted, by.origin.source, is_last=True)
            except KiwiError:
                continue
            if choice is not None and home in {"", choice.opened.tool.manifest.category}:
                break
        else:
            return None
        found = f"sha256:{choice.opened.tool.digest}"
        if pin is not None and not pin.is_builtin and found != pin.digest:
            where = f"{by.identity} was published with another"
            raise IntegrityMismatch(name, expected=pin.digest, actual=found, where=where)
        return choice

    def pin(self, tool: Tool, ref: str = "") -> Pin | None:
        """Return which executor an item was published on, or what a name in it meant; None where none is recorded."""
        return self._home(tool).pin(tool, ref)

    def _absent_servers(self, tools: Sequence[Tool], sheets: TypeSpecs) -> Iterator[str]:
        for tool in tools:
            for name in required_servers(tool, sheets):
                known = (entry for _, entry in self._ranked(Ref(name)) if isinstance(entry, Card))
                if not any(sheets.is_server(entry.tool_type) for entry in known):
                    yield f"{tool.id} needs the MCP server {name!r}, which is not here; add it with `kiwi mcp add`"

    def _home(self, tool: Tool) -> ItemSource:
        return self._by_name[tool.origin.source]

    def _drift(self, links: Sequence[Tool]) -> Iterator[str]:
        for link, below in pairwise(links):
            pin = self.pin(link)
            if pin and pin.digest != f"sha256:{below.digest}":
                yield f"{link.identity} was published on {pin.name} and runs on {below.identity}"
        for source in self._servers:
            yield from source.drift(links)

    def _find_executor(self, links: Sequence[Tool]) -> _Choice:
        executor, names = links[-1].manifest.executor or "", [link.id for link in links]
        try:
            wanted = Ref.parse(executor)
            pin = self.pin(links[-1])
            # The executor of an item that a server offers is that server, in whichever source the server is.
            is_offered = links[-1].origin.server and wanted.source is not None
            home = wanted.source if is_offered and wanted.source else links[-1].origin.source
            wanted = self._pinned(wanted, pin) if pin else wanted
            return self._find(replace(wanted, item_type="tool"), home=home)
        except VersionNotFound as error:
            raise MissingLink(executor, chain=names, reason=f" in that version ({error.message})") from error
        except (NotFound, InvalidRequest) as error:
            raise MissingLink(executor, chain=names) from error

    def _pinned(self, wanted: Ref, pin: Pin) -> Ref:
        """Return the executor of a published version.

        An executor that ships with Kiwi is taken from this installation, also if the version was published with another
        one. A reserved name always means the built-in item, regardless of the pin: the version's digest covers the name
        and not the pin.
        """
        if wanted.source is None and self.is_reserved(wanted.name):
            return replace(wanted, source="builtin", namespace=BUILTIN_NAMESPACE)
        if pin.is_builtin:
            return wanted if wanted.source else replace(wanted, source="registry", namespace=BUILTIN_NAMESPACE)
        return Ref(pin.name.tool_id, "registry", pin.name.namespace, pin.name.version)

    def _find(self, wanted: Ref, *, home: Source = "project") -> _Choice:
        wanted = replace(wanted, source=self._stands_for.get(wanted.source, wanted.source))
        choice = self._choose(wanted, home, is_last=False)
        if choice is None:
            self._refresh()
            choice = self._choose(wanted, home, is_last=True)
        if choice is None:
            raise self._not_found(wanted)
        return choice

    def _not_found(self, wanted: Ref) -> KiwiError:
        """Return why nothing answers to a reference."""
        name = wanted.name
        for fault in self.faults():
            return fault.with_traceback(None)
        for source in self._sources:
            if versions := source.withdrawn(wanted):
                return NotFound(
                    f"Every version of {name!r} that could be meant is yanked: {', '.join(versions[:10])}.",
                    suggestion=f"Ask for one exactly, such as `{name}@{versions[0]}`, or let its publisher take the "
                    "yank back.",
                    tool_id=name,
                    versions=list(versions),
                )
            if isinstance(source, McpSource) and (servers := source.gone(wanted)):
                offers = "offers" if len(servers) == 1 else "offer"
                return _named_otherwise(
                    ToolNotFound(name),
                    f"{' and '.join(servers)} no longer {offers} {name!r}.",
                    f"`kiwi mcp list {servers[0]}` shows what it offers, and `search` what else there is.",
                )
        unknown = ToolNotFound(name, near=self.near(name))
        others = [entry for _, entry in self._ranked(replace(wanted, item_type=None)) if isinstance(entry, Card)]
        others = [entry for entry in others if wanted.is_from(entry.source, entry.namespace)]
        if not wanted.item_type or not others:
            return unknown
        kind = self.sheets.item_type(others[0].tool_type)
        return _named_otherwise(
            unknown,
            f"No {wanted.item_type} is named {name!r}; {others[0].identity} is a {kind}.",
            f"Send `item_type: {kind}`, or leave it out.",
        )

    def _choose(self, wanted: Ref, home: Source, *, is_last: bool) -> _Choice | None:
        """Return the best match for a reference, or None if a closer look at the files may give another.

        An item of one source never uses an executor from a source that comes before it: a project cannot put its own
        runtime below the user's tools.
        """
        reach = _ORDER[_ORDER.index(home) :]
        ranked = self._ranked(wanted)
        asked = [pair for pair in ranked if _is_asked(wanted, *pair, reach)]
        if not asked and wanted.item_type == "tool":
            # Requests may call every item a tool, so without a tool of that name the name alone counts.
            ranked = self._ranked(replace(wanted, item_type=None))
            asked = [pair for pair in ranked if _is_asked(wanted, *pair, reach)]
        fitting = [
            (source, found)
            for source, found in asked
            if isinstance(found, BrokenFile)
            or (wanted.covers(found.version) and (not wanted.digest or _is_same(source, found, wanted.digest)))
        ]
        if not fitting:
            if asked:
                found = [entry.version for _, entry in asked if isinstance(entry, Card)]
                raise VersionNotFound(wanted.name, wanted.version or "", found=found)
            return None
        source, used = fitting[0]
        if isinstance(used, BrokenFile):
            if is_last:
                raise used.error.with_traceback(None)
            return None
        opened = source.open(used)
        if opened is None:
            return None
        others = [(place, entry) for place, entry in ranked if isinstance(entry, Card) and entry is not used]
        stamps = tuple((entry.path, place.stamp(entry)) for place, entry in others)
        # A caller that asks by identity knows of the others.
        hidden = () if wanted.source else tuple(_hiding(used, others, opened.tool.digest))
        for place, entry in () if wanted.source else _hidden(used, others):
            # By all of its files, an item was found to be the same as the one in use or not.
            compared = None if SOURCE_TRAITS[entry.source].is_offered else _opened(place, entry)
            stamps += compared.stamps if compared else ()
        is_offered = SOURCE_TRAITS[used.source].is_offered
        rivals = [entry for entry in (used, *hidden) if is_offered and SOURCE_TRAITS[entry.source].is_offered]
        return _Choice(
            opened,
            tuple(self._sentence(used, entry) for entry in hidden),
            (*opened.stamps, *stamps),
            tuple(entry.identity.partition("@")[0] for entry in rivals) if len(rivals) > 1 else (),
        )

    def _ranked(self, ref: Ref) -> list[tuple[ItemSource, Card | BrokenFile]]:
        """Return everything with a name, the one in use first; broken files count if a source has nothing else."""
        ranked: list[tuple[ItemSource, Card | BrokenFile]] = []
        kind, asked, sheets = ref.item_type, replace(ref, item_type=None), self.sheets
        for source in self._sources:
            entries = [one for one in source.named(asked) if kind in {None, sheets.item_type(one.tool_type)}]
            ranked += [(source, entry) for entry in entries]
            if not entries:
                broken = (one for one in source.broken() if one.stem == ref.name)
                ranked += [
                    (source, one) for one in broken if kind is None or sheets.item_type_in(one.kind) in {None, kind}
                ]
        if len(ranked) > 1 and any(_is_users_provider(source, entry) for source, entry in ranked):
            ranked.sort(key=lambda pair: SOURCE_TRAITS[pair[0].name].is_in_project)
        if self.is_reserved(ref.name):
            ranked.sort(key=lambda pair: not SOURCE_TRAITS[pair[0].name].is_built_in)
        return ranked

    def _sentence(self, used: Card, hidden: Card) -> str:
        where = "" if hidden.path == hidden.identity else f" ({hidden.path})"
        kind = self.sheets.item_type(hidden.tool_type)
        how = f"; `item_type: {kind}` asks for that one" if kind != self.sheets.item_type(used.tool_type) else ""
        return f"{used.identity} is used, and hides {hidden.identity}{where}{how}"


def _is_users_provider(home: ItemSource, found: Card | BrokenFile) -> bool:
    """Whether an item is a model provider in the user's space, which no project replaces."""
    if not SOURCE_TRAITS[found.source].is_in_user_space:
        return False
    if isinstance(found, BrokenFile) or found.kind == PROVIDERS.name:
        return found.kind == PROVIDERS.name
    if found.tool_type not in _link_types():
        return False
    opened = _opened(home, found)
    return opened is not None and has_providers(opened.tool.manifest.config)


def _is_asked(wanted: Ref, home: ItemSource, found: Card | BrokenFile, reach: Collection[Source]) -> bool:
    return home.name in reach and wanted.is_from(found.source, found.namespace)


def _named_otherwise(fault: ToolNotFound, message: str, suggestion: str) -> ToolNotFound:
    """Return an error that says where the name is known, and not that nothing has it."""
    fault.is_unknown, fault.message, fault.suggestion = False, message, suggestion
    return fault


@cache
def _link_types() -> frozenset[str]:
    # Use the built-in type specs only: a project that changes a spec must not free a reserved name.
    return frozenset(kind for sheet in load_type_specs().by_type.values() for kind in sheet.executor_types)


def _opened(home: ItemSource, entry: Card) -> OpenedItem | None:
    try:
        return home.open(entry)
    except KiwiError:
        return None


def _is_same(home: ItemSource, entry: Card, digest: str) -> bool:
    other = _opened(home, entry)
    return other is not None and other.tool.digest == digest


def _hidden(used: Card, ranked: Sequence[tuple[ItemSource, Card]]) -> Iterator[tuple[ItemSource, Card]]:
    """Yield the entries of the same name that are not used; of a published item, the version that would be used."""
    seen: set[tuple[Source, str]] = (
        {(used.source, used.namespace)} if SOURCE_TRAITS[used.source].is_published else set()
    )
    for home, entry in ranked:
        key = (entry.source, entry.namespace)
        if entry is not used and key not in seen:
            yield home, entry
        if SOURCE_TRAITS[entry.source].is_published:
            seen.add(key)


def _hiding(used: Card, ranked: Sequence[tuple[ItemSource, Card]], digest: str) -> Iterator[Card]:
    """Yield the hidden entries that are worth reporting: no equal copies, and none that the owner has not accepted."""
    for home, entry in _hidden(used, ranked):
        # Two servers that describe a tool in the same words are still two, with an account each perhaps.
        is_offered = SOURCE_TRAITS[entry.source].is_offered
        if is_accepted(entry) if is_offered else not _is_same(home, entry, digest):
            yield entry


def _refuse_ambiguous(choice: _Choice) -> None:
    """Refuse a short name that several MCP servers answer to, unless what would be run changes nothing."""
    tool, rivals = choice.opened.tool, choice.rivals
    if rivals and tool.manifest.mutates_state:
        raise InvalidRequest(
            f"Several MCP servers offer {tool.id!r}, and it may change something: {', '.join(rivals)}.",
            suggestion="Ask for the one that is meant, by its full name.",
            tool_id=tool.id,
            meant=list(rivals),
        )


def traits_of(links: Sequence[Tool], sheets: TypeSpecs) -> tuple[TypeTraits, ...]:
    """Return the traits of each link's type, after checking that the type is allowed at its position."""
    found: list[TypeSpec] = []
    for index, link in enumerate(links):
        manifest = link.manifest
        sheet = sheets.get(link.manifest.tool_type)
        if sheet is None:
            kind = f"is of the type {manifest.written_type!r}, which no sheet describes"
            raise ChainMistyped(
                [link.id for link in links[: index + 1]],
                reason=f"{manifest.tool_id!r} {kind if manifest.tool_type else 'does not say its `tool_type`'}",
                suggestion=f"Use one of: {', '.join(sheets.types())}; or describe the type in .ai/types/.",
            )
        found.append(sheet)
    for index, sheet in enumerate(found):
        for reason, suggestion in _faults(sheet, links[index:], is_top=index == 0):
            names = [link.id for link in links[: index + 2]]
            raise ChainMistyped(names, reason=reason, suggestion=suggestion)
    return tuple(sheet.traits for sheet in found)


def unsound(links: Sequence[Tool], sheets: TypeSpecs) -> Iterator[Issue]:
    """Yield the values in the links that their types do not allow, except unknown keys, which no driver reads."""
    for link in links:
        sheet = sheets.get(link.manifest.tool_type)
        if sheet is not None:
            schema = {**sheet.config, "additionalProperties": True}
            yield from faults(schema, link.manifest.config, place=f"{link.id}.config", formats=formats_for(""))
            if "permissions" in sheet.words:  # one that is misspelt is refused when it is used, and never ignored
                yield from permissions.permission_faults(link.manifest.config.get("permissions"), sheets)
    top = sheets.traits(links[0].manifest.tool_type)
    for link in links if top.lifetime != "call" else ():
        # A server that is started here has a process, whichever of its items is called.
        is_process = sheets.is_server(link.manifest.tool_type) and link.manifest.executor == SUBPROCESS
        if link.manifest.isolation not in {None, "trusted"} and not is_process:
            # Never weaker than requested: an item that cannot be isolated is not run.
            fix = "Remove it, or use a script instead."
            yield Issue(f"{link.id}.isolation", "asks for a sandbox, and items of this type have no process", fix)


def _faults(sheet: TypeSpec, links: Sequence[Tool], *, is_top: bool) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the first of some links is not allowed at its position."""
    link, *rest = links
    names = [f"`{name}`" for name in sheet.executor_ids] or [f"a {kind}" for kind in sheet.executor_types]
    wanted = f"Let {link.id!r} run on {' or '.join(names)}."
    if sheet.ids and (link.id not in sheet.ids or not link.origin.is_built_in):
        # These are Kiwi's own code; a file cannot become one by saying so.
        reason = f"{link.id!r} calls itself a {sheet.type}, and those are built in: {', '.join(sheet.ids)}"
        yield reason, "Give it another type, and let it run on one of them."
    if rest and sheet.needs_executor == "none":
        yield f"{link.id!r} is a {sheet.type}, which has no executor", f"Remove `executor` from {link.id!r}."
    kind = rest[0].manifest.tool_type if rest else ""
    is_allowed = not sheet.executor_types or kind in sheet.executor_types
    if rest and not (is_allowed and (not sheet.executor_ids or rest[0].id in sheet.executor_ids)):
        yield f"{link.id!r} is a {sheet.type} and cannot run on {rest[0].id!r}, which is a {kind}", wanted
    if not rest and sheet.needs_executor == "required":
        yield f"{link.id!r} is a {sheet.type} and names no executor", wanted
    if not rest and not is_top and not sheet.ids:
        yield f"{link.id!r} is a {sheet.type}, and a chain ends in a primitive", f"Let {link.id!r} run on one."


def sources_of(
    space: Space,
    registry: Callable[[], Registry] | None = None,
    definitions: Callable[[], McpDefinitions | None] | None = None,
) -> Sequence[ItemSource]:
    """Return the sources of a space that its owner wants used, in the order in which short names resolve."""
    trust_file = space.user / TRUST_FILE
    folder = partial(FolderSource, cache=space.cache, trust_file=trust_file)
    project, user = folder("project", space.project_ai), folder("user", space.user)
    # What an older Kiwi kept in the user's folder has the same names in the memory, so that it can be moved there.
    memory = folder("user", space.memory, only=MEMORY_ITEMS)
    builtin = FolderSource("builtin", BUILTIN, namespace="kiwi", cache=space.cache, rest=1.0)
    published = (RegistrySource(registry, space.cache, trust_file),) if registry else ()
    offered = (McpSource(definitions, space),) if definitions else ()
    bases = [(space.project / name).parent for name in space.sources if name not in SOURCE_TRAITS]
    others = (folder("project", base, namespace=base.name.strip("."), only=("skills",)) for base in bases)
    # In the folder above the user's own `.ai`, the items are the user's, with the same names as everywhere else.
    is_one = space.user.resolve() == space.project_ai.resolve()
    found = (*(() if is_one else (project,)), user, memory, *published, *offered, builtin)
    wanted = [one for one in found if one.name in space.sources]
    at = sum(one.name == "project" for one in wanted)
    return (*wanted[:at], *(() if is_one else others), *wanted[at:])
