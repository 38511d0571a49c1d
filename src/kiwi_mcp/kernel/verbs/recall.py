"""recall: which items were used after which searches; list, show, forget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import ANYONE, Argument, NameText, Option, Request, Response, filled, verb
from kiwi_mcp.kernel.view import Notice, TableRow, ViewItem
from kiwi_mcp.store.search_index.recall import RecallEntry

Latest = Annotated[int, Meta(ge=1, le=2_000), Option("At most this many, the latest first.")]


class RecallListRequest(Request, frozen=True, kw_only=True):
    """Which searches to list."""

    item: NameText | None = None
    limit: Latest = 50


class RememberedSearch(Response, frozen=True, kw_only=True):
    """One search, and the item that was used after it."""

    request: str
    item: str
    used: str
    at: str
    project: str | UnsetType = UNSET


class RecallListResponse(Response, frozen=True, kw_only=True):
    """Remembered searches, the latest first."""

    action: str = "list"
    is_on: bool
    total: int
    remembered: list[RememberedSearch]


def _list_view(response: RecallListResponse) -> Iterator[ViewItem]:
    yield from (TableRow(f"{one.item}  {one.used}  {one.at[:10]}  {one.request}") for one in response.remembered)
    if not response.is_on:
        yield Notice("`remember: false` in registry.yaml: searches are not remembered, and do not use these.")
    if response.remembered:
        yield Notice(f"{response.total} in all. hint: `kiwi recall forget` forgets them.")
    else:
        yield Notice("No search is remembered yet: use an item that a search finds, and the search is remembered.")


@verb(
    "list", group="recall", wire=("memory", "list"), access=ANYONE, records=False, aliases=("recall",),
    shows=_list_view,
)  # fmt: skip
async def list_recall(request: RecallListRequest, context: VerbContext) -> RecallListResponse:
    """Show past searches and the items used after them: similar searches find these items sooner."""
    entries = await _entries(request.item, context)
    return RecallListResponse(
        is_on=context.services.recall_log.is_enabled,
        total=len(entries),
        remembered=[_response(entry) for entry in entries[: request.limit]],
    )


class RecallShowRequest(Request, frozen=True, kw_only=True):
    """Which item."""

    item: Annotated[NameText, Argument("An item, by its name or its full name.", "ITEM")]
    limit: Latest = 50


@verb(
    "show", group="recall", wire=("memory", "show"), access=ANYONE, records=False,
    shows=_list_view,
)  # fmt: skip
async def show_recall(request: RecallShowRequest, context: VerbContext) -> RecallListResponse:
    """Show the searches after which one item was used."""
    return await list_recall(RecallListRequest(item=request.item, limit=request.limit), context)


class RecallForgetRequest(Request, frozen=True, kw_only=True):
    """What to forget."""

    item: Annotated[NameText | None, Argument("Only searches after which this item was used.", "ITEM")] = None


class RecallForgetResponse(Response, frozen=True, kw_only=True):
    """How many searches were forgotten."""

    action: str = "forget"
    status: str = "forgotten"
    forgotten: int
    message: str


@verb("forget", group="recall", wire=("memory", "forget"), access=ANYONE)
async def forget_recall(request: RecallForgetRequest, context: VerbContext) -> RecallForgetResponse:
    """Forget all past searches, or those of one item."""
    entries = await _entries(request.item, context)
    items = None if request.item is None else sorted({entry.item for entry in entries})
    count = await asyncio.to_thread(context.services.recall_log.forget, context.caller.name, items)
    message = f"{count} remembered request{'' if count == 1 else 's'} forgotten"
    return RecallForgetResponse(forgotten=count, message=message)


async def _entries(item: str | None, context: VerbContext) -> Sequence[RecallEntry]:
    """Return what is remembered of the caller; what is remembered of the owner, only the owner in person sees."""
    if not context.caller.name and not context.is_owner:
        raise PolicyDenied(
            "Only the owner may see or forget the owner's searches.", suggestion="Ask the owner to type `kiwi recall`."
        )
    entries = await asyncio.to_thread(context.services.recall_log.entries, context.caller.name)
    found = [entry for entry in entries if item is None or _is_called(entry, item)]
    if item is not None and not found:
        raise InvalidRequest(
            f"No remembered search led to `{item}`.", suggestion="`kiwi recall` lists the remembered searches."
        )
    return found


def _is_called(entry: RecallEntry, name: str) -> bool:
    wanted = name.partition("@")[0]
    return entry.item == wanted or entry.item.endswith(f"/{wanted}")


def _response(entry: RecallEntry) -> RememberedSearch:
    at = datetime.fromtimestamp(entry.at / 1_000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return filled(RememberedSearch, entry, used="run" if entry.is_run else "load", at=at)
