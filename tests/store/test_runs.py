"""Runs in the store: complete, filtered, and pruned by the retention."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from kiwi_mcp.domain.errors import NotFound, RunNotFound, StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.records import RunRecord, RunStatus
from kiwi_mcp.domain.times import is_run_id, iso, run_id
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import EndedRun, Pruned, RunFilter, RunRetention, Runs, new_run

NOW = 1_769_601_600_000
DAY = 86_400_000
WRITER = """
import sys, time
from hashlib import sha256
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import EndedRun, Runs, new_run

runs = Runs(open_database(sys.argv[1]))
for number in range(int(sys.argv[3])):
    id, at = new_run(time.time_ns() // 1_000_000)
    data = f"{sys.argv[2]} {number}".encode() * 5_000 if number % 5 == 0 else None
    hash = sha256(data).hexdigest() if data else None
    run = RunRecord(id, "say", "success", at, number, "me", "/p", message="m" * 300, result_sha256=hash,
              result_size=len(data) if data else None)
    if data or not runs.record_now([EndedRun(run, None)]):
        runs.add(run, data)
    print(id, flush=True)
"""


@pytest.fixture
def runs(database: Database) -> Runs:
    return Runs(database)


def a_run(
    at: int = NOW, *, tool: str = "say", status: RunStatus = "success", project: str = "/p", noise: int = 1
) -> RunRecord:
    return RunRecord(run_id(at, noise), tool, status, iso(at), 12, "me", project)


def with_result(run: RunRecord, data: bytes) -> RunRecord:
    return replace(run, result_sha256=sha256(data).hexdigest(), result_size=len(data))


def add(runs: Runs, run: RunRecord, data: bytes | None = None) -> RunRecord:
    runs.add(run, data)
    return run


def count(database: Database, table: str) -> int:
    return int(str(database.read(f"select count(*) from {table}")[0][0]))


def test_a_run_is_returned_as_recorded(runs: Runs) -> None:
    run = RunRecord(
        id=run_id(NOW, 7),
        tool_id="say",
        status="error",
        started_at=iso(NOW),
        duration_ms=1_234,
        actor="ana",
        project="/home/ana/äöü 🥝",
        identity="project/local/say@1.0.0",
        digest="a" * 64,
        plan_digest="b" * 64,
        code="execution_failed",
        message="It fell over.",
        exit_code=-9,
        cost_micros=2**40,
        output="say/output_20260128_120000",
    )
    runs.add(run)

    assert runs.get(run.id) == run
    assert run.started_at == "2026-01-28T12:00:00.000Z"


def test_a_run_is_recorded_without_waiting_in_a_file_store(runs: Runs, database: Database) -> None:
    run = a_run()

    assert runs.record_now([EndedRun(run, None)]) is database.is_embedded
    assert count(database, "runs") == int(database.is_embedded)


def test_a_run_that_meets_another_writer_is_added_afterwards(sqlite_url: str) -> None:
    database, other = open_database(sqlite_url), open_database(sqlite_url)
    runs = Runs(database)
    with other.transaction() as transaction:
        transaction.write("delete from runs")
        assert not runs.record_now([EndedRun(a_run(), None)])
    runs.add(a_run())

    assert count(database, "runs") == 1
    database.close()
    other.close()


def test_an_id_is_used_once(runs: Runs) -> None:
    run = add(runs, a_run())

    with pytest.raises(StoreUnavailable):
        runs.add(run)


def test_an_id_is_used_once_by_concurrent_writers(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    run = add(Runs(database), a_run())

    with pytest.raises(StoreUnavailable):
        Runs(database).record_now([EndedRun(run, None)])
    database.close()


def test_a_text_that_no_database_can_hold_is_recorded_approximately(runs: Runs) -> None:
    run = replace(a_run(), message="a\0b\ud800" + "c" * 5_000, tool_id="x\0y", project="/\udcff")
    runs.add(run)

    found = runs.get(run.id)
    assert (found.tool_id, found.project, found.message[:4]) == ("x\ufffdy", "/?", "a\ufffdb?")
    assert len(found.message) == 2_000


def test_an_unknown_id_is_not_found(runs: Runs) -> None:
    for wanted in ("", "x", "0" * 25, "8" + "0" * 25, "I" * 26, "\0", "0" * 26):
        with pytest.raises(RunNotFound):
            runs.get(wanted)
        with pytest.raises(RunNotFound):
            runs.result(wanted)


def test_runs_are_listed_by_tool_status_project_and_time(runs: Runs) -> None:
    old = add(runs, a_run(NOW - 3 * DAY))
    failed = add(runs, a_run(NOW - DAY, status="error"))
    other = add(runs, a_run(NOW - 500, tool="sing"))
    away = add(runs, a_run(NOW, project="/q"))

    assert runs.list(RunFilter()) == (away, other, failed, old)
    assert runs.list(RunFilter(tool_id="sing")) == (other,)
    assert runs.list(RunFilter(status="error")) == (failed,)
    assert runs.list(RunFilter(project="/p", tool_id="say")) == (failed, old)
    assert runs.list(RunFilter(since=NOW - DAY)) == (away, other, failed)
    assert runs.list(RunFilter(since=NOW - DAY, until=NOW)) == (other, failed)
    assert runs.list(RunFilter(until=-5)) == ()
    assert runs.list(RunFilter(tool_id="it's \0")) == ()


def test_pages_of_runs_contain_each_run_once(runs: Runs) -> None:
    made = [add(runs, a_run(NOW, noise=noise)).id for noise in range(1, 24)]
    seen: list[str] = []
    for _ in range(10):
        page = runs.list(RunFilter(limit=5, before=seen[-1] if seen else None))
        seen += [run.id for run in page]
        if len(page) < 5:
            break

    assert seen == made[::-1]


def test_a_large_result_is_stored_once(runs: Runs, database: Database) -> None:
    data = b"x" * 100_000
    first, second = (add(runs, with_result(a_run(noise=noise), data), data) for noise in (1, 2))

    assert runs.result(first.id) == runs.result(second.id) == data
    assert count(database, "blobs") == 1


def test_a_run_without_a_large_result_has_none_in_the_store(runs: Runs) -> None:
    with pytest.raises(NotFound):
        runs.result(add(runs, a_run()).id)


def test_a_result_that_changed_in_the_store_is_not_returned(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    runs = Runs(database)
    run = add(runs, with_result(a_run(), b"right"), b"right")
    with database.transaction() as transaction:
        transaction.write("drop trigger blobs_never_change")
        transaction.write("update blobs set content = ?", (b"wrong",))

    with pytest.raises(StoreDamaged):
        runs.result(run.id)
    database.close()


def test_the_oldest_runs_are_removed_by_number_and_by_age(database: Database) -> None:
    runs = Runs(database, retention=RunRetention(count=4, days=10))
    kept = [add(runs, a_run(NOW - number * 1_000)).id for number in range(4)]
    for number in range(5, 9):
        add(runs, a_run(NOW - number * 1_000))

    assert runs.prune(NOW) == Pruned(4, 0)
    assert [run.id for run in runs.list(RunFilter())] == kept
    assert runs.prune(NOW) == Pruned()
    assert runs.prune(NOW + 11 * DAY) == Pruned(4, 0)
    assert runs.list(RunFilter()) == ()


def test_a_result_is_removed_with_its_last_run(database: Database) -> None:
    runs = Runs(database, retention=RunRetention(days=10))
    shared, own = b"shared" * 20_000, b"own" * 30_000
    add(runs, with_result(a_run(NOW - 20 * DAY), shared), shared)
    add(runs, with_result(a_run(NOW - 19 * DAY), own), own)
    newest = add(runs, with_result(a_run(NOW), shared), shared)

    assert runs.prune(NOW) == Pruned(2, 1)
    assert runs.result(newest.id) == shared
    assert count(database, "blobs") == 1


def test_a_result_that_is_also_a_file_of_a_published_version_stays(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    runs, data = Runs(database, retention=RunRetention(days=10)), b"both" * 30_000
    run = add(runs, with_result(a_run(NOW - 20 * DAY), data), data)
    with database.transaction() as transaction:
        transaction.write("pragma defer_foreign_keys = on")
        transaction.write("drop trigger files_come_before_their_version")
        transaction.write("insert into tools (id, tool_id, tool_type, executor_id) values ('t', 'x', 'script', 'y')")
        digest = f"sha256:{'0' * 64}"
        transaction.write(
            "insert into tool_versions (id, tool_id, version, version_key, place, manifest, manifest_canon,"
            " content_hash, closure_hash, depth, published_by, created_at, sealed_at)"
            " values ('v', 't', '1.0.0', 'k', 'tools/x.py', '{}', '{}', ?, ?, 1, 'me', '', '')",
            (digest, digest),
        )
        transaction.write(
            "insert into tool_version_files (id, tool_version_id, path, sha256, size_bytes, storage_key, created_at)"
            " values ('f', 'v', 'x.bin', ?, ?, ?, '')",
            (run.result_sha256, len(data), f"sha256:{run.result_sha256}"),
        )

    assert runs.prune(NOW) == Pruned(1, 0)
    assert count(database, "blobs") == 1
    database.close()


def test_large_results_over_the_budget_are_removed_and_their_runs_stay(database: Database) -> None:
    runs = Runs(database, retention=RunRetention(result_bytes=250_000))
    made = []
    for number in range(4):
        data = bytes([number]) * 100_000
        made.append(add(runs, with_result(a_run(NOW + number), data), data))

    assert runs.prune(NOW) == Pruned(0, 2)
    assert [run.result_sha256 for run in runs.list(RunFilter())] == [
        made[3].result_sha256,
        made[2].result_sha256,
        None,
        None,
    ]
    assert runs.get(made[0].id).result_size == 100_000
    assert count(database, "blobs") == 2


def test_runs_are_pruned_automatically(database: Database) -> None:
    runs = Runs(database, retention=RunRetention(count=2, days=36_500))
    for noise in range(1, 7):
        runs.add(a_run(noise=noise))
    due = replace(a_run(NOW + 1), id=f"{run_id(NOW + 1, 0)}")

    assert due.id.endswith("00")
    assert not runs.record_now([EndedRun(due, None)])
    runs.add(due)
    assert count(database, "runs") == 2


def test_one_pruning_step_is_bounded(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    runs = Runs(database, retention=RunRetention(count=1))
    words = RunRecord.__struct_fields__
    with database.transaction() as transaction:
        transaction.insert("runs", words, [astuple(a_run(noise=noise)) for noise in range(2_500)])

    assert [runs.prune(NOW).runs for _ in range(3)] == [2_000, 499, 0]
    database.close()


def test_every_status_is_recorded(runs: Runs) -> None:
    for noise, status in enumerate(get_args(RunStatus), start=1):
        run = add(runs, a_run(status=status, noise=noise))

        assert runs.list(RunFilter(status=status)) == (run,)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**48 - 1), st.integers(0, 2**80 - 1)), min_size=2, max_size=5))
def test_ids_are_ordered_by_time(moments: list[tuple[int, int]]) -> None:
    ids = [run_id(*moment) for moment in moments]

    assert all(is_run_id(one) for one in ids)
    assert sorted(ids) == [run_id(*moment) for moment in sorted(moments)]


def test_ids_of_one_process_increase() -> None:
    ids = [new_run(NOW + 10**6 - number // 100)[0] for number in range(1_000)]

    assert ids == sorted(set(ids))


@pytest.fixture
def start(store_url: str) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start a process that records a number of runs and prints their ids; none outlives the test."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with ExitStack() as stack:

        def begin(times: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", WRITER, store_url, str(times), str(times)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def check(database: Database, acknowledged: list[str]) -> None:
    runs = Runs(database)
    found = {run.id: run for run in runs.list(RunFilter(limit=10_000))}
    assert set(acknowledged) <= set(found)
    for run in found.values():
        assert (run.message, run.tool_id, run.status) == ("m" * 300, "say", "success")
        if run.result_sha256:
            assert len(runs.result(run.id)) == run.result_size


@pytest.mark.usefixtures("processes")
def test_writers_in_several_processes_lose_nothing(
    database: Database, start: Callable[[int], subprocess.Popen[str]]
) -> None:
    writers = [start(60) for _ in range(3)]
    acknowledged = [line for writer in writers for line in writer.communicate(timeout=60)[0].split()]

    assert len(set(acknowledged)) == len(acknowledged) == 180
    check(database, acknowledged)
    assert count(database, "runs") == 180


@pytest.mark.usefixtures("processes")
def test_a_killed_recorder_leaves_only_whole_runs(
    database: Database, start: Callable[[int], subprocess.Popen[str]]
) -> None:
    acknowledged: list[str] = []
    for writer in [start(100_000) for _ in range(3)]:
        assert writer.stdout
        acknowledged += [writer.stdout.readline().strip() for _ in range(40)]
        writer.kill()
        # What was said was written before; the last line may be cut short.
        acknowledged += [line for line in writer.communicate(timeout=60)[0].split("\n")[:-1] if is_run_id(line)]

    check(database, acknowledged)


def test_no_file_is_left_beside_the_store(tmp_path: Path, sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    add(Runs(database), a_run())
    database.close()

    assert [path.name for path in (tmp_path / "store").iterdir()] == ["registry.db"]


def test_an_actor_sees_only_their_own_runs(database: Database) -> None:
    for noise, actor in enumerate(("ada", "eve"), start=1):
        Runs(database).add(replace(a_run(noise=noise), actor=actor))
    ada = Runs(database, actor="ada")
    (mine,) = ada.list(RunFilter())
    (theirs,) = Runs(database, actor="eve").list(RunFilter())
    assert (mine.actor, theirs.actor) == ("ada", "eve")
    assert ada.get(mine.id) == mine
    with pytest.raises(RunNotFound):
        ada.get(theirs.id)
