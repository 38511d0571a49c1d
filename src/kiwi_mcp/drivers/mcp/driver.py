"""`McpDriver`: bind, drive, list everything a server offers, complete, log in and out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import find_invalid_x_mcp_header
from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Ask, Caller, Space, no_answers
from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.mcp import Era, ServerListing
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import REPEATABLE, HttpSpec, Plan, ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers import Dispatch, unavailable
from kiwi_mcp.drivers.mcp.call import ServerCall, asked, for_want_of, refused
from kiwi_mcp.drivers.mcp.connection import ServerConnection, ServerInfo
from kiwi_mcp.drivers.mcp.oauth.account import account_for, forget, log_in, settled
from kiwi_mcp.drivers.mcp.pool import ConnectionPool, Lease
from kiwi_mcp.drivers.mcp.server import ServerConfig, ServerRequest, plan_of, server_of, wanted_of
from kiwi_mcp.drivers.mcp.server_events import missing_grant
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.manifest.json_schema import schema_faults
from kiwi_mcp.manifest.runtime import seconds
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.origin_client import is_session_lost

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


async def listed(connection: ServerConnection) -> ServerListing:
    """Ask a server for everything it offers."""
    greeting = await connection.greeted()
    taking = _Taking(greeting.era)
    found = {kind.word: await _all(connection, greeting, kind, taking) for kind in _KINDS}
    more = Issue("items", f"have {taking.untold:,} more faults", "The items with faults are left out.")
    return ServerListing(
        server_info=greeting.server_info,
        protocol_version=greeting.protocol_version,
        era=greeting.era,
        instructions=greeting.instructions,
        tools=found["tools"],
        prompts=found["prompts"],
        resources=found["resources"],
        templates=found["resourceTemplates"],
        issues=(*taking.faults, *([more] if taking.untold else []), *taking.limits),
    )


async def _all(
    connection: ServerConnection, greeting: ServerInfo, kind: _ListKind, taking: _Taking
) -> tuple[JsonObject, ...]:
    if kind.method.partition("/")[0] not in greeting.capabilities:
        return ()
    reason = f"the list has more than {MOST_ITEMS:,} items, {MOST_PAGES:,} pages or {MOST_BYTES:,} bytes"
    too_many = Issue(kind.word, reason, "The rest is left out.", severity="warning")
    kept: dict[str, JsonObject] = {}
    cursor = ""
    for _ in range(MOST_PAGES):
        try:
            page = await connection.ask(kind.method, {"cursor": cursor} if cursor else {})
        except MCPError as refusal:
            if refusal.code != _METHOD_NOT_FOUND:
                said = strip_controls(refusal.error.message)[:_LONGEST_NAME]
                fault = f"cannot be listed ({refusal.code}: {said})"
                taking.limits.append(Issue(kind.word, fault, "Ask the author of the server."))
            break
        is_whole, cursor = await _take(kind, page, kept, taking), as_text(page.get("nextCursor"))
        if not is_whole or (cursor and len(kept) >= MOST_ITEMS):
            taking.limits.append(too_many)
            break
        if not cursor:
            break
    else:
        taking.limits.append(too_many)
    return tuple(kept.values())


async def _take(kind: _ListKind, page: JsonObject, kept: dict[str, JsonObject], taking: _Taking) -> bool:
    """Keep what is sound on a page; whether all of the page was looked at."""
    items, before = as_list(page.get(kind.word)), len(kept)
    longest = _LONGEST_NAME if kind.named_by == "name" else 8 * _LONGEST_NAME
    for number, item in enumerate(map(as_object, items[: MOST_ITEMS - before])):
        if number % _BREATH == 0:
            await asyncio.sleep(0)
        taking.size += len(compact(items[number]))
        if taking.size > MOST_BYTES:
            return False
        name = as_text(item.get(kind.named_by))
        at = f"{kind.word}.{strip_controls(name)[:_LONGEST_NAME]}" if name else f"{kind.word}[{before + number}]"
        if not name or len(name) > longest or _CONTROLS.search(name):
            fix = "The server must give it one; the rest is kept."
            faults = [Issue(at, f"has no usable `{kind.named_by}`", fix)]
        elif name in kept:
            faults = [Issue(at, "is listed twice", "The first one is kept.", severity="warning")]
        else:
            faults = kind.check(item, at, taking.era)
        if not faults:
            kept[name] = item
        # The first faults are reported, and the others are counted.
        room = MOST_ISSUES - len(taking.faults)
        taking.faults += faults[:room]
        taking.untold += len(faults[room:])
    return len(items) <= MOST_ITEMS - before


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


MOST_PROPOSALS = 100
"""The most proposals that are taken: as many as the protocol allows."""


async def completions(
    connection: ServerConnection, chain: Chain, argument: str, value: str, context: Mapping[str, str]
) -> list[str]:
    """Ask a server for its proposals; one that has none for anything is not asked."""
    config = chain.tool.manifest.config
    about: JsonObject = {"type": "ref/resource", "uri": as_text(config.get("mcp_resource_uri"))}
    if not about["uri"]:
        about = {"type": "ref/prompt", "name": as_text(config.get("mcp_prompt_name"))}
        if not about["name"]:
            return []
    if "completions" not in (await connection.greeted()).capabilities:
        return []
    params: dict[str, Json] = {"ref": about, "argument": {"name": argument, "value": value}}
    if context:
        params["context"] = {"arguments": dict(context)}
    answer = await connection.ask("completion/complete", params)
    proposed = as_list(as_object(answer.get("completion")).get("values"))
    return [one for one in proposed if isinstance(one, str)][:MOST_PROPOSALS]


_OTHER_ERA: Final = -32022
_CHANGED: Final = frozenset({_OTHER_ERA, -32600, -32601})
"""What a server may say that was replaced by one of the other era."""
_COMPLETING = 5.0
"""How long a server may take to complete what is being typed, in seconds."""


class McpDriver:
    """Calls MCP servers.

    `on_change` gets the identity of a server with a list that has changed, or may have changed. `eras` remembers the
    protocol era of each server.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] | None = None
        self.eras: dict[str, Era] = {}
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, ConnectionPool] = WeakKeyDictionary()

    def check(self, chain: Chain, space: Space) -> None:
        """Find nothing: what a server offers is known only when it is asked."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Return the plan of an item of a server: how the server is reached, and what it is asked."""
        tool, server = chain.tool, server_of(chain.executor, space)
        wanted = wanted_of(chain, inputs)
        spec = replace(server.spec, timeout=seconds(tool.manifest.config.get("timeout"), server.spec.timeout))
        # A tool of a remote server only reads if the owner accepted its definition and the server says so
        # (`readOnlyHint`). What a file says about a server's tool does not count. For a local process, the sandbox
        # profile shows what it may change and reach.
        is_accepted = isinstance(spec, HttpSpec) and tool.integrity == "accepted"
        return replace(
            plan_of(chain, server),
            spec=spec,
            inputs=inputs,
            facts={"mcp": {"method": wanted.method, "name": wanted.name, "transport": server.transport}},
            effect=tool.manifest.effect or ("at_most_once" if wanted.method == "tools/call" else "idempotent"),
            only_reads=wanted.method != "tools/call" or (is_accepted and not tool.manifest.mutates_state),
        )

    async def aclose(self) -> None:
        """End every connection of this event loop."""
        if (pool := self._pools.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.aclose()
        await settled()
        await client.aclose()

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Refuse a level of isolation that this machine does not have, for a server that is a process."""
        if isinstance(plan.spec, ProcessSpec) and plan.profile is not None:
            await open_sandbox(plan.profile, space)

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Ask the server, and give its answer as a result."""
        server = _server_in(plan, chain.executor, space)
        request = ServerCall(
            convert(plan.facts["mcp"], ServerRequest),
            plan.inputs,
            server.spec.timeout,
            chain.tool.manifest.parameters,
            chain.tool.manifest.outputs,
            caller,
            is_repeatable=plan.effect in REPEATABLE,
        )
        if caller.journal is not None:
            caller.journal.confirm()
        try:
            return await self._ask(server, secrets, request)
        except Unavailable as fault:
            return unavailable(fault)

    def plan_server(self, chain: Chain, space: Space) -> Plan:
        """Plan how a server is started or reached, to list it or to log in; `chain` is the server's own."""
        return plan_of(chain, server_of(chain.tool, space))

    async def list_items(self, plan: Plan, chain: Chain, space: Space, secrets: Mapping[str, str]) -> ServerListing:
        """Return everything that a server offers; `chain` is the server's own."""
        server = _server_in(plan, chain.tool, space)
        async with self._pool().using(server, secrets) as lease:
            try:
                async with lease.connection.watched(), asyncio.timeout(server.spec.timeout):
                    found = await listed(lease.connection)
            except TimeoutError:
                lease.retire()
                raise Unavailable(
                    f"The MCP server {server.name!r} did not list its items within {server.spec.timeout:g} seconds.",
                    suggestion="Give it a longer `timeout`, or ask its author.",
                    server=server.identity,
                ) from None
            lease.worked()
            return found

    async def log_in(
        self, plan: Plan, chain: Chain, space: Space, secrets: Mapping[str, str], ask: Ask, scopes: Sequence[str] = ()
    ) -> str:
        """Have a person log in to the server of this chain, and return the rights that they gave."""
        server = _server_in(plan, chain.tool, space)
        account = account_for(server, secrets)
        if account.record_or_reset().challenge is None:
            try:  # what the server wants, it says when it is asked without
                await self.list_items(plan, chain, space, secrets)
            except Unavailable as fault:
                if not isinstance(fault, LoginRequired):
                    raise
        tokens = await log_in(account, ask, server=server.name, scopes=scopes)
        await self._pool().end(server.identity)  # connections that began under another login are not reused
        return tokens.scope

    async def log_out(self, link: Tool, space: Space) -> bool:
        """Forget the tokens of a server, and say whether there were any."""
        server = server_of(link, space)
        await self._pool().end(server.identity)
        return server.oauth is not None and forget(server.oauth)

    async def restart(self, identity: str) -> None:
        """End the processes of a server, so that the next call starts it anew."""
        await self._pool().end(identity)

    async def complete(
        self,
        plan: Plan,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        argument: str,
        value: str,
        context: Mapping[str, str],
    ) -> list[str]:
        """Return what a server proposes for an argument of a prompt or a template, of which `value` is typed so far.

        `context` are the arguments that are known already. A server that proposes nothing, or not in time, gives an
        empty list.
        """
        server = _server_in(plan, chain.executor, space)
        async with self._pool().using(server, secrets) as lease:
            try:
                async with lease.connection.watched(), asyncio.timeout(min(server.spec.timeout, _COMPLETING)):
                    return await completions(lease.connection, chain, argument, value, context)
            except (MCPError, TimeoutError):
                return []

    def _pool(self) -> ConnectionPool:
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            pool = self._pools[loop] = ConnectionPool(self.eras, self.on_change)
        return pool

    async def _ask(self, server: ServerConfig, secrets: Mapping[str, str], request: ServerCall) -> Outcome:
        pool, is_askable = self._pool(), bool(server.client) and request.caller.ask is not no_answers
        for is_last in (False, True):
            async with pool.using(server, secrets, is_askable=is_askable) as lease:
                try:
                    async with lease.connection.watched():
                        outcome = await asked(lease.connection, request)
                except Unavailable as fault:
                    return _with_findings(unavailable(fault), lease.connection)
                except MCPError as refusal:
                    if server.transport == "http" and (refusal.code in _CHANGED or _was_not_heard(refusal)):
                        lease.retire()
                        if not is_last and (request.is_repeatable or _was_not_heard(refusal)):
                            continue
                    lacking = missing_grant(refusal, server)
                    outcome = (
                        Outcome("error", message=lacking.message, suggestion=lacking.suggestion)
                        if lacking
                        else for_want_of(request.unanswered, refused(request.wanted.name, refusal))
                    )
                except TimeoutError:
                    late = replace(_late(lease, request), sent=lease.connection.left())
                    return _with_findings(late, lease.connection)
                if lease.worked() and self.on_change is not None:
                    self.on_change(server.identity)  # a server that came back may be another version of itself
                sent = lease.connection.left()
                if outcome.status == "error":
                    lease.connection.save_log()
                    if remedy := lease.connection.lacking(outcome.message, sent):
                        outcome = replace(outcome, suggestion=remedy)
                if outcome.status == "error" and request.not_passed:
                    outcome = replace(outcome, suggestion=request.not_passed[0].suggestion)
                outcome = _with_findings(replace(outcome, sent=sent), lease.connection)
                notices: list[Json] = [*lease.connection.notices()]
                notices += [f"{fault.message} {fault.suggestion}" for fault in request.not_passed]
                return replace(outcome, details={**outcome.details, "notices": notices}) if notices else outcome
        raise AssertionError("the last attempt has an outcome")


def _with_findings(outcome: Outcome, connection: ServerConnection) -> Outcome:
    """Return an outcome that names the settings of other programs that the server's process created."""
    found = connection.quarantined()
    if not (warnings := tuple(found.warnings())):
        return outcome
    passed = outcome.passed
    if passed is not None:  # a client that gets the server's own answer also gets the warnings
        passed = {**passed, "content": [*as_list(passed.get("content")), {"type": "text", "text": "\n".join(warnings)}]}
    details = {**outcome.details, **found.to_json()}
    return replace(outcome, details=details, warnings=(*outcome.warnings, *warnings), passed=passed)


def _was_not_heard(refusal: MCPError) -> bool:
    """Whether the server surely did nothing: it speaks another era, or has forgotten the session."""
    return refusal.code == _OTHER_ERA or is_session_lost(refusal.error.data)


def _late(lease: Lease, request: ServerCall) -> Outcome:
    # A server that sent nothing at all in the meantime hangs: it is restarted for the next call. A server that did send
    # something is only slow with this call, and was asked to stop.
    if lease.connection.heard_at < request.asked_at:
        lease.retire()
    return Outcome(
        "timeout",
        message=f"The MCP server {lease.connection.server.name!r} did not answer {request.wanted.name!r} within "
        f"{request.timeout:g} seconds; it was cancelled.",
        suggestion="Ask for less, or give the tool a longer `config.timeout`.",
    )


def _server_in(plan: Plan, link: Tool, space: Space) -> ServerConfig:
    """Return the server of a plan as the plan says that it is reached; without a sandbox there, the strictest."""
    assert isinstance(plan.spec, ProcessSpec | HttpSpec)  # noqa: S101 - this driver plans nothing else
    client = tuple(map(as_text, as_list(as_object(plan.facts.get("mcp")).get("client"))))
    server = replace(server_of(link, space), spec=plan.spec, client=client)
    return server if plan.profile is None else replace(server, profile=plan.profile)
