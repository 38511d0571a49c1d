"""Connecting: Kiwi's entry in another client's configuration, planned, written with a backup, and undone."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import unified_diff
from pathlib import Path

from kiwi_mcp.domain.errors import Conflict, Invalid, InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.mcp.clients import SCOPES, Client, Scope, clients, read_text, unusable
from kiwi_mcp.kernel.mcp.jsonc import not_an_object, plain, read_object, with_member, without_member
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.names import did_you_mean

ENTRY = "kiwi"
"""The name under which clients know Kiwi."""
BACKUP = ".kiwi-backup-"
_MAX_BACKUPS = 20
_STRING = re.compile(r'("(?:[^"\\]|\\.)*+")(\s*:)?')
_PRIVATE, _SHARED = 0o600, 0o644


@dataclass(frozen=True, slots=True)
class Change:
    """What will be written into a client's file; None stands for no file.

    The texts may hold other servers' secrets, so only `diff` is ever shown.
    """

    path: Path
    before: str | None = field(repr=False)
    after: str | None = field(repr=False)
    mode: int = _PRIVATE
    spent: Path | None = None
    """The backup that an undo puts back, which is then no longer needed."""
    shown: frozenset[str] = frozenset()

    @property
    def is_needed(self) -> bool:
        """Whether anything would change."""
        return self.before != self.after

    @property
    def diff(self) -> str:
        """The change as a person reads it, with every value masked that is not Kiwi's own."""
        before, after = (_masked(text or "", self.shown) for text in (self.before, self.after))
        return "".join(unified_diff(before, after, str(self.path), str(self.path)))


def plan_connect(client: str, scope: Scope, *, home: Path, project: Path, command: str) -> Change:
    """Return the change that lets a client start Kiwi by the command, an absolute path."""
    known, path = _target(client, scope, home, project)
    if not Path(command).is_absolute():
        raise InvalidRequest(f"{command!r} is not an absolute path.", suggestion="Name the program by its whole path.")
    before = _read(path, known)
    entry = {**known.entry, "command": command, "args": known.arguments(scope)}
    after = _with_entry(before or "", known, entry, what=str(path))
    mode = _PRIVATE if scope == "user" else _SHARED
    return Change(path, before, after, mode, shown=frozenset(_texts(entry)))


def plan_undo(client: str, scope: Scope, *, home: Path, project: Path) -> Change:
    """Return the change that takes Kiwi out again: the file as it was, or as it is now without Kiwi's entry."""
    known, path = _target(client, scope, home, project)
    before = _read(path, known)
    entry = _entry_in(before, known, what=str(path))
    if before is None or entry is None:
        return Change(path, before, before)
    own = {word: entry[word] for word in (*known.entry, "command", "args") if word in entry}
    shown = frozenset(_texts(own))
    for backup in _backups(path):
        # Written here and not touched since: what was there before is put back to the byte.
        text = read_text(backup)
        if text is not None and _led_to(before, text, known, own):
            return Change(path, before, text, spent=backup, shown=shown)
    if _with_entry("", known, own, what=str(path)) == before:
        return Change(path, before, None, shown=shown)
    return Change(path, before, without_member(before, (*known.key, ENTRY), what=str(path)), shown=shown)


def apply(change: Change, *, now: datetime | None = None) -> Path | None:
    """Write a change, whole or not at all, and return the backup of what was there, if one was made."""
    if not change.is_needed:
        return None
    if os.path.realpath(change.path) != str(change.path) or read_text(change.path) != change.before:
        raise Conflict(
            f"{change.path} was changed by somebody else meanwhile; nothing was written.",
            suggestion="Look at it, then ask for the change again.",
        )
    try:
        return _write(change, now or datetime.now(UTC))
    except OSError as fault:
        raise unusable(change.path, fault.strerror or "it cannot be written") from fault


