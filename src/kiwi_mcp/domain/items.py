"""Items and their chains: `Manifest`, `Needs`, `Tool`, `TypeTraits`, `Chain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import Level, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, text_of

SUBPROCESS = "subprocess"
"""The primitive that starts processes."""
TOOL_FILES = ("tool.yaml", "tool.yml", "tool.json")
"""The names of a manifest that makes a folder one item."""
SKILL_FILE = "SKILL.md"
FOLDER_FILES = (*TOOL_FILES, SKILL_FILE)
"""The names of files that make a folder one item; `SKILL.md` does so where skills are."""
WORDS = ("read", "write", "hosts", "commands", "client", "sockets", "items")
CHECKPOINT_MODES = ("auto", "explicit", "disabled")
"""When a run that changes files gets a checkpoint."""
CLIENT_REQUESTS = ("roots", "sampling", "questions")
"""What an MCP server can ask of the client that calls it: its folders, its model, and its user."""
UNIX = "unix"
"""The one kind of sockets, besides those of the network, that an MCP server can need: browsers do."""
Source = Literal["project", "user", "registry", "mcp", "builtin"]
"""Where an item was found, in the order in which short names resolve."""
ItemType: TypeAlias = str
"""What a request calls an item: `tool`, or the type of an item that is read: `directive`, `knowledge`."""
ResultKind: TypeAlias = Literal["data", "text", "instructions"]
"""The kind of content that an item returns to a model: data, text or instructions."""
Lifetime: TypeAlias = Literal["none", "call", "server"]
"""How long the process of an item lives: it has none, one for each call, or that of a server, for many calls."""
DefinedBy: TypeAlias = Literal["owner", "server"]
"""Who describes an item: the author of its file, or an MCP server, which the owner has to accept first."""


class Needs(Struct, frozen=True):
    """The files, hosts and programs that an item requires. What is not declared is not given."""

    read: tuple[str, ...] = ()
    """Files and folders to read: below the project, absolute, or below `~/`. A folder includes everything in it."""
    write: tuple[str, ...] = ()
    """Files and folders to change; they are readable too."""
    hosts: tuple[str, ...] = ()
    """Hosts to reach, in the format of `SandboxProfile.hosts`."""
    commands: tuple[str, ...] = ()
    """Programs that it starts."""
    client: tuple[str, ...] = ()
    """What an MCP server asks of the client that calls it, of `CLIENT_REQUESTS`."""
    sockets: tuple[str, ...] = ()
    """Kinds of sockets that an MCP server makes besides those of the network: `UNIX`."""
    items: tuple[str, ...] = ()
    """The items that it calls."""

    @classmethod
    def from_json(cls, written: Json) -> Needs:
        """Return the needs under `needs` in a manifest; a value that is not a list of texts counts as empty."""
        words = as_object(written)
        return cls(*(tuple(text for text in as_list(words.get(word)) if isinstance(text, str)) for word in WORDS))

    def to_json(self) -> JsonObject:
        """Return the needs as they are shown, without empty ones."""
        return {word: list(asked) for word in WORDS if (asked := getattr(self, word))}


def together(needs: Iterable[Needs]) -> Needs:
    """Return the needs of several items at once."""
    all_of = tuple(needs)
    return Needs(*(tuple(dict.fromkeys(text for one in all_of for text in getattr(one, word))) for word in WORDS))


class SourceTraits(Struct, frozen=True):
    """What Kiwi must know of a source. Only the catalog asks for the name of a source."""

    is_built_in: bool = False
    """Its items ship with Kiwi."""
    is_editable: bool = False
    """Its items are files of the project or of the user, who can change them."""
    is_in_project: bool = False
    """Its items belong to one project: the same name is another item in another project."""
    is_in_user_space: bool = False
    """Its items are in the user's own folder, which every project uses."""
    is_published: bool = False
    """Its items are sealed versions of a registry."""
    is_offered: bool = False
    """Its items have no files: MCP servers offer them."""


SOURCE_TRAITS: Mapping[str, SourceTraits] = MappingProxyType(
    {
        "project": SourceTraits(is_editable=True, is_in_project=True),
        "user": SourceTraits(is_editable=True, is_in_user_space=True),
        "registry": SourceTraits(is_published=True),
        "mcp": SourceTraits(is_offered=True),
        "builtin": SourceTraits(is_built_in=True),
    }
)
DEFAULT_SOURCES = tuple(SOURCE_TRAITS)
NO_SOURCE = SourceTraits()
"""The traits of a source that is not known."""


