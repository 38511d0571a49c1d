"""memory: what the memory tools do; export, import and migrate; recall: which items were used after which searches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field, to_builtins

from kiwi_mcp.domain.errors import (
    Conflict,
    InvalidRequest,
    KiwiError,
    NotFound,
    PathInvalid,
    PolicyDenied,
    TooLarge,
    Unavailable,
)
from kiwi_mcp.domain.items import FOLDER_FILES, Source
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.kernel.approvals import visible
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.memory import GitHistory, MemoryMove
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    LongText,
    NameText,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, TableRow, ViewItem, warning_rows
from kiwi_mcp.manifest.home_config import memory_folder
from kiwi_mcp.memory.files import Memory, list_files, read_text, search_files
from kiwi_mcp.store.search_index.recall import RecallEntry

_CHANGES = 20
_MOST_BYTES = 64_000_000
_MOST_SHOWN = 1_000
_tool = partial(verb, group="memory_tools", access=ANYONE, records=False)


class MemoryToolRequest(Request, frozen=True, kw_only=True):
    """The arguments of a memory tool."""

    arguments: dict[str, AnyJson] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return an argument that is text; empty without one."""
        return as_text(self.arguments.get(name))


class MemoryToolResponse(Response, frozen=True, kw_only=True):
    """What a memory tool returns."""

    content: AnyJson

    def to_json(self) -> JsonObject:
        """Return the fields of the tool itself."""
        return as_object(self.content)


def memory_of(context: VerbContext) -> Memory:
    """Return the owner's memory."""
    root = memory_folder(context.services.user)
    return Memory(root, GitHistory(root))


async def _looked_up(context: VerbContext, look: Callable[[Path], JsonObject]) -> MemoryToolResponse:
    memory = memory_of(context)
    async with memory.opened():
        return MemoryToolResponse(content=await asyncio.to_thread(look, memory.root))


