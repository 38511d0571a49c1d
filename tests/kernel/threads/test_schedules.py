"""Schedules and the queue: each time is served once, and threads run within the limits of the owner."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest
from msgspec.structs import replace
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.threads import Schedule
from kiwi_mcp.domain.times import iso, milliseconds, now_ms
from kiwi_mcp.engine.queue import QueueLimit, QueueLimits, choose
from kiwi_mcp.engine.schedule_times import due_time, due_times, next_time
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.queue import LiveThread, StartedThread, ThreadQueue, WorkerRow
from kiwi_mcp.store.schedules import Schedules
from kiwi_mcp.store.threads import Threads

MINUTE = 60_000
HOUR = 60 * MINUTE
NOW = 1_769_601_600_000  # 2026-01-28T12:00:00Z


@pytest.fixture
def stored(store_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of the home, of each kind."""
    monkeypatch.setenv("KIWI_REGISTRY", store_url)
    return store_url


@pytest.fixture
async def scheduled(stored: str, agents: Agents) -> Agents:
    agents.directive("study")
    await agents.sign("study")
    agents.model.default = lambda _: say("Done.")
    return agents


def miss(url: str, name: str, ago: int) -> Schedule:
    """Let the next time of a schedule lie in the past, as if no worker had run since."""
    database = open_database(url)
    schedules = Schedules(database, owner_of(database))
    at = now_ms() - ago
    schedules.put_times(replace(schedules.get(name), next_at=at, due_at=at))
    found = schedules.get(name)
    database.close()
    return found


def owner_of(database: Any) -> str:
    return str(database.read("select owner from schedules limit 1")[0][0])


async def lines(agents: Agents, name: str) -> list[tuple[str, bool]]:
    """Return the status of the last times of a schedule, the newest first, and whether each has a thread."""
    listed = (await agents.read("schedule", action="list"))["schedules"]
    (one,) = [each for each in listed if each["name"] == name]
    return [(each["status"], "thread_id" in each) for each in one.get("last", [])]


@pytest.mark.req("K-TH-07")
async def test_a_schedule_starts_threads_in_its_own_name(scheduled: Agents, stored: str) -> None:
    agents = scheduled
    words: Any = {"item_id": "study", "cron": "0 * * * *", "inputs": {"topic": "birds"}}
    added = await agents.read("schedule", action="add", name="hourly", zone="Europe/Zurich", **words)
    assert (added["item"].partition("@")[0], added["next_at"][14:19]) == ("user/local/study", "00:00"), added
    assert (await agents.call("schedule", action="add", name="hourly", **words)).content["code"] == "conflict"
    miss(stored, "hourly", 3 * HOUR)
    assert (await agents.call("worker", until_idle=True)).content == {"threads": 1}
    assert await lines(agents, "hourly") == [("started", True)]
    (thread,) = (await agents.read("thread", action="list"))["threads"]
    assert thread["status"] == "completed"
    assert "birds" in json.dumps(agents.model.requests[-1].messages)
    database = open_database(stored)
    assert Threads(database, owner_of(database)).get(thread["thread_id"]).starter == "schedule:hourly"
    database.close()
    # It was served: another worker finds nothing. By hand it runs beside its times.
    assert (await agents.call("worker", until_idle=True)).content == {"threads": 0}
    assert (await agents.read("schedule", action="run", name="hourly"))["status"] == "queued"
    assert (await agents.call("worker", until_idle=True)).content == {"threads": 1}
    await agents.call("schedule", action="pause", name="hourly")
    miss(stored, "hourly", HOUR)
    assert (await agents.call("worker", until_idle=True)).content == {"threads": 0}
    assert (await agents.read("schedule", action="pause", name="hourly", resume=True))["paused"] is False
    assert (await agents.read("schedule", action="remove", name="hourly"))["removed"] is True
    assert (await agents.read("schedule", action="list"))["schedules"] == []
    for cron, zone in (("61 * * * *", "UTC"), ("0 0 30 2 *", "UTC"), ("hourly", "UTC"), ("0 * * * *", "Mars/Base")):
        refused = await agents.call("schedule", action="add", name="x", item_id="study", cron=cron, zone=zone)
        assert refused.content["code"] == "invalid_request", refused.content
        assert refused.content["suggestion"]