class TypeTraits(Struct, frozen=True):
    """What the kernel and the policy must know of an item's type. They never ask for the name of a driver."""

    driver: str = ""
    """The package in `drivers/` that runs items of the type; empty if they cannot be run."""
    lifetime: Lifetime = "none"
    defined_by: DefinedBy = "owner"
    result_kind: ResultKind = "data"

    @property
    def is_server(self) -> bool:
        """Whether items of the type are servers: they cannot be run, and what they offer can."""
        return self.lifetime == "server" and not self.driver


class Manifest(Struct, frozen=True):
    """What an author wrote, in the one shape every placement and spelling is read into.

    `tool_type`, `executor`, `config` and `parameters` are canonical (old spellings resolved, parameters always a
    JSON Schema object); `written` holds the mapping exactly as it was authored.
    """

    tool_id: str
    tool_type: str
    version: str
    executor: str | None = None
    name: str = ""
    description: str = ""
    category: str = ""
    tags: tuple[str, ...] = ()
    config: JsonObject = field(default_factory=dict)
    parameters: JsonObject = field(default_factory=dict)
    outputs: JsonObject = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    mutates_state: bool = False
    effect: str = ""
    result_kind: ResultKind = "data"
    """What its type gives to a model."""
    validation: JsonObject = field(default_factory=dict)
    env_config: JsonObject = field(default_factory=dict)
    extra: JsonObject = field(default_factory=dict)
    written: JsonObject = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()

    @property
    def executor_id(self) -> str | None:
        """The executor's short name, without the namespace and the version that may be asked for."""
        return self.executor.partition("@")[0].rpartition("/")[2] if self.executor else None

    @property
    def isolation(self) -> str | None:
        """The minimum isolation level of its process, as it was written; None if the manifest does not set one."""
        return text_of(self.extra["isolation"]) if "isolation" in self.extra else None

    @property
    def needs(self) -> Needs:
        """The files, hosts and programs of the owner that it needs."""
        return Needs.from_json(self.extra.get("needs"))

    @property
    def written_type(self) -> str:
        """The type as the author spelled it."""
        word = self.written.get("tool_type")
        return word if isinstance(word, str) else self.tool_type


class ToolFile(Struct, frozen=True):
    """One file of an item: its path below the item's root, and the hash of its bytes."""

    path: str
    sha256: str
    size: int
    is_executable: bool = False


class Signature(Struct, frozen=True):
    """The first line of a signed item: when, which hash, and by which scheme it was written."""

    timestamp: str
    hash: str
    scheme: Literal["kiwi", "rye"] = "kiwi"
    key: str = ""
    """The public key of the signer, if the line contains more than a hash."""
    proof: str = ""
    """The signature itself, by that key."""


class Location(Struct, frozen=True):
    """Where an item lives: the file of its manifest, the folder of its files, and `base`, an `.ai` folder for most."""

    source: Source
    path: Path
    root: Path
    namespace: str = "local"
    base: Path = Path()

    @property
    def is_folder(self) -> bool:
        """Whether the item is a folder with a manifest in it, not a single file."""
        return self.path.name in FOLDER_FILES

    @property
    def is_built_in(self) -> bool:
        """Whether the item ships with Kiwi."""
        return SOURCE_TRAITS[self.source].is_built_in

    @property
    def is_editable(self) -> bool:
        """Whether the item is a file of the project or of the user, which they can change."""
        return SOURCE_TRAITS[self.source].is_editable

    @property
    def is_in_project(self) -> bool:
        """Whether the item is in the project: the same name is another item in another project."""
        return SOURCE_TRAITS[self.source].is_in_project

    @property
    def is_in_user_space(self) -> bool:
        """Whether the item is in the user's own folder, which every project uses."""
        return SOURCE_TRAITS[self.source].is_in_user_space

    @property
    def is_published(self) -> bool:
        """Whether the item is a sealed version of a registry."""
        return SOURCE_TRAITS[self.source].is_published

    @property
    def server(self) -> str:
        """The name of the MCP server that offers the item; empty for an item with files."""
        return self.namespace if SOURCE_TRAITS[self.source].is_offered else ""

    @property
    def place(self) -> str:
        """Where the file with the manifest stands below the base: `tools/mail/enricher/tool.yaml`."""
        return self.path.relative_to(self.base).as_posix()


