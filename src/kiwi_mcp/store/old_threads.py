"""Threads of earlier versions, as files of a project: Kiwi's `.ai/threads` and RyeOS's `.ai/agent/threads`.

They are only read. Whatever is damaged, or has another form, is left out.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, most_values
from kiwi_mcp.store.folder import below, opened, read_file

TranscriptForm: TypeAlias = Literal["kiwi", "ryeos"]
_FILE = "transcript.jsonl"
_PLACES: Mapping[TranscriptForm, tuple[str, ...]] = {
    "kiwi": (".ai", "threads"),
    "ryeos": (".ai", "agent", "threads"),
}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_LARGEST, _MOST = 64_000_000, 10_000
_LARGEST_OBJECT, _MOST_VALUES, _DEEPEST, _SECONDS = 1_000_000, 4_000_000, 100, 5.0
"""The limits for one JSON object, the values of a transcript, their nesting, and one look into a database."""
_KINDS = {
    "user_message": "cognition_in",
    "assistant_message": "cognition_out",
    "tool_call": "tool_call_start",
    "tool_result": "tool_call_result",
    "error": "error_classified",
    "completed": "thread_completed",
}
"""The kinds of events of Kiwi's form, and what RyeOS calls them."""
_NAMES = {"id": "call_id", "arguments": "input", "content": "output"}
_BACK = {new: old for old, new in _KINDS.items()}, {new: old for old, new in _NAMES.items()}


class OldEvent(Struct, frozen=True):
    """One event of an old thread."""

    at: str
    kind: str
    body: JsonObject


class OldThread(Struct, frozen=True):
    """A thread of an earlier version, in the words of its files."""

    id: str
    form: TranscriptForm
    directive: str = ""
    status: str = ""
    model: str = ""
    parent_id: str = ""
    started_at: str = ""
    updated_at: str = ""
    cost: JsonObject = field(default_factory=dict)
    result: Json = None
    events: tuple[OldEvent, ...] = ()

    def lines(self, form: TranscriptForm) -> Iterator[JsonObject]:
        """Yield its events in one of both forms."""
        kinds, names = (_KINDS, _NAMES) if form == "ryeos" else _BACK
        if form == self.form:
            kinds, names = {}, {}
        for event in self.events:
            kind = kinds.get(event.kind, event.kind)
            is_call = event.kind in {"tool_call", "tool_result", "tool_call_start", "tool_call_result"}
            body = {names.get(name, name) if is_call else name: value for name, value in event.body.items()}
            if form == "kiwi":
                yield {"ts": event.at, "type": kind, **body}
            else:
                yield {"timestamp": event.at, "thread_id": self.id, "event_type": kind, "payload": body}


def old_threads(project: Path) -> list[OldThread]:
    """Return the old threads of a project without their events, the newest first."""
    found = [one for form in _PLACES for one in _listed(project, form)]
    return sorted(found, key=lambda one: (one.started_at, one.id), reverse=True)


def old_thread(project: Path, thread_id: str) -> OldThread | None:
    """Return one old thread with its events."""
    one = next((one for one in old_threads(project) if one.id == thread_id), None)
    if one is None:
        return None
    data = _read(project, (*_PLACES[one.form], one.id), _FILE)
    lines = data.splitlines() if most_values(data) <= _MOST_VALUES else ()
    rows = [row for line in lines if (row := as_object(_json(line)))] or [
        {"ts": row.get("ts"), "type": row.get("event_type"), **as_object(_json(row.get("payload_json")))}
        for row in _rows(project, one.form, "thread_events")
        if row.get("thread_id") == one.id
    ]
    events = tuple(map(_event, rows))
    times = [event.at for event in events if event.at] or [""]
    return replace(one, started_at=one.started_at or times[0], updated_at=one.updated_at or times[-1], events=events)


