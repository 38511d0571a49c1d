"""The items that an item names in its config: the directive of a thread, what a directive extends, its context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.errors import NotCallable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import ItemType, ReferredItem, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.manifest.hooks import hook_items
from kiwi_mcp.manifest.program import Load, TextItem, ancestors, context_ids, mcps_in, merged_inputs
from kiwi_mcp.manifest.type_specs import TypeSpecs

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

    def absent(self) -> Issue:
        """Return the issue of a name that nothing has."""
        fix = f"Create `{self.ref:.140}`, or name one that exists."
        return Issue(self.place, f"no {self.item_type} is named {self.ref!r:.140}", fix)


def references_in(tool: Tool, sheets: TypeSpecs) -> Iterator[Reference]:
    """Yield the names of other items in an item."""
    sheet = sheets.get(tool.manifest.tool_type)
    if sheet is None or not sheet.references:
        return
    config = _config(tool)
    for word, item_type in sheet.references.items():
        if named := as_text(config.get(word)):
            yield Reference(f"config.{word}", named, item_type)
    for place, name, item_type in hook_items(config.get("hooks")) if "hooks" in sheet.words else ():
        yield Reference(place, name, item_type, is_required=False)
    for name in context_ids(config) if "context" in sheet.words else ():
        yield Reference("config.context", name, "knowledge", is_required=False)


def required_servers(tool: Tool, sheets: TypeSpecs) -> Sequence[str]:
    """Return the MCP servers that an item cannot do without."""
    sheet = sheets.get(tool.manifest.tool_type)
    if sheet is None or "mcps" not in sheet.words:
        return ()
    return [use.name for use in mcps_in(_config(tool).get("mcps")) if use.is_required]


def _config(tool: Tool) -> JsonObject:
    return text_item(tool).config if tool.origin.is_folder else tool.manifest.config


def text_item(tool: Tool) -> TextItem:
    """Return an item with its text; items without one have an empty text."""
    try:
        text = load_bytes(tool, text_file(tool)).decode("utf-8", errors="replace")
    except NotCallable:
        text = ""
    return TextItem(tool.manifest, text, tool.identity)


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
    if not any(one.by == tool.identity and one.item_type == tool.item_type for one in references):
        return tool
    lineage = ancestors(text_item(tool), loader(references))
    parameters = merged_inputs([one.manifest.parameters for one in lineage])
    return replace(tool, manifest=replace(tool.manifest, parameters=parameters))


def loader(references: Sequence[ReferredItem]) -> Load:
    """Return what gives a program the items that it names, out of those that were resolved with it."""
    known = {(one.ref, one.item_type, one.by): one.tool for one in references}

    def load(ref: str, item_type: str, by: str) -> TextItem | None:
        tool = known.get((ref, item_type, by))
        return text_item(tool) if tool else None

    return load
