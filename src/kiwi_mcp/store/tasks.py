"""Tasks in the store: calls that go on once their client was answered, and what is known of them afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, TypeAlias, cast

from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.store.database import Database, Row, Value, within

TaskStatus: TypeAlias = Literal["working", "input_required", "completed", "failed", "cancelled"]

KEPT_MS = 3_600_000
"""How long a task can be read after it has ended."""
STALE_MS = 15_000
"""How long the process that makes a call may be silent before it counts as gone."""
MOST_KEPT = 1_000
"""How many tasks one principal may have, those that can still be read among them."""
LOST: JsonObject = {"code": -32603, "message": "Kiwi ended while it ran; whether it finished is unknown."}
"""What is said of a task whose process is gone, as an error of JSON-RPC."""

_COLUMNS = (
    "id", "principal", "method", "identity", "owner", "created_at", "updated_at", "expires_at", "beat_at", "status",
    "message", "detail",
)  # fmt: skip
_READ = f"select {', '.join(_COLUMNS)} from tasks where actor = ?"  # noqa: S608 - our own names
_ADD = (
    f"insert into tasks (actor, is_unwanted, answers, {', '.join(_COLUMNS)})"  # noqa: S608 - as above
    f" values (?, 0, '', {', '.join('?' * len(_COLUMNS))})"
)
_RUNS = "status in ('working', 'input_required')"
_CHANGE = f"update tasks set status = ?, message = ?, detail = ?, updated_at = ? where id = ? and owner = ? and {_RUNS}"  # noqa: S608 - as above
_END = (
    "update tasks set status = ?, message = ?, detail = ?, updated_at = ?, expires_at = ?"  # noqa: S608 - as above
    f" where id = ? and owner = ? and {_RUNS}"
)
_BEAT = f"update tasks set beat_at = ?, expires_at = ? where owner = ? and {_RUNS}"  # noqa: S608 - as above
_BURY = (
    "update tasks set status = 'failed', message = ?, detail = ?, updated_at = ?, expires_at = ?"  # noqa: S608 - as above
    f" where actor = ? and beat_at < ? and {_RUNS}"
)
_PRUNE = "delete from tasks where id in (select id from tasks where expires_at < ? order by expires_at limit ?)"
_STEP = 500
"""How many old tasks go at the most when one is added."""
_LONGEST = 1_000
_PATIENCE = 10.0
"""For how many seconds a server may be silent: a client waits for it."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is known of one task; times are milliseconds since 1970."""

    id: str
    principal: str
    """Whose it is: nobody else sees it."""
    method: str
    identity: str
    """What was called."""
    owner: str
    """The process that makes the call."""
    created_at: int
    updated_at: int
    expires_at: int
    beat_at: int
    """When its process was last heard of."""
    status: TaskStatus = "working"
    message: str = ""
    detail: JsonObject = field(default_factory=dict)
    """What comes with the status: the questions that wait for an answer, the result, or the error."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status not in {"working", "input_required"}


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants of a task that another process makes."""

    id: str
    is_unwanted: bool
    answers: JsonObject
    """Answers to its questions, by their keys."""


