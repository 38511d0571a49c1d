"""A checkpoint around a run: what stood there before, and exactly what the run changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.checkpoints.copies import Copies
from kiwi_mcp.kernel.checkpoints.git import repository
from kiwi_mcp.kernel.checkpoints.guard import Guard, Unguarded, Wish, not_made
from kiwi_mcp.kernel.checkpoints.record import Record, side
from kiwi_mcp.kernel.checkpoints.tree import SECONDS, Snapshot, Survey, survey
from kiwi_mcp.kernel.checkpoints.vault import Vault
from kiwi_mcp.primitives.children import completed

KEPT = 200
"""How many checkpoints of a project are kept."""
_LOOKED_AT = 50
_TOLD = ("changed", "changed_paths", "left_out", "beside")


class Checkpoint:
    """What was saved before a run; leaving it finds out what the run changed."""

    def __init__(self, space: Space, vault: Vault, record: Record) -> None:
        self._space = space
        self._vault = vault
        self._record = record
        self.told: JsonObject | None = None
        self.warnings: tuple[str, ...] = ()

    async def __aenter__(self) -> None:
        """Begin: all has been saved."""

    async def __aexit__(self, *error: object) -> None:
        """Look at what changed, also where the run was cancelled; that this fails does not undo the run."""
        await completed(self._finish())

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                self.told = await self._ended()
        except (KiwiError, OSError, TimeoutError) as reason:
            run_id = self._record.run_id
            self.told = {"saved": True, "unfinished": True, "undo": run_id}
            self.warnings = (f"What the run changed could not be told: {_words(reason)} All before it is saved.",)

    async def _ended(self) -> JsonObject:
        before = self._record.saved or {}
        found = await look(self._space, self._vault, self._record)
        fresh = {path: entry for path, entry in found.items() if before.get(path) != entry}
        kept = await self._vault.keep(fresh) if fresh else {}
        same = {path: entry for path, entry in found.items() if path not in fresh}
        record = self._record.ended(_now(), {**same, **kept})
        if not record.changes:
            await self._vault.drop([record.run_id])
            return {"saved": True, "changed": []}
        await seal(self._vault, record)
        told = replace(record, beside=await self._tidied(record)).summary()
        return {"saved": True, "undo": record.run_id, **{word: told[word] for word in _TOLD if word in told}}

    async def _tidied(self, record: Record) -> tuple[str, ...]:
        """Forget the oldest checkpoints, and note which runs went on beside this one."""
        runs = await self._vault.runs()
        near = await self._vault.records(runs[-_LOOKED_AT:])
        beside = tuple(other.run_id for other in near if record.overlaps(other))
        if beside:
            await seal(self._vault, replace(record, beside=beside))
        with suppress(KiwiError):  # the next run forgets what this one could not
            await self._vault.drop(runs[:-KEPT])
        return beside


async def begin(space: Space, tool_id: str, run_id: str, wanted: Wish) -> Guard:
    """Save what a run may change, and return what stands around it.

    A checkpoint that the call asks for and cannot be made refuses the run; one that the owner or the item wants is
    told as missing.
    """
    try:
        async with asyncio.timeout(SECONDS):
            return await _begun(space, tool_id, run_id, wanted.paths)
    except (KiwiError, OSError, TimeoutError) as reason:
        if wanted.is_asked:
            raise not_made(_words(reason)) from reason
        return Unguarded({"saved": False}, (f"Nothing was saved before the run: {_words(reason)}",))


async def _begun(space: Space, tool_id: str, run_id: str, paths: tuple[str, ...]) -> Checkpoint:
    started = _now()
    vault = await vault_for(space, paths)
    listing = await vault.paths()
    found = await look_at(space, vault, listing.paths)
    saved = await vault.keep(found.entries)
    record = Record(
        run_id,
        tool_id,
        started,
        saved=saved,
        scope=vault.granted if isinstance(vault, Copies) else (),
        left_out=tuple(sorted({*found.left_out, *listing.repositories})),
        unsaved=(*found.left_out, *listing.ignored, *(f"{path}/" for path in listing.repositories)),
    )
    try:
        await vault.seal(record, {"before": saved})
    except asyncio.CancelledError:
        # Nothing will run, so nothing must look like a run that was killed.
        with suppress(KiwiError):
            await completed(vault.drop([run_id]))
        raise
    return Checkpoint(space, vault, record)


async def vault_for(space: Space, paths: tuple[str, ...]) -> Vault:
    """Return where a project's checkpoints are kept; outside a repository only what a tool says it changes can be."""
    if (git := await repository(space)) is not None:
        return git
    if not space.project_ai.is_dir():
        raise Unavailable(
            "the project is neither a git repository nor has it an `.ai` folder.",
            suggestion="Make one of them: `git init`, or `kiwi init`.",
        )
    if not paths:
        raise Unavailable(
            "the project is no git repository, and the tool does not say which paths it changes.",
            suggestion="Make it one with `git init`, or write `needs: {write: [...]}` in the tool's manifest.",
        )
    return Copies(space.project, paths)


async def vaults(space: Space) -> list[Vault]:
    """Return every place in which checkpoints of a project may be kept."""
    git = await repository(space)
    return [*([git] if git else []), Copies(space.project)]


async def look(space: Space, vault: Vault, record: Record) -> Snapshot:
    """Return what stands now at all paths that a run may have changed, those among them that git ignores by now."""
    listed = (await vault.paths()).paths
    return record.seen((await look_at(space, vault, [*listed, *(record.saved or ())])).entries)


async def look_at(space: Space, vault: Vault, paths: Sequence[str]) -> Survey:
    """Return what stands at some paths."""
    return await asyncio.to_thread(survey, space.project, paths, vault.algorithm)


async def seal(vault: Vault, record: Record) -> None:
    """Keep the record of a run that has ended, with the contents on both sides of its changes."""
    await vault.seal(record, {word: side(record.changes, word) for word in ("before", "after")})


def _now() -> int:
    return time.time_ns() // 1_000_000


def _words(reason: BaseException) -> str:
    match reason:
        case KiwiError():
            return reason.message
        case TimeoutError():
            return f"it took more than {SECONDS:.0f} seconds."
        case _:
            return f"{reason}."
