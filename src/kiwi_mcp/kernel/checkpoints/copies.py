"""The vault of copies, for a project outside a repository: contents by their hash below the project's `.ai` folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.errors import NotFound, StoreDamaged
from kiwi_mcp.domain.run import is_run_id
from kiwi_mcp.kernel.checkpoints.record import Record, side
from kiwi_mcp.kernel.checkpoints.scope import is_left_out
from kiwi_mcp.kernel.checkpoints.tree import LARGEST, Entry, Snapshot, blob_id, content, names_in, walk
from kiwi_mcp.kernel.checkpoints.vault import Listing
from kiwi_mcp.store.folder import below, lock, make_below, opened, put_file, read_file

FOLDER = (".ai", "state", "checkpoints")
_CONTENTS = "contents"
_MOST_RECORD = 64_000_000
_YOUNG = 600.0


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the paths that a tool says it changes."""

    project: Path
    granted: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """The hash that ids are made with."""
        return "sha256"

    async def paths(self) -> Listing:
        """Return the files at and below the paths of the tool."""
        return Listing(await asyncio.to_thread(lambda: [*walk(self.project, self.granted, is_left_out)]))

    async def keep(self, entries: Snapshot) -> Snapshot:
        """Copy contents that are not kept yet."""
        return await asyncio.to_thread(self._keep, entries)

    async def read(self, entries: Iterable[Entry]) -> Mapping[str, bytes]:
        """Return contents by their ids, each checked against its own."""
        return await asyncio.to_thread(lambda: {entry.id: self._content(entry.id) for entry in entries})

    async def seal(self, record: Record, contents: Mapping[str, Snapshot]) -> None:  # noqa: ARG002 - all of it is kept
        """Keep a record."""
        await asyncio.to_thread(self._seal, record)

    async def runs(self) -> Sequence[str]:
        """Return the runs that have a record, the oldest first."""
        return await asyncio.to_thread(self._runs)

    async def records(self, runs: Sequence[str]) -> Sequence[Record]:
        """Return the records of some runs."""
        return await asyncio.to_thread(self._records, runs) if runs else []

    async def drop(self, runs: Sequence[str]) -> None:
        """Remove records, and contents that no other needs."""
        if runs:
            await asyncio.to_thread(self._drop, runs)

    @contextmanager
    def _home(self) -> Iterator[int]:
        """Give the folder of this vault to one writer at a time."""
        with opened(self.project) as project:
            make_below(project, *FOLDER, _CONTENTS)
            with below(project, *FOLDER) as home:
                lock(home, self.project.joinpath(*FOLDER))
                yield home

    def _seal(self, record: Record) -> None:
        with self._home() as home:
            put_file(home, f"{record.run_id}.json", record.to_text(), is_durable=True)

    def _runs(self) -> Sequence[str]:
        with opened(self.project) as project:
            try:
                with below(project, *FOLDER) as home:
                    return sorted(filter(is_run_id, (name.removesuffix(".json") for name in names_in(home))))
            except OSError:  # there is none, or it is a link
                return []

    def _records(self, runs: Sequence[str]) -> Sequence[Record]:
        with self._home() as home:
            return [record for run in runs if (record := _record(home, run)) is not None]

    def _keep(self, entries: Snapshot) -> Snapshot:
        kept: dict[str, Entry] = {}
        with self._home() as home, below(home, _CONTENTS) as contents:
            there = {*names_in(contents)}
            for path, entry in entries.items():
                if entry.id in there:
                    os.utime(entry.id, dir_fd=contents)
                    kept[path] = entry
                elif (data := content(self.project, path, entry)) is not None:
                    found = Entry(entry.mode, blob_id(self.algorithm, data), len(data))
                    put_file(contents, found.id, data)
                    kept[path] = found
                    there.add(found.id)
        return kept

    def _content(self, name: str) -> bytes:
        try:
            with self._home() as home, below(home, _CONTENTS) as contents:
                data = read_file(contents, name, limit=LARGEST)
        except LookupError as error:
            raise NotFound(
                f"The checkpoint's content is gone: {error}.", suggestion="Restore the files from your own backups."
            ) from error
        if blob_id(self.algorithm, data) != name:
            raise StoreDamaged(
                "The checkpoint's content is not what was saved.",
                suggestion="Do not use it; restore the files from your own backups.",
            )
        return data

    def _drop(self, runs: Sequence[str]) -> None:
        with self._home() as home:
            for run in runs:
                with suppress(FileNotFoundError):
                    os.unlink(f"{run}.json", dir_fd=home)
            left = filter(is_run_id, (name.removesuffix(".json") for name in names_in(home)))
            records = [record for run in left if (record := _record(home, run)) is not None]
            needed = {entry.id for record in records for entry in _entries(record)}
            with below(home, _CONTENTS) as contents:
                for name in {*names_in(contents)} - needed:
                    # What was kept just now belongs to a run whose record is still to come.
                    if time.time() - os.stat(name, dir_fd=contents).st_mtime > _YOUNG:
                        os.unlink(name, dir_fd=contents)


def _record(home: int, run: str) -> Record | None:
    with suppress(LookupError):
        return Record.of_text(read_file(home, f"{run}.json", limit=_MOST_RECORD), run)
    return None


def _entries(record: Record) -> Iterator[Entry]:
    yield from (record.saved or {}).values()
    for word in ("before", "after"):
        yield from side(record.changes, word).values()
