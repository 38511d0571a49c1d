"""Calls that are stored before they start: how they end, and what happens if their kernel disappears."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.domain.records import Approval, Receipt, RunRecord
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.kernel_lock import FOLDER, KernelLock
from kiwi_mcp.store.receipts import Receipts, close_abandoned
from kiwi_mcp.store.runs import EndedRun, Runs, new_run

Begin = Callable[..., subprocess.Popen[str]]
HOLD = """
import sys, time
from pathlib import Path
from kiwi_mcp.store.kernel_lock import KernelLock
lock = KernelLock(Path(sys.argv[1]))
print(lock.name(), flush=True)
time.sleep(60)
"""


def a_run(status: str = "started") -> tuple[RunRecord, Receipt]:
    id_, at = new_run(1_700_000_000_000)
    run = RunRecord(id_, "say", "started", at, 0, "me", "/p", plan_digest="d" * 64)
    receipt = Receipt(id_, at, "me", "cli", "run", "say", "started", "standard", plan_digest="d" * 64)
    return replace(run, status=status), replace(receipt, status=status)


def test_a_started_run_is_finished_in_place(database: Database) -> None:
    runs, (run, receipt) = Runs(database), a_run()
    runs.begin(run, receipt, "home/kernel")
    assert runs.get(run.id).status == "started"
    assert Receipts(database).after(0, 10) == ()

    done = replace(run, status="success", duration_ms=5)
    runs.finish(EndedRun(done, replace(receipt, status="success"), is_begun=True), None)
    assert runs.get(run.id) == done
    assert [entry.receipt.status for entry in Receipts(database).after(0, 10)] == ["success"]
    close_abandoned(database, lambda _: True)
    assert runs.get(run.id) == done


def test_a_run_of_a_lost_kernel_becomes_unknown_once(database: Database) -> None:
    runs, (run, receipt) = Runs(database), a_run()
    runs.begin(run, receipt, "home/kernel")
    close_abandoned(database, lambda _: False)
    assert runs.get(run.id).status == "started"
    for _ in range(2):
        close_abandoned(database, lambda _: True)
    assert (runs.get(run.id).status, runs.get(run.id).code) == ("unknown", "unknown")
    (entry,) = Receipts(database).after(0, 10)
    assert (entry.receipt.id, entry.receipt.status) == (run.id, "unknown")
    assert Receipts(database).verify(10)[1] == []


def test_a_call_without_a_run_has_one_receipt(database: Database) -> None:
    receipts, (_, done), (_, lost) = Receipts(database), a_run(), a_run()
    for receipt in (done, lost):
        receipts.begin(receipt, "home/kernel")
    receipts.finish(replace(done, status="success"))
    close_abandoned(database, lambda _: True)
    found = {entry.receipt.id: entry.receipt.status for entry in receipts.after(0, 10)}
    assert found == {done.id: "success", lost.id: "unknown"}


@pytest.mark.parametrize(("status", "is_unfinished"), [("started", True), ("unknown", True), ("success", False)])
def test_an_approval_used_by_a_run_warns_until_the_run_has_ended(
    database: Database, status: str, is_unfinished: bool
) -> None:
    approvals, (run, _) = Approvals(database, "me"), a_run(status)
    question = Approval(new_run(1)[0], "d" * 64, "me", "/p", "project/local/say@1.0.0", ("x",), {}, "", 1, 10_000)
    approvals.accept(approvals.ask(question), run.id, by="me", how="cli", now=2)
    assert approvals.unfinished(question) == run.id
    Runs(database).add(run)
    assert approvals.unfinished(question) == (run.id if is_unfinished else "")


def test_a_kernel_is_gone_only_when_its_process_was_killed(tmp_path: Path, begin: Begin) -> None:
    process = begin(HOLD, str(tmp_path))
    assert process.stdout
    name = process.stdout.readline().strip()
    lock = KernelLock(tmp_path)
    assert not lock.is_gone(name)
    process.kill()
    process.wait(120)
    assert lock.is_gone(name)
    assert lock.is_gone(name)


def test_a_kernel_does_not_check_itself_or_kernels_of_another_folder(tmp_path: Path) -> None:
    here, there = KernelLock(tmp_path / "here"), KernelLock(tmp_path / "there")
    assert not here.is_gone(there.name())
    assert not here.is_gone(here.name())
    name = here.name()
    here.close()
    assert KernelLock(tmp_path / "here").is_gone(name)
    there.close()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FOLDER).parent.write_text("a file")
    with pytest.raises(StoreUnavailable):
        KernelLock(tmp_path).name()
