"""The catalog: every item a space can see, found by name, with the chain it stands on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from heapq import nlargest
from itertools import pairwise
from typing import get_args

from kiwi_mcp.catalog.chain import judge, unsound, walk
from kiwi_mcp.catalog.entry import Broken, Entry
from kiwi_mcp.catalog.files import Stamps, are_fresh
from kiwi_mcp.catalog.mcp import McpSource, is_accepted, refuse_unaccepted
from kiwi_mcp.catalog.read import Opened
from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.catalog.registry import RegistrySource
from kiwi_mcp.catalog.seeds import BUILTIN
from kiwi_mcp.catalog.source import FolderSource, ItemSource
from kiwi_mcp.catalog.types import TypeSheets
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, MissingLink, NotFound, ToolNotFound, VersionNotFound
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Pin
from kiwi_mcp.manifest.sheets import Sheets, load_sheets
from kiwi_mcp.manifest.trust import FILE_NAME as TRUST_FILE
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.registry import Registry

FOLDERS: tuple[Source, ...] = ("project", "user", "builtin")
"""The sources that are looked through at no cost."""

_KEPT_CHAINS = 4_096
_LIKELY = 50
_ORDER: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The item that answers to a name, those it hides, and the stamps all of this rests on."""

    opened: Opened
    hidden: tuple[str, ...]
    stamps: Stamps
    rivals: tuple[str, ...] = ()
    """The full names of what several MCP servers offer under the name, where that is how it was asked for."""


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A chain, and what it was made from."""

    chain: Chain
    stamps: Stamps
    generation: tuple[int, ...]
    sheets: Sheets


class Catalog:
    """Every item of a space. Names resolve by the order of sources; built-in links are never replaced."""

    def __init__(
        self,
        space: Space,
        *,
        sheets: Sheets | None = None,
        sources: Sequence[ItemSource] | None = None,
        registry: Callable[[], Registry] | None = None,
        definitions: Callable[[], Definitions | None] | None = None,
    ) -> None:
        self.space = space
        self._sheets = TypeSheets(space.project_ai / "types").now if sheets is None else lambda: sheets
        self._sources = tuple(sources_of(space, registry, definitions) if sources is None else sources)
        names = {source.name for source in self._sources}
        self._is_users = "user" in names and "project" not in names
        self._chains: dict[str, _Resolved] = {}
        self._listed: dict[tuple[Source, ...], tuple[tuple[int, ...], Sequence[Entry]]] = {}

    @property
    def sheets(self) -> Sheets:
        """The type sheets that hold in this space now."""
        return self._sheets()

    def find(self, ref: str, *, source: Source | None = None) -> Tool:
        """Return the item a reference asks for; with a source, the one of that source."""
        self._sync(self.sheets)
        wanted = self._meant(ref) if source is None else replace(Ref.parse(ref), source=source)
        return self._find(wanted).opened.tool

    def resolve(self, ref: str) -> Chain:
        """Return the item a reference asks for, with all that it stands on."""
        sheets = self.sheets
        generation = self._sync(sheets)
        known = self._chains.get(ref)
        if known and known.generation == generation and known.sheets is sheets and are_fresh(known.stamps):
            return known.chain
        resolved = self._resolve(self._meant(ref), sheets, generation)
        if len(self._chains) >= _KEPT_CHAINS:
            self._chains.clear()
        self._chains[ref] = resolved
        return resolved.chain

    def below(self, tool: Tool) -> Chain:
        """Return what an item stands on, seen from where the item is at home."""
        sheets = self.sheets
        wanted = Ref.parse(tool.manifest.executor or "")
        return self._resolve(wanted, sheets, self._sync(sheets), tool.origin.source).chain

    def all(self, sources: Collection[Source] = FOLDERS) -> Sequence[Entry]:
        """Return every item of some sources, hidden ones too, by name; the same object as long as nothing changes."""
        asked = [source for source in self._sources if self._is_meant(source, sources)]
        sheets = self.sheets
        generation = tuple(source.refresh(sheets) for source in asked)
        key = tuple(source.name for source in asked)
        if key not in self._listed or generation != self._listed[key][0]:
            found = [entry for source in asked for entry in source.entries()]
            self._listed[key] = (generation, tuple(sorted(found, key=lambda entry: (entry.tool_id, entry.identity))))
        return self._listed[key][1]

    def sources(self, names: Collection[Source]) -> Sequence[ItemSource]:
        """Return the sources that some names stand for here."""
        return [source for source in self._sources if self._is_meant(source, names)]

    def generation(self, sources: Collection[Source]) -> tuple[int, ...]:
        """Return numbers that change when an item of some sources is seen to come or to go."""
        sheets = self.sheets
        return tuple(source.sync(sheets) for source in self._sources if self._is_meant(source, sources))

    def _is_meant(self, source: ItemSource, names: Collection[Source]) -> bool:
        return source.name in names or (self._is_users and source.name == "user" and "project" in names)

    @property
    def has_servers(self) -> bool:
        """Whether MCP servers are known here whose items may be called."""
        offered = [source for source in self._sources if isinstance(source, McpSource)]
        for source in offered:
            source.sync(self.sheets)
        return any(not source.is_empty for source in offered)

    def servers(self) -> Sequence[str]:
        """Return the MCP servers that are known here and offer something, those that offer most first."""
        sizes: dict[str, int] = {}
        for source in self._sources:
            if isinstance(source, McpSource):
                source.sync(self.sheets)
                sizes |= source.sizes
        return sorted(filter(sizes.get, sizes), key=lambda name: (-sizes[name], name))

    def meant_hosts(self, server: Tool) -> tuple[str, ...]:
        """Return the hosts beyond the public network that the owner meant by accepting an MCP server as it is."""
        offered = [source for source in self._sources if isinstance(source, McpSource)]
        return tuple(host for source in offered if (host := source.meant_host(server)))

    def is_meant(self, server: Tool) -> bool:
        """Whether the owner added or accepted an MCP server as it is, and so meant what its manifest asks for."""
        return any(source.is_meant(server) for source in self._sources if isinstance(source, McpSource))

    def faults(self) -> Sequence[KiwiError]:
        """Return why sources could not be asked when they last were, if any could not."""
        return [source.fault for source in self._sources if source.fault]

    def broken(self) -> Sequence[Broken]:
        """Return the files that look like items and cannot be read, each with its error."""
        self._refresh()
        return [broken for source in self._sources for broken in source.broken()]

    def seen_broken(self, sources: Collection[Source]) -> Sequence[Broken]:
        """Return those of some sources, as they were when these were last looked through."""
        asked = (source for source in self._sources if self._is_meant(source, sources))
        return [broken for source in asked for broken in source.broken()]

    def shadows(self, tool: Tool) -> tuple[str, ...]:
        """Return one sentence for each item that answers to the same name and is not used."""
        ranked = [(home, entry) for home, entry in self._ranked(Ref(tool.id)) if isinstance(entry, Entry)]
        if not ranked or ranked[0][1].identity != tool.identity:
            return ()
        used = ranked[0][1]
        return tuple(_sentence(used, entry) for entry in _hiding(used, ranked, tool.digest))

    def is_reserved(self, name: str) -> bool:
        """Whether the name is that of a built-in link, which no other item can replace."""
        builtin = (source for source in self._sources if source.name == "builtin")
        return any(entry.tool_type in _link_types() for source in builtin for entry in source.named(Ref(name)))

    def near(self, name: str) -> Sequence[str]:
        """Return names that were perhaps meant."""
        wanted = name[:128].lower()
        parts = [wanted[at : at + 2] for at in range(len(wanted) - 1)]
        names = sorted({known for source in self._sources for known in source.names()})
        # Comparing closely is slow, so only names that share the most pairs of letters are compared.
        likely = nlargest(_LIKELY, names, key=lambda known: sum(part in known for part in parts))
        return get_close_matches(wanted, likely, n=3, cutoff=0.6)

    def _meant(self, text: str) -> Ref:
        """Return what a reference asks for: `server/name` is first what that MCP server offers, then what is published.

        An executor is never meant so: what is published stands on what is published.
        """
        wanted = Ref.parse(text)
        if text.partition("@")[0].count("/") != 1:
            return wanted
        offered = replace(wanted, source="mcp")
        known = (entry for source in self._sources if source.name == "mcp" for entry in source.named(offered))
        return offered if any(entry.namespace == wanted.namespace for entry in known) else wanted

    def _sync(self, sheets: Sheets) -> tuple[int, ...]:
        return tuple(source.sync(sheets) for source in self._sources)

    def _refresh(self) -> tuple[int, ...]:
        sheets = self.sheets
        return tuple(source.refresh(sheets) for source in self._sources)

    def _resolve(self, wanted: Ref, sheets: Sheets, generation: tuple[int, ...], home: Source = "project") -> _Resolved:
        choices = [self._find(wanted, home=home)]
        _refuse_ambiguous(choices[0])

        def below(links: Sequence[Tool]) -> Tool:
            choices.append(self._find_executor(links))
            return choices[-1].opened.tool

        links = walk(choices[0].opened.tool, below)
        for link in links:
            refuse_unaccepted(link)
        chain = Chain(
            links,
            judge(links, sheets).driver,
            shadowed=tuple(sentence for choice in choices for sentence in choice.hidden),
            notes=tuple(note for link in links for note in self._home(link).notes(link)),
            drift=(*self._drift(links), *self._server_drift(links)),
            faults=tuple(unsound(links, sheets)),
            project=self.space.project,
        )
        stamps = tuple(stamp for choice in choices for stamp in choice.stamps)
        return _Resolved(chain, stamps, generation, sheets)

    def _home(self, tool: Tool) -> ItemSource:
        return next(source for source in self._sources if source.name == tool.origin.source)

    def _drift(self, links: Sequence[Tool]) -> Iterator[str]:
        for link, below in pairwise(links):
            pin = self._home(link).pin(link)
            if pin and pin.digest != f"sha256:{below.digest}":
                yield f"{link.identity} was published on {pin.name} and runs on {below.identity}"

    def _server_drift(self, links: Sequence[Tool]) -> Iterator[str]:
        for source in self._sources:
            if isinstance(source, McpSource):
                yield from source.drift(links)

    def _find_executor(self, links: Sequence[Tool]) -> _Choice:
        executor, names = links[-1].manifest.executor or "", [link.id for link in links]
        try:
            wanted = Ref.parse(executor)
            pin = self._home(links[-1]).pin(links[-1])
            # What a server offers stands on that server, wherever the server is at home.
            is_offered = links[-1].origin.source == "mcp" and wanted.source is not None
            home = wanted.source if is_offered and wanted.source else links[-1].origin.source
            return self._find(self._pinned(wanted, pin) if pin else wanted, home=home)
        except VersionNotFound as error:
            raise MissingLink(executor, chain=names, reason=f" in that version ({error.message})") from error
        except (NotFound, InvalidRequest) as error:
            raise MissingLink(executor, chain=names) from error

    def _pinned(self, wanted: Ref, pin: Pin) -> Ref:
        """Return which executor a published version stands on.

        What ships with Kiwi is taken from this installation, whichever was there when the version was published, and
        a reserved name means that whatever the pin says: the version's digest covers the name and not the pin.
        """
        if wanted.source is None and self.is_reserved(wanted.name):
            return replace(wanted, source="builtin", namespace=BUILTIN_NAMESPACE)
        if pin.is_builtin:
            return wanted if wanted.source else replace(wanted, source="registry", namespace=BUILTIN_NAMESPACE)
        return Ref(pin.name.tool_id, "registry", pin.name.namespace, pin.name.version)

    def _find(self, wanted: Ref, *, home: Source = "project") -> _Choice:
        if self._is_users and wanted.source == "project":
            wanted = replace(wanted, source="user")
        choice = self._choose(wanted, home, is_last=False)
        if choice is None:
            self._refresh()
            choice = self._choose(wanted, home, is_last=True)
        if choice is None:
            for fault in self.faults():
                raise fault.with_traceback(None)
            for source in self._sources:
                if versions := source.withdrawn(wanted):
                    raise _only_yanked(wanted.name, versions)
                if isinstance(source, McpSource) and (servers := source.gone(wanted)):
                    raise _offered_no_more(wanted.name, servers)
            raise ToolNotFound(wanted.name, near=self.near(wanted.name))
        return choice

    def _choose(self, wanted: Ref, home: Source, *, is_last: bool) -> _Choice | None:
        """Return the best answer to a reference, or None where a closer look at the files may give another.

        What is at home in one source never stands on what a source ahead of it brings along: a project cannot put its
        own runtime below the user's tools.
        """
        reach = _ORDER[_ORDER.index(home) :]
        ranked = self._ranked(wanted)
        within = [(source, found) for source, found in ranked if source.name in reach]
        asked = [(source, found) for source, found in within if wanted.is_from(found.source, found.namespace)]
        fitting = [
            (source, found)
            for source, found in asked
            if isinstance(found, Broken) or (wanted.covers(found.version) and _has(source, found, wanted.digest))
        ]
        if not fitting:
            if asked:
                found = [entry.version for _, entry in asked if isinstance(entry, Entry)]
                raise VersionNotFound(wanted.name, wanted.version or "", found=found)
            return None
        source, used = fitting[0]
        if isinstance(used, Broken):
            if is_last:
                raise used.error.with_traceback(None)
            return None
        opened = source.open(used)
        if opened is None:
            return None
        others = [(place, entry) for place, entry in ranked if isinstance(entry, Entry) and entry is not used]
        stamps = tuple((entry.path, place.stamp(entry)) for place, entry in others)
        # Whoever asks by identity knows of the others.
        hidden = () if wanted.source else tuple(_hiding(used, others, opened.tool.digest))
        compared = () if wanted.source else tuple(_hidden(used, others))
        stamps += tuple(stamp for place, entry in compared for stamp in _stamps_of(place, entry))
        rivals = [entry for entry in (used, *hidden) if entry.source == "mcp"] if used.source == "mcp" else []
        return _Choice(
            opened,
            tuple(_sentence(used, entry) for entry in hidden),
            (*opened.stamps, *stamps),
            tuple(_full_name(entry) for entry in rivals) if len(rivals) > 1 else (),
        )

    def _ranked(self, ref: Ref) -> list[tuple[ItemSource, Entry | Broken]]:
        """Return all that answers to a name, what is used first; broken files count where a source has nothing else."""
        ranked: list[tuple[ItemSource, Entry | Broken]] = []
        for source in self._sources:
            entries = source.named(ref)
            ranked += [(source, entry) for entry in entries]
            if not entries:
                ranked += [(source, broken) for broken in source.broken() if broken.stem == ref.name]
        if self.is_reserved(ref.name):
            ranked.sort(key=lambda pair: pair[0].name != "builtin")
        return ranked


@cache
def _link_types() -> frozenset[str]:
    # By the built-in sheets alone: a project that changes a sheet must not thereby free a name.
    return frozenset(kind for sheet in load_sheets().by_type.values() for kind in sheet.executor_types)


def _is_same(home: ItemSource, entry: Entry, digest: str) -> bool:
    try:
        other = home.open(entry)
    except KiwiError:
        return False
    return other is not None and other.tool.digest == digest


def _stamps_of(home: ItemSource, entry: Entry) -> Stamps:
    """Return the stamps of all files by which an item was found to be the same as another one or not."""
    try:
        opened = home.open(entry) if entry.source != "mcp" else None
    except KiwiError:
        return ()
    return opened.stamps if opened else ()


def _only_yanked(name: str, versions: Sequence[str]) -> NotFound:
    return NotFound(
        f"Every version of {name!r} that could be meant is yanked: {', '.join(versions[:10])}.",
        suggestion=f"Ask for one exactly, such as `{name}@{versions[0]}`, or let its publisher take the yank back.",
        tool_id=name,
        versions=list(versions),
    )


def _offered_no_more(name: str, servers: Sequence[str]) -> ToolNotFound:
    fault = ToolNotFound(name)
    fault.message = f"{' and '.join(servers)} no longer {'offers' if len(servers) == 1 else 'offer'} {name!r}."
    fault.suggestion = f"`kiwi mcp list {servers[0]}` shows what it offers, and `search` what else there is."
    return fault


def _hidden(used: Entry, ranked: Sequence[tuple[ItemSource, Entry]]) -> Iterator[tuple[ItemSource, Entry]]:
    """Give those that answer to the same name and are not used; of a published item, the version that would be."""
    seen: set[tuple[Source, str]] = {(used.source, used.namespace)} if used.source == "registry" else set()
    for home, entry in ranked:
        key = (entry.source, entry.namespace)
        if entry is not used and key not in seen:
            yield home, entry
        if entry.source == "registry":
            seen.add(key)


def _hiding(used: Entry, ranked: Sequence[tuple[ItemSource, Entry]], digest: str) -> Iterator[Entry]:
    """Give what is hidden and worth telling: an equal copy is not, nor what the owner has not accepted."""
    for home, entry in _hidden(used, ranked):
        # Two servers that describe a tool in the same words are still two, with an account each perhaps.
        is_told = is_accepted(entry) if entry.source == "mcp" else not _is_same(home, entry, digest)
        if is_told:
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


def _has(home: ItemSource, entry: Entry, digest: str) -> bool:
    return not digest or _is_same(home, entry, digest)


def sources_of(
    space: Space,
    registry: Callable[[], Registry] | None = None,
    definitions: Callable[[], Definitions | None] | None = None,
) -> Sequence[ItemSource]:
    """Return the sources of a space, in the order in which short names resolve."""
    trust_file = space.user / TRUST_FILE
    project = FolderSource("project", space.project_ai, cache=space.cache, trust_file=trust_file)
    user = FolderSource("user", space.user, cache=space.cache, trust_file=trust_file)
    builtin = FolderSource("builtin", BUILTIN, namespace="kiwi", rest=1.0)
    published = (RegistrySource(registry, space.cache, trust_file),) if registry else ()
    offered = (McpSource(definitions, space),) if definitions else ()
    # In the folder above the user's own `.ai`, what is there is the user's, by the names that it has everywhere else.
    is_one = space.user.resolve() == space.project_ai.resolve()
    return (*(() if is_one else (project,)), user, *published, *offered, builtin)


def _sentence(used: Entry, hidden: Entry) -> str:
    where = "" if hidden.path == hidden.identity else f" ({hidden.path})"
    return f"{used.identity} is used, and hides {hidden.identity}{where}"


def _full_name(entry: Entry) -> str:
    return entry.identity.partition("@")[0]
