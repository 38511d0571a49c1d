"""The verb `mcp`: servers added, imported and removed, what they offer looked at and accepted, clients connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.mcp.acceptance import Acceptance, named
from kiwi_mcp.kernel.mcp.connecting import connect_client
from kiwi_mcp.kernel.mcp.importing import Wish, imported_servers, keep_secrets, wished_server
from kiwi_mcp.kernel.mcp.login import Logins
from kiwi_mcp.kernel.mcp.servers import Refreshed, Servers, fresh_record, key_of, server_named
from kiwi_mcp.kernel.mcp.told import counted, items_told, server_told, waiting, warned
from kiwi_mcp.kernel.mcp.words import words_of
from kiwi_mcp.kernel.requests import ExecuteRequest, McpRequest, Where
from kiwi_mcp.store.definitions import Definitions

_OWNERS = {
    "add": "add NAME -- COMMAND",
    "import": "import",
    "accept": "accept SERVER",
    "remove": "remove SERVER",
    "login": "login SERVER",
    "logout": "logout SERVER",
}
"""What only the owner does, as the owner types it."""
_AT_ONCE = 4
_CATEGORY = "mcp"


class McpVerb:
    """Everything that is done about MCP servers for one user."""

    def __init__(
        self, user: Path, remembered: Callable[[], Definitions], catalogs: Callable[[], Iterable[Catalog]]
    ) -> None:
        self._servers = Servers(user, remembered, catalogs)
        self._logins = Logins(user, self._servers)
        self._remembered = remembered
        self._user = user

    async def attend(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Look at the server of a chain before it is run, where it may have changed unseen; give why it cannot be."""
        return await self._servers.attend(chain, catalog)

    def used(self, identity: str) -> None:
        """Note that a server was used."""
        self._servers.used(identity)

    async def aclose(self) -> None:
        """Let go of everything."""
        await self._servers.aclose()

    async def act(self, request: McpRequest, catalog: Catalog, caller: Caller, *, is_owner: bool) -> JsonObject:
        """Do what a request says."""
        report = caller.report
        if not is_owner:
            _refuse_strangers(request)
        match request.action:
            case "list":
                return self._list(request, catalog)
            case "add":
                return await self._add(request, catalog, report)
            case "import":
                return await self._import(request, catalog, report)
            case "refresh":
                return await self._refresh(request, catalog, report, is_owner=is_owner)
            case "accept":
                return Acceptance(self._remembered()).accept(request, catalog)
            case "diff":
                return Acceptance(self._remembered()).diff(request, catalog)
            case "remove":
                return await self._remove(request, catalog, report)
            case "connect":
                return connect_client(request, catalog)
            case "login":
                return await self._logins.log_in(request, catalog, caller.ask)
            case "logout":
                return await self._logins.log_out(request, catalog)

    def _list(self, request: McpRequest, catalog: Catalog) -> JsonObject:
        if request.server:
            server = server_named(request.server, catalog)
            key = key_of(server, catalog.space)
            record, known = self._remembered().find(key), self._remembered().of(key)
            return {"action": "list", **server_told(server, record, known), "items": items_told(known)}
        told: list[Json] = [
            server_told(server, self._remembered().find(key), self._remembered().of(key))
            for server, key in self._known_servers(catalog)
        ]
        answer: dict[str, Json] = {"action": "list", "servers": told}
        if not told:
            answer["suggestion"] = (
                "`kiwi mcp add NAME -- COMMAND` adds a server, `kiwi mcp import` those of your clients."
            )
        return answer

    async def _add(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        wish = wished_server(request, catalog.space)
        tool_id, created = await self._create(wish.manifest, request, catalog, report)
        warnings = [*map(Issue.to_json, wish.issues), *_secret_notes([wish], request, self._user)]
        told: dict[str, Json] = {"action": "add", "server": tool_id, "path": created["path"]}
        if request.dry_run:
            return {**told, "status": "planned", "message": f"{tool_id} would be added", **warned(warnings)}
        server = catalog.find(tool_id, source=request.location or "project")
        self._trust(server, catalog, accepts_first=request.accept)
        report(Progress(f"starting {tool_id}"))
        offered = await self._asked(server, catalog, warnings) if request.start else None
        state = "accepted" if request.accept else "to be accepted"
        said = f": {counted(offered.definitions)}, {state}" if offered else ""
        return {
            **told,
            "status": "added",
            "message": f"{tool_id} was added{said}",
            "items": items_told(offered.definitions) if offered else [],
            **warned([*warnings, *(map(Issue.to_json, offered.issues) if offered else ())]),
            "next": _next(tool_id, offered, request),
        }

    async def _import(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        present = {server.id: server for server, _ in self._known_servers(catalog)}
        found = imported_servers(request, catalog.space, present)
        warnings: list[Json] = [*map(Issue.to_json, found.issues)]
        added: list[Tool] = []
        rows: list[Json] = [*found.left_out]
        for wish in found.wishes:
            try:
                tool_id, created = await self._create(wish.manifest, request, catalog, report)
            except KiwiError as fault:
                rows.append(
                    {"server": as_text(wish.manifest.get("tool_id")), "status": "refused", "reason": fault.message}
                )
                continue
            rows.append(
                {"server": tool_id, "status": "planned" if request.dry_run else "added", "path": created["path"]}
            )
            if not request.dry_run:
                added.append(catalog.find(tool_id, source=request.location or "project"))
                self._trust(added[-1], catalog, accepts_first=request.accept)
        warnings += _secret_notes(found.wishes, request, self._user)
        offered = await self._asked_all(added, catalog, warnings, report) if request.start else []
        count = sum(len(one.definitions) for one in offered)
        done = "would be imported" if request.dry_run else "imported"
        number = len(found.wishes) if request.dry_run else len(added)
        return {
            "action": "import",
            "status": "planned" if request.dry_run else "imported",
            "message": f"{number} server{'s' * (number != 1)} {done}" + (f", with {count} items" if offered else ""),
            "servers": rows,
            "variables": dict(found.variables),
            **warned(warnings),
        }

    async def _refresh(self, request: McpRequest, catalog: Catalog, report: Report, *, is_owner: bool) -> JsonObject:
        if request.server:
            server = server_named(request.server, catalog)
            if not is_owner and not self._is_the_owners(server, catalog):
                raise _not_the_owners(server)
            report(Progress(f"asking {server.id}"))
            one = await self._servers.refresh(server, catalog)
            told = {**server_told(server, one.server, one.definitions), "items": items_told(one.definitions)}
            message = f"{server.id}: {counted(one.definitions)}{waiting(one.definitions)}"
            return {"action": "refresh", "message": message, **told, **warned([*map(Issue.to_json, one.issues)])}
        warnings: list[Json] = []
        known = [server for server, _ in self._known_servers(catalog)]
        servers = [server for server in known if is_owner or self._is_the_owners(server, catalog)]
        asked = await self._asked_all(servers, catalog, warnings, report)
        by_id = {one.server.key.server: one for one in asked}
        rows: list[Json] = [
            server_told(one, by_id[one.id].server, by_id[one.id].definitions) for one in servers if one.id in by_id
        ]
        message = f"{len(asked)} of {len(servers)} servers answered"
        return {"action": "refresh", "message": message, "servers": rows, **warned(warnings)}

    async def _remove(self, request: McpRequest, catalog: Catalog, report: Report) -> JsonObject:
        server = server_named(named(request), catalog)
        key, told = key_of(server, catalog.space), {"action": "remove", "server": server.id}
        words: JsonObject = {"location": server.origin.source}
        removed: JsonObject = {}
        if server.origin.source in {"project", "user"}:
            removal = ExecuteRequest(
                action="delete", item_id=server.identity, parameters=dict(words), dry_run=request.dry_run
            )
            removed = (await Author(catalog, report).act(removal)).content
        if request.dry_run:
            return {**told, "status": "planned", "message": f"{server.id} would be removed"}
        self._remembered().remove(key)
        with suppress(KiwiError):  # a server that cannot even be read has no login either
            await self._logins.forget(server, catalog)
        message = f"{server.id} was removed, with all that it offers"
        kept = {"trash_path": removed["trash_path"]} if "trash_path" in removed else {}
        return {**told, "status": "removed", "message": message, **kept}

    def _known_servers(self, catalog: Catalog) -> list[tuple[Tool, ServerKey]]:
        """Return the servers of the project, of the user, and of those that are published the ones that were asked."""
        names = {
            entry.tool_id
            for entry in catalog.all(("project", "user"))
            if catalog.sheets.carries(entry.tool_type, "mcp")
        }
        names |= {one.key.server for one in self._remembered().servers() if not one.path}
        found: list[tuple[Tool, ServerKey]] = []
        for name in sorted(names):
            try:
                server = server_named(name, catalog)
            except KiwiError:
                continue
            found.append((server, key_of(server, catalog.space)))
        return found

    def _is_the_owners(self, server: Tool, catalog: Catalog) -> bool:
        """Whether the owner has added or accepted a server as it is."""
        record = self._remembered().find(key_of(server, catalog.space))
        return record is not None and record.digest == server.digest

    async def _create(
        self, manifest: JsonObject, request: McpRequest, catalog: Catalog, report: Report
    ) -> tuple[str, JsonObject]:
        location: Where = request.location or "project"
        words: dict[str, object] = {"manifest": manifest, "category": _CATEGORY, "location": location}
        creation = ExecuteRequest(action="create", parameters=words, dry_run=request.dry_run)
        created = (await Author(catalog, report).act(creation)).content
        return as_text(created["tool_id"]), created

    def _trust(self, server: Tool, catalog: Catalog, *, accepts_first: bool) -> None:
        key = key_of(server, catalog.space)
        # What an older server of this name offered was accepted of that one, not of this one.
        self._remembered().remove(key)
        said = replace(fresh_record(server, key), accepts_first=accepts_first, words=words_of(server))
        self._remembered().change(key, lambda *_: (said, ()))

    async def _asked(self, server: Tool, catalog: Catalog, warnings: list[Json]) -> Refreshed | None:
        try:
            return await self._servers.refresh(server, catalog)
        except KiwiError as fault:
            fix = f"{fault.suggestion} Then `kiwi mcp refresh {server.id}`."
            warnings.append(Issue(server.id, f"could not be asked: {fault.message}", fix, "warning").to_json())
            return None

    async def _asked_all(
        self, servers: Sequence[Tool], catalog: Catalog, warnings: list[Json], report: Report
    ) -> list[Refreshed]:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(number: int, server: Tool) -> Refreshed | None:
            async with gate:
                report(Progress(f"asking {server.id}", done=number, total=len(servers)))
                return await self._asked(server, catalog, warnings)

        answers = await asyncio.gather(*(ask(number, server) for number, server in enumerate(servers)))
        return [one for one in answers if one is not None]


def _refuse_strangers(request: McpRequest) -> None:
    """Refuse what only the owner decides: which servers there are, what of them may be used, who is connected."""
    if request.action in {*_OWNERS, "connect"}:
        typed = f"kiwi mcp {_OWNERS[request.action]}" if request.action in _OWNERS else "kiwi connect CLIENT"
        raise PolicyDenied(f"Only the owner may {request.action} here.", suggestion=f"Ask the owner to type `{typed}`.")


def _not_the_owners(server: Tool) -> PolicyDenied:
    return PolicyDenied(
        f"The owner has not added {server.id!r} as its manifest is now, so it is not started.",
        suggestion=f"Ask the owner to look at it and type `kiwi mcp refresh {server.id}` and "
        f"`kiwi mcp accept {server.id}`.",
        tool_id=server.id,
    )


def _secret_notes(wishes: Sequence[Wish], request: McpRequest, user: Path) -> list[Json]:
    """Return what the owner must know of the secrets among the words; they are written only where that was asked."""
    secrets = {name: value for wish in wishes for name, value in wish.secrets.items()}
    if not secrets:
        return []
    if request.with_secrets and not request.dry_run:
        return [*map(Issue.to_json, keep_secrets(secrets, user / ".env"))]
    fix = "Set them, or say `with_secrets` (`--with-secrets`) to have them written into the user's .env."
    return [Issue(", ".join(secrets), "held secrets, which are not in the manifest", fix, "warning").to_json()]


def _next(tool_id: str, offered: Refreshed | None, request: McpRequest) -> str:
    if offered is None:
        return f"`kiwi mcp refresh {tool_id}` asks it what it offers."
    return "`kiwi search` finds what it offers." if request.accept else f"`kiwi mcp accept {tool_id}` lets it be used."
