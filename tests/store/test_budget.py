"""Budgets of threads in the store: exact at every limit, under concurrency, over whole trees and per day."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from secrets import randbits

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import BudgetExceeded, LeaseLost, ThreadEnded
from kiwi_mcp.domain.threads import DayLimits, NewEvent, Thread, ThreadChanges, ThreadLimits, ThreadUsage
from kiwi_mcp.domain.times import run_id
from kiwi_mcp.store.budget import DAY_MS, Budget, Refusal, Reservation
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.threads import ThreadFilter, Threads

pytestmark = pytest.mark.req("K-TH-03")
NOW = 1_769_601_600_000
EVENT = NewEvent("hooked", {})
FREE = DayLimits(10**12, 10**12)
RESERVER = """
import sys
from kiwi_mcp.domain.threads import DayLimits
from kiwi_mcp.store.budget import Budget, Refusal
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.threads import Threads

database = open_database(sys.argv[1])
thread = Threads(database).get(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
won = 0
while not isinstance(Budget(database).reserve(thread, 1, 7, 1, day_limits=DayLimits()), Refusal):
    won += 1
print(won, flush=True)
"""


@pytest.fixture
def threads(database: Database) -> Threads:
    return Threads(database)


@pytest.fixture
def budget(database: Database) -> Budget:
    return Budget(database)


def a_thread(spend: int = 1_000, tokens: int = 1_000, **fields: object) -> Thread:
    limits = ThreadLimits(spend=spend, tokens=tokens, spawns=1_000)
    made = Thread(run_id(NOW, randbits(80)), "thread", "i", "d", "", "", "/p", limits, NOW)
    return replace(made, **fields)


def started(threads: Threads, spend: int = 1_000, tokens: int = 1_000, **fields: object) -> Thread:
    made = threads.create(a_thread(spend, tokens, **fields), [EVENT])
    return threads.take(made.id, "me", NOW)


def spawned(threads: Threads, parent: Thread, spend: int, tokens: int) -> Thread:
    _, child = threads.spawn(threads.get(parent.id), a_thread(spend, tokens), [EVENT], [NewEvent("spawned", {})])
    return threads.take(child.id, "me", NOW)


def end(threads: Threads, thread: Thread) -> Thread:
    return threads.append(threads.get(thread.id), [NewEvent("ended", {})], ThreadChanges(status="completed"))


def reserve(budget: Budget, thread: Thread, micros: int, tokens: int = 0, days: DayLimits = FREE) -> Reservation:
    made = budget.reserve(thread, 1, micros, tokens, day_limits=days, now=NOW)
    assert isinstance(made, Reservation), made
    return made


def test_a_limit_of_n_allows_exactly_n(threads: Threads, budget: Budget) -> None:
    thread = started(threads, 10, 20)
    reserve(budget, thread, 4, 5)

    assert budget.reserve(thread, 1, 7, 0, day_limits=FREE) == Refusal("spend", 7, 6)
    assert budget.reserve(thread, 1, 0, 16, day_limits=FREE) == Refusal("tokens", 16, 15)
    reserve(budget, thread, 6, 15)
    assert budget.reserve(thread, 1, 1, 0, day_limits=FREE) == Refusal("spend", 1, 0)
    assert budget.reserve(thread, 1, 0, 1, day_limits=FREE) == Refusal("tokens", 1, 0)
    found = threads.get(thread.id)
    assert (found.reserved, found.reserved_tokens, found.usage) == (10, 20, ThreadUsage())


def test_a_reservation_is_closed_once(threads: Threads, budget: Budget) -> None:
    thread = started(threads)
    usage = ThreadUsage(input_tokens=1, cache_read_tokens=2, cache_write_tokens=3, output_tokens=4, is_estimated=True)
    first, second, third = (reserve(budget, thread, 100, 50) for _ in range(3))

    assert budget.settle(first, 60, usage, model="a/b", price_source="owner")
    assert not budget.settle(first, 99, usage)
    assert not budget.charge_maximum(first)
    assert not budget.release(first)
    assert threads.get(thread.id).usage == replace(usage, spend=60)
    assert budget.release(second)
    assert threads.get(thread.id).usage == replace(usage, spend=60)
    assert budget.charge_maximum(third)
    found = threads.get(thread.id)
    assert found.usage == replace(usage, spend=160, input_tokens=51)
    assert (found.reserved, found.reserved_tokens) == (0, 0)
    entries = budget.ledger(thread.id)
    assert [entry.kind for entry in entries] == ["reserve"] * 3 + ["settle", "release", "charge_maximum"]
    assert (entries[3].model, entries[3].price_source, entries[3].attempt) == ("a/b", "owner", 1)
    assert threads.verify(thread.id) == ()


def test_a_cost_above_its_reservation_is_recorded(threads: Threads, budget: Budget) -> None:
    thread = started(threads, 10)
    assert budget.settle(reserve(budget, thread, 10), 15, ThreadUsage(output_tokens=2_000))

    assert threads.get(thread.id).usage.spend == 15
    assert budget.reserve(thread, 1, 1, 0, day_limits=FREE) == Refusal("spend", 1, 0)
    assert threads.verify(thread.id) == ()


def test_a_reservation_needs_a_thread_that_runs(threads: Threads, budget: Budget) -> None:
    thread = started(threads)
    end(threads, thread)

    with pytest.raises(ThreadEnded):
        budget.reserve(thread, 1, 1, 1, day_limits=FREE)
    with pytest.raises(LeaseLost):
        budget.reserve(a_thread(), 1, 1, 1, day_limits=FREE)


def test_a_child_gets_its_limits_from_its_parent(threads: Threads, budget: Budget) -> None:
    root = started(threads, 100, 100)
    child = spawned(threads, root, 60, 30)

    for spend, tokens, limit, rest in ((41, 1, "spend", 40), (1, 71, "tokens", 70)):
        with pytest.raises(BudgetExceeded) as refused:
            spawned(threads, root, spend, tokens)
        assert (refused.value.details["limit"], refused.value.details["rest"]) == (limit, rest)
    assert budget.reserve(root, 1, 41, 0, day_limits=FREE) == Refusal("spend", 41, 40)
    assert budget.reserve(child, 1, 61, 0, day_limits=FREE) == Refusal("spend", 61, 60)
    budget.settle(reserve(budget, child, 50, 20), 45, ThreadUsage(input_tokens=7, output_tokens=5))
    reserve(budget, root, 40, 70)
    assert end(threads, child).usage.spend == 45
    found = threads.get(root.id)
    assert (found.usage.spend, found.usage.tokens, found.reserved, found.reserved_tokens) == (45, 12, 40, 70)
    reserve(budget, root, 15, 18)
    assert isinstance(budget.reserve(root, 1, 1, 0, day_limits=FREE), Refusal)
    assert threads.verify(root.id) == threads.verify(child.id) == ()


def test_a_lost_reply_is_charged_when_its_thread_ends(threads: Threads, budget: Budget) -> None:
    root = started(threads)
    child = spawned(threads, root, 100, 100)
    reserve(budget, child, 30, 40)

    assert end(threads, child).usage == ThreadUsage(spend=30, input_tokens=40, is_estimated=True)
    assert threads.get(root.id).usage == ThreadUsage(spawns=1, spend=30, input_tokens=40, is_estimated=True)


def test_a_rest_goes_up_once_every_thread_below_has_ended(threads: Threads, budget: Budget) -> None:
    root = started(threads)
    middle = spawned(threads, root, 500, 500)
    lowest = spawned(threads, middle, 200, 200)
    budget.settle(reserve(budget, lowest, 50), 50, ThreadUsage())
    end(threads, middle)

    assert threads.get(root.id).reserved == 500
    end(threads, lowest)
    found = threads.get(root.id)
    assert (found.reserved, found.reserved_tokens, found.usage.spend) == (0, 0, 50)
    assert all(threads.verify(one.id) == () for one in (root, middle, lowest))


def test_raised_limits_of_a_child_are_taken_from_its_parent(threads: Threads, budget: Budget) -> None:
    root = started(threads, 100, 100)
    child = spawned(threads, root, 60, 30)
    child = threads.append(child, [EVENT], ThreadChanges(limits=replace(child.limits, spend=90)))
    assert threads.get(root.id).reserved == 90
    with pytest.raises(BudgetExceeded):
        threads.append(child, [EVENT], ThreadChanges(limits=replace(child.limits, spend=101)))
    child = threads.append(child, [EVENT], ThreadChanges(limits=replace(child.limits, spend=10, tokens=20)))
    found = threads.get(root.id)
    assert (found.reserved, found.reserved_tokens) == (10, 20)
    end(threads, child)
    assert threads.get(root.id).reserved == 0
    root = threads.append(threads.get(root.id), [EVENT], ThreadChanges(limits=replace(root.limits, spend=10**6)))
    reserve(budget, root, 10**6)
    assert threads.verify(root.id) == threads.verify(child.id) == ()


def test_a_day_has_a_limit_for_each_starter_and_for_the_owner(database: Database, budget: Budget) -> None:
    ana, bob = (Threads(database, owner) for owner in ("ana", "bob"))
    days = DayLimits(starter=50, owner=80)
    own, agent, other = (started(ana, starter=starter) for starter in ("", "agent", "other"))
    open_one = reserve(budget, agent, 50, days=days)

    assert budget.reserve(agent, 1, 1, 0, day_limits=days, now=NOW) == Refusal("starter_day", 1, 0)
    assert isinstance(budget.reserve(agent, 1, 0, 1, day_limits=days, now=NOW), Reservation)
    assert budget.reserve(other, 1, 31, 0, day_limits=days, now=NOW) == Refusal("owner_day", 31, 30)
    reserve(budget, own, 30, days=days)
    assert budget.reserve(own, 1, 1, 0, day_limits=days, now=NOW) == Refusal("owner_day", 1, 0)
    reserve(budget, started(bob), 80, days=days)
    assert isinstance(budget.reserve(own, 1, 80, 0, day_limits=days, now=NOW + DAY_MS), Reservation)
    assert budget.settle(open_one, 10, ThreadUsage())
    assert budget.reserve(agent, 1, 41, 0, day_limits=days, now=NOW) == Refusal("owner_day", 41, 40)
    reserve(budget, agent, 40, days=days)
    assert budget.reserve(own, 1, 1, 0, day_limits=days, now=NOW) == Refusal("owner_day", 1, 0)


def test_fifty_reservers_compete_for_the_last_cent(threads: Threads, database: Database) -> None:
    thread = started(threads, 10_000)

    def compete(_: int) -> bool:
        return isinstance(Budget(database).reserve(thread, 1, 10_000, 1, day_limits=FREE), Reservation)

    with ThreadPoolExecutor(50) as pool:
        won = list(pool.map(compete, range(50)))

    assert sum(won) == 1
    assert threads.get(thread.id).reserved == 10_000
    assert threads.verify(thread.id) == ()


def test_fifty_children_share_what_their_parent_has(threads: Threads, database: Database) -> None:
    root = started(threads, 70, 10**6)

    def compete(_: int) -> int:
        while True:
            try:
                child = spawned(threads, root, 10, 1)
            except LeaseLost:  # another one was quicker
                continue
            except BudgetExceeded:
                return 0
            made = [Budget(database).reserve(child, 1, 3, 0, day_limits=FREE) for _ in range(5)]
            for one in made:
                if isinstance(one, Reservation):
                    Budget(database).settle(one, 3, ThreadUsage())
            end(threads, child)
            return 1

    with ThreadPoolExecutor(10) as pool:
        spawned_children = sum(pool.map(compete, range(50)))

    found = threads.get(root.id)
    # Each child uses 9 of its 10 and returns 1, so 7 fit: 7 * 9 + 10 > 70.
    assert (spawned_children, found.usage.spend, found.reserved) == (7, 63, 0)
    assert threads.verify(root.id) == ()


def test_processes_never_reserve_one_too_many(
    store_url: str, threads: Threads, begin: Callable[..., subprocess.Popen[str]]
) -> None:
    thread = started(threads, 1_000)
    every = [begin(RESERVER, store_url, thread.id) for _ in range(4)]
    for process in every:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in every:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    won = [int(process.communicate(timeout=60)[0]) for process in every]

    assert sum(won) == 1_000 // 7
    assert threads.get(thread.id).reserved == 994
    assert threads.verify(thread.id) == ()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "settle", "release", "maximum", "spawn", "spawn", "end"]),
        st.integers(0, 1_000),
        st.integers(0, 400),
        st.integers(0, 400),
    ),
    max_size=25,
)


def test_a_random_tree_never_overspends_and_its_sums_balance(store_url: str) -> None:
    database = open_database(store_url)

    @settings(max_examples=40 if database.is_embedded else 25, deadline=None)
    @given(STEPS)
    def check(steps: list[tuple[str, int, int, int]]) -> None:
        owner = f"{randbits(64)}"
        threads, budget = Threads(database, owner), Budget(database)
        root = started(threads)
        running, reserved = [root], list[Reservation]()
        charged = 0
        for action, which, micros, tokens in steps:
            thread = running[which % len(running)] if running else None
            if action == "reserve" and thread:
                made = budget.reserve(thread, 1, micros, tokens, day_limits=FREE, now=NOW)
                reserved += [made] if isinstance(made, Reservation) else []
            elif action in {"settle", "release", "maximum"} and reserved:
                one = reserved.pop(which % len(reserved))
                spend, used = min(micros, one.micros), min(tokens, one.tokens)
                match action:
                    case "settle":
                        charged += spend * budget.settle(one, spend, ThreadUsage(output_tokens=used))
                    case "maximum":
                        charged += one.micros * budget.charge_maximum(one)
                    case _:
                        budget.release(one)
            elif action == "spawn" and thread:
                try:
                    running.append(spawned(threads, thread, micros, tokens))
                except BudgetExceeded:
                    continue
            elif action == "end" and thread:
                running.remove(thread)
                lost = [one for one in reserved if one.thread_id == thread.id]
                reserved = [one for one in reserved if one not in lost]
                charged += sum(one.micros for one in lost)
                end(threads, thread)
            for found in threads.list(ThreadFilter(limit=100)):
                assert found.usage.spend + found.reserved <= found.limits.spend
                assert found.usage.tokens + found.reserved_tokens <= found.limits.tokens
        ((spent,),) = database.read(
            "select cast(sum(spend + reserved) as bigint) from budget_days where owner = ?", (owner,)
        )
        assert int(str(spent or 0)) == charged + sum(one.micros for one in reserved)
        for thread in running:
            charged += sum(one.micros for one in reserved if one.thread_id == thread.id)
            end(threads, thread)
        found = threads.get(root.id)
        assert (found.usage.spend, found.reserved, found.reserved_tokens) == (charged, 0, 0)
        entries = [one for one in budget.ledger(root.id) if one.kind in {"settle", "charge_maximum"}]
        assert sum(one.spend for one in entries) == charged
        assert all(threads.verify(one.id) == () for one in threads.list(ThreadFilter(limit=100)))

    try:
        check()
    finally:
        database.close()
