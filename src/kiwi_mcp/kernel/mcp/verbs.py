"""The verb `mcp`: servers added, imported and removed, what they offer looked at and accepted, clients connected."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, text_of
from kiwi_mcp.domain.mcp import ServerKey, plain
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.kernel.mcp.acceptance import Acceptance, named
from kiwi_mcp.kernel.mcp.adding import Adding
from kiwi_mcp.kernel.mcp.asking import asked_all, known_servers
from kiwi_mcp.kernel.mcp.connecting import connect_client
from kiwi_mcp.kernel.mcp.login import Logins
from kiwi_mcp.kernel.mcp.needs import needs_told
from kiwi_mcp.kernel.mcp.servers import Servers, key_of, server_named
from kiwi_mcp.kernel.mcp.told import SHOWN, counted, items_told, looking, package_told, server_told, waiting, warned
from kiwi_mcp.kernel.naming import mark_changed
from kiwi_mcp.kernel.requests import ExecuteRequest, McpRequest
from kiwi_mcp.store.definitions import Definitions

_OWNERS = {
    "add": "add NAME -- COMMAND",
    "import": "import",
    "accept": "accept SERVER",
    "allow": "allow SERVER --read PATH",
    "remove": "remove SERVER",
    "login": "login SERVER",
    "logout": "logout SERVER",
}
"""What only the owner does, as the owner types it."""
_CHANGING = frozenset({"add", "import", "accept", "refresh", "remove"})
"""What may change which servers there are, or how much each offers."""
_PAUSE = 60.0
"""How long a server that was asked for somebody else than the owner is not asked for them again, in seconds."""


class McpVerb:
    """Everything that is done about MCP servers for one user."""

    def __init__(
        self,
        user: Path,
        remembered: Callable[[], Definitions],
        catalogs: Callable[[], Iterable[Catalog]],
        judge: Judge,
    ) -> None:
        self._user = user
        self._servers = Servers(user, remembered, catalogs, judge)
        self._logins = Logins(user, self._servers)
        self._adding = Adding(user, self._servers, remembered)
        self._remembered = remembered
        self._asked_for_others: dict[ServerKey, float] = {}

    async def attend(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Look at the server of a chain before it is run, where it may have changed unseen; give why it cannot be."""
        return await self._servers.attend(chain, catalog)

    def used(self, identity: str) -> None:
        """Note that a server was used."""
        self._servers.used(identity)

    async def aclose(self) -> None:
        """Let go of everything."""
        await self._servers.aclose()

    def look(self, request: McpRequest, catalog: Catalog, *, is_owner: bool) -> JsonObject:
        """Do what a request says that asks no server: tell what is known of them, or accept it."""
        if not is_owner:
            _refuse_strangers(request)
        match request.action:
            case "accept":
                with self._changing(request):
                    return Acceptance(self._remembered()).accept(request, catalog)
            case "diff":
                return Acceptance(self._remembered()).diff(request, catalog)
            case _:
                return self._list(request, catalog)

    async def act(self, request: McpRequest, catalog: Catalog, caller: Caller, *, is_owner: bool) -> JsonObject:
        """Do what any other request says."""
        if not is_owner:
            _refuse_strangers(request)
        with self._changing(request):
            return await self._done(request, catalog, caller, is_owner=is_owner)

    @contextmanager
    def _changing(self, request: McpRequest) -> Iterator[None]:
        """Say that servers may be others afterwards, also where only a part of what was asked for was done."""
        try:
            yield
        finally:
            if request.action in _CHANGING and not request.dry_run:
                mark_changed(self._user)

    async def _done(self, request: McpRequest, catalog: Catalog, caller: Caller, *, is_owner: bool) -> JsonObject:
        report = caller.report
        match request.action:
            case "add":
                return await self._adding.add(request, catalog, report)
            case "import":
                return await self._adding.import_(request, catalog, report)
            case "allow":
                return await self._adding.allow(request, catalog, report)
            case "refresh":
                return await self._refresh(request, catalog, report, is_owner=is_owner)
            case "remove":
                return await self._remove(request, catalog, report)
            case "connect":
                return connect_client(request, catalog, self._remembered())
            case "login":
                return await self._logins.log_in(request, catalog, caller.ask)
            case "logout":
                return await self._logins.log_out(request, catalog)
            case _:
                return self.look(request, catalog, is_owner=is_owner)

    def _list(self, request: McpRequest, catalog: Catalog) -> JsonObject:
        if request.server:
            server = server_named(request.server, catalog)
            key = key_of(server, catalog.space)
            shown = self._remembered().first(key, SHOWN)
            about = {**self._told(server, key), **package_told(server, catalog.space)}
            return {"action": "list", **about, "items": items_told(shown)}
        told: list[Json] = [self._told(server, key) for server, key in known_servers(catalog, self._remembered())]
        answer: dict[str, Json] = {"action": "list", "servers": told}
        if not told:
            answer["suggestion"] = (
                "`kiwi mcp add NAME -- COMMAND` adds a server, `kiwi mcp import` those of your clients."
            )
        return answer

    def _told(self, server: Tool, key: ServerKey) -> JsonObject:
        return server_told(server, self._remembered().find(key), self._remembered().states(key))

    async def _refresh(self, request: McpRequest, catalog: Catalog, report: Report, *, is_owner: bool) -> JsonObject:
        if request.server:
            server = server_named(request.server, catalog)
            if not is_owner and not self._is_the_owners(server, catalog):
                raise _not_the_owners(server)
            if not request.yes and not self._may_start(server, catalog):
                raise _never_accepted(server)
            if not is_owner and not self._is_due(server, catalog):
                message = f"{server.id} was asked less than a minute ago; this is what it offered then"
                return {**self._list(request, catalog), "action": "refresh", "message": message}
            report(Progress(f"asking {server.id}"))
            one = await self._servers.refresh(server, catalog)
            told = {**server_told(server, one.server, one.states), "items": items_told(one.definitions)}
            message = f"{server.id}: {counted(one.definitions)}{waiting(one.definitions)}"
            warnings = warned([*map(Issue.to_json, one.issues)])
            return {"action": "refresh", "message": message, **told, **warnings, **looking(server.id, one.definitions)}
        unanswered: list[Json] = []
        known = [server for server, _ in known_servers(catalog, self._remembered())]
        servers = [
            server
            for server in known
            if self._may_visit(server, catalog)
            and (is_owner or (self._is_the_owners(server, catalog) and self._is_due(server, catalog)))
        ]
        if is_owner:
            unanswered += [_unvisited(server) for server in known if not self._may_visit(server, catalog)]
        asked = await asked_all(self._servers, servers, catalog, unanswered, report)
        by_id = {one.server.key.server: one for one in asked}
        rows: list[Json] = [
            server_told(one, by_id[one.id].server, by_id[one.id].states) for one in servers if one.id in by_id
        ]
        message = f"{len(asked)} of {len(servers)} servers answered"
        changed = [one for one in asked if waiting(one.definitions)]
        name = changed[0].server.key.server if len(changed) == 1 else "SERVER"
        following = looking(name, [one for each in changed for one in each.definitions])
        return {"action": "refresh", "message": message, "servers": rows, **warned(unanswered), **following}

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

    def _is_the_owners(self, server: Tool, catalog: Catalog) -> bool:
        """Whether the owner has added or accepted a server as it is."""
        record = self._remembered().find(key_of(server, catalog.space))
        return record is not None and record.digest == server.digest

    def _may_visit(self, server: Tool, catalog: Catalog) -> bool:
        """Whether a server may be asked although nobody named it: a project's could lead to any address."""
        is_meant = server.origin.source != "project" or self._is_the_owners(server, catalog)
        return is_meant and self._may_start(server, catalog)

    def _may_start(self, server: Tool, catalog: Catalog) -> bool:
        """Whether asking a server starts no program that its owner has not meant."""
        is_process = server.manifest.config.get("transport") == "stdio"
        return not is_process or server.origin.source == "builtin" or self._is_the_owners(server, catalog)

    def _is_due(self, server: Tool, catalog: Catalog) -> bool:
        """Whether a server may be asked for somebody else than the owner, which counts as asked then."""
        key, now = key_of(server, catalog.space), monotonic()
        if now - self._asked_for_others.get(key, -_PAUSE) < _PAUSE:
            return False
        self._asked_for_others[key] = now
        return True


