"""Vaults: where checkpoints are kept; one file for each kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kiwi_mcp.kernel.checkpoints.record import Record
from kiwi_mcp.kernel.checkpoints.tree import Entry, Snapshot


@dataclass(frozen=True, slots=True)
class Listing:
    """The paths that a checkpoint is about, and what stands beside them."""

    paths: Sequence[str]
    repositories: Sequence[str] = ()
    """Submodules, and other repositories within the project, which are left alone."""
    ignored: Sequence[str] = ()
    """What git ignores; a folder ends with a slash."""


class Vault(Protocol):
    """Keeps contents by their ids, and a record for each run."""

    @property
    def algorithm(self) -> str:
        """The hash that ids are made with."""

    async def paths(self) -> Listing:
        """Return which paths of the project are saved."""

    async def keep(self, entries: Snapshot) -> Snapshot:
        """Keep the content of each entry as it is now, and return the entries as they were kept."""

    async def read(self, entries: Iterable[Entry]) -> Mapping[str, bytes]:
        """Return contents by their ids."""

    async def seal(self, record: Record, contents: Mapping[str, Snapshot]) -> None:
        """Keep a record, in place of an earlier one of its run, with the contents that it speaks of."""

    async def runs(self) -> Sequence[str]:
        """Return the runs that have a record, the oldest first."""

    async def records(self, runs: Sequence[str]) -> Sequence[Record]:
        """Return the records of some runs, without those that are gone or are not what was written."""

    async def drop(self, runs: Sequence[str]) -> None:
        """Forget some runs, and the contents that no other needs."""
