"""The record of a checkpoint: which run, and exactly which paths it changed, from what to what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.run import iso
from kiwi_mcp.kernel.checkpoints.tree import Entry, Snapshot

_SHOWN = 50
"""How many paths an answer lists."""
_PENDING_MS = 3_600_000
"""After this time a run that never came to its end is not taken to be still going on."""


@dataclass(frozen=True, slots=True)
class Change:
    """One path: what stood there before a run, and after it."""

    path: str
    before: Entry | None
    after: Entry | None

    @property
    def word(self) -> str:
        """What happened to the path."""
        if self.before is None:
            return "created"
        return "deleted" if self.after is None else "changed"


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of one run, besides the contents themselves."""

    run_id: str
    tool_id: str
    started: int
    """In milliseconds since 1970, as is the end."""
    finished: int | None = None
    """None while the run goes on, and for good where it was killed."""
    saved: Snapshot | None = None
    """All that was saved, until it is known what of it was changed."""
    scope: tuple[str, ...] = ()
    """The paths that it is about, where it is not about the whole project."""
    changes: tuple[Change, ...] = ()
    left_out: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    """All that stood there and was not saved, folders with a slash at the end: a run may bring it into view."""
    beside: tuple[str, ...] = ()
    """Other runs that went on at the same time: what they changed cannot be told apart."""
    undoes: str = ""

    def overlaps(self, other: Record) -> bool:
        """Whether another run may have changed files while this one, which ends now, did."""
        end = self.finished if self.finished is not None else self.started
        if other.run_id == self.run_id or other.started > end:
            return False
        if other.finished is None:
            return end - other.started < _PENDING_MS
        return other.finished > self.started

    def seen(self, found: Snapshot) -> Snapshot:
        """Return what was found, without what stood there before the run and was not saved then."""
        hidden = {*self.unsaved}
        return {path: entry for path, entry in found.items() if hidden.isdisjoint(_ways(path))} if hidden else found

    def summary(self) -> JsonObject:
        """Return what a list shows."""
        told: dict[str, Json] = {
            "run_id": self.run_id,
            "tool_id": self.tool_id,
            "started_at": iso(self.started),
            "changed": [{"path": shown(change.path), "change": change.word} for change in self.changes[:_SHOWN]],
        }
        if len(self.changes) > _SHOWN:
            told["changed_paths"] = len(self.changes)
        if self.finished is None:
            told["unfinished"] = True
        for word in ("left_out", "beside"):
            if listed := getattr(self, word):
                told[word] = [shown(path) for path in listed[:_SHOWN]]
        return {**told, "undoes": self.undoes} if self.undoes else told

    def to_text(self) -> bytes:
        """Return the record as one line of JSON."""
        return json.dumps(
            {
                "run_id": self.run_id,
                "tool_id": self.tool_id,
                "started": self.started,
                "finished": self.finished,
                "saved": None if self.saved is None else [[path, *_row(entry)] for path, entry in self.saved.items()],
                "scope": list(self.scope),
                "changes": [[change.path, _row(change.before), _row(change.after)] for change in self.changes],
                "left_out": list(self.left_out),
                "unsaved": list(self.unsaved),
                "beside": list(self.beside),
                "undoes": self.undoes,
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def of_text(cls, text: bytes, run_id: str) -> Record | None:
        """Return the record that a text holds; None where it is not one that Kiwi wrote for the run."""
        try:
            written: Json = json.loads(text)
            record = _record(as_object(written))
        except (ValueError, TypeError, IndexError, RecursionError):
            return None
        return record if record.run_id == run_id else None

    def ended(self, now: int, after: Snapshot) -> Record:
        """Return the record of a run that has ended and left these entries."""
        return replace(self, finished=now, saved=None, unsaved=(), changes=changes(self.saved or {}, after))


def changes(before: Snapshot, after: Snapshot) -> tuple[Change, ...]:
    """Return every path that differs, in order."""
    paths = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    return tuple(Change(path, before.get(path), after.get(path)) for path in paths)


def side(listed: Iterable[Change], word: str) -> Snapshot:
    """Return what stood at the changed paths `before`, or `after`."""
    entries = ((change.path, getattr(change, word)) for change in listed)
    return {path: entry for path, entry in entries if entry is not None}


def _ways(path: str) -> Iterator[str]:
    """Yield a path and each folder that it lies in, with a slash at the end."""
    yield path
    for place, letter in enumerate(path):
        if letter == "/":
            yield path[: place + 1]


def shown(path: str) -> str:
    """Return a path as text that every surface can write."""
    return path.encode(errors="replace").decode()


def _row(entry: Entry | None) -> Sequence[Json]:
    return [] if entry is None else [entry.mode, entry.id, entry.size]


def _entry(row: Json) -> Entry | None:
    match row:
        case [int() as mode, str() as name, int() as size] if name.isalnum() and name.isascii():
            return Entry(mode, name, size)
        case []:
            return None
        case _:
            raise ValueError(row)


def _path(value: Json) -> str:
    # What is put back stays below the project, whoever wrote the record.
    path = as_text(value)
    if not path or "\0" in path or any(part in {"", ".", "..", ".git"} for part in path.lower().split("/")):
        raise ValueError(path)
    return path


def _record(written: JsonObject) -> Record:
    saved, finished = written.get("saved"), written.get("finished")
    rows = [as_list(row) for row in as_list(saved)]
    entries = {_path(row[0]): _entry(row[1:]) for row in rows}
    return Record(
        as_text(written.get("run_id")),
        as_text(written.get("tool_id")),
        int(str(written.get("started"))),
        None if finished is None else int(str(finished)),
        None if saved is None else {path: entry for path, entry in entries.items() if entry is not None},
        tuple(map(_path, as_list(written.get("scope")))),
        tuple(
            Change(_path(row[0]), _entry(row[1]), _entry(row[2]))
            for row in map(as_list, as_list(written.get("changes")))
        ),
        tuple(map(as_text, as_list(written.get("left_out")))),
        tuple(map(as_text, as_list(written.get("unsaved")))),
        tuple(map(as_text, as_list(written.get("beside")))),
        as_text(written.get("undoes")),
    )
