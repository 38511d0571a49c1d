"""The list of tools, prompts and resources that clients see without searching, from the owner's preferences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from os.path import lexists
from pathlib import Path
from threading import Lock

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp import data
from kiwi_mcp.catalog.catalog import FOLDERS, Catalog
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.errors import DriverMissing, InvalidRequest, KiwiError, NotCallable, NotFound, PolicyDenied
from kiwi_mcp.domain.items import SOURCE_TRAITS, Chain, ItemType, Source
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.kernel.permission import ItemVisibility, all_in, all_of
from kiwi_mcp.kernel.settings import FILE_NAME as SETTINGS_NAME
from kiwi_mcp.kernel.tool_names import (
    OWN_SCHEME,
    address_of,
    callable_names,
    kind_of,
    known_namespaces,
    names_of,
    namespaces_place,
    offer_of,
    own_address,
)
from kiwi_mcp.kernel.verbs import VERBS
from kiwi_mcp.manifest.files import owner_stamp, stamp_of
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.policy.policy_files import rule_files
from kiwi_mcp.policy.preferences import Preference, Preferences, Section, owner_preferences, preferences_file

MOST: Mapping[Section, int] = {"always_send": 200, "prompts": 50, "resources": 50}
"""The maximum number of items of each section; the rest is found by searching."""

_META_TOOLS = tuple(verb.name for verb in VERBS if verb.is_meta_tool)
_DISCOVERY = "search"
_MARKDOWN = "text/markdown"
_OWN_TEMPLATES = (("Knowledge by name", "knowledge", "id"), ("Kiwi help by topic", "help", "topic"),
                  ("Skill by name", "skill", "id"))  # fmt: skip
_MAX_NOTICES = 100
_MAX_DEFINITION = 50_000
_FOLDERS: Mapping[Section, tuple[str, ...]] = {
    "always_send": ("tools", "scripts"),
    "prompts": ("directives", "skills"),
    "resources": ("knowledge",),
}
"""The folders in which a pattern finds items of a section."""
_KINDS: Mapping[Section, frozenset[OfferKind]] = {
    "always_send": frozenset({"tool"}),
    "prompts": frozenset({"prompt"}),
    "resources": frozenset({"resource", "template"}),
}
_ITEM_TYPES: Mapping[Section, ItemType] = {"always_send": "tool", "prompts": "directive", "resources": "knowledge"}
"""The preferred type of several items with one name; the item of an MCP server is always a tool."""
_LOOKED_FOR: Mapping[Section, frozenset[str]] = {section: _KINDS[section] | {*_FOLDERS[section]} for section in MOST}
"""The folders of items, and the kinds of a server's items, that belong to a section."""
_WHAT: Mapping[Section, str] = {"always_send": "tools", "prompts": "prompts", "resources": "resources"}
_NAMED_FROM: tuple[Source, ...] = ("project", "user", "registry", "mcp")


