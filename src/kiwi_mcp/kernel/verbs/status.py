"""status, list: what is here, what waits for the owner, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.threads import ENDED
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.mcp_servers import known_servers
from kiwi_mcp.kernel.threads.work import ThreadStores
from kiwi_mcp.kernel.verb import OWNER, ProjectRequest, Response, filled, verb
from kiwi_mcp.kernel.view import Data, ViewItem, count_text, first_sentence, next_hint, rows
from kiwi_mcp.manifest.home_config import home_config, memory_folder
from kiwi_mcp.store.threads import ThreadFilter

_OWN: tuple[Source, ...] = ("project", "user")
_MANY = 1_000


class StatusResponse(Response, frozen=True, kw_only=True):
    """How much there is of everything, and what to do next."""

    tools: int
    servers: int
    down: list[str]
    approvals: int
    questions: int
    threads: int
    blocked: str = ""
    """Why no item runs, or the memory cannot be read."""
    next: str


def _status_view(response: StatusResponse) -> Iterator[ViewItem]:
    waiting = response.approvals + response.questions
    down = f", {len(response.down)} down: {', '.join(response.down)}" if response.down else ""
    if response.blocked:
        yield Data(f"! {response.blocked}")
    yield Data(f"{'!' if response.down else '✓'} {count_text(response.servers, 'MCP server')}{down}")
    yield Data(f"✓ {count_text(response.tools, 'item')} of your own")
    yield Data(f"{'!' if waiting else '✓'} {count_text(waiting, 'question')} for you")
    yield Data(f"✓ {count_text(response.threads, 'thread')} not ended")
    yield from next_hint(response.next)


@verb("status", access=OWNER, records=False, shows=_status_view)
async def show_status(request: ProjectRequest, context: VerbContext) -> StatusResponse:
    """Show what is here, what waits for you, and what to do next."""
    catalogs, store = context.services.catalogs, context.services.store
    definitions, stores, now = catalogs.definitions(), ThreadStores(context.services), now_ms()

    def look(catalog: Catalog) -> tuple[int, int, list[str]]:
        known = [(server.id, definitions.find(key)) for server, key in known_servers(catalog, definitions)]
        return len(_own(catalog)), len(known), [name for name, one in known if one and one.fault]

    space = catalogs.space_if_any(request.project_path)
    tools, servers, down = await catalogs.near.do(space, look)
    approvals = len(store.approvals().list(now, status="pending", limit=_MANY))
    questions = len(await stores.do(lambda: stores.questions.open(now)))
    listed = await stores.do(lambda: stores.threads.list(ThreadFilter(limit=_MANY)))
    try:
        memory_folder(space.user)
    except Unavailable as error:
        blocked = f"{error.message} {error.suggestion}"
    else:
        is_locked = home_config(space.user).auth_mode == "locked"
        blocked = "No item runs: `auth_mode` in config.yaml is `locked`." if is_locked else ""
    return StatusResponse(
        tools=tools,
        servers=servers,
        down=down,
        approvals=approvals,
        questions=questions,
        threads=sum(one.status not in ENDED for one in listed),
        blocked=blocked,
        next=_next_step(approvals, questions, down, servers=servers, tools=tools),
    )


def _next_step(approvals: int, questions: int, down: list[str], *, servers: int, tools: int) -> str:
    asks = "`kiwi thread list --status waiting` shows the threads that ask you something."
    if approvals:
        return f"`kiwi approvals` shows what waits for your approval{f'; {asks}' if questions else '.'}"
    if questions:
        return asks
    if down:
        return f"`kiwi mcp refresh {down[0]}` starts it again and says what is wrong."
    if not servers:
        return "`kiwi setup` brings the MCP servers of your clients."
    if not tools:
        return "`kiwi help tool` shows how to write a tool of your own."
    return "`kiwi search WHAT YOU NEED` finds a tool; `kiwi --help` lists all commands."


class OwnItem(Response, frozen=True, kw_only=True):
    """An item of the project's or the user's own folder."""

    tool_id: str
    tool_type: str
    version: str
    source: str
    description: str
    path: str


class OwnItemsResponse(Response, frozen=True, kw_only=True):
    """The items of the project's and the user's own folders."""

    items: list[OwnItem]


def _list_view(response: OwnItemsResponse) -> Iterator[ViewItem]:
    width = max((len(one.tool_id) for one in response.items), default=0)
    lines = (
        f"{one.tool_id.ljust(width)}  {f'{one.source}/{one.tool_type}':<20}  {first_sentence(one.description)}".rstrip()
        for one in response.items
    )
    yield from rows(lines, "You have no items of your own yet: `kiwi help tool` shows how to write one.")


@verb("list", access=OWNER, records=False, shows=_list_view)
async def list_own(request: ProjectRequest, context: VerbContext) -> OwnItemsResponse:
    """List your own tools, directives and knowledge: those of the project and of your user folder."""
    catalogs = context.services.catalogs
    return OwnItemsResponse(items=await catalogs.near.do(catalogs.space_if_any(request.project_path), _own))


def _own(catalog: Catalog) -> list[OwnItem]:
    """Return the items of the project, then those of the user, without the manifests of MCP servers."""
    found = [filled(OwnItem, one) for one in catalog.all(_OWN) if not catalog.sheets.is_server(one.tool_type)]
    return sorted(found, key=lambda one: (one.source, one.tool_id))
