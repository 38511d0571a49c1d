"""`make reference`: writes `prepared.json`, `commands.json` and `parsed.json`; never imported at run time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import yaml
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.data import PARSED
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.verb import Request, Verb
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.surfaces.cli.commands import COMMANDS, GROUPS, LOCAL_PARTS, Command, LocalPart
from kiwi_mcp.surfaces.cli.rows import CommandRow, CommandTable, OptionRow
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import ENVELOPE, answer, build_server, handshake, tool_lists
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

_HERE = Path(__file__).parent
PREPARED = _HERE / "mcp" / "prepared.json"
COMMAND_TABLE = _HERE / "cli" / "commands.json"


async def prepared() -> Mapping[str, Mapping[str, str]]:
    """Return the SDK's answers to the opening of a conversation, by era and method."""
    with TemporaryDirectory() as folder:  # of an owner who prefers nothing of their own
        kernel = Kernel(user=Path(folder, "user"), cache=Path(folder, "cache"), is_owner=False, surface="mcp")
        calls = Calls(kernel.tasks, task_after=lambda: 0.0, principal=lambda _: "")
        server = build_server(kernel, calls=calls, changes=ToolListWatcher(kernel))
        greetings = {one: await answer(server, "initialize", handshake(one)) for one in HANDSHAKE_PROTOCOL_VERSIONS}
        answers = {
            "versions": {"modern": LATEST_MODERN_VERSION},
            "initialize": {**greetings, "else": greetings[LATEST_HANDSHAKE_VERSION]},
            "legacy": {"ping": await answer(server, "ping", {}, is_legacy=True)},
            "modern": {"server/discover": await answer(server, "server/discover", ENVELOPE)},
            "tools": await tool_lists(server),
        }
        await kernel.aclose()
        return answers


def command_table() -> CommandTable:
    """Return one row for each command: the everyday commands, those of each group, the others."""
    rows = [*map(_verb_row, every_verb()), *map(_command_row, COMMANDS)]
    order = ["setup", "init", "run", "search", "load", "create", "sign", "why", "doctor", *GROUPS]

    def place(row: CommandRow) -> int:
        path = row["path"]
        inside = [name for name in order if path == name or (name in GROUPS and path.startswith(f"{name} "))]
        return max(map(order.index, inside), default=len(order))

    return {"groups": GROUPS, "commands": sorted(rows, key=place)}


def _verb_row(verb: Verb) -> CommandRow:
    local = LOCAL_PARTS.get(verb.path, LocalPart())
    row: CommandRow = {
        "path": verb.path,
        "help": verb.help,
        "run": local.run,
        "options": [*_options(verb.request), *(_options(local.options) if local.options else ())],
        "aliases": [*verb.aliases],
        "wire": [*verb.wire],
    }
    if local.about:
        row["about"] = local.about
    if verb.everyday:
        row["everyday"] = verb.everyday
    if verb.asks:
        row["asks"] = True
    has_option = any(option["field"] == "project_path" for option in row["options"])
    has_project = "project_path" in verb.request.__struct_fields__ and not has_option
    return _flagged(row, has_project if local.has_project is None else local.has_project, local.has_json)


def _command_row(command: Command) -> CommandRow:
    row: CommandRow = {
        "path": command.path,
        "help": " ".join((command.request.__doc__ or "").split()),
        "run": command.run,
        "options": _options(command.request),
        "aliases": [],
    }
    return _flagged(row, command.has_project, command.has_json)


def _flagged(row: CommandRow, has_project: bool, has_json: bool) -> CommandRow:
    if has_project:
        row["has_project"] = True
    if has_json:
        row["has_json"] = True
    return row


def _options(request: type[Request]) -> list[OptionRow]:
    """Return the options of a request; a field without `Argument` or `Option` is no option."""
    hints = get_type_hints(request, include_extras=True)
    fields = [(field, *_typed(hints[field.name])) for field in msgspec.structs.fields(request)]
    return [_option(field, hint, meta) for field, hint, meta in fields if meta is not None]


def _typed(hint: object) -> tuple[object, msgspec.Meta | None]:
    """Return the type of a field, and what describes its option."""
    if get_origin(hint) is not Annotated:
        return hint, None
    inner, *metas = get_args(hint)
    return inner, next((meta for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra), None)


def _option(field: msgspec.structs.FieldInfo, hint: object, meta: msgspec.Meta) -> OptionRow:
    # `str | None` and `tuple[str, ...]` are read as `str`; a tuple or a list may be repeated.
    inner = next((one for one in get_args(hint) if one is not type(None)), hint)
    inner = _typed(inner)[0]
    words: Mapping[str, Any] = meta.extra or {}
    kinds: Mapping[object, str] = {bool: "flag", int: "number"}
    row: OptionRow = {
        "field": field.encode_name,
        "input": words["kind"] or kinds.get(inner, "text"),
        "help": words["help"] or meta.description or "",
    }
    if "flags" in words:
        row["flags"] = words["flags"] or [f"--{field.name.replace('_', '-')}"]
    if row["input"] == "flag":
        row["value"] = True if words["value"] is None else words["value"]
    else:
        row["metavar"] = words["metavar"] or field.encode_name.upper()
        if field.required:
            row["required"] = True
        if isinstance(field.default, str | int) and field.default:
            row["default"] = field.default
    if get_origin(hint) in {tuple, list, dict}:
        row["many"] = True
    if not words["is_sent"]:
        row["local"] = True
    return row


def main() -> None:
    """Write the files again, each in one piece."""
    _write(PARSED, parsed_data())
    _write(PREPARED, json.dumps(asyncio.run(prepared()), ensure_ascii=False, indent=1))
    _write(COMMAND_TABLE, _lines(command_table()))


def parsed_data() -> str:
    """Return the YAML files that most commands need, parsed, with a line for each."""
    rows: dict[str, str] = {}
    for path in sorted(PARSED.parent.rglob("*.yaml")):
        if path.parent.name in {"types", "isolation"} or path.name == "languages.yaml":
            text = path.read_text(encoding="utf-8")
            value = json.dumps(yaml.load(text, Loader=yaml.CSafeLoader), ensure_ascii=False)
            rows[sha256(text.encode()).hexdigest()] = value
    return "{{\n{}\n}}".format(",\n".join(f'"{digest}": {value}' for digest, value in rows.items()))


def _lines(table: CommandTable) -> str:
    """Return the table with a line for each command, so that a difference shows which one changed."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in table["commands"])
    return f'{{"groups": {json.dumps(table["groups"], ensure_ascii=False, indent=1)},\n"commands": [\n{rows}\n]}}'


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(f"{text}\n", encoding="utf-8")
    draft.replace(path)
    sys.stderr.write(f"wrote {path.name}\n")


if __name__ == "__main__":
    main()