@pytest.mark.req("K-TH-07")
async def test_a_time_that_overlaps_is_skipped_queued_replaces_or_runs(scheduled: Agents, stored: str) -> None:
    agents = scheduled
    agents.model.default = lambda _: use("ask", question="Which colour?")
    rules = {
        "skip": [("skipped", False), ("started", True)],
        "queue": [("pending", False), ("started", True)],
        "replace": [("started", True), ("started", True)],
        "allow": [("started", True), ("started", True)],
    }
    for rule in rules:
        words: Any = {"item_id": "study", "cron": "0 * * * *", "overlap": rule, "misfire": "all"}
        await agents.call("schedule", action="add", name=rule, **words)
        miss(stored, rule, now_ms() % HOUR + HOUR + 1_000)  # the last two hours
    await agents.call("worker", until_idle=True)
    assert {rule: await lines(agents, rule) for rule in rules} == rules
    threads = (await agents.read("thread", action="list", limit=20))["threads"]
    assert sorted(one["status"] for one in threads) == ["cancelled"] + ["waiting"] * 5
    # The time that was queued starts when the thread before it has ended.
    (queued,) = [each["last"][1]["thread_id"] for each in await all_lines(agents) if each["name"] == "queue"]
    await agents.call("thread", action="cancel", thread_id=queued)
    await agents.call("worker", until_idle=True)
    assert await lines(agents, "queue") == [("started", True), ("started", True)]


async def all_lines(agents: Agents) -> list[dict[str, Any]]:
    return list((await agents.read("schedule", action="list"))["schedules"])


@pytest.mark.parametrize("misfire", ["skip", "latest", "all"])
def test_times_that_were_missed_are_made_up_for_as_the_schedule_says(misfire: Any) -> None:
    schedule = Schedule("s", "study", "0 * * * *", "UTC", 0, misfire=misfire, next_at=NOW - 3 * HOUR)
    missed = [NOW - 3 * HOUR, NOW - 2 * HOUR, NOW - HOUR, NOW]
    assert due_times(schedule, NOW + 30 * MINUTE) == ({"skip": [], "latest": [NOW], "all": missed}[misfire], NOW + HOUR)
    # A worker that was busy for some seconds missed nothing.
    on_time = [NOW] if misfire == "skip" else missed if misfire == "all" else [NOW]
    assert due_times(schedule, NOW + 5_000) == (on_time, NOW + HOUR)
    years = replace(schedule, next_at=NOW - 30_000 * HOUR)
    assert len(due_times(years, NOW)[0]) == {"skip": 1, "latest": 1, "all": 100}[misfire]
    delayed = replace(schedule, jitter=1_800, next_at=NOW)
    assert NOW <= due_time(delayed, NOW) < NOW + 30 * MINUTE
    assert due_times(delayed, due_time(delayed, NOW) - 1) == ([], NOW)
    assert due_times(delayed, due_time(delayed, NOW)) == ([NOW], NOW + HOUR)


def test_a_change_of_the_clock_loses_and_doubles_no_time() -> None:
    zone = "Europe/Zurich"
    spring, autumn = (milliseconds(datetime.fromisoformat(f"2026-{day}T12:00:00Z")) for day in ("03-28", "10-24"))
    assert iso(next_time("30 2 * * *", zone, spring)) == "2026-03-29T01:00:00.000Z"  # 3:00, since there is no 2:30
    first = next_time("30 2 * * *", zone, autumn)
    assert iso(first) == "2026-10-25T00:30:00.000Z"
    assert iso(next_time("30 2 * * *", zone, first)) == "2026-10-26T01:30:00.000Z"


def a_thread(number: int, **fields: Any) -> LiveThread:
    thread = LiveThread(f"{number:026}", "queued", "", "", "", 0, 1, 0, "default", 0, "local/tiny", "", "", None)
    return replace(thread, **fields)


