"""The declared result of a tool: its schema, or the older `format` and `schema`, and how a result differs from it."""

from __future__ import annotations

from pathlib import Path

from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.manifest.json_schema import faults, schema_faults

FORMATS = ("json", "text", "file")
"""The values of `format` in older manifests. `file` is the path of a file that the tool wrote, from the project."""


def is_old_form(outputs: JsonObject) -> bool:
    """Whether outputs are declared by `format` and `schema`; in a JSON Schema, `format` stands beside `type`."""
    return "format" in outputs and "type" not in outputs


def output_schema(outputs: JsonObject) -> JsonObject:
    """Return the schema of a result; empty where none is declared, or only the name of one."""
    declared = as_object(outputs.get("schema")) if is_old_form(outputs) else outputs
    return declared if isinstance(declared.get("type"), str) and not schema_faults(declared, "outputs") else {}


def output_faults(outputs: JsonObject, result: Json, project: Path) -> tuple[str, ...]:
    """Return how a result differs from what its author declares."""
    found = [f"{issue.place} {issue.reason}" for issue in faults(output_schema(outputs), result, place="result")]
    declared = outputs.get("format") if is_old_form(outputs) else None
    if declared in {"text", "file"} and not isinstance(result, str):
        found.append(f"result is not text, as `format: {declared}` says")
    elif declared == "file" and isinstance(result, str) and not _is_file(project, result):
        found.append("result is not the path of a file, as `format: file` says")
    return tuple(found)


def _is_file(project: Path, named: str) -> bool:
    try:
        path = (project / named.strip()).resolve()
        return path.is_relative_to(project.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # no name that a file can have, or a loop of links
        return False