async def _changed(action: str, request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    caller = context.caller
    by = " ".join(filter(None, (caller.name or "owner", caller.client, caller.origin.thread)))
    made = await memory_of(context).change(action, request.arguments, visible(by))
    if context.is_owner:
        return MemoryToolResponse(content=made)
    # Until its owner signs or edits an item of the memory that a model wrote, a model reads it as data.
    catalog = context.services.catalogs.at(None)
    whole = catalog.space.memory / as_text(made["path"])
    for card in catalog.all(frozenset[Source](("user",))):
        place = Path(card.path)
        if place == whole or (place.name in FOLDER_FILES and whole.is_relative_to(place.parent)):
            with suppress(KiwiError):  # what cannot be read as an item gives no instructions
                tool = catalog.find(card.identity, item_type=catalog.sheets.item_type(card.tool_type))
                context.services.authorship(caller).writes([tool.digest], "user")
    return MemoryToolResponse(content=made)


@_tool("read")
async def read_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Read a file."""
    return await _looked_up(context, lambda root: read_text(root, request.text("path")))


@_tool("list")
async def list_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """List files and folders."""
    is_recursive = request.arguments.get("recursive") is True
    return await _looked_up(context, lambda root: list_files(root, request.text("path"), is_recursive=is_recursive))


@_tool("search")
async def search_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Find lines, or files by their names."""
    in_names = request.text("type") == "filename"
    query, path = request.text("query"), request.text("path")
    return await _looked_up(context, lambda root: search_files(root, query, path, in_names=in_names))


@_tool("history")
async def show_memory_history(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Show the changes of a file, or the file after one of them."""
    limit = request.arguments.get("limit")
    most = limit if isinstance(limit, int) else _CHANGES
    found = await memory_of(context).versions(request.text("path"), most, request.text("commit"))
    return MemoryToolResponse(content=found)


@_tool("export")
async def return_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:  # noqa: ARG001 - a verb
    """Return everything with its history."""
    stream = await _stream(memory_of(context))
    try:
        return MemoryToolResponse(content={"format": "git fast-import", "stream": stream.decode()})
    except UnicodeDecodeError as error:
        raise PathInvalid("the memory", "has files that are not text") from error


@_tool("write")
async def write_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Write a file."""
    return await _changed("write", request, context)


@_tool("edit")
async def edit_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Replace a passage of a file."""
    return await _changed("edit", request, context)


@_tool("delete")
async def delete_memory(request: MemoryToolRequest, context: VerbContext) -> MemoryToolResponse:
    """Delete a file."""
    return await _changed("delete", request, context)


async def _stream(memory: Memory) -> bytes:
    history = GitHistory(memory.root)
    async with memory.opened():
        await history.record(".", "Changed outside Kiwi")
        return await history.exported()


class MemoryFileRequest(Request, frozen=True, kw_only=True):
    """A file with a whole memory."""

    path: Annotated[LongText, Argument("A file.", "FILE", kind="path")]


class MemoryFileResponse(Response, frozen=True, kw_only=True):
    """What was exported or imported."""

    status: str
    path: str
    bytes: int
    message: str
    warnings: list[str] = field(default_factory=list)
    """What the preferences name and is not here."""


def _file_view(response: MemoryFileResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield Data(response.message)


@verb("export", group="memory", access=OWNER, is_local=True, shows=_file_view)
async def export_memory(request: MemoryFileRequest, context: VerbContext) -> MemoryFileResponse:
    """Write all of your memory with its history to a file, which `git fast-import` reads too."""
    stream, target = await _stream(memory_of(context)), Path(request.path)
    try:
        await asyncio.to_thread(_write_private, target, stream)
    except FileExistsError as error:
        raise Conflict(f"{target} exists already.", suggestion="Choose another file.") from error
    except OSError as error:
        raise Unavailable(
            f"{target} cannot be written: {error.strerror}.", suggestion="Choose another file."
        ) from error
    message = f"Exported {len(stream):,} bytes."
    return MemoryFileResponse(status="exported", path=str(target), bytes=len(stream), message=message)


def _write_private(target: Path, stream: bytes) -> None:
    """Write a new file that only its owner reads; nothing is left of one that cannot be written whole."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        try:
            file.write(stream)
            file.flush()
        except OSError:
            target.unlink()
            raise


def _read_plain(path: Path) -> bytes:
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise InvalidRequest(f"{path} is not a plain file.", suggestion="Use a file of `kiwi memory export`.")
        if found.st_size > _MOST_BYTES:
            raise TooLarge(f"{path}", size=found.st_size, limit=_MOST_BYTES)
        return path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}.", suggestion="Check the path.") from error


@verb("import", group="memory", access=OWNER, is_local=True, shows=_file_view)
async def import_memory(request: MemoryFileRequest, context: VerbContext) -> MemoryFileResponse:
    """Bring a memory here with its history; yours has to be empty."""
    memory = memory_of(context)
    stream = await asyncio.to_thread(_read_plain, Path(request.path))
    async with memory.opened():
        if [one for one in memory.root.iterdir() if one.name != ".git"] or await GitHistory(memory.root).exported():
            raise Conflict(
                f"{memory.root} is not empty.",
                suggestion="Move that folder away first, or export and merge it with git.",
            )
        count = await GitHistory(memory.root).imported(stream)
    gaps = (await context.services.offers(None)).notices
    message = f"Imported {count} files."
    return MemoryFileResponse(
        status="imported", path=str(memory.root), bytes=len(stream), message=message, warnings=list(gaps)
    )


class MemoryMigrateRequest(Request, frozen=True, kw_only=True):
    """Whether to move files into the memory, or back."""

    apply: Annotated[bool, Option("Do it; otherwise the plan is shown.")] = False
    undo: Annotated[bool, Option("Move back what was moved.")] = False


class MemoryMigrateResponse(Response, frozen=True, kw_only=True):
    """What happens to each file."""

    status: str
    message: str
    path: str
    files: list[AnyJson]
    left_off: int
    next: str


def _migrate_view(response: MemoryMigrateResponse) -> Iterator[ViewItem]:
    for one in map(as_object, response.files):
        yield Data(f"{one['what']}  {one['path']}{': ' if one['reason'] else ''}{as_text(one['reason'])}")
    if response.left_off:
        yield Notice(f"… and {response.left_off} more")
    yield Notice(response.message)
    yield Hint(response.next)


@verb("migrate", group="memory", access=OWNER, is_local=True, shows=_migrate_view)
async def migrate_memory(request: MemoryMigrateRequest, context: VerbContext) -> MemoryMigrateResponse:
    """Move directives, knowledge, skills and preferences of your user folder into your memory."""
    memory = memory_of(context)
    move = MemoryMove(context.services.user, memory.root)
    plan, act = (move.back, move.move_back) if request.undo else (move.there, move.move_there)
    try:
        if request.apply:
            async with memory.opened():
                await memory.history.record(".", "Changed outside Kiwi")
                steps = await asyncio.to_thread(act)
                await memory.history.record(".", f"Moved {'back to' if request.undo else 'here from'} the user folder")
        else:
            steps = await asyncio.to_thread(plan)
    except OSError as error:
        fix = "Fix that and do it again: what was moved until now is complete, and nothing is lost."
        raise Unavailable(f"{error.filename} cannot be moved: {error.strerror}.", suggestion=fix) from error
    count, kept = sum(step.what == "move" for step in steps), sum(step.what == "keep" for step in steps)
    target = context.services.user if request.undo else memory.root
    following = "Nothing more to do."
    if count and not request.apply:
        following = "Nothing was changed. Do it with `--apply`."
    elif count and not request.undo:
        following = "`kiwi memory migrate --undo --apply` moves them back."
    return MemoryMigrateResponse(
        status="migrated" if request.apply else "planned",
        message=f"{count} file{'s' * (count != 1)} {'' if request.apply else 'would be '}moved to {target}"
        + (f", {kept} left in place" if kept else ""),
        path=str(target),
        files=[to_builtins(step) for step in sorted(steps, key=lambda step: step.what)[:_MOST_SHOWN]],
        left_off=max(len(steps) - _MOST_SHOWN, 0),
        next=following,
    )


_recall = partial(verb, group="recall", access=ANYONE)
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


def _recall_view(response: RecallListResponse) -> Iterator[ViewItem]:
    yield from (TableRow(f"{one.item}  {one.used}  {one.at[:10]}  {one.request}") for one in response.remembered)
    if not response.is_on:
        yield Notice("`remember: false` in registry.yaml: searches are not remembered, and do not use these.")
    if response.remembered:
        yield Notice(f"{response.total} in all. hint: `kiwi recall forget` forgets them.")
    else:
        yield Notice("No search is remembered yet: use an item that a search finds, and the search is remembered.")


@_recall("list", wire=("memory", "list"), records=False, aliases=("recall",), shows=_recall_view)
async def list_recall(request: RecallListRequest, context: VerbContext) -> RecallListResponse:
    """Show past searches and the items used after them: similar searches find these items sooner."""
    entries = await _entries(request.item, context)
    return RecallListResponse(
        is_on=context.services.recall_log.is_enabled,
        total=len(entries),
        remembered=[_remembered(entry) for entry in entries[: request.limit]],
    )


class RecallShowRequest(Request, frozen=True, kw_only=True):
    """Which item."""

    item: Annotated[NameText, Argument("An item, by its name or its full name.", "ITEM")]
    limit: Latest = 50


@_recall("show", wire=("memory", "show"), records=False, shows=_recall_view)
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


@_recall("forget", wire=("memory", "forget"))
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
    if item is None:
        return entries
    wanted = item.partition("@")[0]
    found = [entry for entry in entries if entry.item == wanted or entry.item.endswith(f"/{wanted}")]
    if not found:
        raise InvalidRequest(
            f"No remembered search led to `{item}`.", suggestion="`kiwi recall` lists the remembered searches."
        )
    return found


def _remembered(entry: RecallEntry) -> RememberedSearch:
    at = datetime.fromtimestamp(entry.at / 1_000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return filled(RememberedSearch, entry, used="run" if entry.is_run else "load", at=at)
