"""Chains: from a tool down its executors to a primitive, and the rules for what may stand on what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kiwi_mcp.domain.errors import ChainCycle, ChainMistyped, ChainTooDeep
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.manifest.check import HELD, STARTS
from kiwi_mcp.manifest.formats import formats_for
from kiwi_mcp.manifest.permissions import permission_faults
from kiwi_mcp.manifest.schema import faults
from kiwi_mcp.manifest.sheets import Sheet, Sheets

MAX_LINKS = 16


def walk(tool: Tool, below: Callable[[Sequence[Tool]], Tool]) -> tuple[Tool, ...]:
    """Return a tool and all that it stands on; `below` gives the executor of the last of some links."""
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


def judge(links: Sequence[Tool], sheets: Sheets) -> Sheet:
    """Return the sheet of the top link once every link is found to stand where its type may stand."""
    found = [_sheet(links[: index + 1], sheets) for index in range(len(links))]
    for index, sheet in enumerate(found):
        for reason, suggestion in _faults(sheet, links[index:], is_top=index == 0):
            names = [link.id for link in links[: index + 2]]
            raise ChainMistyped(names, reason=reason, suggestion=suggestion)
    return found[0]


def _sheet(links: Sequence[Tool], sheets: Sheets) -> Sheet:
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


def unsound(links: Sequence[Tool], sheets: Sheets) -> Iterator[Issue]:
    """Give what the links say that their types do not allow: limits hold when a tool runs, too.

    Words that the type does not have are for the author to hear of, when the item is checked: no driver reads them.
    """
    for link in links:
        sheet = sheets.get(link.manifest.tool_type)
        if sheet is not None:
            schema = {**sheet.config, "additionalProperties": True}
            yield from faults(schema, link.manifest.config, place=f"{link.id}.config", formats=formats_for(""))
            if "permissions" in sheet.words:  # one that is misspelt is refused when it is used, and never ignored
                yield from permission_faults(link.manifest.config.get("permissions"))
    top = sheets.get(links[0].manifest.tool_type)
    for link in links if top is not None and top.driver != HELD else ():
        # A server that is started here has a process, whatever is asked of it.
        is_held = sheets.carries(link.manifest.tool_type, "mcp") and link.manifest.executor == STARTS
        if link.manifest.isolation not in {None, "trusted"} and not is_held:
            # Never weaker than asked for: what cannot be held is not run.
            reason, fix = "asks to be held, and nothing holds items of this type", "Remove it, or use a script instead."
            yield Issue(f"{link.id}.isolation", reason, fix)


def _faults(sheet: Sheet, links: Sequence[Tool], *, is_top: bool) -> Iterator[tuple[str, str]]:
    """Give the reasons why the first of some links may not stand where it does."""
    link, *rest = links
    wanted = f"Let {link.id!r} run on {_wanted(sheet)}."
    if sheet.ids and (link.id not in sheet.ids or link.origin.source != "builtin"):
        # These are Kiwi's own code; a file cannot become one by saying so.
        reason = f"{link.id!r} calls itself a {sheet.type}, and those are built in: {', '.join(sheet.ids)}"
        yield reason, "Give it another type, and let it run on one of them."
    if rest and sheet.needs_executor == "none":
        yield f"{link.id!r} is a {sheet.type}, which stands on nothing", f"Remove `executor` from {link.id!r}."
    if rest and not _carries(rest[0], sheet):
        kind = rest[0].manifest.tool_type
        yield f"{link.id!r} is a {sheet.type} and cannot run on {rest[0].id!r}, which is a {kind}", wanted
    if not rest and sheet.needs_executor == "required":
        yield f"{link.id!r} is a {sheet.type} and names no executor", wanted
    if not rest and not is_top and not sheet.ids:
        yield f"{link.id!r} is a {sheet.type}, and a chain ends in a primitive", f"Let {link.id!r} run on one."


def _carries(executor: Tool, sheet: Sheet) -> bool:
    is_of_type = not sheet.executor_types or executor.manifest.tool_type in sheet.executor_types
    return is_of_type and (not sheet.executor_ids or executor.id in sheet.executor_ids)


def _wanted(sheet: Sheet) -> str:
    return " or ".join([f"`{name}`" for name in sheet.executor_ids] or [f"a {kind}" for kind in sheet.executor_types])
