"""undo: list the runs that can be undone, undo one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError, NotFound, StoreDamaged, Unavailable
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.domain.times import iso
from kiwi_mcp.kernel.checkpoints.checkpoint import KEPT, look, look_at, seal
from kiwi_mcp.kernel.checkpoints.file_changes import (
    CheckpointRecord,
    Copies,
    FileChange,
    FileState,
    Snapshot,
    changes,
    content,
    differences,
    put,
    remove,
    shown,
    side,
)
from kiwi_mcp.kernel.checkpoints.git_store import Git, private_repository, stores
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import ANYONE, OWNER, Argument, NameText, Option, ProjectRequest, Response, verb
from kiwi_mcp.kernel.view import Data, Hint, Notice, TableRow, ViewItem, count_text, warning_rows
from kiwi_mcp.store.runs import Runs, new_run

TOOL_ID = "undo"
"""The name under which an undo is recorded as a run."""
_SHORTEST = 6
_SHOWN = 1_000
_NAMED = 3
"""How many paths a list names."""


class UndoListRequest(ProjectRequest, frozen=True, kw_only=True):
    """How many runs to list."""

    limit: Annotated[int, Meta(ge=1, le=200), Option("At most this many.")] = 20


class PathChange(Response, frozen=True, kw_only=True):
    """A path, and what became of it."""

    path: str
    change: str


class CheckpointLine(Response, frozen=True, kw_only=True):
    """A run that can be undone."""

    run_id: str
    tool_id: str
    started_at: str
    changed: list[PathChange]
    changed_paths: int | UnsetType = UNSET
    """How many paths changed, if not all are listed."""
    unfinished: bool | UnsetType = UNSET
    left_out: list[str] | UnsetType = UNSET
    beside: list[str] | UnsetType = UNSET
    commit: str | UnsetType = UNSET
    """The private commit that holds the files from before and after the run."""
    undoes: str | UnsetType = UNSET


class UndoListResponse(Response, frozen=True, kw_only=True):
    """Runs that can be undone, the newest first."""

    action: str = "list"
    checkpoints: list[CheckpointLine]


def _list_view(response: UndoListResponse) -> Iterator[ViewItem]:
    for one in response.checkpoints:
        paths = [change.path for change in one.changed]
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        changed = "did not come to its end" if one.unfinished else ", ".join(paths[:_NAMED]) + more
        undone = f"  (undid {one.undoes})" if one.undoes else ""
        yield TableRow(f"{one.run_id}  {one.tool_id:<20}  {changed}{undone}")
    if not response.checkpoints:
        yield Notice("No run of this project can be undone.")
        saves = "`kiwi run TOOL --checkpoint` saves the files first"
        yield Hint(f"{saves}; so does `checkpoint: auto` in ~/.ai/policy.yaml.")


@verb(
    "undoable", group="runs", wire=("undo", "list"), access=ANYONE, records=False, aliases=("undo",), shows=_list_view
)
async def list_undoable(request: UndoListRequest, context: VerbContext) -> UndoListResponse:
    """List the runs that can be undone."""
    space, runs = context.services.catalogs.space(request.project_path), context.services.runs_or_error(context.caller)
    found: list[CheckpointRecord] = []
    for source in await _sources(space):
        records = await source.records((await source.runs())[-request.limit :])
        found += [record for record in records if await asyncio.to_thread(_is_own, record, space, runs)]
    newest = sorted(found, key=lambda record: record.run_id, reverse=True)[: request.limit]
    return UndoListResponse(checkpoints=[msgspec.convert(record.summary(), CheckpointLine) for record in newest])


class UndoRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which run to undo."""

    run_id: Annotated[NameText, Argument("The run: its id, or the beginning of it.", "RUN")]
    dry_run: Annotated[bool, Option("Show what would happen, do nothing.")] = False
    force: Annotated[bool, Option("Also files that were changed by others since.")] = False


class UndoResponse(Response, frozen=True, kw_only=True):
    """The paths that were restored, or would be; `undo` is the run that undoes this."""

    action: str = "apply"
    run_id: str
    tool_id: str
    changed: list[PathChange]
    left_out: list[str] | UnsetType = UNSET
    status: str
    message: str
    diff: str | UnsetType = UNSET
    doubts: list[str] | UnsetType = UNSET
    drift: str | UnsetType = UNSET
    undo: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