class Tool(Struct, frozen=True, dict=True):
    """A manifest with its files, its origin, its digest and its signature."""

    manifest: Manifest
    origin: Location
    files: tuple[ToolFile, ...] = ()
    digest: str = ""
    signature: Signature | None = None
    integrity: str = "unsigned"
    """`unsigned`, `signed` with a key, `hashed` (the line has a hash alone), `builtin`, `published`, `valid:<gen>` for
    an old hash, `modified`, `legacy-unverifiable`. What a registry sealed is `published` where it bears no signature of
    its own. What an MCP server offers is `accepted`, `changed` since it was, or `new`."""
    trust: str = ""
    """Who vouches for it: `verified` (a publisher with a key that the owner trusts), `owner` (the owner's own key),
    `integrity` (only a hash, without a signer), `unsigned`, `tampered`, `revoked`, `unknown_key`. Empty for items that
    are never signed: those that ship with Kiwi, and those that an MCP server offers.
    """
    signer: str = ""
    """The fingerprint of the key that it is signed with, where it is signed with one."""

    @cached_property
    def id(self) -> str:
        """The short name."""
        return self.manifest.tool_id

    @property
    def item_type(self) -> ItemType:
        """What a request calls it; a tool and a directive may have the same full name."""
        return "tool" if self.manifest.result_kind == "data" else self.manifest.tool_type

    @cached_property
    def identity(self) -> str:
        """The full name: `source/namespace/name@version`."""
        return f"{self.origin.source}/{self.origin.namespace}/{self.id}@{self.manifest.version}"

    @property
    def entrypoint(self) -> str:
        """The path of the file to run, below the root; empty for an item without one."""
        named = self.manifest.config.get("entrypoint")
        return named if isinstance(named, str) else ""


class ReferredItem(Struct, frozen=True):
    """An item that another one names in its config: the directive of a thread, what a directive extends."""

    ref: str
    item_type: ItemType
    by: str
    """The identity of the item that names it."""
    tool: Tool


class Chain(Struct, frozen=True, dict=True):
    """The links from a tool down to a primitive, the traits of their types, and notes about them for the user."""

    links: tuple[Tool, ...]
    traits: tuple[TypeTraits, ...]
    """The traits of each link's type, in the order of the links."""
    shadowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """The status that publishers gave links after publication: deprecated, yanked."""
    drift: tuple[str, ...] = ()
    """How the chain differs from the one its tool was published on."""
    faults: tuple[Issue, ...] = ()
    """Issues of links that break the rules of their types; such a chain does not run."""
    references: tuple[ReferredItem, ...] = ()
    """What the tool names, directly or through what it names; it belongs to the tool wherever that goes."""
    project: Path | None = None
    """The project it was resolved for; templates may name it."""

    @cached_property
    def tool(self) -> Tool:
        """The item that was asked for."""
        return self.links[0]

    @property
    def driver(self) -> str:
        """The driver that runs the tool; empty if the tool cannot be run."""
        return self.traits[0].driver

    @cached_property
    def server(self) -> Chain | None:
        """The links of the server that offers the tool, or that the tool is; None if there is no server."""
        top = self.traits[0]
        if top.lifetime != "server":
            return None
        return self if top.is_server else replace(self, links=self.links[1:], traits=self.traits[1:])

    @property
    def process(self) -> Chain | None:
        """The links that run in one process on this machine; None if no process is started."""
        if self.traits[0].lifetime == "none" or self.primitive.id != SUBPROCESS:
            return None
        return self.server or self

    @cached_property
    def executor(self) -> Tool:
        """The executor of the tool, or the tool itself without one."""
        return self.links[1] if len(self.links) > 1 else self.links[0]

    @property
    def primitive(self) -> Tool:
        """The bottom of the chain."""
        return self.links[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The short names, top to bottom."""
        return tuple(link.id for link in self.links)

    @property
    def item_traits(self) -> tuple[str, ...]:
        """The traits by which a rule may name the item: types and runtimes of its chain, and its name in every form."""
        tool, place = self.tool, self.tool.origin
        homes = ("", tool.manifest.category, place.namespace, f"{place.source}/{place.namespace}")
        return (
            *(f"type/{link.manifest.tool_type}" for link in self.links),
            *(f"runtime/{link.id}" for link in self.links[1:]),
            *(f"item/{tool.item_type}/{home}/{tool.id}".replace("//", "/") for home in homes),
        )

    @property
    def isolation(self) -> Level:
        """The isolation level that the links ask for: the strictest one, or `trusted` if none asks."""
        return strictest(["trusted", *(asked for link in self.links if (asked := link.manifest.isolation) is not None)])

    @cached_property
    def needs(self) -> Needs:
        """The needs of all links together."""
        return together(link.manifest.needs for link in self.links)

    def to_json(self) -> list[JsonObject]:
        """Return the chain as surfaces show it."""
        return [
            {
                "tool_id": link.id,
                "identity": link.identity,
                "tool_type": link.manifest.tool_type,
                "version": link.manifest.version,
                "digest": link.digest,
                "integrity": link.integrity,
                **({"trust": link.trust} if link.trust else {}),
                **({"signer": link.signer} if link.signer else {}),
                "path": str(link.origin.path),
            }
            for link in self.links
        ]