class Tasks:
    """The tasks of one actor. What one process writes, every other reads."""

    def __init__(self, database: Database, actor: str) -> None:
        self._database = database
        self._actor = actor

    def add(self, task: Task) -> bool:
        """Keep a new task, and say whether that was done: a principal may have only so many."""
        with within(_PATIENCE), self._database.transaction() as transaction:
            transaction.write(_PRUNE, (task.created_at, _STEP))
            counted = "select count(*) from tasks where actor = ? and principal = ?"
            if int(transaction.read(counted, (self._actor, _whose(task.principal)))[0][0] or 0) >= MOST_KEPT:
                return False
            transaction.write(_ADD, (self._actor, *_row(task)))
            return True

    def get(self, task_id: str, principal: str, now: int) -> Task | None:
        """Return a task of a principal, unless there is none or its time is over."""
        found = self._one(task_id, principal)
        if found is not None and _is_lost(found, now):
            self._bury(now)
            found = self._one(task_id, principal)
        return found if found is not None and now < found.expires_at else None

    def list(self, now: int, *, limit: int, prefix: str = "") -> Sequence[Task]:
        """Return the actor's tasks, whoever's they are, the newest first; of some ids only, by their beginning."""
        rows = self._listed(now, limit, prefix)
        if any(_is_lost(task, now) for task in rows):
            self._bury(now)
            rows = self._listed(now, limit, prefix)
        return rows

    def finish(self, task: Task) -> bool:
        """Keep how a task ended, and say whether it was still this process's to end."""
        values = (task.status, _clean(task.message), _text(task.detail), task.updated_at, task.expires_at)
        with within(_PATIENCE), self._database.transaction() as transaction:
            return transaction.write(_END, (*values, task.id, task.owner)) > 0

    def beat(self, owner: str, now: int, changed: Iterable[Task] = ()) -> None:
        """Tell that a process is still at its tasks, and what has changed with them."""
        with within(_PATIENCE), self._database.transaction() as transaction:
            for task in changed:
                values = (task.status, _clean(task.message), _text(task.detail), task.updated_at, task.id, owner)
                transaction.write(_CHANGE, values)
            transaction.write(_BEAT, (now, now + KEPT_MS, owner))

    def wishes(self, owner: str) -> Sequence[Wish]:
        """Return what others want of the tasks that a process makes; answers are handed over once."""
        asked = f"select id, is_unwanted, answers from tasks where owner = ? and {_RUNS}"  # noqa: S608 - as above
        with within(_PATIENCE):
            rows = self._database.read(f"{asked} and (is_unwanted = 1 or answers <> '')", (owner,))
            for task_id, _, answers in rows:
                if answers:
                    with self._database.transaction() as transaction:
                        # Unless more came meanwhile: then all of it is taken again, and what is known is passed over.
                        transaction.write(
                            "update tasks set answers = '' where id = ? and answers = ?", (task_id, answers)
                        )
        return tuple(Wish(str(row[0]), bool(row[1]), _object(row[2]) if row[2] else {}) for row in rows)

    def stop(self, task_id: str, principal: str | None) -> None:
        """Ask the process that makes a call to end it; with no principal it may be anybody's."""
        own, values = self._own(task_id, principal)
        with within(_PATIENCE), self._database.transaction() as transaction:
            transaction.write(f"update tasks set is_unwanted = 1 where {own} and {_RUNS}", values)  # noqa: S608 - as above

    def answer(self, task_id: str, principal: str, answers: JsonObject) -> None:
        """Leave answers for the process that makes a call."""
        own, values = self._own(task_id, principal)
        with within(_PATIENCE), self._database.transaction() as transaction:
            rows = transaction.read(f"select answers from tasks where {own} and {_RUNS}", values)  # noqa: S608 - as above
            if rows:
                known = _object(rows[0][0]) if rows[0][0] else {}
                # What was said first holds.
                transaction.write(f"update tasks set answers = ? where {own}", (_text({**answers, **known}), *values))  # noqa: S608 - as above

    def _one(self, task_id: str, principal: str) -> Task | None:
        with within(_PATIENCE):
            rows = self._database.read(
                f"{_READ} and principal = ? and id = ?", (self._actor, _whose(principal), _clean(task_id))
            )
        return _task(rows[0]) if rows else None

    def _listed(self, now: int, limit: int, prefix: str) -> Sequence[Task]:
        # The ids are hexadecimal, so every one that begins so is before the same beginning and a `g`.
        begins = (_clean(prefix), f"{_clean(prefix)}g")
        statement = f"{_READ} and expires_at > ? and id >= ? and id < ? order by created_at desc, id limit ?"
        with within(_PATIENCE):
            return tuple(map(_task, self._database.read(statement, (self._actor, now, *begins, limit))))

    def _bury(self, now: int) -> None:
        values = (str(LOST["message"]), _text(LOST), now, now + KEPT_MS, self._actor, now - STALE_MS)
        with within(_PATIENCE), self._database.transaction() as transaction:
            transaction.write(_BURY, values)

    def _own(self, task_id: str, principal: str | None) -> tuple[str, tuple[Value, ...]]:
        if principal is None:
            return "actor = ? and id = ?", (self._actor, _clean(task_id))
        return "actor = ? and principal = ? and id = ?", (self._actor, _whose(principal), _clean(task_id))


def _is_lost(task: Task, now: int) -> bool:
    return not task.is_over and task.beat_at < now - STALE_MS


def _row(task: Task) -> Sequence[Value]:
    texts = (task.id, _whose(task.principal), *map(_clean, (task.method, task.identity, task.owner)))
    times = (task.created_at, task.updated_at, task.expires_at, task.beat_at)
    return (*texts, *times, task.status, _clean(task.message), _text(task.detail))


def _task(row: Row) -> Task:
    id_, principal, method, identity, owner = map(str, row[:5])
    created_at, updated_at, expires_at, beat_at = (int(time or 0) for time in row[5:9])
    status, message, detail = row[9:]
    return Task(
        id_, principal, method, identity, owner, created_at, updated_at, expires_at, beat_at,
        cast("TaskStatus", status), str(message), _object(detail),
    )  # fmt: skip


def _text(value: JsonObject) -> str:
    # As ASCII: every database holds it, whatever characters a tool gives.
    return json.dumps(value, separators=(",", ":"))


def _object(text: Value) -> JsonObject:
    try:
        return as_object(json.loads(str(text)))
    except ValueError as error:
        raise StoreDamaged(
            "A task in the store is not JSON.", suggestion="Take the store back from a backup, or call the tool again."
        ) from error


def _whose(principal: str) -> str:
    """Return a principal as it is kept: one that cannot be kept as it is must not become somebody else."""
    if _clean(principal) == principal:
        return principal
    return f"sha256:{sha256(principal.encode(errors='surrogatepass')).hexdigest()}"


def _clean(text: str) -> str:
    """Return a text that every database can hold."""
    return text[:_LONGEST].encode(errors="replace").decode().replace("\0", "\ufffd")
