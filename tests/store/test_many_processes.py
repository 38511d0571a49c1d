"""Four processes that write to one store concurrently: nothing is lost and no writer gets a busy error."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.records import ReceiptHead
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import ReceiptFilter, Receipts
from kiwi_mcp.store.runs import RunFilter, RunRetention, Runs

Begin = Callable[..., subprocess.Popen[str]]
WRITER = """
import sys, time
from pathlib import Path
from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import EndedRun, RunRetention, Runs, new_run

database = open_database(sys.argv[1])
runs = Runs(database, retention=RunRetention(count=1_000_000))
print("ready", flush=True)
end = time.monotonic() + 120
while not Path(sys.argv[3]).exists() and time.monotonic() < end:
    time.sleep(0.002)
slowest = 0.0
for number in range(200):
    id_, at = new_run(time.time_ns() // 1_000_000)
    run = RunRecord(id_, f"tool_{number}", "success", at, 1, sys.argv[2], "/somewhere")
    receipt = Receipt(
        id=id_, at=at, actor=sys.argv[2], surface="cli", action="run", item=run.tool_id, status="success",
        level="standard",
    )
    begun = time.monotonic()
    if not runs.record_now([EndedRun(run, receipt)]):
        runs.add(run, None, receipt)
    slowest = max(slowest, time.monotonic() - begun)
database.close()
print(slowest)
"""


@pytest.mark.case("DB-02")
def test_four_processes_that_write_two_hundred_times_each_lose_nothing(
    new_url: Callable[[], str], begin: Begin, tmp_path: Path
) -> None:
    url, go = new_url(), tmp_path / "go"
    open_database(url).close()
    writers = [begin(WRITER, url, f"writer_{number}", str(go)) for number in range(4)]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    go.touch()
    response = [writer.communicate(timeout=100) for writer in writers]

    assert [(writer.returncode, error) for writer, (_, error) in zip(writers, response, strict=True)] == [(0, "")] * 4
    assert max(float(said) for said, _ in response) < 10
    database = open_database(url)
    found = Runs(database, retention=RunRetention(count=1_000_000)).list(RunFilter(limit=10_000))
    assert len({run.id for run in found}) == 800
    for number in range(4):
        assert {run.tool_id for run in found if run.actor == f"writer_{number}"} == {f"tool_{n}" for n in range(200)}
    receipts = Receipts(database)
    head, issues = receipts.verify(10)
    assert (head.count, [*issues]) == (800, [])
    entries = receipts.list(ReceiptFilter(limit=10_000))
    assert [entry.seq for entry in entries] == [*range(800, 0, -1)]
    assert entries[-1].previous == ReceiptHead().hash
    database.close()
