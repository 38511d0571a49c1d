"""Gathering: one pass through the owner's preferences, wish by wish, to what clients see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import lexists

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import DriverMissing, InvalidRequest, KiwiError, NotCallable, NotFound, PolicyDenied
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import OfferKind
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel.help import topics
from kiwi_mcp.kernel.naming import known_namespaces, namespaces_place
from kiwi_mcp.kernel.offered import (
    OWN_SCHEME,
    address_of,
    callable_names,
    characters_of,
    kind_of,
    names_of,
    offer_of,
    own_address,
)
from kiwi_mcp.kernel.permission import Permission, all_in, all_of
from kiwi_mcp.kernel.settings import FILE_NAME as SETTINGS_NAME
from kiwi_mcp.kernel.verbs import VERBS
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.policy.preferences import Preferences, Section, Wish

MOST: Mapping[Section, int] = {"always_send": 200, "prompts": 50, "resources": 50}
"""How many items of each section are sent; the rest is found by searching."""

_META_TOOLS = tuple(verb.name for verb in VERBS if verb.is_meta_tool)
_DISCOVERY = "search"
_MOST_NOTICES = 100
_LONGEST_DEFINITION = 50_000
_FOLDERS: Mapping[Section, tuple[str, ...]] = {
    "always_send": ("tools", "scripts"),
    "prompts": ("directives",),
    "resources": ("knowledge",),
}
"""Where a pattern looks for items of a section."""
_KINDS: Mapping[Section, frozenset[OfferKind]] = {
    "always_send": frozenset({"tool"}),
    "prompts": frozenset({"prompt"}),
    "resources": frozenset({"resource", "template"}),
}
_LOOKED_FOR: Mapping[Section, frozenset[str]] = {section: _KINDS[section] | {*_FOLDERS[section]} for section in MOST}
"""The folder that an item is in, or the kind of what a server offers."""
_WHAT: Mapping[Section, str] = {"always_send": "tools", "prompts": "prompts", "resources": "resources"}
_NAMED_FROM: tuple[Source, ...] = ("project", "user", "registry", "mcp")


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An item that is to be sent, and the wish that says so."""

    wish: Wish
    chain: Chain

    @property
    def order(self) -> tuple[bool, bool, str]:
        # Who was named by the owner keeps the name; what a pattern brought along gives way.
        return not self.wish.name, self.wish.is_pattern, self.chain.tool.identity


