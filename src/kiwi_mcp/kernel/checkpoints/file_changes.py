"""The files of a project, seen and restored by descriptor, following no link; and what a run changed of them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from difflib import unified_diff
from hashlib import new
from itertools import groupby
from pathlib import Path
from stat import S_IFLNK, S_IFREG, S_ISDIR, S_ISLNK, S_ISREG
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, TooLarge, Unavailable
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.times import is_run_id, iso
from kiwi_mcp.store.folder import below, make_below, opened, read_file

MOST_FILES = 50_000
MOST_BYTES = 512_000_000
"""How much of files that were not read before is read for one checkpoint."""
LARGEST = 64_000_000
"""The size of the largest file that is saved; larger files are left out and reported."""
SECONDS = 60.0
"""How long one checkpoint may take before a run, and again after it."""

_CREATED = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SETTLED_NS = 3_000_000_000
"""How long ago a file must have changed so that another change would show: some disks keep time in steps of seconds."""
_SEEN_KEPT = 200_000
_seen: dict[tuple[object, ...], str] = {}


class FileState(Struct, frozen=True):
    """The state of a path: a file with its permissions, or a link, and the id of its content."""

    mode: int
    id: str
    size: int

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link; the content of a link is its target."""
        return S_ISLNK(self.mode)


Snapshot: TypeAlias = Mapping[str, FileState]
"""The state of some paths below a project; a path without an entry does not exist."""


def blob_id(algorithm: str, data: bytes) -> str:
    """Return the id of a content, as git gives it."""
    return new(algorithm, b"blob %d\0" % len(data) + data).hexdigest()


def survey(root: Path, paths: Iterable[str], algorithm: str) -> Survey:
    """Look at some paths of a project; too many files, bytes or seconds are an error."""
    listed = sorted(set(paths), key=lambda path: (path.rpartition("/")[0], path))
    if len(listed) > MOST_FILES:
        raise TooLarge("What a checkpoint would save", size=len(listed), limit=MOST_FILES, unit="files")
    found = Survey(algorithm)
    with opened(root) as top:
        for parent, group in groupby(listed, key=lambda path: path.rpartition("/")[0]):
            # A folder that is gone, or is a link now, holds nothing of the project.
            with suppress(OSError), _within(top, parent) as folder:
                for path in group:
                    found.look(folder, path)
    return found


class Survey:
    """What was found at some paths; looking at too many bytes, or for too long, is an error."""

    def __init__(self, algorithm: str) -> None:
        self.entries: dict[str, FileState] = {}
        self.left_out: list[str] = []
        """Files that are too large or not ours to read, and what is neither file, link nor folder."""
        self._algorithm = algorithm
        self._left, self._until = MOST_BYTES, time.monotonic() + SECONDS

    def look(self, folder: int, path: str) -> None:
        """Note what is at a path, in its open folder."""
        name = path.rpartition("/")[2]
        try:
            state = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return
        if S_ISLNK(state.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=folder))
            self.entries[path] = FileState(S_IFLNK, blob_id(self._algorithm, target), len(target))
        elif S_ISREG(state.st_mode) and state.st_size <= LARGEST and (entry := self._file(folder, name, state)):
            self.entries[path] = entry
        elif not S_ISDIR(state.st_mode):
            self.left_out.append(path)

    def _file(self, folder: int, name: str, state: os.stat_result) -> FileState | None:
        mode = S_IFREG | (state.st_mode & 0o777)
        key = (self._algorithm, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        known = _seen.get(key)
        self._left -= state.st_size if known is None else 0
        if self._left < 0:
            raise TooLarge("What a checkpoint would read", size=None, limit=MOST_BYTES)
        if time.monotonic() > self._until:
            raise Unavailable(
                f"Looking at the project's files took more than {SECONDS:.0f} seconds.",
                suggestion="Let git ignore what need not be saved, or run without a checkpoint.",
            )
        if known is not None:
            return FileState(mode, known, state.st_size)
        try:
            data = read_file(folder, name, limit=LARGEST)
        except LookupError:
            return None
        found = FileState(mode, blob_id(self._algorithm, data), len(data))
        if time.time_ns() - max(state.st_ctime_ns, state.st_mtime_ns) > _SETTLED_NS and len(data) == state.st_size:
            if len(_seen) >= _SEEN_KEPT:
                _seen.clear()
            _seen[key] = found.id
        return found


def _within(top: int, parent: str) -> AbstractContextManager[int]:
    return below(top, *filter(None, parent.split("/")))


def content(root: Path, path: str, entry: FileState) -> bytes | None:
    """Return what a path holds now; None where it is no longer of the same kind."""
    parent, _, name = path.rpartition("/")
    with opened(root) as top, suppress(LookupError, OSError), _within(top, parent) as folder:
        if entry.is_link:
            return os.fsencode(os.readlink(name, dir_fd=folder))
        return read_file(folder, name, limit=LARGEST)
    return None


def remove(root: Path, path: str) -> None:
    """Remove a file or link, and the folders that are empty without it."""
    parts = path.split("/")
    with opened(root) as top:
        with _within(top, "/".join(parts[:-1])) as folder:
            os.unlink(parts[-1], dir_fd=folder)
        for depth in range(len(parts) - 1, 0, -1):
            with _within(top, "/".join(parts[: depth - 1])) as folder:
                try:
                    os.rmdir(parts[depth - 1], dir_fd=folder)
                except OSError:
                    return


def put(root: Path, path: str, entry: FileState, data: bytes) -> None:
    """Put a file or link in its place, whole or not at all; an empty folder there gives way."""
    parent, _, name = path.rpartition("/")
    draft = f".kiwi-undo-{secrets.token_hex(6)}"
    with opened(root) as top:
        make_below(top, *filter(None, parent.split("/")))
        with _within(top, parent) as folder:
            with suppress(OSError):
                if S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.rmdir(name, dir_fd=folder)
            try:
                _make(folder, draft, entry, data)
                os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)
                raise


