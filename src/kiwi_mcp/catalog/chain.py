"""Chains: from a tool down its executors to a primitive, and the rules for which types can be executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kiwi_mcp.domain.errors import ChainCycle, ChainMistyped, ChainTooDeep
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SUBPROCESS, Tool, TypeTraits
from kiwi_mcp.manifest import permissions
from kiwi_mcp.manifest.formats import formats_for
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.type_specs import TypeSpec, TypeSpecs

MAX_LINKS = 16


def walk(tool: Tool, below: Callable[[Sequence[Tool]], Tool]) -> tuple[Tool, ...]:
    """Return a tool and all of its executors; `below` returns the executor of the last link."""
    links = [tool]
    while links[-1].manifest.executor:
        following = below(links)
        names = (*(link.id for link in links), following.id)
        if any(link.origin.path == following.origin.path for link in links):
            raise ChainCycle(names)
        if len(links) == MAX_LINKS:
            raise ChainTooDeep(names, limit=MAX_LINKS)
        links.append(following)
    return tuple(links)


def traits_of(links: Sequence[Tool], sheets: TypeSpecs) -> tuple[TypeTraits, ...]:
    """Return the traits of each link's type, after checking that the type is allowed at its position."""
    found = [_sheet(links[: index + 1], sheets) for index in range(len(links))]
    for index, sheet in enumerate(found):
        for reason, suggestion in _faults(sheet, links[index:], is_top=index == 0):
            names = [link.id for link in links[: index + 2]]
            raise ChainMistyped(names, reason=reason, suggestion=suggestion)
    return tuple(sheet.traits for sheet in found)


def _sheet(links: Sequence[Tool], sheets: TypeSpecs) -> TypeSpec:
    manifest = links[-1].manifest
    sheet = sheets.get(manifest.tool_type)
    if sheet is None:
        kind = f"is of the type {manifest.written_type!r}, which no sheet describes"
        raise ChainMistyped(
            [link.id for link in links],
            reason=f"{manifest.tool_id!r} {kind if manifest.tool_type else 'does not say its `tool_type`'}",
            suggestion=f"Use one of: {', '.join(sheets.types())}; or describe the type in .ai/types/.",
        )
    return sheet


def unsound(links: Sequence[Tool], sheets: TypeSpecs) -> Iterator[Issue]:
    """Yield the values in the links that their types do not allow, except unknown keys, which no driver reads."""
    for link in links:
        sheet = sheets.get(link.manifest.tool_type)
        if sheet is not None:
            schema = {**sheet.config, "additionalProperties": True}
            yield from faults(schema, link.manifest.config, place=f"{link.id}.config", formats=formats_for(""))
            if "permissions" in sheet.words:  # one that is misspelt is refused when it is used, and never ignored
                yield from permissions.permission_faults(link.manifest.config.get("permissions"), sheets)
    top = sheets.traits(links[0].manifest.tool_type)
    for link in links if top.lifetime != "call" else ():
        # A server that is started here has a process, whichever of its items is called.
        is_process = sheets.is_server(link.manifest.tool_type) and link.manifest.executor == SUBPROCESS
        if link.manifest.isolation not in {None, "trusted"} and not is_process:
            # Never weaker than requested: an item that cannot be isolated is not run.
            fix = "Remove it, or use a script instead."
            yield Issue(f"{link.id}.isolation", "asks for a sandbox, and items of this type have no process", fix)


def _faults(sheet: TypeSpec, links: Sequence[Tool], *, is_top: bool) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the first of some links is not allowed at its position."""
    link, *rest = links
    wanted = f"Let {link.id!r} run on {_wanted(sheet)}."
    if sheet.ids and (link.id not in sheet.ids or not link.origin.is_built_in):
        # These are Kiwi's own code; a file cannot become one by saying so.
        reason = f"{link.id!r} calls itself a {sheet.type}, and those are built in: {', '.join(sheet.ids)}"
        yield reason, "Give it another type, and let it run on one of them."
    if rest and sheet.needs_executor == "none":
        yield f"{link.id!r} is a {sheet.type}, which has no executor", f"Remove `executor` from {link.id!r}."
    if rest and not _carries(rest[0], sheet):
        kind = rest[0].manifest.tool_type
        yield f"{link.id!r} is a {sheet.type} and cannot run on {rest[0].id!r}, which is a {kind}", wanted
    if not rest and sheet.needs_executor == "required":
        yield f"{link.id!r} is a {sheet.type} and names no executor", wanted
    if not rest and not is_top and not sheet.ids:
        yield f"{link.id!r} is a {sheet.type}, and a chain ends in a primitive", f"Let {link.id!r} run on one."


def _carries(executor: Tool, sheet: TypeSpec) -> bool:
    is_of_type = not sheet.executor_types or executor.manifest.tool_type in sheet.executor_types
    return is_of_type and (not sheet.executor_ids or executor.id in sheet.executor_ids)


def _wanted(sheet: TypeSpec) -> str:
    return " or ".join([f"`{name}`" for name in sheet.executor_ids] or [f"a {kind}" for kind in sheet.executor_types])
