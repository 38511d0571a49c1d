"""What MCP servers offer: definitions as listed and as accepted, their differences, and `Offers` for clients."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from msgspec import Struct, field

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import ItemType, Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.names import Version, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.safe_text import escape_controls, strip_controls

_EXPRESSION = lazy_pattern(r"\{(\+?)([A-Za-z0-9_.]+)\*?\}")
_BORDERS = frozenset("/?#")
"""The end of a part of an address."""
_RESERVED = ":/?#[]@!$&'()*+,;="
OfferKind: TypeAlias = Literal["tool", "prompt", "resource", "template"]
State: TypeAlias = Literal["accepted", "changed", "new", "gone"]
"""The state of a definition: accepted, changed, new, or no longer offered."""
Era: TypeAlias = Literal["modern", "legacy"]
"""The two eras of the protocol: since revision 2026-07-28, and before it."""
UNKNOWN_VERSION = "0.0.0"
"""The version of what a server offers that reports none, or one that is not semantic."""
_WORDS: Mapping[OfferKind, str] = {
    "tool": "mcp_tool_name",
    "prompt": "mcp_prompt_name",
    "resource": "mcp_resource_uri",
    "template": "mcp_resource_uri",
}
_NAMED_BY: Mapping[OfferKind, str] = {"tool": "name", "prompt": "name", "resource": "uri", "template": "uriTemplate"}
_NOT_IN_ID = lazy_pattern(r"[^a-z0-9_-]+")
_CAMEL = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])")
_MAX_ID = 100
MAX_DIFF = 20_000
"""The maximum number of characters of a diff in responses that were not a request for that diff."""
_PROSE = frozenset({"title", "description", "$comment"})
_VALUES = frozenset({"const", "default", "enum", "examples"})
"""What of a schema is sent to the server as it stands."""
_LONG_LINE = 200
_SHORT = 12
"""How many characters of a digest are shown. The owner repeats them to accept what was shown."""
_SENTENCES = lazy_pattern(r"(?<=[.!?;] )|(?<=\\n)")
_VOLATILE = frozenset({"_meta", "size"})
"""Keys that may change without a change of meaning."""
TaskUse: TypeAlias = Literal["auto", "always", "required", "never"]
"""When a call becomes a task: once it takes long; at once where the client can; at once or not at all; never."""


def names_in(template: str) -> tuple[str, ...]:
    """Return the variables of a URI template."""
    return tuple(dict.fromkeys(name for _, name in _EXPRESSION.findall(template)))


def variables_of(template: str) -> tuple[str, ...] | None:
    """Return the variables of a URI template; None if it has forms that Kiwi does not support."""
    left = _EXPRESSION.sub("", template)
    return None if "{" in left or "}" in left else names_in(template)


def expand(template: str, values: Mapping[str, str]) -> str:
    """Return the address that a template and the values of all its variables make."""
    return _EXPRESSION.sub(lambda one: quote(values[one[2]], safe=_RESERVED if one[1] else ""), template)


def match(template: str, uri: str) -> Mapping[str, str] | None:
    """Return what a template has to be filled with to be an address; None where it cannot be that address."""
    head, *rest = _EXPRESSION.split(template)
    if not rest or not uri.startswith(head):
        return None
    left, values = uri.removeprefix(head), dict[str, str]()
    for at in range(0, len(rest), 3):
        plus, name, literal = rest[at : at + 3]
        if at + 3 == len(rest):
            value = left.removesuffix(literal) if left.endswith(literal) else ""
        elif literal:
            value, _, left = left.partition(literal)
        else:  # two adjacent values could be separated in many ways
            return None
        if not value or (not plus and _BORDERS & set(value)):
            return None
        values[name] = unquote(value)
    return values


class ServerListing(Struct, frozen=True):
    """What a server said about itself and about each item it offers; what was not valid is an issue instead."""

    server_info: JsonObject
    protocol_version: str
    era: Era
    instructions: str = ""
    tools: tuple[JsonObject, ...] = ()
    prompts: tuple[JsonObject, ...] = ()
    resources: tuple[JsonObject, ...] = ()
    templates: tuple[JsonObject, ...] = ()
    issues: tuple[Issue, ...] = ()


class ServerKey(NamedTuple):
    """A server of one actor: the folder its manifest is below, and its name."""

    space: str
    server: str


class ServerRecord(Struct, frozen=True):
    """The stored record of a server."""

    key: ServerKey
    identity: str
    path: str
    """The file its manifest is in; empty for one that is published."""
    digest: str
    """What its manifest was when the owner added it, or last accepted what it offers."""
    version: str = UNKNOWN_VERSION
    era: str = ""
    protocol_version: str = ""
    info: JsonObject = field(default_factory=dict)
    instructions: str = ""
    seen_at: str = ""
    fault: str = ""
    """Why it could not be asked when that was last tried; empty where it could."""
    fault_at: str = ""
    accepts_first: bool = False
    """Whether the owner accepts what it offers first, which adding it says."""
    mark: str = ""
    """Another one whenever anything of the server or its definitions changes."""
    words: JsonObject = field(default_factory=dict)
    """How it was to be reached when the owner added it, or last accepted its manifest; empty where no owner did."""

    @property
    def executor(self) -> str:
        """The server as an executor of what it offers, in whichever version."""
        return self.identity.partition("@")[0]


class Definition(Struct, frozen=True):
    """One thing that a server offers, as it says it now and as it was accepted."""

    kind: OfferKind
    name: str
    """The server's own spelling: a name, an address, or a template of addresses."""
    tool_id: str
    state: State
    offered: JsonObject
    digest: str
    accepted: JsonObject | None = None
    accepted_digest: str = ""
    seen_at: str = ""
    accepted_at: str = ""

    @property
    def shown(self) -> JsonObject:
        """The definition that may be shown to a model: what was accepted, once something was."""
        return self.offered if self.accepted is None else self.accepted

    @property
    def shown_digest(self) -> str:
        """The digest of the definition that is shown."""
        return self.accepted_digest or self.digest

    @property
    def difference(self) -> str:
        """The diff between the accepted and the offered definition, for people to read."""
        before = _lines(self.accepted) if self.accepted is not None else []
        offered = f"offered {self.tool_id}@{self.digest[:_SHORT]}"
        return "\n".join(difflib.unified_diff(before, _lines(self.offered), "accepted", offered, lineterm="", n=2))

    def difference_within(self, limit: int, more: str) -> str:
        """Return the beginning of the difference, and how much `more` shows where that is not all of it."""
        found = self.difference
        return found if len(found) <= limit else f"{found[:limit]}\n… {len(found) - limit:,} characters more: {more}"


