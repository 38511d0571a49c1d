"""Checkpoints that earlier versions kept as copies below the project's `.ai` folder: only read, to undo them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.errors import NotFound, StoreDamaged
from kiwi_mcp.domain.times import is_run_id
from kiwi_mcp.kernel.checkpoints.change_record import CheckpointRecord
from kiwi_mcp.kernel.checkpoints.file_tree import LARGEST, FileState, blob_id, names_in
from kiwi_mcp.store.folder import below, opened, read_file

FOLDER = (".ai", "state", "checkpoints")
ALGORITHM = "sha256"
"""The hash that names contents there."""
_CONTENTS = "contents"
_MOST_RECORD = 64_000_000


class Copies(Struct, frozen=True):
    """The copies of one project."""

    project: Path

    async def runs(self) -> Sequence[str]:
        """Return the runs that have a record, the oldest first."""
        return await asyncio.to_thread(self._runs)

    async def records(self, runs: Sequence[str]) -> Sequence[CheckpointRecord]:
        """Return the records of some runs."""
        return await asyncio.to_thread(self._records, runs) if runs else []

    async def read(self, entries: Iterable[FileState]) -> Mapping[str, bytes]:
        """Return contents by their ids, each checked against its own."""
        return await asyncio.to_thread(lambda: {entry.id: self._content(entry.id) for entry in entries})

    def _runs(self) -> Sequence[str]:
        with opened(self.project) as project:
            try:
                with below(project, *FOLDER) as home:
                    return sorted(filter(is_run_id, (name.removesuffix(".json") for name in names_in(home))))
            except OSError:  # it does not exist, or it is a link
                return []

    def _records(self, runs: Sequence[str]) -> Sequence[CheckpointRecord]:
        with opened(self.project) as project, below(project, *FOLDER) as home:
            return [record for run in runs if (record := _record(home, run)) is not None]

    def _content(self, name: str) -> bytes:
        try:
            with opened(self.project) as project, below(project, *FOLDER, _CONTENTS) as contents:
                data = read_file(contents, name, limit=LARGEST)
        except LookupError as error:
            raise NotFound(
                f"The checkpoint's content is gone: {error}.", suggestion="Restore the files from your own backups."
            ) from error
        if blob_id(ALGORITHM, data) != name:
            raise StoreDamaged(
                "The checkpoint's content is not what was saved.",
                suggestion="Do not use it; restore the files from your own backups.",
            )
        return data


def _record(home: int, run: str) -> CheckpointRecord | None:
    with suppress(LookupError):
        return CheckpointRecord.of_text(read_file(home, f"{run}.json", limit=_MOST_RECORD), run)
    return None
