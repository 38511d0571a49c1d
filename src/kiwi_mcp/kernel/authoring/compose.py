"""From the words of a create or update request to a draft."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path, PurePosixPath

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.kernel.authoring.drafts import MANIFEST_NAME, Draft, contents, dump_manifest, place_for, too_deep
from kiwi_mcp.manifest.names import is_tool_id
from kiwi_mcp.manifest.placement import read_written
from kiwi_mcp.manifest.signature import split

CONTROL_WORDS = {"manifest", "files", "content", "filename", "location", "category", "path"}
"""Words of the request itself; every other word is a word of the manifest."""
_UNNAMED = "unnamed"
_MARKDOWN_FOLDERS = {"directive": "directives", "knowledge": "knowledge"}


def new_item(item_id: str | None, words: JsonObject, item_type: str) -> tuple[str, Draft]:
    """Return the name and the draft of an item to create."""
    manifest = _manifest_of(words)
    files = contents(_mapping("files", words.get("files")))
    given = as_text(manifest.get("tool_id")) or item_id or as_text(manifest.get("name"))
    tool_id = given or _name_inside(words, files)
    _refuse_two_names(tool_id, item_id)
    category = as_text(words.get("category"))
    # A name that no item can have is reported with all other issues; until then its draft needs a place.
    stem = tool_id if is_tool_id(tool_id) else _UNNAMED
    if "content" in words:
        return tool_id, _single_file(stem, words, item_type, category)
    if MANIFEST_NAME not in files:
        named = {"tool_id": tool_id, **manifest, **({"category": category} if category else {})}
        if not files:
            name = f"{stem}.yaml"
            return tool_id, Draft(
                place_for(kind="tools", category=category, name=name), name, {name: dump_manifest(named)}
            )
        files = {MANIFEST_NAME: dump_manifest(named), **files}
    return tool_id, Draft(place_for(kind="tools", category=category, name=stem), MANIFEST_NAME, files)


def _manifest_of(words: JsonObject) -> dict[str, Json]:
    beside = {name: value for name, value in words.items() if name not in CONTROL_WORDS and value is not None}
    return {**beside, **_mapping("manifest", words.get("manifest"))}


def _refuse_two_names(tool_id: str, item_id: str | None) -> None:
    if item_id and tool_id != item_id:
        raise InvalidRequest(
            f"item_id is {item_id!r} and tool_id is {tool_id!r}.", suggestion="Send one name, or the same name twice."
        )


def _name_inside(words: JsonObject, files: Mapping[str, bytes]) -> str:
    """Return the name that a text sent whole gives itself or, where it does not, has from its file."""
    text = as_text(words.get("content")) or files.get(MANIFEST_NAME, b"").decode("utf-8", errors="replace")
    name = as_text(words.get("filename")) or MANIFEST_NAME
    written = read_written(Path(name), text) if text else None
    said = as_text(written.value.get("tool_id")) if written else ""
    return said or ("" if name == MANIFEST_NAME else PurePosixPath(name).stem)


def _mapping(word: str, value: Json) -> JsonObject:
    if value is not None and not isinstance(value, Mapping):
        issue = Issue(word, "is not an object", f'Send `"{word}": {{…}}`.')
        raise InvalidManifest("The request", [issue])
    return as_object(value)


def _single_file(tool_id: str, words: JsonObject, item_type: str, category: str) -> Draft:
    """Return the draft of an item whose whole text was sent."""
    text = as_text(words.get("content"))
    folder = _MARKDOWN_FOLDERS.get(item_type) or _MARKDOWN_FOLDERS.get(as_text(words.get("tool_type")))
    name = as_text(words.get("filename")) or f"{tool_id}{'.md' if folder else '.yaml'}"
    if "/" in name:
        issue = Issue("filename", f"{name!r} is a path", "Send a bare file name; `category` says the folder.")
        raise InvalidManifest("The request", [issue])
    kind = folder or ("directives" if PurePosixPath(name).suffix == ".md" else "tools")
    return Draft(place_for(kind=kind, category=category, name=name), name, contents({name: text}))


def changed_item(tool: Tool, words: JsonObject, base_relative: str) -> Draft:
    """Return the draft of an item after an update: what is not named stays as it is."""
    name = tool.origin.path.name
    files = {file.path: load_bytes(tool, file) for file in tool.files}
    executables = frozenset(file.path for file in tool.files if file.is_executable)
    sent = _mapping("files", words.get("files"))
    removed = {path for path, value in sent.items() if value is None}
    changes = _manifest_of(words)
    own = tool.origin.path.read_bytes() if "content" not in words else contents({name: words["content"]})[name]
    own = _unsigned(own, tool.origin.path.suffix)
    if changes and "content" not in words:
        own = _edited(own.decode(), tool.origin.path.suffix, changes)
    if not tool.origin.is_folder:
        if sent:
            issue = Issue(
                "files", "cannot be added to an item that is one file", "Create a folder item with these files."
            )
            raise InvalidManifest(tool.id, [issue])
        return Draft(base_relative, name, {name: own}, executables)
    # Code that tools share is among the files of those that import it, and stays where it is.
    own_files = {path: data for path, data in files.items() if (tool.origin.root / path).exists()}
    kept = {path: data for path, data in own_files.items() if path not in removed and path != name}
    added = contents({path: value for path, value in sent.items() if value is not None})
    return Draft(base_relative, name, {name: own, **kept, **added}, executables)


def _unsigned(data: bytes, suffix: str) -> bytes:
    """Return a file without its signature, which holds for nothing that was changed."""
    _signature, body = split(data.decode(errors="surrogateescape"), suffix)
    return body.encode(errors="surrogateescape")


def _edited(body: str, suffix: str, changes: JsonObject) -> bytes:
    """Return a YAML manifest with words changed and its comments kept."""
    if suffix not in {".yaml", ".yml"}:
        issue = Issue("manifest", f"is inside a {suffix} file", "Send the whole new text as `content`.")
        raise InvalidManifest("The item", [issue])
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 4_096
    editor.indent(mapping=2, sequence=4, offset=2)
    try:
        document = editor.load(body)
    except YAMLError as error:
        issue = Issue("", f"the present text cannot be edited: {error}", "Send the whole new text as `content`.")
        raise InvalidManifest("The item", [issue]) from error
    for word, value in changes.items():
        document[word] = value
    out = StringIO()
    try:
        editor.dump(document, out)
    except RecursionError:
        raise too_deep() from None
    return out.getvalue().encode()
