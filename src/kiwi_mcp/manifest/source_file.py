"""The manifest in a file: in a data file, in a leading comment, or in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Literal

from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest import directive, markdown, python_source
from kiwi_mcp.manifest.document import Document, read_data, read_json, read_toml, read_yaml, refuse, syntax_fault
from kiwi_mcp.manifest.type_specs import FileFormat, TypeSpec, TypeSpecs, load_type_specs

MAX_LEAD = 64_000
"""How many characters at the start of a file are searched for metadata."""

_KEY = lazy_pattern(r"^(?:tool_id|tool_type)[ \t]*:", re.MULTILINE)
_SIGNED = lazy_pattern(r"(?:kiwi-mcp:validated|rye:signed):")


Placement = Literal["manifest", "embedded", "text"]


class SourceManifest(Struct, frozen=True):
    """A manifest as it was authored, the lines of its parts, and which placement it has."""

    value: JsonObject
    placement: Placement
    lines: Mapping[str, int] = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()


class Comments(Struct, frozen=True):
    """The marks of one language: what begins a comment line, and what surrounds a block."""

    line: str = ""
    block: tuple[str, str] | None = None


def read_embedded(suffix: str, text: str, *, what: str, is_legacy_script: bool = False) -> SourceManifest | None:
    """Return the metadata a code file holds, or None where it is no item. Nothing in the file is run."""
    if suffix == ".py":
        if not is_legacy_script and not python_source.may_be_item(text):
            return None
        source = python_source.read_python(text, what=what)
        if not is_legacy_script and not source.is_item:
            return None
        # An old script is Python, run by its runtime, in a first version.
        usual = {"tool_type": "script", "executor": "python_runtime", "version": "1.0.0"} if is_legacy_script else {}
        return SourceManifest({**usual, **source.value}, "embedded", source.lines, tuple(source.issues))
    for start, block in _leading_comments(text[:MAX_LEAD], comment_marks().get(suffix, Comments("#"))):
        if _KEY.search(block) is None:
            continue
        try:
            document = read_yaml(block, what=what)
        except InvalidManifest as error:
            raise InvalidManifest(what, [python_source.shifted(issue, start) for issue in error.issues]) from None
        lines = {place: line + start for place, line in document.lines.items()}
        return SourceManifest(as_object(document.value), "embedded", lines)
    return None


@cache
def comment_marks() -> Mapping[str, Comments]:
    """Return the comment marks of each suffix of files; `#` is meant where it is not listed."""
    return convert(read_data("languages.yaml"), dict[str, Comments])


def _leading_comments(text: str, marks: Comments) -> Iterator[tuple[int, str]]:
    """Yield each comment before the first line of code, as the number of lines before it and its text."""
    lines = text.splitlines()
    at = 1 if lines and lines[0].startswith("#!") else 0
    while at < len(lines):
        line = lines[at].strip()
        if not line or _SIGNED.search(line):
            at += 1
        elif marks.block is not None and line.startswith(marks.block[0]):
            opening, closing = marks.block
            after = (place for place in range(at + 1, len(lines)) if closing in lines[place])
            end = at if closing in line.removeprefix(opening) else next(after, len(lines) - 1)
            yield at, _inside(lines[at : end + 1], marks.block)
            at = end + 1
        elif marks.line and line.startswith(marks.line):
            end = at
            while end < len(lines) and lines[end].strip().startswith(marks.line):
                end += 1
            yield at, dedent("\n".join(part.strip().removeprefix(marks.line) for part in lines[at:end]))
            at = end
        else:
            return


def _inside(lines: list[str], marks: tuple[str, str]) -> str:
    body = "\n".join(lines).strip().removeprefix(marks[0])
    parts = (body.rpartition(marks[1])[0] if marks[1] in body else body).split("\n")
    if all(part.lstrip().startswith("*") for part in parts[1:] if part.strip()):
        parts = [part.lstrip().removeprefix("*") for part in parts]
    # The opening mark keeps its line, so that line numbers stay those of the file.
    if parts[0].strip("*! "):
        return dedent("\n".join(parts)).strip()
    return "\n" + dedent("\n".join(parts[1:]))


_READERS = {".yaml": read_yaml, ".yml": read_yaml, ".json": read_json, ".toml": read_toml}
_YAML = (".yaml", ".yml")
_MARKS = ("tool_id", "tool_type", "executor", "executor_id")
"""Any of these at the top makes a data file an item; a `package.json` beside a tool has none."""


def read_manifest(
    path: Path, text: str, *, sheets: TypeSpecs | None = None, is_legacy_script: bool = False
) -> SourceManifest | None:
    """Return the manifest in a file, or None if it is no item. Nothing in it is run."""
    suffix = path.suffix.lower()
    if suffix in _READERS:
        is_tool_file = path.stem == "tool"
        if not is_tool_file and not any(mark in text for mark in _MARKS):
            if suffix in _YAML and (fault := syntax_fault(text, what=path.name)):
                raise fault  # it may have been meant as an item, and its author has to see the error
            return None
        document: Document = _READERS[suffix](text, what=path.name)
        if isinstance(document.value, Mapping) and (is_tool_file or any(mark in document.value for mark in _MARKS)):
            return SourceManifest(document.value, "manifest", document.lines)
        if is_tool_file:
            raise refuse(path.name, "is not a mapping", "Write `tool_id`, `tool_type` and `version` as keys.", line=1)
        return None
    if suffix == ".md":
        written = (sheets or load_type_specs()).written_as(path, text)
        return _read_markdown(path, text, *written) if written else None
    found = read_embedded(suffix, text, what=path.name, is_legacy_script=is_legacy_script)
    if found is None or "entrypoint" in found.value or "entrypoint" in as_object(found.value.get("config")):
        return found
    return replace(found, value={**found.value, "entrypoint": path.name})  # the file is its own entrypoint


def _read_markdown(path: Path, text: str, spec: TypeSpec, format_: FileFormat) -> SourceManifest:
    issues: tuple[Issue, ...] = ()
    if format_.reader == "directive":
        value = directive.read_directive(text, what=path.name)
    elif format_.reader == "skill":
        stem = path.parent.name if path.name == format_.file else path.stem
        value, issues = markdown.read_skill(text, what=path.name, stem=stem)
    else:
        value = markdown.read_front_matter(text, spec, format_, what=path.name, stem=path.stem)
    value = {**value, "tool_type": spec.type, "executor": spec.default_executor or None}
    return SourceManifest(value, "text", issues=issues)