def _make(folder: int, name: str, entry: FileState, data: bytes) -> None:
    if entry.is_link:
        os.symlink(os.fsdecode(data), name, dir_fd=folder)
        return
    descriptor = os.open(name, _CREATED, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, entry.mode & 0o777)
        os.fsync(descriptor)


_SHOWN = 50
"""How many paths an answer lists."""
_PENDING_MS = 3_600_000
"""After this time a run that never came to its end is not taken to be still going on."""


class FileChange(Struct, frozen=True):
    """One path: its state before a run, and after it."""

    path: str
    before: FileState | None
    after: FileState | None

    @property
    def word(self) -> str:
        """What happened to the path."""
        if self.before is None:
            return "created"
        return "deleted" if self.after is None else "changed"


class CheckpointRecord(Struct, frozen=True):
    """What is kept of one run, besides the contents themselves."""

    run_id: str
    tool_id: str
    started: int
    """In milliseconds since 1970, as is the end."""
    finished: int | None = None
    """None while the run continues, and permanently if it was killed."""
    saved: Snapshot | None = None
    """All that was saved, until it is known what of it was changed."""
    scope: tuple[str, ...] = ()
    """The paths that it is about, where it is not about the whole project, as an undo is."""
    changes: tuple[FileChange, ...] = ()
    left_out: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    """Everything that existed and was not saved, folders with a slash at the end: a run may make it visible."""
    beside: tuple[str, ...] = ()
    """Other runs at the same time: their changes cannot be separated from the changes of this run."""
    undoes: str = ""
    commit: str = ""
    """The private commit that holds it; empty where it is kept otherwise."""
    is_marked: bool = False
    """Whether it bears the mark of this Kiwi for this project; records of earlier versions have none."""

    def overlaps(self, other: CheckpointRecord) -> bool:
        """Whether another run may have changed files while this one, which ends now, did."""
        end = self.finished if self.finished is not None else self.started
        if other.run_id == self.run_id or other.started > end:
            return False
        if other.finished is None:
            return end - other.started < _PENDING_MS
        return other.finished > self.started

    def seen(self, found: Snapshot) -> Snapshot:
        """Return what was found, without what already existed before the run and was not saved then."""
        hidden = {*self.unsaved}
        return {path: entry for path, entry in found.items() if hidden.isdisjoint(_ways(path))} if hidden else found

    def summary(self) -> JsonObject:
        """Return what a list shows."""
        changed = [{"path": shown(change.path), "change": change.word} for change in self.changes[:_SHOWN]]
        about: JsonObject = {"run_id": self.run_id, "tool_id": self.tool_id, "started_at": iso(self.started)}
        more: JsonObject = {
            "changed_paths": len(self.changes) if len(self.changes) > _SHOWN else 0,
            "unfinished": self.finished is None,
            "left_out": list(map(shown, self.left_out[:_SHOWN])),
            "beside": list(map(shown, self.beside[:_SHOWN])),
            "commit": self.commit,
            "undoes": self.undoes,
        }
        return {**about, "changed": changed, **{word: value for word, value in more.items() if value}}

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
    def of_text(cls, text: bytes, run_id: str) -> CheckpointRecord | None:
        """Return the record that a text holds; None where it is not one that Kiwi wrote for the run."""
        try:
            record = _record(as_object(json.loads(text)))
        except (ValueError, TypeError, IndexError, RecursionError):
            return None
        return record if record.run_id == run_id else None

    def ended(self, now: int, after: Snapshot) -> CheckpointRecord:
        """Return the record of a run that has ended and left these entries."""
        return replace(self, finished=now, saved=None, unsaved=(), changes=changes(self.saved or {}, after))


