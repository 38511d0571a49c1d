"""Connecting: Kiwi's entry in another client's configuration, planned, written with a backup, and undone."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.errors import Conflict, Invalid, InvalidRequest, NotFound
from kiwi_mcp.domain.json import JsonObject, as_list, as_text, text_of
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.mcp.client_format import format_of, masked, plain, with_member
from kiwi_mcp.manifest.mcp.clients import SCOPES, ClientApp, Scope, clients, read_text, unusable
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.owner_file import put_file

ENTRY = "kiwi"
"""The name under which clients know Kiwi."""
BACKUP, REPLACED = ".kiwi-backup-", ".kiwi-replaced-"
"""What follows on the name of a file in that of its backup; the second where servers were taken out of the file."""
_MAX_BACKUPS = 20
_PRIVATE, _SHARED = 0o600, 0o644


class ClientFileChange(Struct, frozen=True):
    """The new text of a client's file, None for no file; only `diff` is shown, as the texts may hold secrets."""

    path: Path
    before: str | None
    after: str | None
    mode: int = _PRIVATE
    spent: Path | None = None
    """The backup that an undo puts back, which is then no longer needed."""
    shown: frozenset[str] = frozenset()
    keep_in: Path | None = None
    """Where the backup goes; beside the file otherwise."""
    taken_out: tuple[str, ...] = ()
    """The servers that the file loses."""
    put_back: tuple[str, ...] = ()
    """The servers that the file has again."""

    def __repr__(self) -> str:
        return f"ClientFileChange(path={self.path!r})"

    @property
    def is_needed(self) -> bool:
        """Whether anything would change."""
        return self.before != self.after

    @property
    def diff(self) -> str:
        """The change as a person reads it, with every value masked that is not Kiwi's own."""
        kind = format_of(self.path.name)
        texts = [plain(text or "") if kind == "json" else text or "" for text in (self.before, self.after)]
        before, after = (masked(text, kind, self.shown).splitlines(keepends=True) for text in texts)
        return "".join(unified_diff(before, after, str(self.path), str(self.path)))


def plan_connect(
    client: str,
    scope: Scope,
    *,
    home: Path,
    project: Path,
    command: str,
    without: Collection[str] = (),
    keep_in: Path | None = None,
) -> ClientFileChange:
    """Return the change that lets a client start Kiwi by the command, `without` servers that Kiwi stands for.

    The command is an absolute path: programs with windows do not have the PATH of a shell.
    """
    known, path = target_of(client, scope, home, project)
    if not Path(command).is_absolute():
        raise InvalidRequest(f"{command!r} is not an absolute path.", suggestion="Name the program by its whole path.")
    before = _read(path, known)
    entry = known.entry_of(command, known.arguments(scope))
    gone = tuple(name for name in known.file.servers(before or "", what=str(path)) if name in without)
    after = _with_entry(_without(before or "", known, gone, what=str(path)), known, entry, what=str(path))
    mode = _PRIVATE if scope == "user" else _SHARED
    shown = frozenset(_texts(entry))
    return ClientFileChange(path, before, after, mode, shown=shown, keep_in=keep_in, taken_out=gone)


def plan_undo(client: str, scope: Scope, *, home: Path, project: Path, keep_in: Path | None = None) -> ClientFileChange:
    """Return the change that takes Kiwi's entry out again and puts back the servers that Kiwi had replaced."""
    known, path = target_of(client, scope, home, project)
    before = _read(path, known)
    table = known.file.servers(before or "", what=str(path))
    if before is None or ENTRY not in table:
        return ClientFileChange(path, before, before)
    entry = table[ENTRY]
    own = {word: entry[word] for word in known.entry_of("", ()) if word in entry}
    shown = frozenset(_texts(own))
    backups = _backups_since_connect(path, keep_in, known)
    lost = _lost(backups, known, table)
    for backup, text in backups[:1]:
        # Written here and not touched since: what was there before is put back to the byte.
        try:
            missing = tuple(name for name in known.file.servers(text, what="the backup") if name not in table)
            bare = _without(text, known, missing, what="the backup")
            is_untouched = _with_entry(bare, known, own, what="the backup") == before
        except Invalid:
            continue
        if is_untouched and {*lost} <= {*missing}:
            return ClientFileChange(path, before, text, spent=backup, shown=shown, put_back=missing)
    if not lost and _with_entry("", known, own, what=str(path)) == before:
        return ClientFileChange(path, before, None, shown=shown)
    after = known.file.without_server(before, ENTRY, what=str(path))
    for name, words in lost.items():
        after = known.file.with_server(after, name, words, what=str(path))
    return ClientFileChange(path, before, after, shown=shown, keep_in=keep_in, put_back=tuple(lost))


def apply(change: ClientFileChange, *, now: datetime | None = None) -> Path | None:
    """Write a change, whole or not at all, and return the backup of what was there, if one was made."""
    if not change.is_needed:
        return None
    if os.path.realpath(change.path) != str(change.path) or read_text(change.path) != change.before:
        raise Conflict(
            f"{change.path} was changed by another program meanwhile; nothing was written.",
            suggestion="Look at it, then ask for the change again.",
        )
    try:
        return _write(change, now or datetime.now(UTC))
    except OSError as fault:
        raise unusable(change.path, fault.strerror or "it cannot be written") from fault


