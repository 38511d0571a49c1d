"""The queue in the store: which threads are live, which of them a worker takes, and which workers there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kiwi_mcp.domain.errors import ThreadEnded, ThreadTaken
from kiwi_mcp.domain.threads import Thread, ThreadStatus, WaitReason
from kiwi_mcp.store.database import OwnedRows, clean, quick_transaction
from kiwi_mcp.store.threads import STALE_MS, take_in

MINUTE_MS = 60_000
_DAY_MS = 86_400_000


class LiveThread(Struct, frozen=True):
    """What a worker needs to know of a thread that has not ended."""

    id: str
    status: ThreadStatus
    waits_for: WaitReason
    command: str
    lease_owner: str
    beat_at: int
    seq: int
    wake_at: int
    queue: str
    priority: int
    model: str
    starter: str
    project: str
    parent_id: str | None

    @property
    def provider(self) -> str:
        """The provider of its model."""
        return self.model.partition("/")[0]


class StartedThread(Struct, frozen=True):
    """A thread that a worker took in the last minute."""

    queue: str
    provider: str
    starter: str


class WorkerRow(Struct, frozen=True):
    """A worker that gave a sign of life."""

    process: str
    host: str
    pid: int
    queues: str
    started_at: int
    beat_at: int


class OpenQuestions(Struct, frozen=True):
    """What waiting threads wait for: threads with open questions, and approvals that are pending."""

    threads: frozenset[str]
    approvals: frozenset[str]


Chooser = Callable[[Sequence[LiveThread], Sequence[StartedThread]], Sequence[LiveThread]]
"""Returns the threads to take, from those that run and those that were started in the last minute."""
_LIVE = (
    f"select {', '.join(LiveThread.__struct_fields__)} from threads"  # noqa: S608 - our own names
    " where owner = ? and ended_at = 0 and status <> 'paused'"
)
_WORKERS = f"select {', '.join(WorkerRow.__struct_fields__)} from workers where owner = ?"  # noqa: S608 - as above
_STARTED = "select queue, provider, starter from queue_starts where owner = ? and at > ?"
_ADD_STARTED = """insert into queue_starts (owner, at, thread_id, queue, provider, starter) values (?, ?, ?, ?, ?, ?)
  on conflict do nothing"""
_BEAT = """insert into workers (process, owner, host, pid, queues, started_at, beat_at) values (?, ?, ?, ?, ?, ?, ?)
  on conflict (process) do update set beat_at = excluded.beat_at"""
_DUE = """select min(at) from (
  select min(expires_at) as at from questions where owner = ? and status = 'open' and expires_at > ?
  union all select min(expires_at) from approvals where owner = ? and status = 'pending' and expires_at > ? and exists (
    select 1 from threads where owner = ? and status = 'waiting' and waits_for = 'approval')
  union all select min(wake_at) from threads where owner = ? and status = 'waiting' and wake_at > ?
  union all select min(due_at) from schedules where owner = ? and is_paused = 0) as times"""


class ThreadQueue(OwnedRows):
    """The threads of one owner that workers run."""

    def live(self) -> tuple[LiveThread, ...]:
        """Return the threads that have not ended and were not paused, the oldest first."""
        rows = self.database.read(f"{_LIVE} order by id", (self.owner,))
        return tuple(LiveThread(*row) for row in rows)  # type: ignore[arg-type]  # the schema checks the types

    def claim(self, choose: Chooser, process: str, now: int, gone: Callable[[str], bool]) -> list[Thread]:
        """Take the leases of the threads that `choose` returns, and return these threads. One worker at a time claims.

        `gone` says whether the process of a lease is known to have ended.
        """
        taken: list[Thread] = []
        with quick_transaction(self.database) as transaction:
            leased = f"{_LIVE} and lease_owner <> '' and beat_at >= ?"
            rows = transaction.read(leased, (self.owner, now - STALE_MS))
            running = [LiveThread(*row) for row in rows]  # type: ignore[arg-type]  # as above
            last_minute = (self.owner, now - MINUTE_MS)
            transaction.write("delete from queue_starts where owner = ? and at <= ?", last_minute)
            started = [StartedThread(*row) for row in transaction.read(_STARTED, last_minute)]  # type: ignore[arg-type]  # as above
            for one in choose([each for each in running if not gone(each.lease_owner)], started):
                try:
                    owner = one.lease_owner if gone(one.lease_owner) else ""
                    taken.append(take_in(transaction, one.id, process, now, owner))
                except (ThreadTaken, ThreadEnded):  # since it was read
                    continue
                known = (self.owner, now, one.id, one.queue, one.provider, one.starter)
                transaction.write(_ADD_STARTED, known)
        return taken

    def questions(self, now: int) -> OpenQuestions:
        """Return what is open."""
        values = (self.owner, now)
        asked = "select distinct thread_id from questions where owner = ? and status = 'open' and expires_at > ?"
        pending = "select id from approvals where owner = ? and status = 'pending' and expires_at > ?"
        found = (frozenset(str(row[0]) for row in self.database.read(each, values)) for each in (asked, pending))
        return OpenQuestions(*found)

    def next_due(self, now: int) -> int:
        """Return when something happens by itself: a schedule, a timer, the end of a question; 0 if nothing does."""
        owner = self.owner
        rows = self.database.read(_DUE, (owner, now, owner, now, owner, owner, now, owner))
        return int(str(rows[0][0] or 0))

    def beat(self, worker: WorkerRow) -> None:
        """Store a sign of life of a worker, and forget workers that gave none for a day."""
        with quick_transaction(self.database) as transaction:
            known = (worker.process, self.owner, clean(worker.host), worker.pid, clean(worker.queues))
            transaction.write(_BEAT, (*known, worker.started_at, worker.beat_at))
            transaction.write("delete from workers where beat_at < ?", (worker.beat_at - _DAY_MS,))

    def leave(self, process: str) -> None:
        """Forget a worker that ends."""
        with quick_transaction(self.database) as transaction:
            transaction.write("delete from workers where process = ?", (process,))

    def workers(self, now: int) -> tuple[WorkerRow, ...]:
        """Return the workers that gave a sign of life in time."""
        rows = self.database.read(f"{_WORKERS} and beat_at >= ? order by started_at", (self.owner, now - STALE_MS))
        return tuple(WorkerRow(*row) for row in rows)  # type: ignore[arg-type]  # as above