def _listed(project: Path, form: TranscriptForm) -> Iterator[OldThread]:
    rows = {
        name: row for row in _rows(project, form, "threads") if _ID.fullmatch(name := as_text(row.get("thread_id")))
    }
    names: dict[str, bool] = {}
    left = _LARGEST
    with suppress(KiwiError), opened(project) as root, below(root, *_PLACES[form]) as folder:
        for name in sorted(os.listdir(folder))[:_MOST]:  # noqa: PTH208 - of this descriptor
            if _ID.fullmatch(name):
                names[name] = False
                with suppress(OSError), below(folder, name) as inner:
                    names[name] = S_ISREG(os.stat(_FILE, dir_fd=inner, follow_symlinks=False).st_mode)
    for name in dict.fromkeys([*rows, *names]):
        text = _read(project, (*_PLACES[form], name), "thread.json", min(left, _LARGEST_OBJECT))
        left -= len(text)
        about = {**as_object(_json(text)), **rows.get(name, {})}
        if about or names.get(name):
            cost = about.get("cost") or about.get("total_usage_json")
            result = about.get("outputs") or about.get("result")
            yield OldThread(
                id=name,
                form=form,
                directive=as_text(about.get("directive_id") or about.get("directive")),
                status=as_text(about.get("status")),
                model=as_text(about.get("model")),
                parent_id=as_text(about.get("parent_thread_id") or about.get("parent_id")),
                started_at=as_text(about.get("created_at")),
                updated_at=as_text(about.get("updated_at")),
                cost=as_object(_json(cost)),
                result=_json(result) if isinstance(result, str) and result[:1] in {"{", "["} else result,
            )


def _event(row: JsonObject) -> OldEvent:
    at, kind = as_text(row.get("ts") or row.get("timestamp")), as_text(row.get("type") or row.get("event_type"))
    names = {"ts", "timestamp", "type", "event_type", "thread_id"}
    body = row.get("payload") if "payload" in row else {name: row[name] for name in row if name not in names}
    return OldEvent(at, kind, as_object(body))


def _rows(project: Path, form: TranscriptForm, table: Literal["threads", "thread_events"]) -> list[JsonObject]:
    """Return the rows of a table of `registry.db`, which is read as a copy in memory."""
    data = _read(project, _PLACES[form], "registry.db")
    if not data:
        return []
    found, size, until = list[JsonObject](), 0, time.monotonic() + _SECONDS
    with closing(sqlite3.connect(":memory:")) as database, suppress(sqlite3.Error):
        database.deserialize(data[:18] + b"\x01\x01" + data[20:])  # a copy has no write-ahead log beside it
        database.execute("pragma trusted_schema = off")
        # Reading is allowed and nothing else: the schema of a database may name functions and endless queries.
        allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_OBJECT)
        database.set_progress_handler(lambda: time.monotonic() > until, 100_000)
        made = database.execute("select sql from sqlite_master where name = ? and type = 'table'", (table,)).fetchone()
        if not made or not str(made[0]).lower().startswith("create table"):  # a virtual table runs code of its own
            return []
        rows = database.execute(f"select * from {table} limit 100000")  # noqa: S608 - our own names
        names = [column[0] for column in rows.description]
        for row in rows:
            cells = zip(names, row, strict=True)
            found.append({name: cell for name, cell in cells if _is_json(cell)})
            size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
            if size > _LARGEST:
                break
    return found


def _is_json(cell: object) -> bool:
    return isinstance(cell, str | int) or (isinstance(cell, float) and isfinite(cell))


def _read(project: Path, folders: tuple[str, ...], name: str, limit: int = _LARGEST) -> bytes:
    with suppress(KiwiError, LookupError), opened(project) as root, below(root, *folders) as folder:
        return read_file(folder, name, limit=limit)
    return b""


def _json(text: Json | bytes) -> Json:
    """Return the value of a JSON text, any other value as it is, and None for a damaged or deeply nested one."""
    if not isinstance(text, str | bytes):
        return text
    try:
        value: Json = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if _is_flat(value, _DEEPEST) else None


def _is_flat(value: Json, deepest: int) -> bool:
    inner = value.values() if isinstance(value, dict) else as_list(value)
    return deepest > 0 and all(_is_flat(one, deepest - 1) for one in inner)
