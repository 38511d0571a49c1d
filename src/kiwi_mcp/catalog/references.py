"""References to items: how an item is asked for, and the items that another one names in its config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import bad_name, load_bytes
from kiwi_mcp.domain.errors import InvalidRequest, NotCallable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS, ItemType, ReferredItem, Source, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.names import Range, Version, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.manifest import hooks, program
from kiwi_mcp.manifest.type_specs import TypeSpecs

_SOURCES: tuple[Source, ...] = get_args(Source)
_MAX_LENGTH = 400
_DIGEST = lazy_pattern(r"sha256:([0-9a-f]{64})")
_EXAMPLES = (
    "Write `name`, `name@^1.2`, `name@sha256:…`, `namespace/name` for a published one, `server/name` for one of an MCP "
    "server, or a full identity such as `project/local/name@1.0.0`."
)


class Ref(Struct, frozen=True):
    """An item by short name, by full identity, or by name and range of versions or digest."""

    name: str
    source: Source | None = None
    namespace: str | None = None
    version: str | None = None
    """An exact version, a range, or `sha256:` and a digest; None lets every version through."""
    item_type: ItemType | None = None
    """Only items of that type. If no tool is found, items of other types count too."""

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Return the reference in a text; refuse a text that cannot name anything."""
        place, at, wanted = text[:_MAX_LENGTH].partition("@")
        *home, name = place.split("/")
        version = wanted if at else None
        source = next((word for word in _SOURCES if home and word == home[0]), None)
        match home if len(text) <= _MAX_LENGTH and is_tool_id(name) else None:
            case []:
                return cls(name, version=version)
            case [namespace] if source is None and is_tool_id(namespace):
                return cls(name, "registry", namespace, version)  # as lists of what is published name it
            case [_, namespace] if source is not None:
                return cls(name, source, namespace, version)
        stem, dot, _ = name.partition(".")  # of the path of a file, its item probably has the stem as its name
        is_path = dot and is_tool_id(stem)
        examples = f"Name the item, not its file: `{stem}`. {_EXAMPLES}" if is_path else _EXAMPLES
        raise InvalidRequest(f"{bad_name(place if home else name).reason}.", suggestion=examples)

    def is_from(self, source: Source, namespace: str | None) -> bool:
        """Whether an item of that source and namespace may be meant."""
        return self.source in {None, source} and self.namespace in {None, namespace}

    @property
    def published_namespace(self) -> str | None:
        """The namespace in the registry that was asked for; None where none was."""
        return self.namespace if SOURCE_TRAITS.get(self.source or "", NO_SOURCE).is_published else None

    def is_exactly(self, listed: VersionInfo) -> bool:
        """Whether a published version was asked for by its exact number or by its digest."""
        return self.version in {listed.name.version, listed.digest}

    @property
    def digest(self) -> str:
        """The digest that was asked for, as 64 hexadecimal digits; empty where none was."""
        found = _DIGEST.fullmatch(self.version or "")
        return found[1] if found else ""

    def covers(self, version: str) -> bool:
        """Whether an item of that version may be what was asked for."""
        if self.version in {None, version} or self.digest:
            return True
        wanted, given = Range.parse(self.version or ""), Version.parse(version)
        return wanted is not None and given is not None and wanted.covers(given)


MAX_REFERENCES = 200
_CONTENT_NAMES = ("directive.md", "content.md", "README.md")
"""The file names of an item's text, next to its manifest."""


class Reference(Struct, frozen=True):
    """One name of another item in a config."""

    place: str
    ref: str
    item_type: ItemType
    is_required: bool = True
    """Whether the item cannot be used without it."""
    severity: Literal["error", "warning"] = "error"

    def absent(self) -> Issue:
        """Return the issue of a name that nothing has."""
        fix = f"Create `{self.ref:.140}`, or name one that exists."
        return Issue(self.place, f"no {self.item_type} is named {self.ref!r:.140}", fix, self.severity)