class ToolListBuilder:
    """Builds the list: which items are sent, why others are not, and which files that depends on."""

    def __init__(self, catalog: Catalog, preferences: Preferences) -> None:
        self._catalog = catalog
        self._preferences = preferences
        self._permission = ItemVisibility(catalog)
        self._notices: dict[str, None] = {}
        self.sources: set[Source] = set()
        """The sources that were read."""
        self.paths: dict[str, None] = {}
        """The files of every item that was read."""

    def offers(self) -> Offers:
        """Return everything that a client sees without searching."""
        if fault := self._preferences.fault:
            self._note(f"{fault.message} Until it is fixed, the defaults of Kiwi apply.")
        if self._permission.fault:
            self._note(f"{self._permission.fault.message} Until it is fixed, nothing else is sent.")
        meta_tools = self._meta_tools()
        tools = self._called("always_send", taken={verb.name for verb in VERBS})
        prompts = self._called("prompts", taken=())
        resources, templates = self._addressed()
        notices = [*self._notices][:_MAX_NOTICES]
        if len(self._notices) > _MAX_NOTICES:
            notices.append(f"And {len(self._notices) - _MAX_NOTICES} more notices like these.")
        # A model does not search for servers that it does not know; the namespaces are those of the last change.
        user, is_hidden = self._catalog.space.user, self._permission.is_hidden
        self.sources.add("mcp")
        self.paths |= dict.fromkeys((str(namespaces_place(user)), str(user / SETTINGS_NAME)))
        servers: tuple[str, ...] = ()
        namespaces: tuple[str, ...] = ()
        if not self._permission.fault:
            servers = tuple(name for name in self._catalog.servers() if not is_hidden(all_of(name)))
            namespaces = tuple(name for name in known_namespaces(user) if not is_hidden(all_in(name)))
        return Offers(meta_tools, tools, prompts, resources, templates, tuple(notices), servers, namespaces)

    def _meta_tools(self) -> tuple[str, ...]:
        decided = {name: self._preferences.sections["always_send"].about([name]) for name in _META_TOOLS}
        sent = {name for name, wish in decided.items() if wish and wish.is_sent}
        if _DISCOVERY not in sent:
            self._note(f"`{_DISCOVERY}` is always sent: a model needs it to find items that are not sent.")
        for name in (name for name, wish in decided.items() if wish and wish.name):
            self._note(f"`{name}` keeps its name, which its own instructions use.")
        return tuple(name for name in _META_TOOLS if name in sent or name == _DISCOVERY)

    def _called(self, section: Section, taken: Collection[str]) -> tuple[Offer, ...]:
        """Return the tools or the prompts, each under a name of its own."""
        used, offers = set(taken), []
        for wish, chain in self._chosen(section):
            names = [wish.name] if wish.name else callable_names(chain.tool)
            name = next((name for name in names if name not in used), "")
            if not name:
                reason = f"the name `{names[0]}` is taken. Give it another with `as`."
                self._note(f"{chain.tool.identity} is not sent: {reason}")
                continue
            used.add(name)
            offers.append(offer_of(chain, name))
        return _sorted(offers)

    def _addressed(self) -> tuple[tuple[Offer, ...], tuple[Offer, ...]]:
        """Return the resources and the templates of their addresses; they always include help."""
        pages = {f"{OWN_SCHEME}//help/{topic}": f"Kiwi help: {topic}" for topic in help_topics()}
        resources = {name: Offer(name, "", title=title, mime_type=_MARKDOWN) for name, title in pages.items()}
        templates: dict[str, Offer] = {}
        for title, place, word in _OWN_TEMPLATES:
            taken: JsonObject = {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]}
            name = f"{OWN_SCHEME}//{place}/{{{word}}}"
            templates[name] = Offer(name, "", title=title, parameters=taken, mime_type=_MARKDOWN)
        chosen = self._chosen("resources")
        shared = Counter(address_of(chain.tool) for _, chain in chosen)
        for _, chain in chosen:
            tool, address = chain.tool, address_of(chain.tool)
            if kind_of(chain) == "resource":
                name = address if shared[address] == 1 else own_address(tool)
                resources.setdefault(name, offer_of(chain, name))
            elif address in templates or address.startswith(OWN_SCHEME):
                self._note(f"{tool.identity} is not sent: another item has the addresses {address}.")
            else:
                templates[address] = offer_of(chain, address)
        return _sorted(resources.values()), _sorted(templates.values())

    def _chosen(self, section: Section) -> Sequence[tuple[Preference, Chain]]:
        """Return the items of a section that are sent, each once; those with names of the owner's choice come first."""
        found: dict[str, tuple[Preference, Chain]] = {}
        left = 0
        for refs, wish in self._wanted(section):
            if len(found) == MOST[section]:
                left += 1
            elif chosen := self._judged(section, refs, wish):
                found.setdefault(chosen[1].tool.identity, chosen)
        if left:
            what = _WHAT[section]
            self._note(f"No more than {MOST[section]} {what} are sent; {left} others are found by searching.")
        # An item with a name of the owner's choice keeps it; an item of a pattern gets another name.
        return sorted(found.values(), key=lambda one: (not one[0].name, one[0].is_pattern, one[1].tool.identity))

    def _wanted(self, section: Section) -> Iterator[tuple[Sequence[str], Preference]]:
        """Yield the references of each preferred item with its preference: named items first, then patterns."""
        wishes = self._preferences.sections[section]
        for wish in wishes.named:
            if section != "always_send" or wish.word not in _META_TOOLS:
                self.sources |= {*_NAMED_FROM}
                # `server/name` is first an item of that server.
                yield [f"mcp/{wish.word}", wish.word] if wish.word.count("/") == 1 else [wish.word], wish
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
                self._note(f"No item matches `{wish.word}` under `{section}`.")

    def _entries(self, section: Section) -> Iterator[Card]:
        """Yield the items that a pattern may match, by name; of items that hide each other, the one that is used."""
        bases = [source.home for source in self._catalog.sources(("project", "user"))]
        folders = [f"{base}/{name}" for base in bases for name in _FOLDERS[section]]
        self.paths |= dict.fromkeys(folders)
        # Without these folders, the sources need not be read.
        sources: set[Source] = {"project", "user"} if any(map(lexists, folders)) else set()
        if self._preferences.sections[section].owner.patterns:
            sources.add("mcp")
        self.sources |= sources
        runnable = {sheet.type for sheet in self._catalog.sheets.by_type.values() if sheet.driver}
        seen: set[str] = set()
        for entry in self._catalog.all(sources) if sources else ():
            home = SOURCE_TRAITS[entry.source]
            kinds = entry.tags if home.is_offered else (entry.kind,)
            is_meant = entry.tool_type in runnable and not _LOOKED_FOR[section].isdisjoint(kinds)
            if is_meant and not (home.is_in_user_space and entry.tool_id in seen):
                yield entry
            if home.is_in_project:
                seen.add(entry.tool_id)

    def _judged(self, section: Section, refs: Sequence[str], wish: Preference) -> tuple[Preference, Chain] | None:
        """Return a preferred item if it can be sent; otherwise note why not, unless it only matches a pattern."""
        label = refs[-1] if wish.is_pattern else wish.word
        try:
            chain = self._resolved(refs, _ITEM_TYPES[section])
            self._check(chain)
            names = names_of(chain.tool.origin.source, chain.tool.origin.namespace, chain.tool.id)
            deciding = self._preferences.sections[section].about(names) or wish
            kind = kind_of(chain)
            if not deciding.is_sent or (wish.is_pattern and kind not in _KINDS[section]):
                return None
            if section != "always_send" and kind not in _KINDS[section]:
                raise NotCallable(chain.tool.id, f"{kind}", f"it is not one of the {_WHAT[section]}")
        except KiwiError as error:
            if not self._permission.fault:  # which has its own note
                self._note(f"`{label}` is not sent: {error.message} {error.suggestion}")
            return None
        if not wish.is_pattern:
            for sentence in chain.shadowed:
                self._note(f"`{label}`: {sentence}")
        return deciding, chain

    def _resolved(self, refs: Sequence[str], item_type: ItemType) -> Chain:
        for ref in refs:
            for wanted in (item_type, None):
                with suppress(NotFound):
                    return self._catalog.resolve(ref, item_type=wanted)
        return self._catalog.resolve(refs[-1])

    def _check(self, chain: Chain) -> None:
        """Refuse an item that cannot be called, with the error of a call."""
        tool = chain.tool
        self.paths |= dict.fromkeys([str(tool.origin.path), *(str(tool.origin.root / one.path) for one in tool.files)])
        verify(chain, (), (), is_frozen=False)  # the lockfile is compared at each call
        if not chain.driver:
            raise NotCallable(tool.id, tool.manifest.tool_type, "other items run on it")
        if find_spec(f"kiwi_mcp.drivers.{chain.driver}") is None:
            raise DriverMissing(tool.id, chain.driver)
        if reason := self._permission.refusal_of([link.identity for link in chain.links]):
            raise PolicyDenied(
                f"it is not permitted, since {reason}.", suggestion="See policy.yaml and config.yaml in ~/.ai."
            )
        offer = offer_of(chain, tool.id)
        size = len(compact([offer.name, offer.title, offer.description, offer.parameters, offer.outputs]))
        if size > _MAX_DEFINITION:
            message = f"its definition is {size:,} characters long; {_MAX_DEFINITION:,} is the maximum."
            raise InvalidRequest(message, suggestion="It is found by searching.")

    def _note(self, notice: str) -> None:
        self._notices[notice] = None


