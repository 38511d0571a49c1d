"""The checkpoint of a run: whether it gets one, and how one is begun and sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.items import CHECKPOINT_MODES, Chain, Lifetime, Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.checkpoints.file_changes import SECONDS, CheckpointRecord, Snapshot, Survey, side, survey
from kiwi_mcp.kernel.checkpoints.git_store import Git, private_repository, repository
from kiwi_mcp.primitives.process.spawn import completed

OFFER: JsonObject = {
    "saved": False,
    "hint": "This tool changes state. Send `checkpoint: true` (`--checkpoint`) to be able to undo a run.",
}
_ELSEWHERE: JsonObject = {"saved": False, "hint": "Nothing was saved: this item changes no file of the project."}


class Unguarded:
    """A run of which nothing is saved."""

    def __init__(self, summary: JsonObject | None = None, warnings: tuple[str, ...] = ()) -> None:
        self.summary = summary
        """What the answer says about it."""
        self.warnings = warnings
        """What could not be saved, and why."""

    async def __aenter__(self) -> None:
        """Do nothing."""

    async def __aexit__(self, *error: object) -> None:
        """Do nothing."""


UNGUARDED = Unguarded()


class CheckpointRequest(Struct, frozen=True):
    """What is wanted for one run."""

    is_made: bool = False
    is_asked: bool = False
    """Whether the call itself asks: then it is not made without."""
    is_offered: bool = False
    """Whether the item changes something, and nothing is saved unless the call asks."""
    is_disabled: bool = False
    is_elsewhere: bool = False
    """Whether the item acts through no process here, and so changes no file."""


NOTHING = CheckpointRequest()


def wish(manifest: Manifest, plan: Plan, lifetime: Lifetime, owner: str, *, is_asked: bool) -> CheckpointRequest:
    """Return what is wanted for a run of an item; what acts elsewhere alone changes no file here."""
    if not (is_asked or manifest.mutates_state):
        return NOTHING
    if not isinstance(plan.spec, ProcessSpec):
        return CheckpointRequest(is_asked=is_asked, is_elsewhere=True)
    mode = mode_of(owner) or mode_of(manifest.extra.get("checkpoint")) or "explicit"
    is_made = mode != "disabled" and (is_asked or mode == "auto")
    # A server rarely changes this folder, so a hint at every call would not help.
    is_offered = mode == "explicit" and not is_asked and lifetime == "call"
    is_offered = is_offered and manifest.written.get("mutates_state") is True
    return CheckpointRequest(is_made, is_asked, is_offered, is_disabled=mode == "disabled")


async def guard_of(space: Space, owner: str, chain: Chain, plan: Plan, run_id: str, *, is_asked: bool) -> Guard:
    """Return the guard of a run: a checkpoint if one is wanted; the owner's setting has priority."""
    tool = chain.tool
    wanted = wish(tool.manifest, plan, chain.traits[0].lifetime, owner, is_asked=is_asked)
    if wanted.is_made:
        return await begin(space, tool.id, run_id, wanted)
    if wanted.is_disabled and wanted.is_asked:
        raise not_made(f"checkpoints of {tool.id!r} are disabled.")
    if wanted.is_elsewhere and wanted.is_asked:
        return Unguarded(_ELSEWHERE)
    return Unguarded(OFFER) if wanted.is_offered else UNGUARDED


def not_made(reason: str) -> Unavailable:
    """Return the error for a checkpoint that was asked for and cannot be had."""
    return Unavailable(
        f"A checkpoint was asked for and cannot be made: {reason}",
        suggestion="Nothing ran. Fix that, or run without `checkpoint`.",
    )


def mode_of(written: Json) -> str:
    """Return the mode that a manifest or the owner's policy sets, alone or together with paths; empty if it sets none.

    An unknown value counts as `auto`, because the author wanted something and saving is the safe choice.
    """
    word = as_object(written).get("mode") if isinstance(written, Mapping) else written
    return next((mode for mode in CHECKPOINT_MODES if mode == word), "auto" if word else "")


KEPT = 200
"""How many checkpoints of a project are kept."""
_LOOKED_AT = 50
_TOLD = ("changed", "changed_paths", "commit", "insertions", "deletions", "left_out", "beside")