class Gathering:
    """What becomes of each wish, why others are left out, and which files that was read from."""

    def __init__(self, catalog: Catalog, preferences: Preferences) -> None:
        self._catalog = catalog
        self._preferences = preferences
        self._permission = Permission(catalog)
        self._notices: dict[str, None] = {}
        self.sources: set[Source] = set()
        """Where items were looked for."""
        self.paths: dict[str, None] = {}
        """The files of every item that was looked at."""

    def offers(self) -> Offers:
        """Return all that a client sees without searching."""
        if fault := self._preferences.fault:
            self._note(f"{fault.message} Until it is mended, what ships with Kiwi holds.")
        if self._permission.fault:
            self._note(f"{self._permission.fault.message} Until it is mended, nothing else is sent.")
        meta_tools = self._meta_tools()
        tools = self._called("always_send", taken={verb.name for verb in VERBS})
        prompts = self._called("prompts", taken=())
        resources, templates = self._addressed()
        notices = [*self._notices][:_MOST_NOTICES]
        if len(self._notices) > _MOST_NOTICES:
            notices.append(f"And {len(self._notices) - _MOST_NOTICES} more notices like these.")
        return Offers(
            meta_tools, tools, prompts, resources, templates, tuple(notices), self._servers(), self._namespaces()
        )

    def _servers(self) -> tuple[str, ...]:
        """Return the servers that a model is told of, since it does not search for what it does not know to exist."""
        self.sources.add("mcp")
        if self._permission.fault:
            return ()
        return tuple(name for name in self._catalog.servers() if not self._permission.is_hidden(all_of(name)))

    def _namespaces(self) -> tuple[str, ...]:
        """Return the namespaces that a model is told of, as they were noted when the registry last changed."""
        user = self._catalog.space.user
        self.paths |= dict.fromkeys((str(namespaces_place(user)), str(user / SETTINGS_NAME)))
        if self._permission.fault:
            return ()
        return tuple(name for name in known_namespaces(user) if not self._permission.is_hidden(all_in(name)))

    def _meta_tools(self) -> tuple[str, ...]:
        decided = {name: self._preferences.always_send.about([name]) for name in _META_TOOLS}
        sent = {name for name, wish in decided.items() if wish and wish.is_sent}
        if _DISCOVERY not in sent:
            self._note(f"`{_DISCOVERY}` stays: without it a model could find nothing that is not sent to it.")
        for name in (name for name, wish in decided.items() if wish and wish.name):
            self._note(f"`{name}` keeps its name, which its own instructions use.")
        return tuple(name for name in _META_TOOLS if name in sent or name == _DISCOVERY)

    def _called(self, section: Section, taken: Collection[str]) -> tuple[Offer, ...]:
        """Return the tools or the prompts, each under a name of its own."""
        used, offers = set(taken), []
        for one in self._chosen(section):
            names = [one.wish.name] if one.wish.name else callable_names(one.chain.tool)
            name = next((name for name in names if name not in used), "")
            if not name:
                reason = f"the name `{names[0]}` is taken. Give it another with `as`."
                self._note(f"{one.chain.tool.identity} is not sent: {reason}")
                continue
            used.add(name)
            offers.append(offer_of(one.chain, name))
        return _sorted(offers)

    def _addressed(self) -> tuple[tuple[Offer, ...], tuple[Offer, ...]]:
        """Return the resources and the templates of their addresses; help is among them always."""
        resources = {offer.name: offer for offer in _help_pages()}
        templates = {offer.name: offer for offer in _own_templates()}
        chosen = self._chosen("resources")
        shared = Counter(address_of(one.chain.tool) for one in chosen)
        for one in chosen:
            tool, address = one.chain.tool, address_of(one.chain.tool)
            if kind_of(one.chain) == "resource":
                name = address if shared[address] == 1 else own_address(tool)
                resources.setdefault(name, offer_of(one.chain, name))
            elif address in templates or address.startswith(OWN_SCHEME):
                self._note(f"{tool.identity} is not sent: another one has the addresses {address}.")
            else:
                templates[address] = offer_of(one.chain, address)
        return _sorted(resources.values()), _sorted(templates.values())

    def _chosen(self, section: Section) -> Sequence[_Chosen]:
        """Return the items of a section that are sent, each once: those with names of the owner's choice first."""
        found: dict[str, _Chosen] = {}
        left = 0
        for refs, wish in self._wanted(section):
            if len(found) == MOST[section]:
                left += 1
            elif chosen := self._judged(section, refs, wish):
                found.setdefault(chosen.chain.tool.identity, chosen)
        if left:
            what = _WHAT[section]
            self._note(f"No more than {MOST[section]} {what} are sent; {left} others are found by searching.")
        return sorted(found.values(), key=lambda one: one.order)

    def _wanted(self, section: Section) -> Iterator[tuple[Sequence[str], Wish]]:
        """Give how each wished item may be asked for, with the wish: named ones first, then what fits a pattern."""
        wishes = self._preferences.wishes(section)
        for wish in wishes.named:
            if section != "always_send" or wish.word not in _META_TOOLS:
                self.sources |= {*_NAMED_FROM}
                yield _refs(wish.word), wish
        fitted = set()
        for entry in self._entries(section) if wishes.patterns else ():
            names = names_of(entry.source, entry.namespace, entry.tool_id)
            deciding = wishes.about(names)
            if deciding and deciding.is_pattern:
                fitted.add(deciding.word)
                if deciding.is_sent:
                    yield names[:1], deciding
        for wish in wishes.owner.patterns:
            if wish.is_sent and wish.word not in fitted:
                self._note(f"Nothing that could be sent fits `{wish.word}` under `{section}`.")

    def _entries(self, section: Section) -> Iterator[Entry]:
        """Give what a pattern may mean, in the order of names; of items that hide each other, the one that is used."""
        bases = [self._catalog.space.project_ai, self._catalog.space.user]
        folders = [str(base / name) for base in bases for name in _FOLDERS[section]]
        self.paths |= dict.fromkeys(folders)
        # Nothing is looked through to find out that there is nothing.
        sources: set[Source] = {"project", "user"} if any(map(lexists, folders)) else set()
        if self._preferences.wishes(section).owner.patterns:
            sources.add("mcp")
        self.sources |= sources
        runnable = {sheet.type for sheet in self._catalog.sheets.by_type.values() if sheet.driver}
        seen: set[str] = set()
        for entry in self._catalog.all(sources) if sources else ():
            kinds = entry.tags if entry.source == "mcp" else (entry.kind,)
            is_meant = entry.tool_type in runnable and not _LOOKED_FOR[section].isdisjoint(kinds)
            if is_meant and not (entry.source == "user" and entry.tool_id in seen):
                yield entry
            if entry.source == "project":
                seen.add(entry.tool_id)

    def _judged(self, section: Section, refs: Sequence[str], wish: Wish) -> _Chosen | None:
        """Return a wished item if it can be sent; otherwise tell why not, unless a pattern merely brought it along."""
        label = refs[-1] if wish.is_pattern else wish.word
        try:
            chain = self._resolved(refs)
            self._check(chain)
            deciding = self._preferences.wishes(section).about(_names_of(chain.tool)) or wish
            kind = kind_of(chain)
            if not deciding.is_sent or (wish.is_pattern and kind not in _KINDS[section]):
                return None
            if section != "always_send" and kind not in _KINDS[section]:
                raise NotCallable(chain.tool.id, f"{kind}", f"it is not one of the {_WHAT[section]}")
        except KiwiError as error:
            self._note(f"`{label}` is not sent: {error.message} {error.suggestion}")
            return None
        if not wish.is_pattern:
            for sentence in chain.shadowed:
                self._note(f"`{label}`: {sentence}")
        return _Chosen(deciding, chain)

    def _resolved(self, refs: Sequence[str]) -> Chain:
        for ref in refs[:-1]:
            try:
                return self._catalog.resolve(ref)
            except NotFound:
                continue
        return self._catalog.resolve(refs[-1])

    def _check(self, chain: Chain) -> None:
        """Refuse what could not be called, as a call would."""
        tool = chain.tool
        self.paths |= dict.fromkeys([str(tool.origin.path), *(str(tool.origin.root / one.path) for one in tool.files)])
        verify(chain, (), is_frozen=False)
        if not chain.driver:
            raise NotCallable(tool.id, tool.manifest.tool_type, "other items run on it")
        if find_spec(f"kiwi_mcp.drivers.{chain.driver}") is None:
            raise DriverMissing(tool.id, chain.driver)
        if reason := self._permission.refusal_of([link.identity for link in chain.links]):
            raise PolicyDenied(f"it is not permitted, since {reason}.", suggestion="See policy.yaml of the user space.")
        if (size := characters_of(offer_of(chain, tool.id))) > _LONGEST_DEFINITION:
            message = f"its definition is {size:,} characters long; {_LONGEST_DEFINITION:,} are the most that is sent."
            raise InvalidRequest(message, suggestion="It is found by searching.")

    def _note(self, notice: str) -> None:
        self._notices[notice] = None


def _sorted(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    return tuple(sorted(offers, key=lambda offer: offer.name))


def _names_of(tool: Tool) -> Sequence[str]:
    return names_of(tool.origin.source, tool.origin.namespace, tool.id)


def _refs(word: str) -> Sequence[str]:
    """Return how a named item may be asked for: `server/name` is first what that server offers."""
    return [f"mcp/{word}", word] if word.count("/") == 1 else [word]


def _help_pages() -> Iterator[Offer]:
    for topic in topics():
        yield Offer(f"{OWN_SCHEME}//help/{topic}", "", title=f"Kiwi help: {topic}", mime_type="text/markdown")


def _own_templates() -> Iterator[Offer]:
    for place, word, title in (("knowledge", "id", "Knowledge by name"), ("help", "topic", "Kiwi help by topic")):
        taken: JsonObject = {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]}
        name = f"{OWN_SCHEME}//{place}/{{{word}}}"
        yield Offer(name, "", title=title, parameters=taken, mime_type="text/markdown")
