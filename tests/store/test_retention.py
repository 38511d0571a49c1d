"""Run retention in a shared store: each actor keeps what they chose."""

from __future__ import annotations

from hashlib import sha256

from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.runs import Pruned, RunFilter, RunRetention, Runs

NOW = 1_769_601_600_000
DAY = 86_400_000
LARGE = b"large" * 1_000


def a_run(actor: str, number: int, data: bytes | None = None, at: int = NOW) -> RunRecord:
    hash_, size = (sha256(data).hexdigest(), len(data)) if data else (None, None)
    id_ = run_id(at + number, 7)
    return RunRecord(id_, "say", "success", iso(at + number), 1, actor, "/p", result_sha256=hash_, result_size=size)


def count(runs: Runs) -> int:
    return len(runs.list(RunFilter(limit=1_000)))


def test_a_small_retention_of_one_actor_keeps_the_runs_of_others(database: Database) -> None:
    ann = Runs(database, actor="ann")
    bob = Runs(database, actor="bob", retention=RunRetention(count=1, days=1))
    for number in range(10):
        for runs, actor in ((ann, "ann"), (bob, "bob")):
            runs.add(a_run(actor, 2 * number + (actor == "bob"), at=NOW - 5 * DAY))

    assert bob.prune(NOW) == Pruned(runs=10)
    assert (count(ann), count(bob)) == (10, 0)
    assert ann.prune(NOW) == Pruned()
    assert count(ann) == 10


def test_a_large_result_shared_by_two_actors_is_removed_from_one(database: Database) -> None:
    ann, bob = Runs(database, actor="ann"), Runs(database, actor="bob", retention=RunRetention(result_bytes=0))
    theirs, own = a_run("ann", 1, LARGE), a_run("bob", 2, LARGE)
    ann.add(theirs, LARGE)
    bob.add(own, LARGE)

    assert bob.prune(NOW) == Pruned()  # the result itself stays, as another run needs it
    assert ann.result(theirs.id) == LARGE
    assert bob.get(own.id).result_sha256 is None
