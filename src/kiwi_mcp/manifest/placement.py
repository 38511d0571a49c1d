"""Where a manifest stands: a whole file, inside code, or as a Markdown directive or entry of knowledge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.manifest.directive import read_directive
from kiwi_mcp.manifest.document import Document, refuse
from kiwi_mcp.manifest.embedded import read_embedded
from kiwi_mcp.manifest.json_text import read_json, read_toml
from kiwi_mcp.manifest.knowledge import read_knowledge
from kiwi_mcp.manifest.yaml import read_yaml, syntax_fault

Placement = Literal["manifest", "embedded", "directive", "knowledge"]

_READERS = {".yaml": read_yaml, ".yml": read_yaml, ".json": read_json, ".toml": read_toml}
_YAML = (".yaml", ".yml")
_MARKS = ("tool_id", "tool_type", "executor", "executor_id")
"""Any of these at the top makes a data file an item; a `package.json` beside a tool has none."""
_DIRECTIVE = re.compile(r"<directive[^>]*>")


@dataclass(frozen=True, slots=True)
class Written:
    """A manifest as it was authored, the lines of its parts, and which placement it has."""

    value: JsonObject
    placement: Placement
    lines: Mapping[str, int] = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()


def read_written(path: Path, text: str, *, is_legacy_script: bool = False) -> Written | None:
    """Return what a file says about itself, or None where it is no item. Nothing in it is run."""
    suffix = path.suffix.lower()
    if suffix in _READERS:
        return _read_data(path, suffix, text)
    if suffix == ".md":
        return _read_markdown(path, text)
    found = read_embedded(suffix, text, what=path.name, is_legacy_script=is_legacy_script)
    if found is None:
        return None
    return Written(_with_entrypoint(found.value, path.name), "embedded", found.lines, found.issues)


def _read_data(path: Path, suffix: str, text: str) -> Written | None:
    is_tool_file = path.stem == "tool"
    if not is_tool_file and not any(mark in text for mark in _MARKS):
        if suffix in _YAML and (fault := syntax_fault(text, what=path.name)):
            raise fault  # nobody can tell what it was to be, and who wrote it has to hear of it
        return None
    document: Document = _READERS[suffix](text, what=path.name)
    if isinstance(document.value, Mapping) and (is_tool_file or any(mark in document.value for mark in _MARKS)):
        return Written(document.value, "manifest", document.lines)
    if is_tool_file:
        raise refuse(path.name, "is not a mapping", "Write `tool_id`, `tool_type` and `version` as keys.", line=1)
    return None


def _read_markdown(path: Path, text: str) -> Written | None:
    # The folder decides first, since an entry of knowledge may quote a directive.
    folder = next((part for part in reversed(path.parts[:-1]) if part in {"directives", "knowledge"}), "")
    if folder == "directives" or (not folder and _DIRECTIVE.search(text)):
        return Written(read_directive(text, what=path.name), "directive")
    if folder == "knowledge" or text.startswith("---\n"):
        return Written(read_knowledge(text, what=path.name, stem=path.stem), "knowledge")
    return None


def _with_entrypoint(value: JsonObject, name: str) -> JsonObject:
    """Return embedded metadata that says which file it was found in: the file is its own entrypoint."""
    if "entrypoint" in value or "entrypoint" in as_object(value.get("config")):
        return value
    return {**value, "entrypoint": name}