def name_of(kind: OfferKind, definition: JsonObject) -> str:
    """Return the server's own name of an offered item."""
    return as_text(definition.get(_NAMED_BY[kind]))


def pinned(definition: JsonObject) -> JsonObject:
    """Return all of a definition that the owner accepts with it."""
    kept = {word: value for word, value in definition.items() if word not in _VOLATILE}
    if "annotations" in kept:
        said = as_object(kept["annotations"])
        kept["annotations"] = {word: value for word, value in said.items() if word != "lastModified"}
    return kept


def version_of(info: JsonObject) -> str:
    """Return the version that a server reports, where it is a semantic one."""
    found = Version.parse(as_text(info.get("version")).removeprefix("v"))
    return str(found) if found else UNKNOWN_VERSION


def id_of(
    kind: OfferKind, definition: JsonObject, taken: Collection[str], numbers: dict[str, int] | None = None
) -> str:
    """Return a free item name for something a server offers; `numbers` are the last ones that each name was given."""
    called = as_text(definition.get("name")) or name_of(kind, definition)
    plain = _NOT_IN_ID.sub("_", _CAMEL.sub("_", called).lower()).strip("_-")[:_MAX_ID].rstrip("_-")
    base = plain if is_tool_id(plain) else f"{kind}_{plain}".rstrip("_")
    number, wanted = (numbers or {}).get(base, 1), base
    while wanted in taken:
        number += 1
        wanted = f"{base}_{number}"
    if numbers is not None:
        numbers[base] = number
    return wanted


def manifest_of(definition: Definition, server: ServerRecord) -> Manifest:
    """Return the manifest of the item that something a server offers is."""
    shown = definition.shown
    title = as_text(shown.get("title")) or as_text(as_object(shown.get("annotations")).get("title"))
    return Manifest(
        tool_id=definition.tool_id,
        tool_type="mcp_tool",
        version=server.version,
        executor=server.executor,
        name=strip_controls(title or as_text(shown.get("name"))),
        description=strip_controls(as_text(shown.get("description"))),
        category=server.key.server,
        tags=("mcp", definition.kind),
        config={_WORDS[definition.kind]: definition.name},
        parameters=_parameters(definition.kind, shown),
        outputs=as_object(_readable(as_object(shown.get("outputSchema")))),
        mutates_state=definition.kind == "tool" and as_object(shown.get("annotations")).get("readOnlyHint") is not True,
        extra={
            **({"annotations": _readable(shown["annotations"])} if "annotations" in shown else {}),
            **({"mime_type": kind} if (kind := as_text(shown.get("mimeType"))) else {}),
        },
    )


