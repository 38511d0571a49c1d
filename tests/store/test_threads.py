"""Threads in the store: leases, journals that verify, tool calls, questions and what is erased."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from secrets import randbits

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from kiwi_mcp.domain.errors import (
    BudgetExceeded,
    Conflict,
    LeaseLost,
    ThreadEnded,
    ThreadNotFound,
    ThreadTaken,
)
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.records import RunRecord
from kiwi_mcp.domain.threads import (
    DayLimits,
    NewEvent,
    Thread,
    ThreadChanges,
    ThreadLimits,
    ThreadQuestion,
    ThreadUsage,
)
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.store.budget import Budget, Reservation, settle
from kiwi_mcp.store.database import Database, IntegrityFault, Transaction
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.runs import Runs
from kiwi_mcp.store.threads import (
    STALE_MS,
    Questions,
    ThreadDelta,
    ThreadFilter,
    Threads,
    append_in,
    ask,
)

NOW = 1_769_601_600_000
DAY = 86_400_000
EVENT = NewEvent("hooked", {"hook": "x"})
WRITER = """
import sys
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.threads import Threads

threads = Threads(open_database(sys.argv[1]))
thread = threads.take(sys.argv[2], "writer", 10**13)
while True:
    body = {"text": "x" * (20_000 if thread.seq % 7 == 0 else 200)}
    thread = threads.append(thread, [NewEvent("hooked", body)] * 2, ThreadChanges(tool_calls=1))
    print(thread.seq, flush=True)