def changes(before: Snapshot, after: Snapshot) -> tuple[FileChange, ...]:
    """Return every path that differs, in order."""
    paths = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    return tuple(FileChange(path, before.get(path), after.get(path)) for path in paths)


def side(listed: Iterable[FileChange], word: str) -> Snapshot:
    """Return the state of the changed paths `before`, or `after`."""
    entries = ((change.path, getattr(change, word)) for change in listed)
    return {path: entry for path, entry in entries if entry is not None}


def _ways(path: str) -> Iterator[str]:
    """Yield a path and each folder that contains it, with a slash at the end."""
    yield path
    for place, letter in enumerate(path):
        if letter == "/":
            yield path[: place + 1]


def shown(path: str) -> str:
    """Return a path as text that every surface can write."""
    return path.encode(errors="replace").decode()


def _row(entry: FileState | None) -> Sequence[Json]:
    return [] if entry is None else [entry.mode, entry.id, entry.size]


def _entry(row: Json) -> FileState | None:
    match row:
        case [int() as mode, str() as name, int() as size] if name.isalnum() and name.isascii():
            return FileState(mode, name, size)
        case []:
            return None
        case _:
            raise ValueError(row)


def _path(value: Json) -> str:
    # Restored files stay below the project, even if the record was written by others.
    path = as_text(value)
    if not path or "\0" in path or any(part in {"", ".", "..", ".git"} for part in path.lower().split("/")):
        raise ValueError(path)
    return path


def _record(written: JsonObject) -> CheckpointRecord:
    saved, finished = written.get("saved"), written.get("finished")
    rows = [as_list(row) for row in as_list(saved)]
    entries = {_path(row[0]): _entry(row[1:]) for row in rows}
    return CheckpointRecord(
        as_text(written.get("run_id")),
        as_text(written.get("tool_id")),
        int(str(written.get("started"))),
        None if finished is None else int(str(finished)),
        None if saved is None else {path: entry for path, entry in entries.items() if entry is not None},
        tuple(map(_path, as_list(written.get("scope")))),
        tuple(
            FileChange(_path(row[0]), _entry(row[1]), _entry(row[2]))
            for row in map(as_list, as_list(written.get("changes")))
        ),
        tuple(map(as_text, as_list(written.get("left_out")))),
        tuple(map(as_text, as_list(written.get("unsaved")))),
        tuple(map(as_text, as_list(written.get("beside")))),
        as_text(written.get("undoes")),
    )


_LARGEST = 100_000
"""The largest content that is compared line by line, in bytes."""
_MOST = 60_000
"""The maximum length of a diff, in characters."""


def differences(listed: Sequence[FileChange], contents: Mapping[str, bytes]) -> str:
    """Return one text that shows every change, cut where it is long."""
    text = ""
    for place, change in enumerate(listed):
        path = shown(change.path)
        sides = (change.before, change.after)
        before, after = (path if entry else "/dev/null" for entry in sides)
        sizes = " → ".join("nothing" if entry is None else f"{entry.size:,} bytes" for entry in sides)
        old, new = (_lines(entry, contents) for entry in sides)
        if old is None or new is None:
            text += f"{path}: not text, or long; {sizes}\n"
        else:
            found = "".join(unified_diff(old, new, before, after))
            if change.before and change.after and change.before.mode != change.after.mode:
                found = f"{path}: mode {change.before.mode:o} → {change.after.mode:o}\n{found}"
            text += found or f"{path}: {sizes}\n"
        if len(text) > _MOST:
            return f"{text[:_MOST]}\n… and {len(listed) - place - 1} more paths\n"
    return text


def _lines(entry: FileState | None, contents: Mapping[str, bytes]) -> list[str] | None:
    if entry is None:
        return []
    data = contents.get(entry.id)
    if data is None or len(data) > _LARGEST or b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    kept = [line if line.isprintable() else json.dumps(line, ensure_ascii=False)[1:-1] for line in text.split("\n")]
    last = kept.pop()
    return [*(f"{line}\n" for line in kept), *([f"{last}\n\\ no newline at the end\n"] if last else [])]


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
                    names = os.listdir(home)  # noqa: PTH208 - of a descriptor
            except OSError:  # it does not exist, or it is a link
                return []
            return sorted(filter(is_run_id, (name.removesuffix(".json") for name in names)))

    def _records(self, runs: Sequence[str]) -> Sequence[CheckpointRecord]:
        found: list[CheckpointRecord | None] = []
        with opened(self.project) as project, below(project, *FOLDER) as home:
            for run in runs:
                with suppress(LookupError):
                    text = read_file(home, f"{run}.json", limit=_MOST_RECORD)
                    found.append(CheckpointRecord.of_text(text, run))
        return [record for record in found if record is not None]

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
