"""Converting: an old Python tool as a folder with a manifest of its own beside the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest, Origin, Tool, ToolFile
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel.authoring.drafts import MANIFEST_NAME, Draft, dump_manifest, place_for
from kiwi_mcp.kernel.migrating.habits import Habits, undeclared_variables
from kiwi_mcp.manifest.digest import digest_of, sha256_hex
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.python_source import inferred_parameters
from kiwi_mcp.manifest.sheets import Sheets
from kiwi_mcp.manifest.signature import split
from kiwi_mcp.manifest.yaml import read_yaml


@dataclass(frozen=True, slots=True)
class Converted:
    """The folder that an old tool becomes, and what its manifest does not say any more."""

    draft: Draft
    tool: Tool
    """The item that the draft will be."""
    issues: tuple[Issue, ...]


def convert(tool: Tool, habits: Habits, modules: Mapping[str, bytes], sheets: Sheets) -> Converted:
    """Return an old tool as a folder: its code as it was, without the line that signed it, and a `tool.yaml`."""
    name = tool.origin.path.name
    own = next(file for file in tool.files if file.path == name)
    _signature, body = split(load_bytes(tool, own).decode(), tool.origin.path.suffix)
    manifest = tool.manifest
    sheet = sheets.get(manifest.tool_type)
    idle = [word for word in manifest.config if sheet is not None and word not in sheet.words]
    # Code that it shared with other tools lies in the new folder, so that it need not be lent any more.
    lent = {file.path: load_bytes(tool, file) for file in tool.files if file.path != name}
    words = {**_words(manifest), "config": _config(manifest, habits, idle)}
    if manifest.parameters == inferred_parameters(body, what=name):
        del words["parameters"]  # nobody declared them: they are the entry function's, and are taken from it again
    shown = {word: value for word, value in words.items() if value not in (None, "", {}, [])}
    draft = Draft(
        place_for(kind="tools", category=manifest.category, name=manifest.tool_id),
        MANIFEST_NAME,
        {MANIFEST_NAME: dump_manifest(shown), name: body.encode(), **lent, **modules},
        frozenset({name} if own.is_executable else ()),
    )
    return Converted(draft, _item(draft, tool, sheets), tuple(_left_out(idle)))


def _item(draft: Draft, old: Tool, sheets: Sheets) -> Tool:
    """Return a draft as the item it will be, without writing it anywhere."""
    body = draft.files[MANIFEST_NAME]
    written = as_object(read_yaml(body.decode(), what=MANIFEST_NAME).value)
    manifest = parse(written, stem=old.id, category=old.manifest.category, sheets=sheets)
    if "parameters" not in written:
        manifest = replace(manifest, parameters=old.manifest.parameters)
    files = tuple(
        ToolFile(path, sha256_hex(data), len(data), path in draft.executables)
        for path, data in sorted(draft.files.items())
    )
    digest = digest_of(
        tool_id=manifest.tool_id,
        version=manifest.version,
        executor=manifest.executor,
        manifest_body=body,
        files=[file for file in files if file.path != MANIFEST_NAME],
    )
    path = draft.manifest_path(old.origin.root)
    return Tool(manifest, Origin(old.origin.source, path, path.parent), files, digest)


def _words(manifest: Manifest) -> dict[str, Json]:
    """Return the words of a manifest in the order in which a person would write them."""
    return {
        "tool_id": manifest.tool_id,
        "tool_type": manifest.tool_type,
        "version": manifest.version,
        "executor": manifest.executor,
        "name": manifest.name,
        "description": manifest.description,
        "category": manifest.category,
        "tags": list(manifest.tags),
        "config": {},
        "parameters": manifest.parameters,
        "outputs": manifest.outputs,
        "requires": list(manifest.requires),
        "mutates_state": manifest.mutates_state or None,
        "effect": manifest.effect if "effect" in manifest.written else None,
        "validation": manifest.validation,
        "env_config": manifest.env_config,
        **manifest.extra,
    }


def _config(manifest: Manifest, habits: Habits, idle: list[str]) -> JsonObject:
    config = {word: value for word, value in manifest.config.items() if word not in {*idle, "lib_imports"}}
    missing = undeclared_variables(habits, manifest)
    if needed := [name for name, spare in missing.items() if spare is None]:
        config["variables"] = [*as_list(config.get("variables")), *needed]
    if spared := {name: f"${{{name}:-{spare}}}" for name, spare in missing.items() if spare is not None}:
        config["env"] = {**as_object(config.get("env")), **spared}
    return config


def _left_out(idle: list[str]) -> Iterator[Issue]:
    for word in idle:
        reason = f"`{word}` means nothing to Kiwi, so it is not in the new manifest; the code still has it"
        yield Issue(f"config.{word}", reason, "Nothing, unless you meant a word of the manifest.", "warning")