def test_the_queue_is_fair_and_keeps_its_limits() -> None:
    waiting = [a_thread(number, starter="ana") for number in range(6)] + [a_thread(6, starter="ben")]
    nothing = QueueLimits()

    def order(threads: list[LiveThread], limits: QueueLimits = nothing, most: int = 3, **known: Any) -> list[int]:
        known = {"running": [], "started": [], **known}
        return [int(one.id) for one in choose(threads, limits, most, **known)]

    assert order(waiting) == [0, 6, 1]  # ben's first thread does not wait behind all of ana's
    assert order(waiting, running=[a_thread(9, starter="ben")]) == [0, 1, 6]
    assert order([*waiting, a_thread(7, priority=5, starter="ana")]) == [7, 6, 0]
    one = QueueLimit(concurrency=1)
    assert order(waiting, QueueLimits(queues={"default": one})) == [0]
    assert order(waiting, QueueLimits(queues={"default": one}), running=[a_thread(9)]) == []
    assert order(waiting, QueueLimits(actors={"*": one})) == [0, 6]
    assert order([*waiting, a_thread(7, model="other/x", starter="cy")], QueueLimits(providers={"local": one})) == [
        0,
        7,
    ]
    two = QueueLimits(queues={"default": QueueLimit(per_minute=2)})
    assert order(waiting, two, started=[StartedThread("default", "local", "ana")]) == [6]


async def test_workers_of_one_store_share_the_queue(scheduled: Agents, stored: str) -> None:
    agents = scheduled
    (agents.user / "queues.yaml").write_text("queues: {default: {concurrency: 2}}\n")
    for number in range(6):
        queue = "nightly" if number == 5 else "default"
        await agents.call("thread", action="start", item_id="study", queue=queue)
    others = [Kernel(agents.project, user=agents.user) for _ in range(3)]
    workers = [kernel.call("worker", {"until_idle": True, "queues": ["default"]}) for kernel in others]
    done = await asyncio.gather(*workers)
    for kernel in others:
        await kernel.aclose()
    assert sum(int(str(one.content["threads"])) for one in done) == 5, done
    listed = (await agents.read("thread", action="list"))["threads"]
    assert sorted(one["status"] for one in listed) == ["completed"] * 5 + ["queued"]
    assert len(agents.model.requests) == 5
    (agents.user / "queues.yaml").write_text("queues: {default: {concurency: 2}}\n")
    assert (await agents.call("worker", until_idle=True)).content["code"] == "invalid_manifest"


async def test_a_thread_that_ends_its_workers_fails(scheduled: Agents, stored: str) -> None:
    agents = scheduled
    started = await agents.read("thread", action="start", item_id="study")
    database = open_database(stored)
    threads = Threads(database, str(database.read("select owner from threads")[0][0]))
    for number in range(11):  # each of them took it, and was lost
        threads.take(started["thread_id"], f"elsewhere/{number}", NOW + number * HOUR)
    database.close()
    await agents.call("worker", until_idle=True)
    failed = await agents.read("thread", action="show", thread_id=started["thread_id"])
    assert (failed["status"], failed["code"]) == ("failed", "recovery_limit")
    assert agents.model.requests == []


@pytest.mark.usefixtures("sandbox")
async def test_work_that_is_due_without_a_worker_is_reported(scheduled: Agents, stored: str) -> None:
    agents = scheduled
    await agents.call("schedule", action="add", name="hourly", item_id="study", cron="0 * * * *")
    assert "warnings" not in await agents.read("schedule", action="list")
    miss(stored, "hourly", HOUR)
    (warning,) = (await agents.read("schedule", action="list"))["warnings"]
    assert "kiwi worker" in warning
    checks = (await agents.read("doctor"))["checks"]
    (check,) = [one for one in checks if one["check"] == "worker"]
    assert (check["status"], check["detail"]) == ("warning", warning.partition(":")[0])
    # A worker on another machine counts.
    database = open_database(stored)
    now = now_ms()
    ThreadQueue(database, owner_of(database)).beat(WorkerRow("elsewhere/1", "host", 1, "", now, now))
    database.close()
    assert "warnings" not in await agents.read("schedule", action="list")