def references_in(tool: Tool, sheets: TypeSpecs) -> Iterator[Reference]:
    """Yield the names of other items in an item."""
    sheet = sheets.get(tool.manifest.tool_type)
    if sheet is None or not sheet.references:
        return
    config = _config(tool)
    for path, item_type in sheet.references.items():
        for place, named in _named(config, path):
            yield Reference(f"config.{place}", named, item_type)
    for place, name, item_type in hooks.hook_items(config.get("hooks")) if "hooks" in sheet.words else ():
        yield Reference(place, name, item_type, is_required=False)
    for name in program.context_ids(config) if "context" in sheet.words else ():
        yield Reference("config.context", name, "knowledge", is_required=False)
    for skill in as_list(config.get("skills")) if "skills" in sheet.words else ():
        yield Reference("config.skills", as_text(skill), "skill", is_required=False, severity="warning")


def _named(config: JsonObject, path: str) -> Iterator[tuple[str, str]]:
    """Yield the names at a path in a config, each with its place; `steps[].tool` is `tool` in each of `steps`."""
    word, is_list, inner = path.partition("[].")
    listed = [*map(as_object, as_list(config.get(word)))] if is_list else [config]
    for at, one in enumerate(listed):
        if name := as_text(one.get(inner or word)):
            yield (f"{word}[{at}].{inner}" if is_list else word), name


def circles_in(tool: Tool, references: Sequence[ReferredItem]) -> Iterator[Issue]:
    """Yield an issue for each item called by a tool that calls the tool again, directly or through others."""
    calls: dict[str, list[Tool]] = {}
    for one in references:
        if one.item_type == "tool":
            calls.setdefault(one.by, []).append(one.tool)
    waiting: list[tuple[str, tuple[str, ...]]] = [(tool.identity, (tool.id,))]
    seen: set[str] = set()
    for identity, names in waiting:
        for called in calls.get(identity, ()):
            way = (*names, called.id)
            if called.identity == tool.identity:
                fix = "Let one of them call something else."
                yield Issue("config.steps", f"calls itself: {' → '.join(way)}", fix)
            elif called.identity not in seen:
                seen.add(called.identity)
                waiting.append((called.identity, way))


def required_servers(tool: Tool, sheets: TypeSpecs) -> Sequence[str]:
    """Return the MCP servers that an item cannot do without."""
    sheet = sheets.get(tool.manifest.tool_type)
    if sheet is None or "mcps" not in sheet.words:
        return ()
    return [use.name for use in program.mcps_in(_config(tool).get("mcps")) if use.is_required]


def _config(tool: Tool) -> JsonObject:
    return text_item(tool).config if tool.origin.is_folder else tool.manifest.config


def text_item(tool: Tool) -> program.TextItem:
    """Return an item with its text; items without one have an empty text."""
    try:
        text = load_bytes(tool, text_file(tool)).decode("utf-8", errors="replace")
    except NotCallable:
        text = ""
    return program.TextItem(tool.manifest, text, tool.identity)


def text_file(tool: Tool) -> ToolFile:
    """Return the file with an item's text; refuse an item that has none."""
    by_name = {file.path: file for file in tool.files}
    for name in (tool.entrypoint, *_CONTENT_NAMES, tool.origin.path.name):
        if name in by_name and name.endswith(".md"):
            return by_name[name]
    markdown = [file for file in tool.files if file.path.endswith(".md")]
    if not markdown:
        raise NotCallable(tool.id, tool.manifest.tool_type, "it has no Markdown file beside its manifest to read")
    return markdown[0]


def inheriting(tool: Tool, references: Sequence[ReferredItem]) -> Tool:
    """Return a directive with the inputs of all that it extends; raise `InvalidManifest` where that is a cycle."""
    if tool.item_type == "tool" or not any(
        one.by == tool.identity and one.item_type == tool.item_type for one in references
    ):
        return tool
    lineage = program.ancestors(text_item(tool), loader(references))
    parameters = program.merged_inputs([one.manifest.parameters for one in lineage])
    return replace(tool, manifest=replace(tool.manifest, parameters=parameters))


def loader(references: Sequence[ReferredItem]) -> program.Load:
    """Return what gives a program the items that it names, out of those that were resolved with it."""
    known = {(one.ref, one.item_type, one.by): one.tool for one in references}

    def load(ref: str, item_type: str, by: str) -> program.TextItem | None:
        tool = known.get((ref, item_type, by))
        return text_item(tool) if tool else None

    return load