def _undo_view(response: UndoResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    for change in response.changed:
        yield Notice(f"  {change.change:<9} {change.path}")
    for doubt in response.doubts or ():
        yield Notice(f"warning: {doubt}")
    if response.diff:
        yield Data(response.diff.rstrip())
    if response.drift:
        yield Notice(f"changed since the run:\n{response.drift.rstrip()}")
    if response.left_out:
        yield Notice(f"left alone: {', '.join(response.left_out)}")
    yield Notice(response.message)
    if response.undo:
        yield Hint(f"`kiwi undo {response.undo}` takes this back.")


@verb(
    "undo", group="runs", wire=("undo", "apply"), access=OWNER, aliases=("undo RUN",), everyday="undo",
    shows=_undo_view,
)  # fmt: skip
async def undo(request: UndoRequest, context: VerbContext) -> UndoResponse:
    """Restore the files that a run changed."""
    space, runs = context.services.catalogs.space(request.project_path), context.services.runs_or_error(context.caller)
    source, record = await _found(request.run_id, space, runs)
    # The private repository names contents as the copies of earlier versions do.
    store = source if isinstance(source, Git) else await private_repository(space)
    listed = record.changes
    if record.finished is None:
        # The run was killed: whatever differs now may be its work.
        listed = changes(record.saved or {}, await look(space, store, record))
    now = await look_at(space, store, [change.path for change in listed])
    undoing = _Undoing(space, source, store, replace(record, changes=listed), now.entries, now.left_out)
    doubts, drift = undoing.doubts, undoing.drift
    if request.dry_run:
        return replace(
            undoing.response("planned", f"{count_text(len(undoing.wanted), 'path')} would be put back"),
            diff=await undoing.diff(undoing.wanted),
            doubts=list(doubts) or UNSET,
            drift=await undoing.diff(drift) if doubts else UNSET,
        )
    if doubts and not request.force:
        raise Conflict(
            f"{record.run_id} was not undone: {'; '.join(doubts)}.",
            suggestion=f"Look at the diff; `kiwi undo {record.run_id} --force` puts all paths back as they were "
            "before the run, and can be undone itself.",
            paths=[shown(change.path) for change in drift],
            diff=await undoing.diff(drift),
        )
    if not undoing.wanted:
        return undoing.response("unchanged", f"everything is as it was before {record.run_id}")
    return await undoing.done(runs)


async def _sources(space: Space) -> list[Git | Copies]:
    """Return every place that may hold checkpoints of a project."""
    return [*await stores(space), Copies(space.project)]


async def _found(wanted: str, space: Space, runs: Runs | KiwiError) -> tuple[Git | Copies, CheckpointRecord]:
    """Return the checkpoint of a run, by its id or the beginning of it."""
    start = wanted.upper()
    known = [(source, run) for source in await _sources(space) for run in await source.runs()]
    match [(source, run) for source, run in known if run.startswith(start)] if len(start) >= _SHORTEST else []:
        case [(source, run)]:
            records = await source.records([run])
            if not records or not await asyncio.to_thread(_is_own, records[0], space, runs):
                raise StoreDamaged(
                    f"The checkpoint of {run} is not one that Kiwi made for this project.",
                    suggestion="Do not use it; restore the files from your own commits or backups.",
                )
            return source, records[0]
        case []:
            raise NotFound(
                f"No checkpoint of a run {wanted!r} is kept in this project.",
                suggestion=_elsewhere(wanted, space, runs)
                or "`kiwi undo` lists those there are. A run without a checkpoint, or that changed nothing, has none.",
                run_id=wanted,
            )
        case several:
            listed = ", ".join(run for _, run in several)
            raise InvalidRequest(f"{wanted!r} is the beginning of several runs.", suggestion=f"Write one: {listed}.")


def _is_own(record: CheckpointRecord, space: Space, runs: Runs | KiwiError) -> bool:
    """Whether a checkpoint is not one that came with the project.

    It bears the mark of this Kiwi or, where an earlier version made it, the store knows its run in this project.
    """
    if record.is_marked or not isinstance(runs, Runs):
        return record.is_marked
    try:
        run = runs.get(record.run_id)
    except KiwiError:
        return False
    return (run.tool_id, run.project) == (record.tool_id, str(space.project))


def _elsewhere(wanted: str, space: Space, runs: Runs | KiwiError) -> str:
    try:
        project = runs.get(wanted).project if isinstance(runs, Runs) else ""
    except KiwiError:
        return ""
    return f"That run was made in another project: add `--project {project}`." if project != str(space.project) else ""


class _Undoing(Struct, frozen=True):
    """A run to undo, and the current state of the paths that it changed."""

    space: Space
    source: Git | Copies
    """What holds the run's checkpoint."""
    store: Git
    """What the undo itself is saved in."""
    record: CheckpointRecord
    now: Snapshot
    lost: Sequence[str]
    """Paths with current content that cannot be saved."""

    @property
    def wanted(self) -> Sequence[FileChange]:
        """What is to be done: every path that is not as it was before the run, from now to then."""
        listed = (FileChange(change.path, self.now.get(change.path), change.before) for change in self.record.changes)
        return [change for change in listed if change.before != change.after]

    @property
    def drift(self) -> Sequence[FileChange]:
        """The paths that were changed again after the run, from their state after the run to their current state."""
        return [
            FileChange(change.path, change.after, self.now.get(change.path))
            for change in self.record.changes
            if self.now.get(change.path) not in {change.before, change.after}
        ]

    @property
    def doubts(self) -> Sequence[str]:
        """Why it is not undone unless the owner insists."""
        found = []
        if drift := self.drift:
            paths = ", ".join(shown(change.path) for change in drift[:10])
            found.append(f"{len(drift)} of its paths changed since: {paths}")
        if self.lost:
            paths = ", ".join(map(shown, self.lost[:10]))
            found.append(f"what stands at these paths now cannot be saved, and would be lost: {paths}")
        if self.record.finished is None:
            found.append("it did not come to its end, so what else changed since then would be undone too")
        if self.record.beside:
            beside = ", ".join(self.record.beside[:10])
            found.append(f"other runs went on at the same time, and theirs would be undone too: {beside}")
        return found

    async def done(self, runs: Runs | KiwiError) -> UndoResponse:
        """Put every path back, with a checkpoint of its own, and record it as a run."""
        wanted = self.wanted
        contents = await self.source.read(side(wanted, "after").values())
        started = time.time_ns() // 1_000_000
        before = side(wanted, "before")
        saved = await self.store.keep(before)
        if saved != before:
            raise Conflict("The files are being changed at this moment.", suggestion="Undo when nothing else writes.")
        run_id, _ = new_run(started)
        scope = tuple(change.path for change in wanted)
        own = CheckpointRecord(run_id, TOOL_ID, started, saved=saved, scope=scope, undoes=self.record.run_id)
        await self.store.seal(own, {"before": saved})
        fault = await asyncio.to_thread(_put_back, self.space, wanted, contents)
        after = await self.store.keep((await look_at(self.space, self.store, own.scope)).entries)
        ended = own.ended(time.time_ns() // 1_000_000, after)
        await seal(self.store, ended)
        with suppress(KiwiError):  # the next run forgets what this one could not
            await self.store.drop_oldest((await self.store.runs())[:-KEPT])
        warnings = await asyncio.to_thread(_recorded, runs, self.space, ended, fault)
        if fault is not None:
            raise Unavailable(
                f"{self.record.run_id} was undone in part: {fault.message}",
                suggestion=f"`kiwi undo {run_id}` restores the state before; fix the cause, then undo again.",
                undo=run_id,
                changed=ended.summary()["changed"],
            )
        response = self.response("undone", f"{count_text(len(wanted), 'path')} put back as before {self.record.run_id}")
        return replace(response, undo=run_id, warnings=warnings or UNSET)

    def response(self, status: str, message: str) -> UndoResponse:
        """Return a response with the paths that are restored."""
        words = {"created": "restored", "deleted": "removed", "changed": "restored"}
        return UndoResponse(
            run_id=self.record.run_id,
            tool_id=self.record.tool_id,
            changed=[PathChange(path=shown(one.path), change=words[one.word]) for one in self.wanted[:_SHOWN]],
            left_out=list(map(shown, self.record.left_out[:_SHOWN])) or UNSET,
            status=status,
            message=message,
        )

    async def diff(self, listed: Sequence[FileChange]) -> str:
        """Return the differences of some paths; their current contents are read from the project."""
        found: dict[str, bytes] = {}
        kept: list[FileState] = []
        for change in listed:
            for entry in filter(None, (change.before, change.after)):
                if entry == self.now.get(change.path):
                    data = await asyncio.to_thread(content, self.space.project, change.path, entry)
                    found |= {entry.id: data} if data is not None else {}
                else:
                    kept.append(entry)
        contents = {**await self.source.read(kept), **found} if kept else found
        return await asyncio.to_thread(differences, listed, contents)


def _put_back(space: Space, wanted: Sequence[FileChange], contents: Mapping[str, bytes]) -> KiwiError | None:
    """Put paths back, what goes first; return what stopped it, if something did."""
    try:
        for change in sorted(wanted, key=lambda change: change.path, reverse=True):
            if change.after is None:
                remove(space.project, change.path)
        for change in wanted:
            if change.after is not None:
                put(space.project, change.path, change.after, contents[change.after.id])
    except KiwiError as fault:
        return fault
    return None


def _recorded(runs: Runs | KiwiError, space: Space, record: CheckpointRecord, fault: KiwiError | None) -> list[str]:
    """Record the undo as a run, and return what could not be recorded."""
    if not isinstance(runs, Runs):
        return [f"The undo was not recorded: {runs.message}"]
    message = fault.message if fault else f"{len(record.changes)} paths put back as before {record.undoes}."
    run = RunRecord(
        record.run_id, TOOL_ID, "error" if fault else "success", iso(record.started),
        (record.finished or record.started) - record.started, runs.actor, str(space.project),
        code=fault.code if fault else "", message=message,
    )  # fmt: skip
    try:
        runs.add(run)
    except KiwiError as error:
        return [f"The undo was not recorded: {error.message}"]
    return []