"""


@pytest.fixture
def threads(database: Database) -> Threads:
    return Threads(database)


def a_thread(at: int = NOW, **fields: object) -> Thread:
    made = Thread(
        run_id(at, randbits(80)),
        "thread",
        "user/local/work",
        "user/local/work@1.0.0",
        "d" * 64,
        "",
        "/p",
        ThreadLimits(),
        at,
    )
    return replace(made, **fields)


def started(threads: Threads, **fields: object) -> Thread:
    thread = threads.create(a_thread(**fields), [NewEvent("created", {"by": "cli"})])  # type: ignore[arg-type]
    return threads.take(thread.id, "me", NOW)


def ended(threads: Threads, thread: Thread, result: Json = "done") -> Thread:
    changes = ThreadChanges(status="completed", finish_reason="stop", result=result, message="It is done.")
    return threads.append(thread, [NewEvent("returned", {"result": result}), NewEvent("ended", {})], changes)


def count(database: Database, table: str) -> int:
    return int(str(database.read(f"select count(*) from {table}")[0][0]))


def test_a_thread_is_returned_as_stored(threads: Threads) -> None:
    thread = a_thread(
        kind="conversation",
        starter="ana",
        project="/home/ana/äöü 🥝",
        rights={"execute": ["a", "b"]},
        inputs={"topic": "kiwis \0 \ud800"},
        model="local/tiny",
        is_tainted=True,
        status="waiting",
        waits_for="start",
        limits=ThreadLimits(turns=3, tokens=10, spend=2**40, seconds=1.5, on_exceeded="escalate"),
    )
    made = threads.create(thread, [NewEvent("created", {})])

    assert threads.get(made.id) == made
    assert made == replace(thread, root_id=thread.id, seq=1, head=made.head, updated_at=NOW)
    assert threads.verify(made.id) == ()


def test_a_thread_is_found_by_the_beginning_of_its_id(threads: Threads) -> None:
    first, second = (threads.create(a_thread(at), [EVENT]) for at in (NOW, NOW + 10**9))

    assert threads.get(second.id[:8].lower()) == second
    for wanted in (first.id[:2], "", "x", "\0", first.id + "0", "[", "it's"):
        with pytest.raises(ThreadNotFound) as refused:
            threads.get(wanted)
        assert "kiwi thread list" in refused.value.suggestion


def test_threads_of_another_owner_are_not_found(database: Database) -> None:
    own, other = Threads(database, "ana"), Threads(database, "bob")
    thread = own.create(a_thread(), [EVENT])

    assert own.list(ThreadFilter()) == (thread,)
    assert other.list(ThreadFilter()) == ()
    with pytest.raises(ThreadNotFound):
        other.get(thread.id)
    with pytest.raises(ThreadNotFound):
        other.verify(thread.id)


def test_threads_are_listed_by_filter(threads: Threads) -> None:
    old = threads.create(a_thread(NOW - 3 * DAY, directive="other"), [EVENT])
    root = started(threads, starter="ana")
    root, child = threads.spawn(
        root, a_thread(NOW + 5, limits=ThreadLimits(spend=1, tokens=1)), [EVENT], [NewEvent("spawned", {})]
    )

    assert threads.list(ThreadFilter()) == (child, root, old)
    assert threads.list(ThreadFilter(directive="other")) == (old,)
    assert threads.list(ThreadFilter(starter="ana")) == (child, root)
    assert threads.list(ThreadFilter(parent_id=root.id)) == (child,)
    assert threads.list(ThreadFilter(root_id=root.id)) == (child, root)
    assert threads.list(ThreadFilter(status="running")) == ()
    assert threads.list(ThreadFilter(since=NOW)) == (child, root)
    assert threads.list(ThreadFilter(until=NOW)) == (old,)
    assert threads.list(ThreadFilter(before=child.id, limit=1)) == (root,)


def test_a_lease_is_taken_once_until_it_is_stale(threads: Threads) -> None:
    thread = threads.create(a_thread(), [EVENT])
    first = threads.take(thread.id, "one", NOW)

    with pytest.raises(ThreadTaken):
        threads.take(thread.id, "two", NOW + STALE_MS)
    assert threads.beat([thread.id], "one", NOW + STALE_MS) == {thread.id: ""}
    with pytest.raises(ThreadTaken):
        threads.take(thread.id, "two", NOW + 2 * STALE_MS)
    second = threads.take(thread.id, "two", NOW + 2 * STALE_MS + 1)

    assert (first.lease, second.lease) == (1, 2)
    assert threads.beat([thread.id], "one", NOW) == {}
    threads.release(first)
    with pytest.raises(ThreadTaken):
        threads.take(thread.id, "three", NOW + 2 * STALE_MS + 1)
    threads.release(second)
    assert threads.take(thread.id, "three", NOW).lease == 3


def test_an_unknown_thread_is_not_taken(threads: Threads) -> None:
    for act in (lambda: threads.take("x", "me", NOW), lambda: threads.command("x", "pause")):
        with pytest.raises(ThreadNotFound):
            act()


def everything(database: Database) -> Sequence[object]:
    tables = ("threads", "thread_events", "thread_blobs", "blobs", "budget_ledger", "budget_days",
              "questions", "runs", "thread_deltas")  # fmt: skip
    return [sorted(database.read(f"select * from {table}"), key=str) for table in tables]


@pytest.mark.req("K-TH-08")
def test_a_process_with_a_stale_lease_writes_nothing(threads: Threads, database: Database) -> None:
    old = started(threads)
    budget, days = Budget(database), DayLimits()
    reserved = budget.reserve(old, 1, 100, 100, day_limits=days)
    assert isinstance(reserved, Reservation)
    new = threads.take(old.id, "other", NOW + STALE_MS + 1)
    before = everything(database)

    def write(transaction: Transaction) -> None:
        settle(transaction, reserved, 50, ThreadUsage(input_tokens=5))

    with pytest.raises(LeaseLost):
        threads.append(old, [NewEvent("model", {"text": "x" * 50_000})], ThreadChanges(turns=1), also=write)
    with pytest.raises(LeaseLost):
        ended(threads, old, "y" * 50_000)
    with pytest.raises(LeaseLost):
        threads.spawn(old, a_thread(limits=ThreadLimits(spend=1, tokens=1)), [EVENT], [EVENT])
    with pytest.raises(LeaseLost):
        budget.reserve(old, 1, 1, 1, day_limits=days)
    threads.add_deltas(old, 0, ["late"])
    threads.release(old)

    assert everything(database) == before
    assert threads.append(new, [EVENT]).seq == 2


def test_an_append_comes_after_the_last_event_of_the_same_process(threads: Threads) -> None:
    thread = started(threads)
    newer = threads.append(thread, [EVENT])

    assert threads.append(thread, [EVENT]).seq == 3  # a parallel call knows the row as it was before
    assert threads.append(newer, [EVENT]).seq == 4
    assert threads.verify(thread.id) == ()
    with pytest.raises(ValueError, match="needs an event"):
        threads.append(newer, [])


def test_events_are_returned_as_appended(threads: Threads, database: Database) -> None:
    bodies: list[JsonObject] = [
        {"text": "äöü 🥝 \0 \ud800"}, {"text": "y" * 100_000}, {"b": [1, 2.5, None], "a": {"z": True, "y": {}}}, {},
    ]  # fmt: skip
    thread = started(threads)
    thread = threads.append(thread, [NewEvent("injected", body) for body in bodies], ThreadChanges(turns=2))
    found = threads.events(thread.id, after=1)

    assert [event.body for event in found] == bodies
    assert list(found[2].body) == ["b", "a"]
    assert [event.seq for event in found] == [2, 3, 4, 5]
    assert [event.changes for event in found] == [{}, {}, {}, {"turns": 2}]
    assert found[-1].sha256 == thread.head
    assert threads.events(thread.id, after=2, limit=1) == found[1:2]
    assert count(database, "blobs") == 1


def test_an_append_returns_the_row_that_is_stored(threads: Threads, database: Database) -> None:
    thread = started(threads)
    changes = ThreadChanges(
        status="waiting", waits_for="question", model="a/b", is_tainted=True, turns=1, tool_calls=2,
        limits=ThreadLimits(spend=7_000_000), code="c", message="m \0",
    )  # fmt: skip
    thread = threads.append(thread, [EVENT], changes)

    assert thread == threads.get(thread.id)
    assert (thread.status, thread.waits_for, thread.message) == ("waiting", "question", "m \ufffd")
    assert thread.usage == ThreadUsage(turns=1, tool_calls=2)
    thread = threads.append(thread, [EVENT], ThreadChanges(status="running", turns=1))
    assert (thread.waits_for, thread.usage.turns) == ("", 2)
    done = ended(threads, thread, {"large": "x" * 90_000})
    assert done == threads.get(done.id)
    assert (done.result, done.is_ended, done.lease_owner) == ({"large": "x" * 90_000}, True, "")
    assert threads.verify(done.id) == ()


def test_nothing_is_added_to_a_thread_that_has_ended(threads: Threads) -> None:
    thread = ended(threads, started(threads))

    for act in (
        lambda: threads.append(thread, [EVENT]),
        lambda: threads.take(thread.id, "me", NOW + DAY),
        lambda: threads.command(thread.id, "cancel"),
    ):
        with pytest.raises(ThreadEnded):
            act()


def test_a_failure_beside_an_append_leaves_nothing(threads: Threads, database: Database) -> None:
    thread = started(threads)

    def fail(transaction: Transaction) -> None:
        transaction.write("delete from budget_days")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        threads.append(thread, [EVENT], also=fail)
    assert threads.get(thread.id) == thread


def test_commands_reach_the_process_that_runs_a_thread(threads: Threads) -> None:
    thread = started(threads)
    threads.command(thread.id, "pause")
    thread = threads.append(thread, [EVENT])

    assert thread.command == "pause"
    thread = threads.append(thread, [EVENT], ThreadChanges(status="paused"))
    assert thread.command == ""
    threads.command(thread.id, "cancel")
    threads.command(thread.id, "")
    assert threads.beat([thread.id], "me", NOW) == {thread.id: "cancel"}
    # The process has not seen the command yet: to pause does not take it back.
    assert threads.append(thread, [EVENT], ThreadChanges(status="paused")).command == "cancel"


def test_deltas_go_when_their_model_event_comes(threads: Threads, database: Database) -> None:
    thread = started(threads)
    threads.add_deltas(thread, 0, ["Hel", "lo \0\ud800"])
    threads.add_deltas(thread, 2, ["!"])

    assert threads.deltas(thread.id) == (
        ThreadDelta(2, 0, "Hel"),
        ThreadDelta(2, 1, "lo \0\ud800"),
        ThreadDelta(2, 2, "!"),
    )
    assert threads.deltas(thread.id, after=1) == (ThreadDelta(2, 2, "!"),)
    threads.append(thread, [NewEvent("model", {})])
    assert threads.deltas(thread.id) == ()
    assert count(database, "thread_deltas") == 0


def a_question(thread: Thread, at: int = NOW) -> ThreadQuestion:
    schema: JsonObject = {"type": "object"}
    return ThreadQuestion(run_id(at, randbits(80)), thread.id, "c1", "ask", "Which one? \0", schema, at, at + 7 * DAY)


def test_the_first_answer_to_a_question_holds(threads: Threads, database: Database) -> None:
    questions, thread = Questions(database), started(threads)
    question = a_question(thread)
    threads.append(thread, [NewEvent("asked", {})], also=lambda transaction: ask(transaction, question))

    assert questions.open(NOW) == questions.open(NOW, thread_id=thread.id) == (question,)
    assert questions.open(NOW, root_id=thread.id) == (question,)
    assert questions.open(NOW, thread_id="x") == questions.open(NOW + 8 * DAY) == ()
    answered = questions.answer(question.id, {"one": "\ud800"}, "ana", NOW + 5)
    assert answered == replace(
        question, status="answered", answer={"one": "\ud800"}, answered_by="ana", answered_at=NOW + 5
    )
    assert questions.answer(question.id, "other", "bob", NOW + 6) == answered
    assert questions.get(question.id[:9]) == answered
    assert questions.open(NOW) == ()
    acts: Sequence[Callable[[], object]] = (lambda: questions.get("x"), lambda: questions.answer("x", 1, "ana", NOW))
    for act in acts:
        with pytest.raises(ThreadNotFound):
            act()
    assert Questions(database, "other").of_thread(thread.id) == ()


def test_a_question_expires_or_ends_with_its_thread(threads: Threads, database: Database) -> None:
    questions, thread = Questions(database), started(threads)
    first, second = a_question(thread), a_question(thread, NOW + DAY)

    def write(transaction: Transaction) -> None:
        for question in (first, second, first):
            ask(transaction, question)

    thread = threads.append(thread, [NewEvent("asked", {})], also=write)
    assert questions.answer(first.id, 1, "ana", first.expires_at) == first
    assert questions.expire(first.expires_at) == (replace(first, status="expired"),)
    assert questions.expire(first.expires_at) == ()
    assert questions.answer(first.id, 1, "ana", NOW).status == "expired"
    ended(threads, thread)
    assert [one.status for one in questions.of_thread(thread.id)] == ["expired", "withdrawn"]


def test_the_journal_is_only_added_to(threads: Threads, database: Database) -> None:
    thread = started(threads)
    reserved = Budget(database).reserve(thread, 1, 5, 5, day_limits=DayLimits())
    assert isinstance(reserved, Reservation)
    for statement in (
        "update thread_events set body = '{}'",
        "update thread_events set body = null, kind = 'x'",
        "update thread_events set sha256 = body_sha256",
        "update thread_events set seq = 9",
        "delete from thread_events",
        "update budget_ledger set spend = 0",
        "delete from budget_ledger",
    ):
        with pytest.raises(IntegrityFault, match="only added to"), database.transaction() as transaction:
            transaction.write(statement)
    assert threads.verify(thread.id) == ()


def a_full_thread(database: Database) -> Thread:
    """A thread with everything: a large body, a settled reservation, an ended child, a result."""
    threads, budget = Threads(database), Budget(database)
    thread = started(threads, inputs={"topic": "x"})
    thread = threads.append(
        thread, [NewEvent("prompt", {"text": "y" * 30_000})], ThreadChanges(status="running", model="a/b")
    )
    reserved = budget.reserve(thread, 1, 500, 500, day_limits=DayLimits())
    assert isinstance(reserved, Reservation)
    usage = ThreadUsage(input_tokens=10, cache_read_tokens=20, cache_write_tokens=30, output_tokens=40)
    thread = threads.append(
        thread, [NewEvent("model", {"text": "hi"})], ThreadChanges(turns=1),
        also=lambda transaction: (settle(transaction, reserved, 300, usage), None)[1],
    )  # fmt: skip
    limits = ThreadLimits(spend=1_000, tokens=100)
    thread, child = threads.spawn(thread, a_thread(limits=limits), [EVENT], [NewEvent("spawned", {})])
    ended(threads, threads.take(child.id, "me", NOW))
    return ended(threads, threads.append(thread, [NewEvent("spawned", {})]), {"answer": 42})


TAMPERING = (
    ('update thread_events set body = \'{"text":"no"}\' where seq = 3', "event 3"),
    ("update thread_events set body = null where seq = 3", "event 3"),
    ("update thread_events set kind = 'limit' where seq = 3", "event 3"),
    ("update thread_events set at = at + 1 where seq = 1", "event 1"),
    ("update thread_events set changes = '{\"turns\":9}' where seq = 3", "event 3"),
    ("update thread_events set changes = 'nonsense' where seq = 3", "event 3"),
    ("delete from thread_events where seq = 3", "event 3"),
    ("delete from thread_events where seq = 7", "thread.seq"),
    ("update thread_events set seq = 99 where seq = 7", "event 7"),
    ("update threads set seq = 6", "thread.seq"),
    ("update threads set head = inputs_sha256", "thread.head"),
    ("update threads set status = 'failed'", "thread.status"),
    ("update threads set status = 'running', ended_at = 0", "thread.ended_at"),
    ("update threads set model = 'c/d'", "thread.model"),
    ("update threads set turns = 0", "thread.turns"),
    ("update threads set spawns = 0", "thread.spawns"),
    ("update threads set tool_calls = 1", "thread.tool_calls"),
    ("update threads set spend = 1", "thread.spend"),
    ("update threads set output_tokens = 1", "thread.output_tokens"),
    ("update threads set is_estimated = 1", "thread.is_estimated"),
    ("update threads set reserved = 1", "thread.reserved"),
    ("update threads set reserved_tokens = 1", "thread.reserved_tokens"),
    ("update threads set is_tainted = 1", "thread.is_tainted"),
    ("update threads set spend_limit = 10000000", "thread.spend_limit"),
    ("update threads set limits = '{}'", "thread.limits"),
    ("update threads set rights = '{\"all\":true}'", "thread.row"),
    ("update threads set starter = 'ana'", "thread.row"),
    ("update threads set digest = 'e'", "thread.row"),
    ("update threads set inputs = '{}'", "thread.inputs"),
    ("update threads set inputs = null", "thread.inputs"),
    ("update threads set result = '43'", "thread.result"),
    ("update threads set result = null", "thread.result"),
    ("update threads set message = 'no'", "thread.message"),
    ("update threads set finish_reason = 'limit'", "thread.finish_reason"),
    ("update threads set code = 'x'", "thread.code"),
    ("update budget_ledger set spend = 1 where kind = 'settle'", "thread.spend"),
    ("delete from budget_ledger where kind = 'return'", "thread.reserved"),
    ("update blobs set content = '{}'", "event 2"),
)
GUARDS = (
    ("thread_events", "thread_events_never_change"), ("thread_events", "thread_events_stay"),
    ("budget_ledger", "budget_ledger_never_changes"), ("budget_ledger", "budget_ledger_stays"),
    ("blobs", "blobs_never_change"),
)  # fmt: skip


@pytest.mark.req("K-TH-08")
def test_verify_finds_every_change(database: Database) -> None:
    thread, threads = a_full_thread(database), Threads(database)
    assert thread.seq == 7
    assert threads.verify(thread.id) == ()
    is_server = database.dialect == "postgres"
    with database.transaction() as transaction:
        for table, guard in GUARDS:
            transaction.write(f"drop trigger {guard} {f'on {table}' if is_server else ''}")
    for statement, place in TAMPERING:
        thread = a_full_thread(database)
        change = statement.replace("content = '{}'", "content = cast('{}' as bytea)") if is_server else statement
        if not statement.startswith("update blobs"):
            change += f" {'where id' if ' threads ' in statement else 'and thread_id'} = '{thread.id}'"
        with database.transaction() as transaction:
            assert transaction.write(change), statement
        issues = threads.verify(thread.id)
        assert place in {issue.place for issue in issues}, (statement, issues)


@pytest.mark.req("K-TH-08")
def test_an_erased_thread_still_verifies(database: Database) -> None:
    thread, threads, questions = a_full_thread(database), Threads(database), Questions(database)
    running = started(threads)
    with database.transaction() as transaction:
        ask(transaction, a_question(thread))
    with pytest.raises(Conflict):
        threads.erase(running.id, NOW)
    threads.erase(thread.id, NOW)

    assert threads.verify(thread.id) == ()
    erased = threads.get(thread.id)
    assert (erased.inputs, erased.result, erased.message, erased.usage) == ({}, None, "", thread.usage)
    assert all(event.is_erased and event.body == {} for event in threads.events(thread.id))
    assert [one.message for one in questions.of_thread(thread.id)] == [""]
    assert count(database, "blobs") == 0


def test_a_run_and_an_event_are_written_together(threads: Threads, database: Database) -> None:
    thread = started(threads)
    run = RunRecord(run_id(NOW, 1), "say", "success", iso(NOW), 1, "me", "/p")
    with database.transaction() as transaction:
        transaction.insert("runs", RunRecord.__struct_fields__, [astuple(run)])
        made = append_in(transaction, thread, [NewEvent("result", {"run": run.id})], ThreadChanges(tool_calls=1))

    assert threads.get(thread.id) == threads.current(thread) == made.thread
    assert threads.events(thread.id, thread.seq) == made.events
    assert Runs(database).get(run.id) == run


def test_a_parent_has_a_limited_number_and_depth_of_children(threads: Threads) -> None:
    none = ThreadLimits(spend=0, tokens=0)
    root = started(threads, limits=ThreadLimits(spawns=2, depth=1), is_tainted=True, starter="ana")
    root, child = threads.spawn(root, a_thread(limits=replace(none, depth=9)), [EVENT], [EVENT])
    assert (child.depth, child.limits.depth, child.is_tainted, child.starter) == (1, 1, True, "ana")
    assert (child.parent_id, child.root_id, root.usage.spawns) == (root.id, root.id, 1)
    child = threads.take(child.id, "me", NOW)
    with pytest.raises(BudgetExceeded) as refused:
        threads.spawn(child, a_thread(limits=none), [EVENT], [EVENT])
    assert refused.value.details["limit"] == "depth"
    root, _ = threads.spawn(root, a_thread(limits=none), [EVENT], [EVENT])
    with pytest.raises(BudgetExceeded) as refused:
        threads.spawn(root, a_thread(limits=none), [EVENT], [EVENT])
    assert refused.value.details["limit"] == "spawns"
    assert threads.get(root.id) == root
    assert threads.verify(root.id) == threads.verify(child.id) == ()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(st.characters()), VALUES, max_size=3), min_size=1, max_size=4), st.integers(0, 5)
)
def test_any_body_is_returned_as_appended_and_verifies(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[JsonObject], turns: int
) -> None:
    database = open_database(f"sqlite://{tmp_path_factory.mktemp('store')}/registry.db")
    threads = Threads(database)
    thread = threads.append(
        started(threads), [NewEvent("injected", body) for body in bodies], ThreadChanges(turns=turns)
    )

    found = [event.body for event in threads.events(thread.id, after=1)]
    assert json.dumps(found) == json.dumps(bodies)
    assert threads.verify(thread.id) == ()
    assert threads.get(thread.id) == thread
    database.close()


@pytest.mark.req("K-TH-08")
def test_a_killed_writer_leaves_a_journal_that_verifies(
    store_url: str, database: Database, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    threads = Threads(database)
    thread = threads.create(a_thread(time.time_ns() // 1_000_000), [EVENT])
    for _ in range(3):
        writer = begin(WRITER, store_url, thread.id)
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(20)]
        writer.kill()
        writer.wait(timeout=120)
        found = threads.get(thread.id)

        assert found.seq >= written[-1]
        assert found.seq == len(threads.events(thread.id)) == 2 * found.usage.tool_calls + 1
        assert threads.verify(thread.id) == ()
        threads.release(found)
