"""The catalog: every item a space can see, found by name, with the chain it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import get_args

import kiwi_mcp
from kiwi_mcp.catalog.chain import judge, unsound, walk
from kiwi_mcp.catalog.entry import Broken, Entry
from kiwi_mcp.catalog.files import Stamps, are_fresh
from kiwi_mcp.catalog.read import Opened
from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.catalog.source import FolderSource, ItemSource
from kiwi_mcp.catalog.types import TypeSheets
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, MissingLink, ToolNotFound, VersionNotFound
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.manifest.sheets import Sheets, load_sheets

BUILTIN = Path(kiwi_mcp.__file__).parent / "data"
"""The folder of what ships with Kiwi."""

_KEPT_CHAINS = 4_096
_LIKELY = 50
_ORDER: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The item that answers to a name, those it hides, and the stamps all of this rests on."""

    opened: Opened
    hidden: tuple[str, ...]
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A chain, and what it was made from."""

    chain: Chain
    stamps: Stamps
    generation: tuple[int, ...]
    sheets: Sheets


class Catalog:
    """Every item of a space. Short names resolve project, user, built-in; a built-in link is never replaced."""

    def __init__(
        self, space: Space, *, sheets: Sheets | None = None, sources: Sequence[ItemSource] | None = None
    ) -> None:
        self.space = space
        self._sheets = TypeSheets(space.project_ai / "types").now if sheets is None else lambda: sheets
        self._sources = tuple(sources_of(space) if sources is None else sources)
        self._chains: dict[str, _Resolved] = {}
        self._listed: tuple[tuple[int, ...], Sequence[Entry]] = ((), ())

    @property
    def sheets(self) -> Sheets:
        """The type sheets that hold in this space now."""
        return self._sheets()

    def find(self, ref: str, *, source: Source | None = None) -> Tool:
        """Return the item a reference asks for; with a source, the one of that source."""
        wanted = Ref.parse(ref)
        if source is not None:
            wanted = replace(wanted, source=source)
        self._sync(self.sheets)
        return self._find(wanted).opened.tool

    def resolve(self, ref: str) -> Chain:
        """Return the item a reference asks for, with all that it stands on."""
        sheets = self.sheets
        generation = self._sync(sheets)
        known = self._chains.get(ref)
        if known and known.generation == generation and known.sheets is sheets and are_fresh(known.stamps):
            return known.chain
        resolved = self._resolve(Ref.parse(ref), sheets, generation)
        if len(self._chains) >= _KEPT_CHAINS:
            self._chains.clear()
        self._chains[ref] = resolved
        return resolved.chain

    def below(self, tool: Tool) -> Chain:
        """Return what an item stands on, seen from where the item is at home."""
        sheets = self.sheets
        wanted = Ref.parse(tool.manifest.executor or "")
        return self._resolve(wanted, sheets, self._sync(sheets), tool.origin.source).chain

    def all(self, kinds: Sequence[str] = ()) -> Sequence[Entry]:
        """Return every item, hidden ones too, by name; the same object as long as nothing changes."""
        generation = self._refresh()
        if generation != self._listed[0]:
            found = [entry for source in self._sources for entry in source.entries()]
            self._listed = (generation, tuple(sorted(found, key=lambda entry: (entry.tool_id, entry.identity))))
        entries = self._listed[1]
        return [entry for entry in entries if entry.kind in kinds] if kinds else entries

    def broken(self) -> Sequence[Broken]:
        """Return the files that look like items and cannot be read, each with its error."""
        self._refresh()
        return [broken for source in self._sources for broken in source.broken()]

    def shadows(self, tool: Tool) -> tuple[str, ...]:
        """Return one sentence for each item that answers to the same name and is not used."""
        ranked = [(home, entry) for home, entry in self._ranked(tool.id) if isinstance(entry, Entry)]
        if not ranked or ranked[0][1].identity != tool.identity:
            return ()
        used = ranked[0][1]
        return tuple(_sentence(used, entry) for home, entry in ranked[1:] if not _is_same(home, entry, tool.digest))

    def is_reserved(self, name: str) -> bool:
        """Whether the name is that of a built-in link, which no other item can replace."""
        builtin = (source for source in self._sources if source.name == "builtin")
        return any(entry.tool_type in _link_types() for source in builtin for entry in source.named(name))

    def near(self, name: str) -> Sequence[str]:
        """Return names that were perhaps meant."""
        wanted = name[:128].lower()
        parts = [wanted[at : at + 2] for at in range(len(wanted) - 1)]
        names = sorted({entry.tool_id for source in self._sources for entry in source.entries()})
        # Comparing closely is slow, so only names that share the most pairs of letters are compared.
        likely = nlargest(_LIKELY, names, key=lambda known: sum(part in known for part in parts))
        return get_close_matches(wanted, likely, n=3, cutoff=0.6)

    def _sync(self, sheets: Sheets) -> tuple[int, ...]:
        return tuple(source.sync(sheets) for source in self._sources)

    def _refresh(self) -> tuple[int, ...]:
        sheets = self.sheets
        return tuple(source.refresh(sheets) for source in self._sources)

    def _resolve(self, wanted: Ref, sheets: Sheets, generation: tuple[int, ...], home: Source = "project") -> _Resolved:
        choices = [self._find(wanted, home=home)]

        def below(links: Sequence[Tool]) -> Tool:
            choices.append(self._find_executor(links))
            return choices[-1].opened.tool

        links = walk(choices[0].opened.tool, below)
        sheet = judge(links, sheets)
        hidden = tuple(sentence for choice in choices for sentence in choice.hidden)
        stamps = tuple(stamp for choice in choices for stamp in choice.stamps)
        chain = Chain(links, sheet.driver, hidden, tuple(unsound(links, sheets)))
        return _Resolved(chain, stamps, generation, sheets)

    def _find_executor(self, links: Sequence[Tool]) -> _Choice:
        executor, names = links[-1].manifest.executor or "", [link.id for link in links]
        try:
            return self._find(Ref.parse(executor), home=links[-1].origin.source)
        except VersionNotFound as error:
            raise MissingLink(executor, chain=names, reason=f" in that version ({error.message})") from error
        except (ToolNotFound, InvalidRequest) as error:
            raise MissingLink(executor, chain=names) from error

    def _find(self, wanted: Ref, *, home: Source = "project") -> _Choice:
        choice = self._choose(wanted, home, is_last=False)
        if choice is None:
            self._refresh()
            choice = self._choose(wanted, home, is_last=True)
        if choice is None:
            raise ToolNotFound(wanted.name, near=self.near(wanted.name))
        return choice

    def _choose(self, wanted: Ref, home: Source, *, is_last: bool) -> _Choice | None:
        """Return the best answer to a reference, or None where a closer look at the files may give another.

        What is at home in one source never stands on what a source ahead of it brings along: a project cannot put its
        own runtime below the user's tools.
        """
        reach = _ORDER[_ORDER.index(home) :]
        ranked = self._ranked(wanted.name)
        within = [(source, found) for source, found in ranked if source.name in reach]
        asked = [(source, found) for source, found in within if wanted.is_from(found.source, found.namespace)]
        fitting = [
            (source, found) for source, found in asked if isinstance(found, Broken) or wanted.covers(found.version)
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
        # Whoever asks by identity knows of the others, and an equal copy hides nothing.
        hidden = (
            ()
            if wanted.source
            else (entry for place, entry in others if not _is_same(place, entry, opened.tool.digest))
        )
        return _Choice(opened, tuple(_sentence(used, entry) for entry in hidden), (*opened.stamps, *stamps))

    def _ranked(self, name: str) -> list[tuple[ItemSource, Entry | Broken]]:
        """Return all that answers to a name, what is used first; broken files count where a source has nothing else."""
        ranked: list[tuple[ItemSource, Entry | Broken]] = []
        for source in self._sources:
            entries = sorted(source.named(name), key=lambda entry: entry.path)
            entries.sort(key=lambda entry: entry.semver, reverse=True)
            ranked += [(source, entry) for entry in entries]
            if not entries:
                ranked += [(source, broken) for broken in source.broken() if broken.stem == name]
        if self.is_reserved(name):
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


def sources_of(space: Space) -> Sequence[ItemSource]:
    """Return the sources of a space, in the order in which short names resolve."""
    project = FolderSource("project", space.project_ai, cache=space.cache)
    user = FolderSource("user", space.user, cache=space.cache)
    builtin = FolderSource("builtin", BUILTIN, namespace="kiwi")
    is_one = space.user.resolve() == space.project_ai.resolve()
    return (project, builtin) if is_one else (project, user, builtin)


def _sentence(used: Entry, hidden: Entry) -> str:
    return f"{used.identity} is used, and hides {hidden.identity} ({hidden.path})"
