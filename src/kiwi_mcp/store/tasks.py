"""Tasks in the store: calls that continue after the response to their client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from typing import Literal, TypeAlias

from msgspec import Struct, convert, field
from msgspec.structs import asdict

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.store.database import Database, Value, clean, insert_into, json_column, read_json_column, within

TaskStatus: TypeAlias = Literal["working", "input_required", "completed", "failed", "cancelled"]

KEPT_MS = 3_600_000  # how long a task can be read after it has ended
STALE_MS = 15_000  # how long the process that makes a call may be silent before it counts as gone
MOST_KEPT = 1_000  # how many tasks one principal may have, those that can still be read among them
LOST: JsonObject = {"code": -32603, "message": "Kiwi ended while it ran; whether it finished is unknown."}
"""The JSON-RPC error of a task after its process has ended."""

_RUNS = "status in ('working', 'input_required')"
_CHANGE = f"update tasks set status = ?, message = ?, detail = ?, updated_at = ? where id = ? and owner = ? and {_RUNS}"  # noqa: S608 - our own names
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
_STEP = 500  # the maximum number of expired tasks that are removed when one is added
_clean = partial(clean, limit=1_000)
_PATIENCE = 10.0  # for how many seconds a server may be silent: a client waits for it


class Task(Struct, frozen=True):
    """The state of one task; times are milliseconds since 1970."""

    id: str
    principal: str  # the principal it belongs to. Other principals do not see it.
    method: str
    identity: str  # what was called
    owner: str  # the process that makes the call
    created_at: int
    updated_at: int
    expires_at: int
    beat_at: int  # when its process was last heard of
    status: TaskStatus = "working"
    message: str = ""
    detail: JsonObject = field(default_factory=dict)
    """What comes with the status: the questions that wait for an answer, the result, or the error."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status not in {"working", "input_required"}


_COLUMNS = Task.__struct_fields__
_READ = f"select {', '.join(_COLUMNS)} from tasks where actor = ?"  # noqa: S608 - as above
_ADD = insert_into("tasks", ("actor", "is_unwanted", "answers", *_COLUMNS))


class TaskCommand(Struct, frozen=True):
    """A request to change a task that runs in another process."""

    id: str
    is_unwanted: bool
    answers: JsonObject  # answers to its questions, by their keys


class Tasks:
    """The tasks of one actor. What one process writes, every other reads."""

    def __init__(self, database: Database, actor: str) -> None:
        self._database = database
        self._actor = actor

    def add(self, task: Task) -> bool:
        """Store a new task. Return False if the principal already has the maximum number of tasks."""
        principal = _whose(task.principal)
        with within(_PATIENCE), self._database.transaction() as transaction:
            transaction.write(_PRUNE, (task.created_at, _STEP))
            counted = "select count(*) from tasks where actor = ? and principal = ?"
            if int(transaction.read(counted, (self._actor, principal))[0][0] or 0) >= MOST_KEPT:
                return False
            cells = {**asdict(task), "principal": principal, "detail": json_column(task.detail)}
            texts = {name: _clean(cells[name]) for name in ("method", "identity", "owner", "message")}
            transaction.write(_ADD, (self._actor, 0, "", *(cells | texts).values()))
            return True

    def get(self, task_id: str, principal: str, now: int) -> Task | None:
        """Return a task of a principal, unless there is none or its time is over."""
        found = self._read("principal = ? and id = ?", (_whose(principal), _clean(task_id)), now)
        return next((task for task in found if now < task.expires_at), None)

    def list(self, now: int, *, limit: int, prefix: str = "") -> Sequence[Task]:
        """Return the actor's tasks of all principals, newest first. `prefix` selects ids that start with it."""
        # The ids are hexadecimal, so every one that begins so is before the same beginning and a `g`.
        begins = (_clean(prefix), f"{_clean(prefix)}g")
        where = "expires_at > ? and id >= ? and id < ? order by created_at desc, id limit ?"
        return self._read(where, (now, *begins, limit), now)

    def finish(self, task: Task) -> bool:
        """Keep how a task ended, and say whether it was still this process's to end."""
        values = (task.status, _clean(task.message), json_column(task.detail), task.updated_at, task.expires_at)
        with within(_PATIENCE), self._database.transaction() as transaction:
            return transaction.write(_END, (*values, task.id, task.owner)) > 0

    def beat(self, owner: str, now: int, changed: Iterable[Task] = ()) -> None:
        """Tell that a process is still at its tasks, and what has changed with them."""
        with within(_PATIENCE), self._database.transaction() as transaction:
            for task in changed:
                values = (task.status, _clean(task.message), json_column(task.detail), task.updated_at, task.id, owner)
                transaction.write(_CHANGE, values)
            transaction.write(_BEAT, (now, now + KEPT_MS, owner))

    def wishes(self, owner: str) -> Sequence[TaskCommand]:
        """Return the requests of other processes for the tasks that a process runs; answers are returned once."""
        asked = f"select id, is_unwanted, answers from tasks where owner = ? and {_RUNS}"  # noqa: S608 - as above
        with within(_PATIENCE):
            rows = self._database.read(f"{asked} and (is_unwanted = 1 or answers <> '')", (owner,))
            for task_id, _, answers in rows:
                if answers:
                    with self._database.transaction() as transaction:
                        # Unless more answers came in the meantime: then all are read again, and known ones are skipped.
                        transaction.write(
                            "update tasks set answers = '' where id = ? and answers = ?", (task_id, answers)
                        )
        return tuple(TaskCommand(str(row[0]), bool(row[1]), _object(row[2]) if row[2] else {}) for row in rows)

    def stop(self, task_id: str, principal: str | None) -> None:
        """Ask the process that runs a task to end it; without a principal, the task may belong to any principal."""
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
                every = json_column({**answers, **known})
                transaction.write(f"update tasks set answers = ? where {own}", (every, *values))  # noqa: S608 - as above

    def _read(self, where: str, values: Sequence[Value], now: int) -> Sequence[Task]:
        """Return some of the actor's tasks; those whose process is gone have failed."""

        def read() -> Sequence[Task]:
            with within(_PATIENCE):
                rows = self._database.read(f"{_READ} and {where}", (self._actor, *values))
            cells = ({**dict(zip(_COLUMNS, row, strict=True)), "detail": _object(row[-1])} for row in rows)
            return tuple(convert(one, Task) for one in cells)

        tasks = read()
        if any(not one.is_over and one.beat_at < now - STALE_MS for one in tasks):
            lost = (str(LOST["message"]), json_column(LOST), now, now + KEPT_MS, self._actor, now - STALE_MS)
            with within(_PATIENCE), self._database.transaction() as transaction:
                transaction.write(_BURY, lost)
            tasks = read()
        return tasks

    def _own(self, task_id: str, principal: str | None) -> tuple[str, tuple[Value, ...]]:
        if principal is None:
            return "actor = ? and id = ?", (self._actor, _clean(task_id))
        return "actor = ? and principal = ? and id = ?", (self._actor, _whose(principal), _clean(task_id))


def _object(text: Value) -> JsonObject:
    return read_json_column(text, "A task", "Take the store back from a backup, or call the tool again.")


def _whose(principal: str) -> str:
    """Return a principal as it is stored. One that cannot be stored as it is must not match another principal."""
    if _clean(principal) == principal:
        return principal
    return f"sha256:{sha256(principal.encode(errors='surrogatepass')).hexdigest()}"
