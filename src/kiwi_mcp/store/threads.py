"""Threads in the store: their rows, leases, and journals, and their questions to the owner.

A journal is a hash chain that is only added to. The row of a thread is made from it: every event has what it changed in
the row, so `verify` rebuilds the row and compares. Only the process that has the lease of a thread can append.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Literal, cast

from msgspec import UNSET, Struct, convert, field
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.errors import (
    BudgetExceeded,
    Conflict,
    LeaseLost,
    StoreDamaged,
    ThreadEnded,
    ThreadNotFound,
    ThreadTaken,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.threads import (
    ENDED,
    EventKind,
    NewEvent,
    Thread,
    ThreadChanges,
    ThreadEvent,
    ThreadLimits,
    ThreadQuestion,
    ThreadStatus,
    ThreadUsage,
)
from kiwi_mcp.domain.times import iso, now_ms, run_id
from kiwi_mcp.store.budget import COUNTERS, carve, charge_open, ledger_sums, return_rest
from kiwi_mcp.store.database import (
    Database,
    OwnedRows,
    Row,
    Transaction,
    Value,
    clean,
    conditions,
    id_range,
    insert_into,
    json_column,
    quick_transaction,
)
from kiwi_mcp.store.runs import ADD_BLOB, drop_blob

STALE_MS = 15_000  # after how many milliseconds without a beat another process may take a thread
INLINE_LIMIT = 16_000  # the largest text, in characters of JSON, that is stored in a row; a larger one is a blob
KIND = b"kiwi-thread-event-v1\n"
"""The prefix of the hashed data of an event, so that its hash cannot match another kind of data."""
_ALL = 2**31 - 1
_FIX = "Compare it with an export or a backup."
_FIXED = (
    "id", "owner", "kind", "item", "directive", "digest", "starter", "project", "parent_id", "root_id", "depth",
    "rights", "created_at",
)  # fmt: skip
"""The columns that never change; their hash is in the first event."""
_USED = ThreadUsage.__struct_fields__
_MOVING = (
    "model", "status", "waits_for", "command", "lease_owner", "beat_at", "seq", "head", "is_tainted", "reserved",
    "reserved_tokens", "finish_reason", "code", "message", "updated_at", "ended_at", *_USED,
)  # fmt: skip
_MOVED = _MOVING[: -len(_USED)]
_QUEUED = ("queue", "priority", "wake_at", "recoveries")
"""The columns that only say when a thread runs; the journal does not have them."""
_COLUMNS = (
    *_FIXED, *_MOVING, *_QUEUED, "lease", "limits", "spend_limit", "token_limit", "inputs", "inputs_sha256", "result",
    "result_sha256", "erased_at",
)  # fmt: skip
_ADD = insert_into("threads", _COLUMNS)
_READ = f"select {', '.join(_COLUMNS)} from threads"  # noqa: S608 - our own names
_READ_MOVING = f"select {', '.join(_MOVING)} from threads where id = ?"  # noqa: S608 - as above
_ADD_EVENT = """insert into thread_events (thread_id, seq, at, kind, body, body_sha256, changes, sha256)
  values (?, ?, ?, ?, ?, ?, ?, ?)"""
_EVENTS = """select e.seq, e.at, e.kind, e.body, b.content, e.body_sha256, e.changes, e.sha256 from thread_events e
  left join blobs b on e.body is null and b.sha256 = e.body_sha256
  where e.thread_id = ? and e.seq > ? order by e.seq limit ?"""
_TAKE = """update threads set recoveries = recoveries + case when lease_owner in ('', ?) then 0 else 1 end,
  lease = lease + 1, lease_owner = ?, beat_at = ?
  where id = ? and ended_at = 0 and (lease_owner in ('', ?) or beat_at < ?)"""
_RELEASE = """update threads set recoveries = case when status = 'running' then recoveries else 0 end, lease_owner = ''
  where id = ? and lease = ?"""
_ADD_DELTA = """insert into thread_deltas (thread_id, seq, n, text)
  select id, seq + 1, ?, ? from threads where id = ? and lease = ?"""


class ThreadFilter(Struct, frozen=True):
    """Which threads are wanted; times are milliseconds since 1970, and `before` is the id that a page ended with."""

    status: ThreadStatus | None = None
    directive: str | None = None
    starter: str | None = None
    parent_id: str | None = None
    root_id: str | None = None
    kind: str | None = None
    project: str | None = None
    has_idle: bool = True  # whether conversations that wait for a message are wanted too
    since: int | None = None
    until: int | None = None
    before: str | None = None
    limit: int = 20


class JournalGrew(Exception):
    """Events were appended that the caller has not read."""


class AppendedEvents(Struct, frozen=True):
    """The row of a thread after an append, and the events as they were stored."""

    thread: Thread
    events: tuple[ThreadEvent, ...]


class ThreadDelta(Struct, frozen=True):
    """A piece of the text that a model is writing; `seq` is the number that its event will have."""

    seq: int
    n: int
    text: str


class Threads(OwnedRows):
    """The threads of one owner in one store."""

    def create(
        self, thread: Thread, events: Sequence[NewEvent], also: Callable[[Transaction], None] | None = None
    ) -> Thread:
        """Store a new thread with its first events; `also` writes in the same transaction."""
        root = replace(thread, owner=self.owner, parent_id="", root_id="", depth=0)
        with quick_transaction(self.database) as transaction:
            made = _create(transaction, root, events)
            if also is not None:
                also(transaction)
            return made

    def spawn(
        self,
        parent: Thread,
        child: Thread,
        events: Sequence[NewEvent],
        parent_events: Sequence[NewEvent],
        *,
        is_counted: bool = True,
    ) -> tuple[Thread, Thread]:
        """Store a child with its first events, and the events of its parent; return the rows of both.

        The limits for money and tokens are taken from the rest of the parent, or `BudgetExceeded` is raised. One that
        is not counted needs no `spawns`.
        """
        with quick_transaction(self.database) as transaction:
            before = append_in(transaction, parent, parent_events, ThreadChanges(spawns=int(is_counted))).thread
            limits = before.limits
            running, total = _tree_counts(transaction, before) if is_counted else (-1, -1)
            for limit, used, most in (
                ("spawns", before.usage.spawns - 1 if is_counted else -1, limits.spawns),
                ("children", running, limits.children),
                ("threads", total - 1, limits.threads),
                ("depth", before.depth, limits.depth),
            ):
                if used >= most:
                    raise BudgetExceeded(limit, wanted=1, rest=0)
            wanted = replace(
                child,
                owner=before.owner,
                starter=before.starter,
                parent_id=before.id,
                root_id=before.root_id,
                depth=before.depth + 1,
                limits=replace(child.limits, depth=min(child.limits.depth, before.limits.depth)),
                is_tainted=child.is_tainted or before.is_tainted,
            )
            made = _create(transaction, wanted, events)
            own = made.limits
            carve(transaction, before.id, before.root_id, made.id, own.spend, own.tokens, made.created_at)
            return _required(transaction, before.id), made

    def get(self, wanted: str) -> Thread:
        """Return one thread by its id, or by the beginning of its id."""
        start, end = id_range(wanted)
        rows = self.database.read(f"{_READ} where owner = ? and id >= ? and id < ? limit 2", (self.owner, start, end))
        if len(rows) != 1 or not start:
            raise ThreadNotFound(wanted, is_several=bool(rows and start))
        return _thread(self.database, rows[0])

    def current(self, thread: Thread) -> Thread:
        """Return a thread with its columns of now; its limits and its result change with events only."""
        rows = self.database.read(_READ_MOVING, (thread.id,))
        if not rows:
            raise ThreadNotFound(thread.id)
        return _moved(thread, rows[0], {})

    def list(self, wanted: ThreadFilter) -> tuple[Thread, ...]:
        """Return the threads that are wanted, the newest first."""
        names = ("status", "directive", "starter", "parent_id", "root_id", "kind", "project")
        where, values = conditions(
            ("owner = ?", self.owner),
            *((f"{name} = ?", getattr(wanted, name)) for name in names),
            (
                "(kind <> 'conversation' or status <> 'waiting' or waits_for <> ?)",
                None if wanted.has_idle else "message",
            ),
            ("id >= ?", None if wanted.since is None else run_id(wanted.since, 0)),
            ("id < ?", None if wanted.until is None else run_id(wanted.until, 0)),
            ("id < ?", wanted.before),
        )
        rows = self.database.read(f"{_READ} where {where} order by id desc limit ?", (*values, wanted.limit))
        return tuple(_thread(self.database, row) for row in rows)

    def take(self, thread_id: str, process: str, now: int, gone: str = "") -> Thread:
        """Take the lease of a thread that no process has, or whose process gave no sign for 15 seconds or is `gone`."""
        with quick_transaction(self.database) as transaction:
            return take_in(transaction, thread_id, process, now, gone)

    def beat(self, thread_ids: Sequence[str], process: str, now: int) -> Mapping[str, str]:
        """Renew the leases of a process, and return the command for each thread that it still has."""
        statement = "update threads set beat_at = ? where id = ? and lease_owner = ? returning command"
        with quick_transaction(self.database) as transaction:
            return {
                thread_id: str(command)
                for thread_id in thread_ids
                for (command,) in transaction.read(statement, (now, thread_id, clean(process)))
            }

    def confirm(self, thread: Thread) -> None:
        """Raise if another process has taken a thread."""
        if not self.database.read("select 1 from threads where id = ? and lease = ?", (thread.id, thread.lease)):
            raise LeaseLost(thread.id)

    def release(self, thread: Thread) -> None:
        """Give the lease of a thread back; where it was lost, nothing changes."""
        with quick_transaction(self.database) as transaction:
            transaction.write(_RELEASE, (thread.id, thread.lease))

    def command(self, thread_id: str, command: Literal["", "pause", "cancel"]) -> None:
        """Leave a command for the process that runs a thread. `cancel` cannot be taken back."""
        statement = """update threads set command = case when command = 'cancel' then 'cancel' else ? end
          where owner = ? and id = ? and ended_at = 0"""
        with quick_transaction(self.database) as transaction:
            if not transaction.write(statement, (command, self.owner, thread_id)):
                raise ThreadEnded(thread_id, _required(transaction, thread_id).status)

    def append(
        self,
        thread: Thread,
        events: Sequence[NewEvent],
        changes: ThreadChanges | None = None,
        *,
        also: Callable[[Transaction], None] | None = None,
    ) -> Thread:
        """Append events under the lease, and return the new row; `also` writes first, in the same transaction."""
        return self.append_events(thread, events, changes, also=also).thread

    def append_events(
        self,
        thread: Thread,
        events: Sequence[NewEvent],
        changes: ThreadChanges | None = None,
        *,
        also: Callable[[Transaction], None] | None = None,
        after: int | None = None,
    ) -> AppendedEvents:
        """Append events as `append` does, and return them too. With `after`, that must be the last event so far."""
        with quick_transaction(self.database) as transaction:
            if after is not None and _latest(transaction, thread).seq != after:
                raise JournalGrew
            if also is not None:
                also(transaction)
            return append_in(transaction, thread, events, changes)

    def events(self, thread_id: str, after: int = 0, limit: int = _ALL) -> tuple[ThreadEvent, ...]:
        """Return the events of a thread behind a number, in their order."""
        return tuple(_event(thread_id, row) for row in self.database.read(_EVENTS, (thread_id, after, limit)))

    def add_deltas(self, thread: Thread, first: int, texts: Sequence[str]) -> None:
        """Store pieces of text for those who watch, numbered from `first`. The next model event removes them."""
        with quick_transaction(self.database) as transaction:
            for n, text in enumerate(texts, start=first):
                transaction.write(_ADD_DELTA, (n, json_column(text), thread.id, thread.lease))

    def deltas(self, thread_id: str, after: int = -1) -> tuple[ThreadDelta, ...]:
        """Return the pieces of the text that a model is writing now, behind a number."""
        statement = """select d.seq, d.n, d.text from thread_deltas d join threads t on t.id = d.thread_id
          where d.thread_id = ? and d.seq = t.seq + 1 and d.n > ? order by d.n"""
        rows = self.database.read(statement, (thread_id, after))
        return tuple(ThreadDelta(int(str(seq)), int(str(n)), json.loads(str(text))) for seq, n, text in rows)

    def erase(self, thread_id: str, now: int) -> None:
        """Erase all texts of an ended thread: inputs, bodies, result, questions. Hashes and counters stay.

        The results of its runs go with the retention of the runs.
        """
        with self.database.transaction() as transaction:
            thread = _required(transaction, thread_id)
            if not thread.is_ended:
                raise Conflict(
                    f"The thread {thread_id} has not ended, so it is not erased.",
                    suggestion=f"End it first: `kiwi thread cancel {thread_id}`.",
                    thread_id=thread_id,
                )
            blobs = transaction.read("select sha256 from thread_blobs where thread_id = ?", (thread_id,))
            for statement in (
                "update thread_events set body = null where thread_id = ? and body is not null",
                "update threads set inputs = null, result = null, message = '' where id = ?",
                "delete from thread_blobs where thread_id = ?",
                "delete from thread_deltas where thread_id = ?",
                "update questions set message = '\"\"', schema = '{}', answer = 'null' where thread_id = ?",
            ):
                transaction.write(statement, (thread_id,))
            transaction.write("update threads set erased_at = ? where id = ?", (now, thread_id))
            for (digest,) in blobs:
                drop_blob(transaction, str(digest))

    def verify(self, thread_id: str) -> tuple[Issue, ...]:
        """Return the faults of a thread: in the chain of its events, and where its row differs from them."""
        rows = self.database.read(f"{_READ} where owner = ? and id = ?", (self.owner, clean(thread_id)))
        if not rows:
            raise ThreadNotFound(thread_id)
        cells = dict(zip(_COLUMNS, rows[0], strict=True))
        return tuple(_faults(self.database, thread_id, cells))


def _tree_counts(transaction: Transaction, parent: Thread) -> tuple[int, int]:
    """Return how many children of a thread have not ended, and how many were spawned in its tree."""
    # Two threads of one tree that spawn at the same time take turns.
    transaction.write("update threads set updated_at = updated_at where id = ?", (parent.root_id,))
    running = "select count(*) from threads where parent_id = ? and ended_at = 0"
    total = "select cast(coalesce(sum(spawns), 0) as bigint) from threads where root_id = ?"
    found = (transaction.read(running, (parent.id,)), transaction.read(total, (parent.root_id,)))
    return int(str(found[0][0][0])), int(str(found[1][0][0]))


def take_in(transaction: Transaction, thread_id: str, process: str, now: int, gone: str = "") -> Thread:
    """Take the lease of a thread inside a transaction; a thread that a process lost counts one more recovery."""
    values = (clean(process), clean(process), now, thread_id, gone, now - STALE_MS)
    is_taken = transaction.write(_TAKE, values)
    found = _required(transaction, thread_id)
    if found.is_ended:
        raise ThreadEnded(thread_id, found.status)
    if not is_taken:
        raise ThreadTaken(thread_id)
    return found


def append_in(
    transaction: Transaction, thread: Thread, events: Sequence[NewEvent], changes: ThreadChanges | None = None
) -> AppendedEvents:
    """Append events inside a transaction, under the lease, behind the last event: parallel calls append as well."""
    at = max(now_ms(), thread.updated_at)
    made = _projection(transaction, thread, changes, at) if changes is not None else _Projection()
    has_ended = made.sets.get("status") in ENDED
    if has_ended:
        charge_open(transaction, thread.id)
    found = _append(transaction, thread, events, made, at)
    if has_ended:
        return_rest(transaction, thread.id, at)
        unanswered = "update questions set status = 'withdrawn' where thread_id = ? and status = 'open'"
        transaction.write(unanswered, (thread.id,))
    return found


def _latest(transaction: Transaction, thread: Thread) -> Thread:
    """Return the thread with its last event as it is in the transaction; with a lost lease, as it was given."""
    rows = transaction.read(
        "select seq, head, updated_at from threads where id = ? and lease = ? and ended_at = 0",
        (thread.id, thread.lease),
    )
    if not rows:
        return thread  # the append itself finds out why
    seq, head, updated_at = rows[0]
    return replace(thread, seq=int(str(seq)), head=str(head), updated_at=int(str(updated_at)))


class _Projection(Struct, frozen=True):
    """What changes: columns to set, columns to add to, the changes that the event records, and other fields."""

    sets: dict[str, Value] = field(default_factory=dict)
    adds: dict[str, int] = field(default_factory=dict)
    words: dict[str, Json] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)


def _projection(transaction: Transaction, thread: Thread, changes: ThreadChanges, at: int) -> _Projection:
    adds = {name: number for name in ("turns", "tool_calls", "spawns") if (number := getattr(changes, name))}
    made = _Projection(adds=adds)
    sets, words, fields = made.sets, made.words, made.fields
    for name in ("model", "finish_reason", "code"):
        if (text := getattr(changes, name)) is not None:
            words[name] = sets[name] = clean(text)
    if changes.status is not None:
        words["status"] = sets["status"] = changes.status
        words["waits_for"] = sets["waits_for"] = changes.waits_for
        sets["wake_at"] = fields["wake_at"] = changes.wake_at
        if changes.status in ENDED:
            words["ended_at"] = sets["ended_at"] = at
            sets["lease_owner"] = ""
    if changes.is_tainted is not None:
        words["is_tainted"] = sets["is_tainted"] = int(changes.is_tainted)
    if changes.message is not None:
        sets["message"] = text = clean(changes.message)
        words["message_sha256"] = _digest(text)
    if changes.result is not UNSET:
        text = json_column(fields.setdefault("result", changes.result))
        words["result_sha256"] = sets["result_sha256"] = digest = _digest(text)
        sets["result"] = _stored(transaction, text, digest, thread.id, at)
    if changes.limits is not None:
        fields["limits"] = limits = changes.limits
        words["limits"] = asdict(limits)
        sets |= {"limits": json_column(asdict(limits)), "spend_limit": limits.spend, "token_limit": limits.tokens}
        if thread.parent_id:
            more = (limits.spend - thread.limits.spend, limits.tokens - thread.limits.tokens)
            carve(transaction, thread.parent_id, thread.root_id, thread.id, *more, at)
    words.update(adds)
    return made


def _append(
    transaction: Transaction, thread: Thread, events: Sequence[NewEvent], made: _Projection, at: int
) -> AppendedEvents:
    if not events:
        raise ValueError("every change of a thread needs an event")
    rows: list[Sequence[Value]] = []
    stored: list[ThreadEvent] = []
    head, seq = thread.head, thread.seq
    for event in events:
        seq += 1
        text = json_column(event.body)
        digest = _digest(text)
        # What was changed belongs to the last event.
        changes = json_column(made.words) if made.words and len(rows) + 1 == len(events) else ""
        head = seal(thread.id, seq, at, event.kind, digest, changes, head)
        body = _stored(transaction, text, digest, thread.id, at)
        rows.append((thread.id, seq, at, event.kind, body, digest, changes, head))
        stored.append(_event(thread.id, (seq, at, event.kind, text, None, digest, changes, head)))
    sets: dict[str, Value] = {"seq": seq, "head": head, "updated_at": at, **made.sets}
    words = [*(f"{name} = ?" for name in sets), *(f"{name} = {name} + ?" for name in made.adds)]
    values = [*sets.values(), *made.adds.values()]
    if thread.command and sets.get("status") in {*ENDED, "paused"}:
        words.append("command = case when command = ? then '' else command end")
        values.append(thread.command)
    found = transaction.read(
        f"update threads set {', '.join(words)} where id = ? and lease = ? and seq = ? and ended_at = 0"  # noqa: S608 - our own names
        f" returning {', '.join(_MOVING)}",
        (*values, thread.id, thread.lease, thread.seq),
    )
    if not found and (latest := _latest(transaction, thread)).seq > thread.seq:  # a parallel call was first
        return _append(transaction, latest, events, made, max(at, latest.updated_at))
    if not found:
        ended = transaction.read("select status from threads where id = ? and ended_at > 0", (thread.id,))
        raise ThreadEnded(thread.id, str(ended[0][0])) if ended else LeaseLost(thread.id)
    for row in rows:
        transaction.write(_ADD_EVENT, row)
    if any(event.kind in {"model", "model_failed"} for event in events):
        transaction.write("delete from thread_deltas where thread_id = ?", (thread.id,))
    return AppendedEvents(_moved(thread, found[0], made.fields), tuple(stored))


def seal(thread_id: str, seq: int, at: int, kind: str, body: str, changes: str, previous: str) -> str:
    """Return the hash of an event; `body` and `previous` are the hashes of its body and of the event before it."""
    said = f"{thread_id}\n{seq}\n{at}\n{kind}\n{body}\n{previous}\n{changes}"
    return sha256(KIND + said.encode()).hexdigest()


def _create(transaction: Transaction, thread: Thread, events: Sequence[NewEvent]) -> Thread:
    inputs = json_column(thread.inputs)
    limits = asdict(thread.limits)
    at = thread.created_at
    names = ("item", "directive", "digest", "starter", "project", "model", "queue")
    new = replace(
        thread,
        root_id=thread.root_id or thread.id,
        seq=0,
        head="",
        lease=0,
        wake_at=0,
        recoveries=0,
        usage=ThreadUsage(),
        updated_at=at,
        **{name: clean(getattr(thread, name)) for name in names},
    )
    cells: dict[str, Value] = {
        **{name: getattr(new, name) for name in (*_FIXED, *_MOVED, *_QUEUED)},
        **dict.fromkeys(_USED, 0),
        "parent_id": new.parent_id or None,
        "rights": json_column(new.rights),
        "is_tainted": int(new.is_tainted),
        "lease": 0,
        "limits": json_column(limits),
        "spend_limit": new.limits.spend,
        "token_limit": new.limits.tokens,
        "inputs": inputs if len(inputs) <= INLINE_LIMIT else None,
        "inputs_sha256": (digest := _digest(inputs)),
        "erased_at": 0,
    }
    transaction.write(_ADD, [cells.get(name) for name in _COLUMNS])
    _stored(transaction, inputs, digest, new.id, at)
    words: dict[str, Json] = {
        "row_sha256": _row_digest(cells),
        "inputs_sha256": digest,
        "limits": limits,
        **{name: cells[name] for name in ("status", "waits_for", "model", "is_tainted")},
    }
    return _append(transaction, new, events, _Projection(words=words), at).thread


def _stored(transaction: Transaction, text: str, digest: str, thread_id: str, at: int) -> str | None:
    """Return a text as it is stored in a row: None if it is too large, and then a blob."""
    if len(text) <= INLINE_LIMIT:
        return text
    transaction.write(ADD_BLOB, (digest, len(text), text.encode(), iso(at)))
    transaction.write(
        "insert into thread_blobs (sha256, thread_id) values (?, ?) on conflict do nothing", (digest, thread_id)
    )
    return None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _row_digest(cells: Mapping[str, Value]) -> str:
    return _digest(json_column([cast("Json", cells[name]) for name in _FIXED]))


def _required(transaction: Transaction, thread_id: str) -> Thread:
    rows = transaction.read(f"{_READ} where id = ?", (thread_id,))
    if not rows:
        raise ThreadNotFound(thread_id)
    return _thread(transaction, rows[0])


def _moved(thread: Thread, row: Row, fields: Mapping[str, object]) -> Thread:
    """Return a thread with the columns that an append returned, and the other fields that it changed."""
    cells: dict[str, Json] = dict(zip(_MOVING, row, strict=True))
    moved = {name: cells[name] for name in _MOVED}
    return replace(thread, **{**moved, **fields, "is_tainted": bool(cells["is_tainted"])}, usage=_usage(cells))


def _thread(source: Database | Transaction, row: Row) -> Thread:
    cells: dict[str, Json] = dict(zip(_COLUMNS, row, strict=True))
    place = f"thread {cells['id']}"
    fields: dict[str, Json] = {
        **{name: cells[name] for name in (*_FIXED, *_MOVED, *_QUEUED, "lease")},
        "parent_id": cells["parent_id"] or "",
        "is_tainted": bool(cells["is_tainted"]),
        "rights": as_object(_read(cells["rights"], place)),
        "inputs": as_object(_read(_text(source, cells["inputs"], cells["inputs_sha256"]), place)),
        "result": _read(_text(source, cells["result"], cells["result_sha256"]), place),
    }
    limits = convert(_read(cells["limits"], place), ThreadLimits)
    return Thread(**fields, limits=limits, usage=_usage(cells))  # type: ignore[arg-type]  # the schema checks the types


def _usage(cells: JsonObject) -> ThreadUsage:
    used = {name: cells[name] for name in _USED}
    return ThreadUsage(**used | {"is_estimated": bool(cells["is_estimated"])})  # type: ignore[arg-type]  # the columns are the fields


def _text(source: Database | Transaction, text: Json | Value, digest: Json | Value) -> str | None:
    """Return a text from its row or its blob; None if it was erased or never there."""
    if text is not None or digest is None:
        return cast("str | None", text)
    rows = source.read("select content from blobs where sha256 = ?", (str(digest),))
    return _body(None, rows[0][0]) if rows else None


def _read(text: Json, place: str) -> Json:
    """Return the value of a JSON column."""
    try:
        value: Json = None if text is None else json.loads(str(text))
    except ValueError as error:
        raise StoreDamaged(f"The {place} in the store is not JSON.", suggestion=_FIX) from error
    return value


def _body(body: Value, content: Value) -> str | None:
    if isinstance(content, bytes):
        return content.decode(errors="replace")
    return None if body is None else str(body)


def _event(thread_id: str, row: Row) -> ThreadEvent:
    number, at, kind, body, content, digest, changes, own = row
    seq, text = int(str(number)), _body(body, content)
    place = f"event {seq} of the thread {thread_id}"
    return ThreadEvent(
        thread_id, seq, int(str(at)), cast("EventKind", kind), as_object(_read(text, place)), str(digest), str(own),
        as_object(_read(changes or None, place)), is_erased=text is None,
    )  # fmt: skip


def _faults(database: Database, thread_id: str, cells: Mapping[str, Value]) -> Iterator[Issue]:
    """Yield the faults in the chain of a thread, then those of its row."""
    seq, head, state = 0, "", dict[str, Json]()
    for row in database.read(_EVENTS, (thread_id, 0, _ALL)):
        number, at, kind, body, content, digest, changes, own = row
        if number != seq + 1:
            yield Issue(f"event {seq + 1}", "removed from the journal", _FIX)
        seq = int(str(number))
        place = f"event {seq}"
        text = _body(body, content)
        if text is None and not cells["erased_at"]:
            yield Issue(place, "its body is missing", _FIX)
        if text is not None and _digest(text) != digest:
            yield Issue(place, "its body was changed after it was written", _FIX)
        if seal(thread_id, seq, int(str(at)), str(kind), str(digest), str(changes), head) != own:
            yield Issue(place, "it was changed after it was written, or does not follow the one before it", _FIX)
        head = str(own)
        try:
            made = as_object(json.loads(str(changes) or "{}"))
        except ValueError:  # the hash of the event is wrong, too
            continue
        for name, value in made.items():
            known = state.get(name)
            is_count = name in {"turns", "tool_calls", "spawns"} and isinstance(value, int)
            state[name] = value + (known if isinstance(known, int) else 0) if is_count else value  # type: ignore[operator]  # as checked
    yield from _row_faults(database, cells, {"seq": seq, "head": head, **ledger_sums(database, thread_id)}, state)


def _row_faults(
    database: Database, cells: Mapping[str, Value], counted: JsonObject, state: JsonObject
) -> Iterator[Issue]:
    """Yield where a row is not what its journal and its ledger make of it."""
    limits = as_object(state.get("limits"))
    wanted: dict[str, Json] = {
        "ended_at": 0, "finish_reason": "", "code": "", "turns": 0, "tool_calls": 0, "spawns": 0,
        "result_sha256": None, **state, **counted,
        "limits": json_column(limits), "spend_limit": limits.get("spend"), "token_limit": limits.get("tokens"),
    }  # fmt: skip
    found: dict[str, Json] = {**cells, "row_sha256": _row_digest(cells)}
    found["message_sha256"] = _digest(str(cells["message"]))
    wanted.setdefault("message_sha256", _digest(""))
    if cells["erased_at"]:
        del wanted["message_sha256"]
    else:
        for name in ("inputs", "result"):
            text = _text(database, cells[name], cells[f"{name}_sha256"])
            found[f"{name}_sha256"] = None if text is None else _digest(text)
    for name, value in wanted.items():
        if found.get(name) != value:
            shown = name.removesuffix("_sha256")
            reason = "differs from the ledger" if name in {*COUNTERS, "is_estimated"} else "differs from the journal"
            yield Issue(f"thread.{shown}", reason, _FIX)


_QUESTION = ThreadQuestion.__struct_fields__
_JSON = ("message", "schema", "answer")
_READ_QUESTION = f"select {', '.join(_QUESTION)} from questions where owner = ?"  # noqa: S608 - as above
_ADD_QUESTION = (
    f"insert into questions (owner, root_id, {', '.join(_QUESTION)})"  # noqa: S608 - as above
    f" select owner, root_id, {', '.join('?' * len(_QUESTION))} from threads where id = ? on conflict do nothing"
)
_ANSWER = """update questions set status = 'answered', answer = ?, answered_by = ?, answered_at = ?
  where owner = ? and id = ? and status = 'open' and expires_at > ?"""


class Questions(OwnedRows):
    """The questions to one owner."""

    def get(self, wanted: str) -> ThreadQuestion:
        """Return a question by its id, or by the beginning of its id."""
        start, end = id_range(wanted)
        rows = self.database.read(f"{_READ_QUESTION} and id >= ? and id < ? limit 2", (self.owner, start, end))
        if len(rows) != 1 or not start:
            raise ThreadNotFound(wanted, what="question", is_several=bool(rows and start))
        return _question(rows[0])

    def answer(self, question_id: str, answer: Json, by: str, now: int) -> ThreadQuestion:
        """Store an answer in time, and return the question as it is then: an earlier answer holds."""
        values = (json_column(answer), clean(by), now, self.owner, question_id, now)
        with quick_transaction(self.database) as transaction:
            transaction.write(_ANSWER, values)
            rows = transaction.read(f"{_READ_QUESTION} and id = ?", (self.owner, clean(question_id)))
        if not rows:
            raise ThreadNotFound(question_id, what="question")
        return _question(rows[0])

    def open(self, now: int, *, thread_id: str | None = None, root_id: str | None = None) -> tuple[ThreadQuestion, ...]:
        """Return the questions that wait for an answer: of a thread, of a tree, or all; the oldest first."""
        given = [(clause, value) for clause, value in (("thread_id", thread_id), ("root_id", root_id)) if value]
        where = "".join(f" and {name} = ?" for name, _ in given)
        values: Sequence[Value] = (self.owner, now, *(clean(value) for _, value in given))
        rows = self.database.read(f"{_READ_QUESTION} and status = 'open' and expires_at > ?{where} order by id", values)
        return tuple(map(_question, rows))

    def of_thread(self, thread_id: str) -> tuple[ThreadQuestion, ...]:
        """Return every question of a thread, the oldest first."""
        rows = self.database.read(f"{_READ_QUESTION} and thread_id = ? order by id", (self.owner, clean(thread_id)))
        return tuple(map(_question, rows))

    def expire(self, now: int) -> tuple[ThreadQuestion, ...]:
        """Close the questions that were not answered in time, and return them."""
        late = "select 1 from questions where owner = ? and status = 'open' and expires_at <= ? limit 1"
        if not self.database.read(late, (self.owner, now)):  # workers ask all the time, and seldom need to write
            return ()
        statement = f"""update questions set status = 'expired' where owner = ? and status = 'open' and expires_at <= ?
          returning {", ".join(_QUESTION)}"""  # noqa: S608 - as above
        with quick_transaction(self.database) as transaction:
            return tuple(map(_question, transaction.read(statement, (self.owner, now))))


def ask(transaction: Transaction, question: ThreadQuestion) -> None:
    """Store a question in the transaction of its event. A question that is stored already stays as it is."""
    cells = {name: getattr(question, name) for name in _QUESTION}
    cells |= {name: json_column(cells[name]) for name in _JSON}
    transaction.write(_ADD_QUESTION, (*(cells[name] for name in _QUESTION), question.thread_id))


def _question(row: Row) -> ThreadQuestion:
    cells: dict[str, Json] = dict(zip(_QUESTION, row, strict=True))
    cells |= {name: json.loads(str(cells[name])) for name in _JSON}
    return ThreadQuestion(**cells)  # type: ignore[arg-type]  # the columns are the fields, and the schema checks them