class Checkpoint:
    """What was saved before a run; leaving it finds out what the run changed."""

    def __init__(self, space: Space, store: Git, record: CheckpointRecord) -> None:
        self._space = space
        self._store = store
        self._record = record
        self.summary: JsonObject | None = None
        self.warnings: tuple[str, ...] = ()

    async def __aenter__(self) -> None:
        """Begin: all has been saved."""

    async def __aexit__(self, *error: object) -> None:
        """Look at what changed, also where the run was cancelled; that this fails does not undo the run."""
        await completed(self._finish())

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                self.summary = await self._ended()
        except (KiwiError, OSError, TimeoutError) as reason:
            run_id = self._record.run_id
            self.summary = {"saved": True, "unfinished": True, "undo": run_id}
            self.warnings = (f"The changes of the run are unknown: {_words(reason)} All before it is saved.",)

    async def _ended(self) -> JsonObject:
        before = self._record.saved or {}
        found = await look(self._space, self._store, self._record)
        fresh = {path: entry for path, entry in found.items() if before.get(path) != entry}
        kept = await self._store.keep(fresh) if fresh else {}
        same = {path: entry for path, entry in found.items() if path not in fresh}
        record = self._record.ended(now_ms(), {**same, **kept})
        if not record.changes:
            await self._store.drop([record.run_id])
            return {"saved": True, "changed": []}
        record = replace(record, commit=await seal(self._store, record))
        runs = await self._store.runs()
        near = await self._store.records(runs[-_LOOKED_AT:])
        if beside := tuple(other.run_id for other in near if record.overlaps(other)):
            record = replace(record, beside=beside)
            record = replace(record, commit=await seal(self._store, record))
        with suppress(KiwiError):  # the next run forgets what this one could not
            await self._store.drop_oldest(runs[:-KEPT])
        added, deleted = await self._store.changed_lines(record.commit)
        response = {**record.summary(), "insertions": added, "deletions": deleted}
        return {"saved": True, "undo": record.run_id, **{word: response[word] for word in _TOLD if word in response}}


Guard: TypeAlias = Checkpoint | Unguarded
"""Stands around a run: entered before it, left after it, however it ends."""


async def begin(space: Space, tool_id: str, run_id: str, wanted: CheckpointRequest) -> Guard:
    """Save what a run may change, and return the guard of the run.

    If the call asks for a checkpoint that cannot be made, the run is refused. If only the owner or the item asks for
    one, the answer says that it is missing.
    """
    try:
        async with asyncio.timeout(SECONDS):
            return await _begun(space, tool_id, run_id)
    except (KiwiError, OSError, TimeoutError) as reason:
        if wanted.is_asked:
            raise not_made(_words(reason)) from reason
        return Unguarded({"saved": False}, (f"Nothing was saved before the run: {_words(reason)}",))


async def _begun(space: Space, tool_id: str, run_id: str) -> Checkpoint:
    started = now_ms()
    store = await repository(space) or await private_repository(space)
    listing = await store.paths()
    found = await look_at(space, store, listing.paths)
    saved = await store.keep(found.entries)
    record = CheckpointRecord(
        run_id,
        tool_id,
        started,
        saved=saved,
        left_out=tuple(sorted({*found.left_out, *listing.repositories})),
        unsaved=(*found.left_out, *listing.ignored, *(f"{path}/" for path in listing.repositories)),
    )
    try:
        await store.seal(record, {"before": saved})
    except asyncio.CancelledError:
        # Nothing will run, so nothing must look like a run that was killed.
        with suppress(KiwiError):
            await completed(store.drop([run_id]))
        raise
    return Checkpoint(space, store, record)


async def look(space: Space, store: Git, record: CheckpointRecord) -> Snapshot:
    """Return the current state of all paths that a run may have changed, including those that git ignores by now."""
    listed = (await store.paths()).paths
    if scope := record.scope:
        below = tuple(f"{path}/" for path in scope)
        listed = [*scope, *(path for path in listed if path.startswith(below))]
    return record.seen((await look_at(space, store, [*listed, *(record.saved or ())])).entries)


async def look_at(space: Space, store: Git, paths: Sequence[str]) -> Survey:
    """Return the state of some paths."""
    return await asyncio.to_thread(survey, space.project, paths, store.algorithm)


async def seal(store: Git, record: CheckpointRecord) -> str:
    """Keep the record of a run that has ended, with the contents on both sides of its changes; return the commit."""
    return await store.seal(record, {word: side(record.changes, word) for word in ("before", "after")})


def _words(reason: BaseException) -> str:
    if isinstance(reason, KiwiError):
        return reason.message
    return f"it took more than {SECONDS:.0f} seconds." if isinstance(reason, TimeoutError) else f"{reason}."