def keep_copy(change: ClientFileChange) -> Path | None:
    """Keep a copy of a file that its client is about to change itself, and return it; None where there is no file."""
    if change.before is None:
        return None
    backup = _free_name(change, datetime.now(UTC))
    put_file(backup, change.before.encode(), _PRIVATE)
    return backup


def _write(change: ClientFileChange, now: datetime) -> Path | None:
    if change.after is None:
        change.path.unlink()
        return None
    backup, mode = None, change.mode
    if change.before is not None:
        mode = change.path.stat().st_mode & 0o777
        if change.spent is None:
            backup = _free_name(change, now)
            put_file(backup, change.before.encode(), mode)
    try:
        change.path.parent.mkdir(parents=True, exist_ok=True)
        put_file(change.path, change.after.encode(), mode)
    except BaseException:
        if backup is not None:
            backup.unlink(missing_ok=True)
        raise
    if change.spent is not None:
        change.spent.unlink(missing_ok=True)
    return backup


def _free_name(change: ClientFileChange, now: datetime) -> Path:
    folder, stem = _backup_folder(change.path, change.keep_in)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = f"{stem}{REPLACED if change.taken_out else BACKUP}{now.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    for number in range(1, 1_000):
        name = folder / (base if number == 1 else f"{base}-{number:03}")
        if not os.path.lexists(name):
            return name
    raise unusable(change.path, "it has a thousand backups of this second")


def _backup_folder(path: Path, keep_in: Path | None) -> tuple[Path, str]:
    """Return the folder in which backups of a file are, and how their names begin."""
    if keep_in is None:
        return path.parent, path.name
    return keep_in, f"{sha256(str(path).encode(errors='surrogatepass')).hexdigest()[:16]}-{path.name}"


def target_of(client: str, scope: Scope, home: Path, project: Path) -> tuple[ClientApp, Path]:
    """Return a client and its file, every link followed, which must stay below the home folder or the project.

    It is the first of its files that is there, and the first of all where none is.
    """
    known = clients().get(client)
    if known is None:
        raise NotFound(
            f"No client {client!r} is known.",
            suggestion=f"{did_you_mean(client, clients())}Choose one of {', '.join(clients())}.",
        )
    places = known.places(scope) if scope in SCOPES else ()
    if not places:
        raise InvalidRequest(
            f"{known.title} has no file for the scope {scope!r}.",
            suggestion=f"Choose the other of {' and '.join(SCOPES)}.",
        )
    root = Path(os.path.realpath(home if scope == "user" else project))
    same = [place for place in places if Path(place).stem == Path(places[0]).stem]
    place = next((one for one in same if os.path.lexists(root / one)), places[0])
    path = Path(os.path.realpath(root / place))
    if not path.is_relative_to(root):
        raise unusable(root / place, f"it is a link that leads out of {root}")
    return known, path


def _read(path: Path, client: ClientApp) -> str | None:
    text = read_text(path)
    if text is not None and client.format == "json" and not client.has_comments and plain(text) != text:
        raise refuse(str(path), f"has comments or trailing commas, which {client.title} does not read", "Remove them.")
    return text


def _without(text: str, client: ClientApp, names: Sequence[str], *, what: str) -> str:
    for name in names:
        text = client.file.without_server(text, name, what=what)
    return text


def _backups_since_connect(path: Path, keep_in: Path | None, client: ClientApp) -> list[tuple[Path, str]]:
    """Return the backups since Kiwi was connected, the oldest first; only the first lacks Kiwi's entry."""
    folders = dict.fromkeys((_backup_folder(path, keep_in), _backup_folder(path, None)))
    backups = [
        one
        for folder, stem in folders
        for mark in (BACKUP, REPLACED)
        for one in folder.glob(f"{glob.escape(stem)}{mark}*")
        if one.is_file() and not one.is_symlink()
    ]
    backups.sort(key=lambda one: re.split(f"{BACKUP}|{REPLACED}", one.name)[-1], reverse=True)
    found: list[tuple[Path, str]] = []
    for backup in backups[:_MAX_BACKUPS]:
        try:
            text = read_text(backup) or ""
            has_entry = ENTRY in client.file.servers(text, what=str(backup))
        except Invalid:
            continue
        found.insert(0, (backup, text))
        if not has_entry:
            break
    return found


def _lost(
    backups: Sequence[tuple[Path, str]], client: ClientApp, table: Mapping[str, JsonObject]
) -> dict[str, JsonObject]:
    """Return the servers that were taken out since Kiwi was written into a file, and are not there again."""
    lost: dict[str, JsonObject] = {}
    for backup, text in backups:
        if REPLACED in backup.name:
            lost |= client.file.servers(text, what=str(backup))
    return {name: words for name, words in lost.items() if name not in table and name != ENTRY}


def _with_entry(text: str, client: ClientApp, entry: JsonObject, *, what: str) -> str:
    known = client.file.servers(text, what=what).get(ENTRY, {})
    if client.format != "json" or client.command_word not in known:
        return client.file.with_server(text, ENTRY, {**known, **entry}, what=what)
    for word, value in entry.items():  # one by one, so that the order and the comments in it stay
        text = with_member(text, (*client.key, ENTRY, word), value, what=what)
    return text


def _texts(entry: JsonObject) -> Iterator[str]:
    for value in entry.values():
        yield from [as_text(value)] if isinstance(value, str) else map(text_of, as_list(value))