def written(manifest: Manifest, server: ServerRecord) -> JsonObject:
    """Return the manifest as an author would write it, to be read, or copied and changed."""
    texts = ("tool_id", "tool_type", "version", "executor", "name", "description", "tags")
    others = ("config", "parameters", "outputs", "mutates_state")
    words: dict[str, Json] = {name: getattr(manifest, name) for name in (*texts, *others)}
    words |= {"executor": server.key.server, "tags": list(manifest.tags), **manifest.extra}
    return {word: value for word, value in words.items() if value not in ("", {}, [])}


def _parameters(kind: OfferKind, shown: JsonObject) -> JsonObject:
    match kind:
        case "tool":
            return as_object(_readable(as_object(shown.get("inputSchema"))))
        case "prompt":
            arguments = [one for one in map(as_object, as_list(shown.get("arguments"))) if as_text(one.get("name"))]
            properties = {as_text(one.get("name")): _text_of(as_text(one.get("description"))) for one in arguments}
            return _closed(properties, [as_text(one["name"]) for one in arguments if one.get("required") is True])
        case "template":
            names = variables_of(as_text(shown.get("uriTemplate"))) or ()
            return _closed({name: _text_of("") for name in names}, names)
        case "resource":
            return _closed({}, ())


def _readable(schema: Json) -> Json:
    """Return a schema with plain prose. The values that are sent to the server do not change."""
    match schema:
        case Mapping():
            prose = {
                word: strip_controls(one) for word, one in schema.items() if word in _PROSE and isinstance(one, str)
            }
            return {word: one if word in _VALUES else _readable(one) for word, one in schema.items()} | prose
        case list() | tuple():
            return [_readable(one) for one in schema]
        case _:
            return schema


def _text_of(description: str) -> JsonObject:
    return {"type": "string", **({"description": strip_controls(description)} if description else {})}


def _closed(properties: Mapping[str, JsonObject], required: Sequence[str]) -> JsonObject:
    schema: dict[str, Json] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _lines(definition: JsonObject) -> list[str]:
    """Return a definition as lines. Invisible characters are escaped, and each sentence of a long text is a line."""
    text = json.dumps(definition, indent=2, ensure_ascii=False, sort_keys=True)
    lines = escape_controls(text).split("\n")
    return [part for line in lines for part in ([line] if len(line) <= _LONG_LINE else _SENTENCES.split(line))]


class Hints(Struct, frozen=True):
    """The hints for a client about the effects of a tool; None if unknown."""

    is_read_only: bool | None = None
    is_destructive: bool | None = None
    is_idempotent: bool | None = None
    is_open_world: bool | None = None


class Offer(Struct, frozen=True):
    """One item under the name that clients call it by."""

    name: str
    """The name, or the address of a resource, or the template of addresses."""
    identity: str
    """The item, as `execute` and `load` take it."""
    title: str = ""
    description: str = ""
    parameters: JsonObject = field(default_factory=dict)
    """JSON Schema of what it takes."""
    outputs: JsonObject = field(default_factory=dict)
    """JSON Schema of its result, where its author declares one."""
    hints: Hints = Hints()
    task: TaskUse = "auto"
    mime_type: str = ""
    digest: str = ""
    """The digest of its content, which may change while everything that clients see stays the same."""
    item_type: ItemType = "tool"
    """What a request calls the item, since a tool and a directive may have the same identity."""


class Offers(Struct, frozen=True):
    """Everything that a client sees without searching, in a stable order."""

    meta_tools: tuple[str, ...]
    tools: tuple[Offer, ...] = ()
    prompts: tuple[Offer, ...] = ()
    resources: tuple[Offer, ...] = ()
    templates: tuple[Offer, ...] = ()
    notices: tuple[str, ...] = ()
    """What the owner prefers and is not here, not permitted, or not possible, each with what to do."""
    servers: tuple[str, ...] = ()
    """The MCP servers with items that a search finds, those with most items first."""
    namespaces: tuple[str, ...] = ()
    """The registry namespaces with items that a search finds, in the same order."""
