"""Receipts are one hash chain, and any later change is detected."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.records import Receipt, ReceiptHead, RunRecord
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.store.database import Database, IntegrityFault
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import ReceiptFilter, Receipts, ReceiptSummary
from kiwi_mcp.store.runs import EndedRun, RunFilter, RunRetention, Runs

Begin = Callable[..., subprocess.Popen[str]]
SEVERAL = 5


def receipt(number: int = 1, **words: str) -> Receipt:
    moment = 1_700_000_000_000 + number
    made = Receipt(
        run_id(moment, number),
        iso(moment),
        "ana",
        "cli",
        "run",
        f"tool_{number}",
        "success",
        "standard",
        outcome_sha256="0" * 64,
    )
    return replace(made, **words)


@pytest.fixture
def receipts(database: Database) -> Receipts:
    """A chain of five."""
    chain = Receipts(database)
    for number in range(1, SEVERAL + 1):
        chain.add(receipt(number))
    return chain


def tamper(database: Database, *statements: str) -> None:
    """Change the store as an attacker with access to the database can: without the triggers."""
    before, after = {
        "sqlite": ("drop trigger receipts_never_change; drop trigger receipts_stay;", ""),
        "postgres": ("alter table receipts disable trigger all;", "alter table receipts enable trigger all;"),
    }[database.dialect]
    with database.transaction() as transaction:
        transaction.run_script(before)
        for statement in statements:
            transaction.write(statement)
        transaction.run_script(after)


def faults(receipts: Receipts) -> list[tuple[str, str]]:
    return [(issue.place, issue.reason) for issue in receipts.verify(20)[1]]


def test_an_untouched_chain_is_valid(receipts: Receipts) -> None:
    head, issues = receipts.verify(20)
    assert issues == []
    assert head == receipts.settled_head()
    assert head.count == SEVERAL
    entries = receipts.after(0, 100)
    assert [entry.seq for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[0].previous == ReceiptHead().hash
    assert all(later.previous == earlier.hash for earlier, later in pairwise(entries))


@pytest.mark.case("DB-08")
@pytest.mark.parametrize(
    "column", ["id", "at", "actor", "surface", "action", "item", "status", "code", "identity", "digest", "plan_digest"]
)
def test_an_edited_text_is_detected(receipts: Receipts, database: Database, column: str) -> None:
    tamper(database, f"update receipts set {column} = 'mallory' where seq = 3")
    assert faults(receipts) == [("receipt 3", "it was changed after it was written")]


@pytest.mark.case("DB-08")
def test_an_edited_number_is_detected(receipts: Receipts, database: Database) -> None:
    tamper(database, "update receipts set cost_micros = 1 where seq = 1")
    assert faults(receipts) == [("receipt 1", "it was changed after it was written")]


@pytest.mark.case("DB-08")
def test_an_edit_with_a_new_hash_is_detected_by_the_next_receipt(receipts: Receipts, database: Database) -> None:
    entry = receipts.required("3")
    other = Receipts(database)
    tamper(database, f"update receipts set hash = '{'a' * 64}' where seq = 3")
    assert faults(other) == [
        ("receipt 3", "it was changed after it was written"),
        ("receipt 4", "it does not follow the one before it"),
    ]
    assert entry.hash != "a" * 64


@pytest.mark.case("DB-08")
@pytest.mark.parametrize(
    ("gone", "place"), [("= 1", "receipt 1"), ("= 3", "receipt 3"), ("in (2, 3, 4)", "receipts 2 to 4")]
)
def test_a_removed_receipt_is_detected(receipts: Receipts, database: Database, gone: str, place: str) -> None:
    tamper(database, f"delete from receipts where seq {gone}")
    assert faults(receipts) == [(place, "removed from the chain")]


@pytest.mark.case("DB-08")
def test_two_swapped_receipts_are_detected(receipts: Receipts, database: Database) -> None:
    tamper(
        database,
        "update receipts set seq = 100 where seq = 2",
        "update receipts set seq = 2 where seq = 3",
        "update receipts set seq = 3 where seq = 100",
    )
    assert {place for place, _ in faults(receipts)} == {"receipt 2", "receipt 3", "receipt 4"}


@pytest.mark.case("DB-08")
def test_an_inserted_receipt_is_detected(receipts: Receipts, database: Database) -> None:
    tamper(
        database,
        "update receipts set seq = seq + 10 where seq > 2",
        "update receipts set seq = seq - 9 where seq > 10",
        "insert into receipts select 3, id, at, actor, surface, action, item, status, level, code, identity, digest,"
        " plan_digest, verdict, arguments_sha256, outcome_sha256, duration_ms, cost_micros, detail, previous, hash"
        " from receipts where seq = 2",
    )
    assert ("receipt 3", "it does not follow the one before it") in faults(receipts)


def test_a_truncation_is_detected_by_the_stored_end(receipts: Receipts, database: Database) -> None:
    head = receipts.settled_head()
    assert receipts.holds(head)
    receipts.add(receipt(6))
    assert receipts.holds(head)
    tamper(database, "delete from receipts where seq >= 5")
    assert faults(receipts) == []
    assert not receipts.holds(head)


def test_the_store_refuses_to_change_or_remove_a_receipt(receipts: Receipts, database: Database) -> None:
    for statement in ("update receipts set actor = 'eve'", "delete from receipts"):
        with pytest.raises(IntegrityFault), database.transaction() as transaction:
            transaction.write(statement)
    assert faults(receipts) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(words=st.lists(st.text(), min_size=1, max_size=4))
def test_any_text_makes_a_valid_receipt(sqlite_url: str, words: list[str]) -> None:
    database = open_database(sqlite_url)
    chain = Receipts(database)
    for word in words:
        chain.add(receipt(item=word, detail=word * 3))
    assert faults(chain) == []
    database.close()


def test_unusual_texts_verify_on_every_database(database: Database) -> None:
    chain = Receipts(database)
    for word in ("\0", "\ud800", "é" * 5_000, "\x7f\x1f\u2028", '"\\', "😀", "\r\n\t"):
        chain.add(receipt(item=word, actor=word))
    assert faults(chain) == []


def test_a_run_and_its_receipt_are_written_together(database: Database) -> None:
    runs, chain = Runs(database), Receipts(database)
    first, second = receipt(1), receipt(2)
    runs.add(run_of(first), None, first)
    assert runs.record_now([EndedRun(run_of(second), second)]) is database.is_embedded
    assert [entry.receipt.id for entry in chain.after(0, 9)] == [first.id, *[second.id] * database.is_embedded]
    with pytest.raises(Exception, match="refused"):  # the run is there already, so neither is written again
        runs.add(run_of(first), None, first)
    assert len(chain.after(0, 9)) == 1 + database.is_embedded
    assert faults(chain) == []


def run_of(one: Receipt) -> RunRecord:
    return RunRecord(one.id, one.item, "success", one.at, 1, one.actor, "/p")


def test_receipts_stay_when_runs_are_removed(database: Database) -> None:
    runs, chain = Runs(database, retention=RunRetention(count=1, days=1)), Receipts(database)
    for number in range(3):
        one = receipt(number)
        runs.add(run_of(one), None, one)
    runs.prune(1_800_000_000_000)
    assert runs.list(RunFilter()) == ()
    assert len(chain.after(0, 9)) == 3
    assert faults(chain) == []


def test_a_list_matches_its_filter(database: Database) -> None:
    chain = Receipts(database)
    for number, words in enumerate(({"actor": "eve"}, {"item": "mail"}, {"action": "sign"}, {"status": "refused"})):
        chain.add(receipt(number, **words))

    def found(wanted: ReceiptFilter) -> list[int]:
        return [entry.seq for entry in chain.list(wanted)]

    assert found(ReceiptFilter()) == [4, 3, 2, 1]
    assert found(ReceiptFilter(actor="eve")) == [1]
    assert found(ReceiptFilter(item="mail")) == [2]
    assert found(ReceiptFilter(action="sign")) == [3]
    assert found(ReceiptFilter(status="refused")) == [4]
    assert found(ReceiptFilter(since=1_700_000_000_002)) == [4, 3]
    assert found(ReceiptFilter(until=1_700_000_000_001, limit=9)) == [1]
    assert found(ReceiptFilter(before=3, limit=1)) == [2]


def test_a_receipt_is_found_by_number_id_or_prefix(receipts: Receipts) -> None:
    entry = receipts.required("2")
    assert receipts.required(entry.receipt.id) == entry
    assert receipts.required(entry.receipt.id[:20].lower()) == entry
    for name in ("99", "9" * 40, "nobody", "", "0", "\0", "²"):
        with pytest.raises(NotFound):
            receipts.required(name)


WRITER = """
import sys
from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import EndedRun, Runs, new_run
database = open_database(sys.argv[1])
runs = Runs(database)
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    made, at = new_run(1_700_000_000_000 + number)
    run = RunRecord(made, "say", "success", at, 1, sys.argv[2], "/p")
    receipt = Receipt(made, at, sys.argv[2], "cli", "run", "say", "success", "standard")
    if not runs.record_now([EndedRun(run, receipt)]):
        runs.add(run, None, receipt)
    print(made, flush=True)
