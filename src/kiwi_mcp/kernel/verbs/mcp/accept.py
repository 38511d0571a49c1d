"""mcp accept, diff: what a server offers compared with what was accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Annotated

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.items import Needs, Tool
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.mcp import MAX_DIFF, Definition, ServerRecord
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.mcp_definitions import accepted, difference, launch_summary
from kiwi_mcp.kernel.mcp_servers import find_server, key_of, new_record
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.tool_names import touch_server_names
from kiwi_mcp.kernel.verb import ANYONE, OWNER, Argument, DryRun, NameText, Response, filled, verb
from kiwi_mcp.kernel.verbs.mcp.servers import (
    ASK_OWNER,
    MARKS,
    NamedServerRequest,
    Warnings,
    unaccepted_notice,
    visible_items,
    visible_server,
)
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, count_text, next_hint, warning_rows
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.needs import needs_text
from kiwi_mcp.primitives.http.addresses import local_network_host
from kiwi_mcp.store.mcp_definitions import McpDefinitions, ServerDefinitions

_SHOWN = 1_000
_MAX_BYTES = 1_000_000
_SHORT = 12
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
"""What may follow a name, as NAME@DIGEST, to accept what was shown and nothing that came since."""


class ServerAcceptResponse(Response, frozen=True, kw_only=True):
    """The items that were accepted."""

    action: str
    server: str
    status: str
    message: str
    accepted: list[str]


class ServerDiffRequest(NamedServerRequest, frozen=True, kw_only=True):
    """What of a server to compare."""

    tool: Annotated[
        NameText | None, Argument("One item of it, or TOOL@DIGEST as shown; all of them otherwise.", "TOOL")
    ] = None


class ServerAcceptRequest(ServerDiffRequest, frozen=True, kw_only=True):
    """What of a server to accept."""

    dry_run: DryRun = False


class DefinitionDiff(Response, frozen=True, kw_only=True):
    """One definition that is not as it was accepted."""

    tool_id: str
    kind: str
    state: str
    digest: str
    diff: str


class ServerDiffResponse(Response, frozen=True, kw_only=True):
    """What a server offers that is not as it was accepted."""

    action: str
    server: str
    status: str
    changes: list[DefinitionDiff]
    gone: list[str]
    warnings: Warnings = UNSET
    manifest: str | UnsetType = UNSET
    next: str | UnsetType = UNSET


def _accept_view(response: ServerAcceptResponse) -> Iterator[ViewItem]:
    yield Data(response.message)
    for name in response.accepted:
        yield Notice(f"  {MARKS['accepted']} {name}")


def _diff_view(response: ServerDiffResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    for change in response.changes:
        yield Data(f"{change.tool_id} ({change.state})")
        yield Data(change.diff)
    for name in response.gone:
        yield Data(f"{name} (gone)")
    if response.manifest:
        yield Data(f"manifest of {response.server}")
        yield Data(response.manifest)
    if response.status == "same":
        yield Notice("Nothing differs.")
    yield from next_hint(response.next)


@verb(
    "accept", group="mcp", access=OWNER, needs_receipt=True, hint=ASK_OWNER.format("accept SERVER"), shows=_accept_view
)
async def accept(request: ServerAcceptRequest, context: VerbContext) -> ServerAcceptResponse:
    """Allow the use of a server's items as it describes them now."""
    catalogs = context.services.catalogs
    space = catalogs.space_if_any(request.project_path)
    return await catalogs.near.do(space, lambda catalog: _accept(request, catalog, catalogs.definitions()))


@verb("diff", group="mcp", access=ANYONE, records=False, needs_rules=True, shows=_diff_view)
async def diff(request: ServerDiffRequest, context: VerbContext) -> ServerDiffResponse:
    """Show the descriptions that changed since the server was accepted."""
    catalogs = context.services.catalogs
    space = catalogs.space_if_any(request.project_path)
    rights = context.services.rights(context.caller)
    return await catalogs.near.do(
        space, lambda catalog: _diff(request, catalog, catalogs.definitions(), ItemVisibility(catalog, rights))
    )


