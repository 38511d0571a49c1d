"""Everything a server offers, as it says it: tools, prompts, resources and templates of resources."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import find_invalid_x_mcp_header
from msgspec import Struct, field

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.mcp import Era, ServerListing
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.connection import ServerConnection, ServerInfo
from kiwi_mcp.manifest.json_schema import schema_faults

MOST_ITEMS = 10_000
"""The most items of one kind that are taken from a server."""
MOST_PAGES = 1_000
"""The most pages in which it may give them."""
MOST_BYTES = 64_000_000
"""The maximum size of the descriptions of all items of a server together, in bytes."""
MOST_ISSUES = 100
"""The maximum number of issues of one listing that are reported."""
_BREATH = 16
"""Items after which others have their turn."""
_LONGEST_NAME = 256
_METHOD_NOT_FOUND: Final = -32601
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class _ListKind(Struct, frozen=True):
    """One kind of item: how it is listed, under which key, which field names it, and when it is valid."""

    method: str
    word: str
    named_by: str
    check: Callable[[JsonObject, str, Era], list[Issue]] = lambda _item, _at, _era: []


class _Taking(Struct):
    """A listing in progress: its size so far, its issues, and where it was cut short."""

    era: Era
    size: int = 0
    faults: list[Issue] = field(default_factory=list)
    untold: int = 0
    limits: list[Issue] = field(default_factory=list)

    def has_room(self, item: Json) -> bool:
        """Count an item; whether there is room for it."""
        self.size += len(compact(item))
        return self.size <= MOST_BYTES

    def note(self, faults: list[Issue]) -> None:
        """Keep the first faults, and count the others."""
        fitting = faults[: MOST_ISSUES - len(self.faults)]
        self.faults += fitting
        self.untold += len(faults) - len(fitting)

    def issues(self) -> tuple[Issue, ...]:
        """Return the issues to report."""
        more = Issue("items", f"have {self.untold:,} more faults", "The items with faults are left out.")
        return (*self.faults, *([more] if self.untold else []), *self.limits)


async def listed(connection: ServerConnection) -> ServerListing:
    """Ask a server for everything it offers."""
    greeting = await connection.greeted()
    taking = _Taking(greeting.era)
    found = {kind.word: await _all(connection, greeting, kind, taking) for kind in _KINDS}
    return ServerListing(
        server_info=greeting.server_info,
        protocol_version=greeting.protocol_version,
        era=greeting.era,
        instructions=greeting.instructions,
        tools=found["tools"],
        prompts=found["prompts"],
        resources=found["resources"],
        templates=found["resourceTemplates"],
        issues=taking.issues(),
    )


async def _all(
    connection: ServerConnection, greeting: ServerInfo, kind: _ListKind, taking: _Taking
) -> tuple[JsonObject, ...]:
    if kind.method.partition("/")[0] not in greeting.capabilities:
        return ()
    kept: dict[str, JsonObject] = {}
    cursor = ""
    for _ in range(MOST_PAGES):
        try:
            page = await connection.ask(kind.method, {"cursor": cursor} if cursor else {})
        except MCPError as refusal:
            if refusal.code != _METHOD_NOT_FOUND:
                taking.limits.append(_refused(kind, refusal))
            break
        is_whole, cursor = await _take(kind, page, kept, taking), as_text(page.get("nextCursor"))
        if not is_whole or (cursor and len(kept) >= MOST_ITEMS):
            taking.limits.append(_too_many(kind))
            break
        if not cursor:
            break
    else:
        taking.limits.append(_too_many(kind))
    return tuple(kept.values())


async def _take(kind: _ListKind, page: JsonObject, kept: dict[str, JsonObject], taking: _Taking) -> bool:
    """Keep what is sound on a page; whether all of the page was looked at."""
    items, before = as_list(page.get(kind.word)), len(kept)
    for number, item in enumerate(items[: MOST_ITEMS - before]):
        if number % _BREATH == 0:
            await asyncio.sleep(0)
        if not taking.has_room(item):
            return False
        _keep(kind, as_object(item), f"{kind.word}[{before + number}]", kept, taking)
    return len(items) <= MOST_ITEMS - before


def _keep(kind: _ListKind, item: JsonObject, place: str, kept: dict[str, JsonObject], taking: _Taking) -> None:
    name = as_text(item.get(kind.named_by))
    at = f"{kind.word}.{strip_controls(name)[:_LONGEST_NAME]}" if name else place
    faults = _name_faults(kind, name, at) or kind.check(item, at, taking.era)
    if name in kept:
        faults = [Issue(at, "is listed twice", "The first one is kept.", severity="warning")]
    taking.note(faults)
    if not faults:
        kept[name] = item


def _name_faults(kind: _ListKind, name: str, at: str) -> list[Issue]:
    longest = _LONGEST_NAME if kind.named_by == "name" else 8 * _LONGEST_NAME
    if name and len(name) <= longest and not _CONTROLS.search(name):
        return []
    return [Issue(at, f"has no usable `{kind.named_by}`", "The server must give it one; the rest is kept.")]


def _tool_faults(item: JsonObject, at: str, era: Era) -> list[Issue]:
    found: list[Issue] = []
    for word in ("inputSchema", "outputSchema"):
        schema = item.get(word)
        if schema is None and word == "outputSchema":
            continue
        if not isinstance(schema, dict) or (word == "inputSchema" and schema.get("type") != "object"):
            found.append(Issue(f"{at}.{word}", "is not the schema of an object", "The server must fix it."))
        else:
            found += schema_faults(schema, f"{at}.{word}")
    # Since the new era words of a schema become names of headers; one that cannot be a name could be anything.
    if era == "modern" and (reason := find_invalid_x_mcp_header(item.get("inputSchema"))) is not None:
        wrong = f"names headers wrongly: {strip_controls(reason)[:_LONGEST_NAME]}"
        found.append(Issue(f"{at}.inputSchema", wrong, "The server must fix it."))
    return found


def _prompt_faults(item: JsonObject, at: str, _: Era) -> list[Issue]:
    arguments = item.get("arguments")
    if arguments is None:
        return []
    if isinstance(arguments, list) and all(as_text(as_object(each).get("name")) for each in arguments):
        return []
    return [Issue(f"{at}.arguments", "are not a list of arguments with names", "The server must fix it.")]


_KINDS = (
    _ListKind("tools/list", "tools", "name", _tool_faults),
    _ListKind("prompts/list", "prompts", "name", _prompt_faults),
    _ListKind("resources/list", "resources", "uri"),
    _ListKind("resources/templates/list", "resourceTemplates", "uriTemplate"),
)


def _too_many(kind: _ListKind) -> Issue:
    reason = f"the list has more than {MOST_ITEMS:,} items, {MOST_PAGES:,} pages or {MOST_BYTES:,} bytes"
    return Issue(kind.word, reason, "The rest is left out.", severity="warning")


def _refused(kind: _ListKind, refusal: MCPError) -> Issue:
    said = strip_controls(refusal.error.message)[:_LONGEST_NAME]
    return Issue(kind.word, f"cannot be listed ({refusal.code}: {said})", "Ask the author of the server.")