database.close()
"""


def test_eight_writers_make_one_chain(store_url: str, begin: Begin) -> None:
    open_database(store_url).close()
    writers = [begin(WRITER, store_url, f"writer_{number}", "24") for number in range(8)]
    response = [writer.communicate(timeout=120) for writer in writers]
    assert [error for _, error in response if error] == []
    database = open_database(store_url)
    chain = Receipts(database)
    head, issues = chain.verify(20)
    assert (head.count, issues) == (8 * 24, [])
    acknowledged = {line for said, _ in response for line in said.split() if line != "ready"}
    assert acknowledged == {entry.receipt.id for entry in chain.after(0, 1_000)}
    database.close()


@pytest.mark.case("DB-01")
def test_acknowledged_receipts_survive_kill_9(store_url: str, begin: Begin) -> None:
    open_database(store_url).close()
    writer = begin(WRITER, store_url, "ana", "100000")
    assert writer.stdout
    seen = [writer.stdout.readline().strip() for _ in range(40)][1:]
    writer.kill()
    rest, _ = writer.communicate(timeout=120)
    database = open_database(store_url)
    chain = Receipts(database)
    head, issues = chain.verify(20)
    kept = [entry.receipt.id for entry in chain.after(0, 100_000)]
    assert issues == []
    assert {*seen, *rest.split("\n")[:-1]} <= {*kept}
    assert head.count == len(kept)
    database.close()


def test_a_summary_shows_the_newest_receipts_in_order_and_reads_no_others(receipts: Receipts) -> None:
    assert [one.item for one in receipts.glance(3)] == ["tool_3", "tool_4", "tool_5"]
    assert receipts.glance(1) == (ReceiptSummary(receipt(5).at, "ana", "cli", "run", "tool_5", ""),)
    assert len(receipts.glance(1_000)) == SEVERAL


def test_a_summary_uses_the_names_of_the_filter(receipts: Receipts) -> None:
    actors = ("ben", "oauth:ben", "token:ben:7", "token:ben", "token:benno:7", "oauth:benno", "Ben", "benno")
    for number, actor in enumerate(actors, start=SEVERAL + 1):
        receipts.add(receipt(number, actor=actor))
    for name in ("ana", "ben", "benno", "b", ""):
        listed = {entry.receipt.actor for entry in receipts.list(ReceiptFilter(actor=name, limit=100))}
        assert {one.actor for one in receipts.glance(1_000) if one.is_of(name)} == listed