def _write(change: Change, now: datetime) -> Path | None:
    if change.after is None:
        change.path.unlink()
        return None
    backup, mode = None, change.mode
    if change.before is not None:
        mode = change.path.stat().st_mode & 0o777
        if change.spent is None:
            backup = _free_name(change.path, now)
            _put(backup, change.before, mode)
    try:
        change.path.parent.mkdir(parents=True, exist_ok=True)
        _put(change.path, change.after, mode)
    except BaseException:
        if backup is not None:
            backup.unlink(missing_ok=True)
        raise
    if change.spent is not None:
        change.spent.unlink(missing_ok=True)
    return backup


def _put(path: Path, text: str, mode: int) -> None:
    """Write a file beside its place and give it its name only when it is complete."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it is open already
            file.write(text.encode())
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _free_name(path: Path, now: datetime) -> Path:
    base = f"{path.name}{BACKUP}{now.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    for number in range(1, 1_000):
        name = path.with_name(base if number == 1 else f"{base}-{number:03}")
        if not os.path.lexists(name):
            return name
    raise unusable(path, "it has a thousand backups of this second")


def _backups(path: Path) -> list[Path]:
    """Return the backups of a file, the newest first."""
    found = sorted(path.parent.glob(f"{_escaped(path.name)}{BACKUP}*"), reverse=True)
    return [one for one in found if one.is_file() and not one.is_symlink()][:_MAX_BACKUPS]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _target(client: str, scope: Scope, home: Path, project: Path) -> tuple[Client, Path]:
    """Return a client and its file, every link followed, which must stay below the home folder or the project."""
    known = clients().get(client)
    if known is None:
        raise NotFound(
            f"No client {client!r} is known.",
            suggestion=f"{did_you_mean(client, clients())}Choose one of {', '.join(clients())}.",
        )
    places = known.places(scope) if scope in SCOPES else ()
    if not places or scope in known.by_hand:
        raise InvalidRequest(
            f"Kiwi is not written into a file of {known.title} for the scope {scope!r}.",
            suggestion=known.by_hand.get(scope) or f"Choose the other of {' and '.join(SCOPES)}.",
        )
    root = Path(os.path.realpath(home if scope == "user" else project))
    path = Path(os.path.realpath(root / places[0]))
    if not path.is_relative_to(root):
        raise unusable(root / places[0], f"it is a link that leads out of {root}")
    return known, path


def _read(path: Path, client: Client) -> str | None:
    text = read_text(path)
    if text is not None and not client.has_comments and plain(text) != text:
        raise refuse(str(path), f"has comments or trailing commas, which {client.title} does not read", "Remove them.")
    return text


def _entry_in(text: str | None, client: Client, *, what: str) -> JsonObject | None:
    """Return Kiwi's entry; None where there is none."""
    holder: Json = read_object(text or "", what=what)
    for depth, key in enumerate(client.key):
        if key not in as_object(holder):
            return None
        holder = as_object(holder)[key]
        if not isinstance(holder, Mapping):
            raise not_an_object(what, client.key[: depth + 1])
    return as_object(as_object(holder)[ENTRY]) if ENTRY in as_object(holder) else None


def _with_entry(text: str, client: Client, entry: JsonObject, *, what: str) -> str:
    path, known = (*client.key, ENTRY), _entry_in(text, client, what=what)
    if known is None or "command" not in known:
        return with_member(text, path, entry, what=what)
    for word, value in entry.items():
        text = with_member(text, (*path, word), value, what=what)
    return text


def _led_to(now: str, backup: str, client: Client, entry: JsonObject) -> bool:
    """Whether what is there now is the backup with Kiwi's entry, and nothing else."""
    try:
        return _with_entry(backup, client, entry, what="the backup") == now
    except Invalid:
        return False


def _texts(entry: JsonObject) -> Iterator[str]:
    for value in entry.values():
        yield from [as_text(value)] if isinstance(value, str) else map(text_of, as_list(value))


def _masked(text: str, shown: frozenset[str]) -> list[str]:
    own = {json.dumps(word, ensure_ascii=False) for word in shown}

    def mask(found: re.Match[str]) -> str:
        return found[0] if found[2] or found[1] in own else '"…"'

    return _STRING.sub(mask, plain(text)).splitlines(keepends=True)