def _refuse_strangers(request: McpRequest) -> None:
    """Refuse what only the owner decides: which servers there are, what of them may be used, who is connected."""
    if request.action in {*_OWNERS, "connect"}:
        typed = f"kiwi mcp {_OWNERS[request.action]}" if request.action in _OWNERS else "kiwi connect CLIENT"
        raise PolicyDenied(f"Only the owner may {request.action} here.", suggestion=f"Ask the owner to type `{typed}`.")


def _never_accepted(server: Tool) -> PolicyDenied:
    """Return the refusal to start what its owner has not looked at, which shows them all that there is to see."""
    config = server.manifest.config
    command = shlex.join(map(text_of, (config.get("command"), *as_list(config.get("args")))))
    return PolicyDenied(
        f"{server.id!r} was never accepted as its manifest ({server.origin.path}) is now. To ask it starts "
        f"`{plain(command)}`{needs_told(server.manifest.needs)}.",
        suggestion=f"If that is right, `kiwi mcp refresh {server.id} --yes` starts it.",
        tool_id=server.id,
    )


def _unvisited(server: Tool) -> JsonObject:
    is_process = server.manifest.config.get("transport") == "stdio"
    fix = f"`kiwi mcp refresh {server.id}` {'shows what would be started' if is_process else 'asks it'}."
    undone = "started" if is_process else "asked"
    return Issue(server.id, f"was never accepted as it is, and was not {undone}", fix, "warning").to_json()


def _not_the_owners(server: Tool) -> PolicyDenied:
    return PolicyDenied(
        f"The owner has not added {server.id!r} as its manifest is now, so it is not started.",
        suggestion=f"Ask the owner to look at it and type `kiwi mcp refresh {server.id}` and "
        f"`kiwi mcp accept {server.id}`.",
        tool_id=server.id,
    )