def _accept(request: ServerAcceptRequest, catalog: Catalog, definitions: McpDefinitions) -> ServerAcceptResponse:
    # NAME@DIGEST names what the owner looked at.
    name, _, expected = request.server.rpartition("@")
    if not (name and _DIGEST.fullmatch(expected)):
        name, expected = request.server, ""
    server = find_server(name, catalog)
    key = key_of(server, catalog.space)
    before, known = definitions.find(key), definitions.of(key)
    if request.tool:
        known = _named(server, request.tool, known)
    if expected and not state_digest(server, known).startswith(expected):
        raise InvalidRequest(
            f"{server.id!r} offers something else than you looked at.",
            suggestion=f"Look at it again: `kiwi mcp diff {server.id}`.",
        )
    if request.tool and before is not None and before.digest != server.digest:
        raise InvalidRequest(
            f"The manifest of {server.id!r} changed, which concerns all that it offers.",
            suggestion=f"Look at it (`kiwi mcp diff {server.id}`). If it is right, `kiwi mcp accept {server.id}`.",
        )
    wanted = [one for one in known if one.state in {"new", "changed"}]
    names = frozenset(one.tool_id for one in wanted)

    def work(record: ServerRecord | None, current: Sequence[Definition]) -> ServerDefinitions:
        # Items that were added since are not what the owner looked at.
        seen = {(one.kind, one.name): one.digest for one in wanted}
        same = {one.tool_id for one in current if seen.get((one.kind, one.name)) == one.digest}
        stored = record or new_record(server, key)
        after = accepted(current, same, now=moment())
        if request.tool:  # accepting one item does not accept the manifest
            return stored, after
        stored = replace(stored, digest=server.digest, accepts_first=False, words=launch_summary(server))
        return stored, tuple(one for one in after if one.state != "gone" or (one.kind, one.name) not in gone)

    gone = {(one.kind, one.name) for one in known if one.state == "gone"}
    is_changed = before is not None and before.digest != server.digest
    is_unrecorded = not request.tool and (before is None or before.words != launch_summary(server))
    if (names or gone or is_changed or is_unrecorded) and not request.dry_run:
        definitions.change(key, work)
    if not request.dry_run:
        touch_server_names(catalog.space.user)
    done = "would be accepted" if request.dry_run else "accepted"
    also = f"the manifest of {server.id} and " if is_changed else ""
    message = f"{also}{count_text(len(wanted), 'item')} of {server.id} {done}"
    if not request.tool:  # where the server may be reached, and what it may ask of clients, from now on
        host = local_network_host(as_text(server.manifest.config.get("url")))
        message += f"; Kiwi may reach it at {host}" if host else ""
        message += needs_text(Needs(client=server.manifest.needs.client))
    return ServerAcceptResponse(
        action="accept",
        server=server.id,
        status="planned" if request.dry_run else "accepted",
        message=message,
        accepted=sorted(names),
    )


def _diff(
    request: ServerDiffRequest, catalog: Catalog, definitions: McpDefinitions, permission: ItemVisibility
) -> ServerDiffResponse:
    server = visible_server(request.server, catalog, permission)
    key = key_of(server, catalog.space)
    record, known = definitions.find(key), visible_items(server.id, definitions.of(key), permission)
    if request.tool:
        known = _named(server, request.tool, known)
    limit = _MAX_BYTES if request.tool else MAX_DIFF
    changes = [
        filled(DefinitionDiff, one, diff=one.difference_within(limit, "name the item to see them"))
        for one in known
        if one.state in {"new", "changed"}
    ]
    gone = [one.tool_id for one in known if one.state == "gone"]
    is_changed = record is not None and record.digest != server.digest
    name = f"{server.id}@{state_digest(server, known)[:_SHORT]}"
    if request.tool:
        name = f"{server.id} {known[0].tool_id}@{known[0].digest[:_SHORT]}"
    return ServerDiffResponse(
        action="diff",
        server=server.id,
        status="differs" if changes or gone or is_changed else "same",
        changes=changes[:_SHOWN],
        gone=gone[:_SHOWN],
        warnings=[unaccepted_notice(server)] if is_changed else UNSET,
        manifest=difference(server, record) if record is not None and is_changed else UNSET,
        next=f"`kiwi mcp accept {name}` accepts what is shown here." if changes or is_changed else UNSET,
    )


def _named(server: Tool, tool: str, known: Sequence[Definition]) -> list[Definition]:
    """Return the definitions of the one item that is named."""
    wanted, _, expected = tool.rpartition("/")[2].partition("@")
    mine = [one for one in known if wanted == one.tool_id or tool == one.name]
    if mine and _DIGEST.fullmatch(expected) and not mine[0].digest.startswith(expected):
        raise InvalidRequest(
            f"{server.id!r} offers {wanted!r} otherwise than you looked at.",
            suggestion=f"Look at it again: `kiwi mcp diff {server.id} {wanted}`.",
        )
    if not mine:
        near = did_you_mean(wanted, [one.tool_id for one in known])
        raise NotFound(
            f"{server.id!r} offers no {tool!r}.", suggestion=f"{near}`kiwi mcp list {server.id}` shows what it offers."
        )
    return mine


def state_digest(server: Tool, known: Sequence[Definition]) -> str:
    """Return the digest of a server's manifest and of everything that waits to be accepted, as they are now."""
    waits = sorted(one.digest for one in known if one.state in {"new", "changed"})
    return sha256(" ".join((server.digest, *waits)).encode()).hexdigest()
