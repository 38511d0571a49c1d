"""Adding servers: one in the owner's words, or those of other clients' configurations, trusted as they are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import AlreadyExists, InvalidRequest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.mcp import ServerKey, ServerRecord
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.init import ignore_derived
from kiwi_mcp.kernel.mcp.acceptance import named
from kiwi_mcp.kernel.mcp.asking import asked, asked_all, known_servers
from kiwi_mcp.kernel.mcp.drafts import id_for
from kiwi_mcp.kernel.mcp.importing import Wish, imported_servers, wished_server
from kiwi_mcp.kernel.mcp.keeping import Kept, keep
from kiwi_mcp.kernel.mcp.needs import needs_said, needs_told, with_needs
from kiwi_mcp.kernel.mcp.servers import Refreshed, Servers, fresh_record, key_of, server_named
from kiwi_mcp.kernel.mcp.told import counted, items_told, package_told, warned
from kiwi_mcp.kernel.mcp.words import words_of
from kiwi_mcp.kernel.requests import ExecuteRequest, McpRequest
from kiwi_mcp.manifest.nearby import nearby_host
from kiwi_mcp.store.definitions import Definitions

_CATEGORY = "mcp"


class Adding:
    """Adds servers to the spaces of one user."""

    def __init__(self, user: Path, servers: Servers, remembered: Callable[[], Definitions]) -> None:
        self._user = user
        self._servers = servers
        self._remembered = remembered

    async def add(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        """Add the server that the owner's words describe."""
        wish = wished_server(request, catalog.space)
        created = await self._create(wish, request, catalog, report)
        tool_id = as_text(created["tool_id"])
        kept = keep([replace(wish, manifest={**wish.manifest, "tool_id": tool_id})], request, catalog.space)
        warnings: list[Json] = [*map(Issue.to_json, (*wish.issues, *kept.issues))]
        told: dict[str, Json] = {"action": "add", "server": tool_id, "path": created["path"]}
        if request.dry_run:
            return {**told, "status": "planned", "message": f"{tool_id} would be added", **warned(warnings)}
        server = self._trusted(tool_id, wish, catalog, accepts_first=request.accept)
        report(Progress(f"starting {tool_id}"))
        offered = await asked(self._servers, server, catalog, warnings) if request.start else None
        state = "accepted" if request.accept else "to be accepted"
        said = f": {counted(offered.definitions)}, {state}" if offered else ""
        return {
            **told,
            "status": "added",
            "message": f"{tool_id} was added{said}{_reached([server])}{needs_told(server.manifest.needs)}",
            "items": items_told(offered.definitions) if offered else [],
            **package_told(server, catalog.space),
            **warned([*warnings, *(map(Issue.to_json, offered.issues) if offered else ())]),
            "next": _next(tool_id, offered, request),
        }

    async def allow(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        """Give a server more of what it needs, in its manifest, which the owner accepts by saying so."""
        server = server_named(named(request), catalog)
        said = needs_said(request.read, request.write, request.hosts, catalog.space)
        told: dict[str, Json] = {"action": "allow", "server": server.id}
        if not said.to_json():
            raise InvalidRequest(
                f"The request does not say what {server.id!r} may have.",
                suggestion=f"`kiwi mcp allow {server.id} --read PATH`, `--write PATH` or `--host HOST`.",
            )
        if server.origin.source not in {"project", "user"}:
            raise InvalidRequest(
                f"{server.id!r} comes from a registry, so its manifest is not changed here.",
                suggestion=f"Copy it first: `kiwi load {server.id} --to user`, then say this again.",
            )
        was_meant = catalog.is_meant(server)
        needs = with_needs({"needs": server.manifest.needs.to_json()}, said)["needs"]
        words: dict[str, object] = {"needs": needs, "location": server.origin.source}
        change = ExecuteRequest(action="update", item_id=server.id, parameters=words, dry_run=request.dry_run)
        await Author(catalog, report).act(change)
        if request.dry_run:
            return {**told, "status": "planned", "message": f"{server.id} would be given more", "needs": needs}
        now = catalog.find(server.id, source=server.origin.source)
        key = key_of(now, catalog.space)
        if was_meant:
            self._remembered().change(key, lambda record, known: (_meant(record, now, key), tuple(known)))
        unaccepted_too = "" if was_meant else f"; nothing of it runs before `kiwi mcp accept {server.id}`"
        message = f"{server.id} was given more{needs_told(now.manifest.needs)}{unaccepted_too}"
        return {**told, "status": "allowed", "message": message, "needs": needs, **_asking(now)}

    async def import_(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        """Add the servers of other clients' configurations."""
        present = {server.id: server for server, _ in known_servers(catalog, self._remembered())}
        found = imported_servers(request, catalog.space, present)
        added: list[Tool] = []
        new = [wish for wish in found.wishes if not wish.is_here]
        rows: list[Json] = [*found.left_out]
        rows += [await self._imported(wish, request, catalog, report, added) for wish in new]
        kept = keep(found.wishes, request, catalog.space)
        rows += [_here(wish, present[wish.tool_id], kept) for wish in found.wishes if wish.is_here]
        warnings: list[Json] = [*map(Issue.to_json, (*found.issues, *kept.issues))]
        mended = [present[wish.tool_id] for wish in found.wishes if wish.is_here and kept.written & wish.secrets.keys()]
        offered = await asked_all(self._servers, [*added, *mended], catalog, warnings, report) if request.start else []
        return {
            "action": "import",
            "status": "planned" if request.dry_run else "imported",
            "message": _message(request, rows, offered, found.empty) + _reached(added),
            "servers": rows,
            "variables": dict(found.variables),
            **({"empty": list(found.empty)} if found.empty else {}),
            **warned(warnings),
        }

    async def _imported(
        self, wish: Wish, request: McpRequest, catalog: Catalog, report: Report, added: list[Tool]
    ) -> JsonObject:
        told = {"server": wish.tool_id, **wish.origin}
        try:
            created = await self._create(wish, request, catalog, report)
        except KiwiError as fault:
            return {**told, "status": "refused", "reason": fault.message}
        if not request.dry_run:
            added.append(self._trusted(wish.tool_id, wish, catalog, accepts_first=request.accept))
        is_renamed = wish.tool_id != id_for(as_text(wish.origin.get("name")), ())
        return {
            **told,
            "status": "planned" if request.dry_run else "added",
            "path": created["path"],
            "location": wish.location,
            **({"reason": "the name is taken"} if is_renamed else {}),
        }

    async def _create(self, wish: Wish, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        words: dict[str, object] = {"manifest": wish.manifest, "category": _CATEGORY, "location": wish.location}
        creation = ExecuteRequest(action="create", parameters=words, dry_run=request.dry_run)
        is_first = wish.location == "project" and not catalog.space.project_ai.is_dir()
        try:
            created = (await Author(catalog, report).act(creation)).content
        except AlreadyExists as fault:
            fault.suggestion = _instead(wish.tool_id, catalog)
            raise
        if is_first and not request.dry_run:
            ignore_derived(catalog.space.project_ai)
        return created

    def _trusted(self, tool_id: str, wish: Wish, catalog: Catalog, *, accepts_first: bool) -> Tool:
        """Return the server that was just added, which its owner trusts as it is."""
        server = catalog.find(tool_id, source=wish.location)
        key = key_of(server, catalog.space)
        said = replace(fresh_record(server, key), accepts_first=accepts_first, words=words_of(server))
        # What an older server of this name offered was accepted of that one, not of this one.
        self._remembered().remove(key)
        self._remembered().change(key, lambda *_: (said, ()))
        return server


def _meant(record: ServerRecord | None, server: Tool, key: ServerKey) -> ServerRecord:
    """Return what is known of a server whose manifest its owner changed just now."""
    return replace(record or fresh_record(server, key), digest=server.digest, words=words_of(server))


def _instead(tool_id: str, catalog: Catalog) -> str:
    is_server = catalog.sheets.carries(catalog.find(tool_id).manifest.tool_type, "mcp")
    return f"`kiwi mcp remove {tool_id}` first, or choose another name." if is_server else "Choose another name."


def _here(wish: Wish, server: Tool, kept: Kept) -> JsonObject:
    """Return what is told of an entry whose server is here already."""
    written = sorted(kept.written & wish.secrets.keys())
    place = "" if server.origin.source == wish.location else f" ({server.origin.source})"
    reason = f"it is here already, as {server.id}{place}"
    if written:
        reason += f"; {', '.join(written)} written into {kept.path}"
    return {"server": as_text(wish.origin.get("name")), "status": "left out", "reason": reason, **wish.origin}


def _message(request: McpRequest, rows: Sequence[Json], offered: Sequence[Refreshed], empty: Sequence[str]) -> str:
    number = sum(isinstance(row, dict) and row.get("status") in {"planned", "added"} for row in rows)
    if not rows and empty:
        return f"{', '.join(empty)} {'holds' if len(empty) == 1 else 'hold'} no MCP server"
    done = "would be imported" if request.dry_run else "imported"
    count = sum(len(one.definitions) for one in offered)
    items = f", with {count} item{'s' * (count != 1)}" if offered else ""
    return f"{number} server{'s' * (number != 1)} {done}{items}"


def _reached(servers: Sequence[Tool]) -> str:
    """Return at which addresses nearby servers may be reached from now on, because their owner named them."""
    hosts = [nearby_host(as_text(server.manifest.config.get("url"))) for server in servers]
    listed = ", ".join(dict.fromkeys(filter(None, hosts)))
    return f"; Kiwi may reach {listed} for {'it' if len(servers) == 1 else 'them'}" if listed else ""


def _asking(server: Tool) -> JsonObject:
    """Return what follows for whoever calls its tools, where it may change files or reach hosts."""
    if not (server.manifest.needs.write or server.manifest.needs.hosts):
        return {}
    rule = f"`kiwi approvals rules add 'mcp/{server.id}/*'` says yes beforehand"
    return {"next": f"Its tools ask you from now on, unless they were accepted as ones that only read; {rule}."}


def _next(tool_id: str, offered: Refreshed | None, request: McpRequest) -> str:
    if offered is None:
        return f"`kiwi mcp refresh {tool_id}` asks it what it offers."
    return "`kiwi search` finds what it offers." if request.accept else f"`kiwi mcp accept {tool_id}` lets it be used."
