"""The undo verb: which runs can be undone, and undoing one, which can be undone as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import (
    Conflict,
    InvalidRequest,
    KiwiError,
    NotFound,
    PolicyDenied,
    StoreDamaged,
    Unavailable,
)
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.run import Run, iso
from kiwi_mcp.kernel.checkpoints.checkpoint import KEPT, look, look_at, seal, vaults
from kiwi_mcp.kernel.checkpoints.diff import differences
from kiwi_mcp.kernel.checkpoints.record import Change, Record, changes, shown, side
from kiwi_mcp.kernel.checkpoints.scope import is_left_out
from kiwi_mcp.kernel.checkpoints.tree import Entry, Snapshot, content, put, remove, walk
from kiwi_mcp.kernel.checkpoints.vault import Vault
from kiwi_mcp.kernel.requests import UndoRequest
from kiwi_mcp.kernel.trail import Recorder
from kiwi_mcp.store.runs import Runs, new_run

TOOL_ID = "undo"
"""The name under which an undo is recorded as a run."""
_SHORTEST = 6
_SHOWN = 1_000


async def undo(request: UndoRequest, space: Space, runs: Recorder, *, is_owner: bool) -> JsonObject:
    """Answer one request about undoing."""
    if request.action == "list":
        return await _list(request.limit, space)
    if not is_owner:
        raise PolicyDenied(
            "Only the owner undoes a run.", suggestion=f"Ask them to type `kiwi undo {request.run_id or 'RUN'}`."
        )
    if not request.run_id:
        raise InvalidRequest("The request names no run.", suggestion="Send `run_id`, as a list or an answer gave it.")
    vault, record = await _found(request.run_id, space, runs)
    undoing = await _undoing(space, vault, record)
    if request.dry_run:
        return await undoing.planned()
    if undoing.doubts and not request.force:
        raise await undoing.refusal()
    return await undoing.done(runs) if undoing.wanted else undoing.settled()


async def _list(limit: int, space: Space) -> JsonObject:
    found: list[Record] = []
    for vault in await vaults(space):
        found += await vault.records((await vault.runs())[-limit:])
    newest = sorted(found, key=lambda record: record.run_id, reverse=True)[:limit]
    return {"action": "list", "checkpoints": [record.summary() for record in newest]}


async def _found(wanted: str, space: Space, runs: Recorder) -> tuple[Vault, Record]:
    """Return the checkpoint of a run, by its id or the beginning of it."""
    start = wanted.upper()
    known = [(vault, run) for vault in await vaults(space) for run in await vault.runs()]
    match [(vault, run) for vault, run in known if run.startswith(start)] if len(start) >= _SHORTEST else []:
        case [(vault, run)]:
            return vault, _sound(run, await vault.records([run]))
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


def _sound(run: str, records: Sequence[Record]) -> Record:
    if not records:
        raise StoreDamaged(
            f"The checkpoint of {run} is not what Kiwi wrote.",
            suggestion="Do not use it; restore the files from your own commits or backups.",
        )
    return records[0]


def _elsewhere(wanted: str, space: Space, runs: Recorder) -> str:
    try:
        project = runs.get(wanted).project if isinstance(runs, Runs) else ""
    except KiwiError:
        return ""
    return f"That run was made in another project: add `--project {project}`." if project != str(space.project) else ""


async def _undoing(space: Space, vault: Vault, record: Record) -> _Undoing:
    listed = record.changes
    if record.finished is None:
        # The run was killed: whatever differs now may be its work.
        listed = changes(record.saved or {}, await _standing(space, vault, record))
    now = await look_at(space, vault, [change.path for change in listed])
    return _Undoing(space, vault, replace(record, changes=listed), now.entries, now.left_out)


async def _standing(space: Space, vault: Vault, record: Record) -> Snapshot:
    if not record.scope:
        return await look(space, vault, record)
    paths = await asyncio.to_thread(lambda: [*walk(space.project, record.scope, is_left_out)])
    return record.seen((await look_at(space, vault, paths)).entries)


@dataclass(frozen=True, slots=True)
class _Undoing:
    """A run that is to be undone, and what stands now at the paths that it changed."""

    space: Space
    vault: Vault
    record: Record
    now: Snapshot
    lost: Sequence[str]
    """Paths at which something stands now that cannot be saved."""

    @property
    def wanted(self) -> Sequence[Change]:
        """What is to be done: every path that is not as it was before the run, from now to then."""
        listed = (Change(change.path, self.now.get(change.path), change.before) for change in self.record.changes)
        return [change for change in listed if change.before != change.after]

    @property
    def drift(self) -> Sequence[Change]:
        """The paths that somebody else changed since, from what the run left to what stands there now."""
        return [
            Change(change.path, change.after, self.now.get(change.path))
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
            found.append(f"other runs went on at the same time, and theirs would be undone too: {self._beside()}")
        return found

    async def planned(self) -> JsonObject:
        """Return what would be done."""
        return {
            **self._told(),
            "status": "planned",
            "message": f"{self._count()} would be put back",
            "diff": await self._diff(self.wanted),
            **({"doubts": list(self.doubts), "drift": await self._diff(self.drift)} if self.doubts else {}),
        }

    async def refusal(self) -> Conflict:
        """Return the error that says why it is not undone."""
        return Conflict(
            f"{self.record.run_id} was not undone: {'; '.join(self.doubts)}.",
            suggestion=f"Look at the diff; `kiwi undo {self.record.run_id} --force` puts all paths back as they were "
            "before the run, and can be undone itself.",
            paths=[shown(change.path) for change in self.drift],
            diff=await self._diff(self.drift),
        )

    def settled(self) -> JsonObject:
        """Return that there is nothing to do."""
        message = f"everything is as it was before {self.record.run_id}"
        return {**self._told(), "status": "unchanged", "message": message}

    async def done(self, runs: Recorder) -> JsonObject:
        """Put every path back, with a checkpoint of its own, and record it as a run."""
        wanted = self.wanted
        contents = await self.vault.read(side(wanted, "after").values())
        own = await self._begun()
        run_id = own.run_id
        fault = await asyncio.to_thread(_put_back, self.space, wanted, contents)
        after = (await look_at(self.space, self.vault, own.scope)).entries
        ended = own.ended(time.time_ns() // 1_000_000, after)
        await seal(self.vault, ended)
        with suppress(KiwiError):  # the next run forgets what this one could not
            await self.vault.drop((await self.vault.runs())[:-KEPT])
        warnings = await asyncio.to_thread(_recorded, runs, self.space, ended, fault)
        if fault is not None:
            raise Unavailable(
                f"{self.record.run_id} was undone in part: {fault.message}",
                suggestion=f"`kiwi undo {run_id}` goes back to where it was; mend the cause, then undo again.",
                undo=run_id,
                changed=ended.summary()["changed"],
            )
        message = f"{self._count()} put back as before {self.record.run_id}"
        told = {**self._told(), "status": "undone", "message": message, "undo": run_id}
        return {**told, "warnings": warnings} if warnings else told

    async def _begun(self) -> Record:
        """Save what stands there now, under a run of its own."""
        started = time.time_ns() // 1_000_000
        before = side(self.wanted, "before")
        saved = await self.vault.keep(before)
        if saved != before:
            raise Conflict("The files are being changed at this moment.", suggestion="Undo when nothing else writes.")
        run_id, _ = new_run(started)
        scope = tuple(change.path for change in self.wanted)
        record = Record(run_id, TOOL_ID, started, saved=saved, scope=scope, undoes=self.record.run_id)
        await self.vault.seal(record, {"before": saved})
        return record

    def _told(self) -> dict[str, Json]:
        words = {"created": "restored", "deleted": "removed", "changed": "restored"}
        return {
            "action": "apply",
            "run_id": self.record.run_id,
            "tool_id": self.record.tool_id,
            "changed": [{"path": shown(change.path), "change": words[change.word]} for change in self.wanted[:_SHOWN]],
            **({"left_out": list(map(shown, self.record.left_out[:_SHOWN]))} if self.record.left_out else {}),
        }

    def _count(self) -> str:
        count = len(self.wanted)
        return f"{count} path{'s' * (count != 1)}"

    def _beside(self) -> str:
        return ", ".join(self.record.beside[:10])

    async def _diff(self, listed: Sequence[Change]) -> str:
        return await asyncio.to_thread(differences, listed, await self._contents(listed))

    async def _contents(self, listed: Iterable[Change]) -> dict[str, bytes]:
        """Return the contents of both sides by their ids, those that stand there now among them."""
        found: dict[str, bytes] = {}
        kept: list[Entry] = []
        for change in listed:
            for entry in filter(None, (change.before, change.after)):
                if entry == self.now.get(change.path):
                    data = await asyncio.to_thread(content, self.space.project, change.path, entry)
                    found |= {entry.id: data} if data is not None else {}
                else:
                    kept.append(entry)
        return {**await self.vault.read(kept), **found} if kept else found


def _put_back(space: Space, wanted: Sequence[Change], contents: Mapping[str, bytes]) -> KiwiError | None:
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


def _recorded(runs: Recorder, space: Space, record: Record, fault: KiwiError | None) -> list[Json]:
    """Record the undo as a run, and return what could not be recorded."""
    if not isinstance(runs, Runs):
        return [f"The undo was not recorded: {runs.message}"] if runs else []
    message = fault.message if fault else f"{len(record.changes)} paths put back as before {record.undoes}."
    run = Run(
        record.run_id, TOOL_ID, "error" if fault else "success", iso(record.started),
        (record.finished or record.started) - record.started, runs.actor, str(space.project),
        code=fault.code if fault else "", message=message,
    )  # fmt: skip
    try:
        runs.add(run)
    except KiwiError as error:
        return [f"The undo was not recorded: {error.message}"]
    return []