def _sorted(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    return tuple(sorted(offers, key=lambda offer: offer.name))


def help_folder() -> Path:
    """Return the folder of the help pages."""
    return data.FOLDER / "help"


def help_topics() -> tuple[str, ...]:
    """Return the names of all help pages, the overview first."""
    names = sorted(entry.name.removesuffix(".md") for entry in help_folder().iterdir() if entry.name.endswith(".md"))
    return ("overview", *(name for name in names if name != "overview"))


class _BuiltList(Struct, frozen=True):
    """A built list, what it depends on, and the state of that."""

    offers: Offers
    digest: str
    sources: Collection[Source]
    paths: Iterable[str]
    state: str


class ToolListCache:
    """The list of one space, cached. Several threads may use it; its catalog has no other user."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = Lock()
        self._made: _BuiltList | None = None
        self._etag = ""

    def now(self) -> Offers:
        """Return the list; the same object as long as nothing changes."""
        with self._lock:
            made = self._made
            if made is None or made.state != self._state(made.sources, made.paths):
                made = self._made = self._make()
            self._etag = made.digest
            return made.offers

    def etag(self) -> str:
        """Return a text that changes with the list; it builds nothing, and waits for no thread that does."""
        if self._made is not None and self._lock.acquire(blocking=False):
            try:
                state = self._state(self._made.sources, self._made.paths)
                self._etag = self._made.digest + ("" if state == self._made.state else f"+{state}")
            finally:
                self._lock.release()
        return self._etag

    def _make(self) -> _BuiltList:
        user = self._catalog.space.user
        if preferences_file(user).exists():  # the items and the memory come first, then what the owner prefers of them
            self._catalog.generation(FOLDERS)
        builder = ToolListBuilder(self._catalog, owner_preferences(user))
        offers = builder.offers()
        sources, paths = frozenset(builder.sources), tuple(builder.paths)
        digest = _digest(repr(replace(offers, notices=())))
        return _BuiltList(offers, digest, sources, paths, self._state(sources, paths))

    def _state(self, sources: Collection[Source], paths: Iterable[str]) -> str:
        """Return the state of everything that the list depends on."""
        user = self._catalog.space.user
        files = (preferences_file(user), *rule_files(user))
        chosen = [(str(file), owner_stamp(str(file))) for file in files]
        seen = self._catalog.generation(sources) if sources else ()
        return _digest(repr((chosen, seen, [stamp_of(path) for path in paths])))


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
