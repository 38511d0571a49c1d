"""Tasks in the store: durable, private, and never reported as running forever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.store import tasks as module
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.tasks import KEPT_MS, LOST, STALE_MS, Task, TaskCommand, Tasks

NOW = 1_769_601_600_000


@pytest.fixture
def tasks(database: Database) -> Tasks:
    return Tasks(database, "ann")


def a_task(number: int = 1, *, at: int = NOW, principal: str = "a client", owner: str = "here") -> Task:
    return Task(f"{number:032x}", principal, "tools/call", "say", owner, at, at, at + KEPT_MS, at)


def ended(task: Task, at: int = NOW) -> Task:
    result = {"content": [{"type": "text", "text": "\0 ü \ud83d"}]}
    return replace(task, status="completed", detail=result, updated_at=at, expires_at=at + KEPT_MS)


def test_a_stored_task_is_returned_unchanged(tasks: Tasks) -> None:
    assert tasks.add(a_task())
    assert tasks.get(a_task().id, "a client", NOW) == a_task()
    assert tasks.finish(ended(a_task()))
    assert tasks.get(a_task().id, "a client", NOW + STALE_MS * 2) == ended(a_task())


def test_a_task_is_visible_only_to_its_principal_and_actor(tasks: Tasks, database: Database) -> None:
    tasks.add(a_task())
    assert tasks.get(a_task().id, "another", NOW) is None
    others = Tasks(database, "bob")
    assert others.get(a_task().id, "a client", NOW) is None
    assert not others.list(NOW, limit=9)
    others.stop(a_task().id, None)
    tasks.stop(a_task().id, "another")
    tasks.answer(a_task().id, "another", {"a": {}})
    assert not tasks.wishes("here")


def test_long_principals_with_a_common_prefix_are_distinguished(tasks: Tasks) -> None:
    first, second = "p" * 2_000 + "1", "p" * 2_000 + "2"
    tasks.add(a_task(principal=first))
    assert tasks.get(a_task().id, first, NOW)
    assert tasks.get(a_task().id, second, NOW) is None


def test_a_task_is_removed_after_its_time(tasks: Tasks) -> None:
    tasks.add(a_task())
    tasks.finish(ended(a_task()))
    assert tasks.get(a_task().id, "a client", NOW + KEPT_MS - 1)
    assert tasks.get(a_task().id, "a client", NOW + KEPT_MS) is None
    assert not tasks.list(NOW + KEPT_MS, limit=9)


def test_a_task_of_a_silent_process_has_failed_and_stays_failed(tasks: Tasks) -> None:
    tasks.add(a_task())
    late = NOW + STALE_MS + 1
    found = tasks.get(a_task().id, "a client", late)
    assert found is not None
    assert (found.status, found.detail) == ("failed", LOST)
    assert not tasks.finish(ended(a_task()))
    tasks.beat("here", late)
    assert tasks.get(a_task().id, "a client", late) == found


def test_a_list_includes_tasks_of_silent_processes(tasks: Tasks) -> None:
    tasks.add(a_task(1))
    tasks.add(a_task(2, at=NOW + STALE_MS + 1))
    seen = tasks.list(NOW + STALE_MS + 1, limit=9)
    assert [(task.id[-1], task.status) for task in seen] == [("2", "working"), ("1", "failed")]


def test_a_process_with_heartbeats_keeps_its_tasks(tasks: Tasks) -> None:
    tasks.add(a_task(1))
    tasks.add(a_task(2, owner="elsewhere"))
    waiting = replace(a_task(1), status="input_required", message="half", detail={"name": {"method": "roots/list"}})
    tasks.beat("here", NOW + STALE_MS, [waiting])
    assert tasks.get(a_task(1).id, "a client", NOW + STALE_MS * 2 - 1) == replace(
        waiting, beat_at=NOW + STALE_MS, expires_at=NOW + STALE_MS + KEPT_MS
    )
    assert tasks.get(a_task(2).id, "a client", NOW + STALE_MS * 2 - 1).status == "failed"  # type: ignore[union-attr]  # it is there


def test_only_its_own_process_ends_a_task_and_only_once(tasks: Tasks) -> None:
    tasks.add(a_task())
    assert not tasks.finish(replace(ended(a_task()), owner="elsewhere"))
    assert tasks.finish(ended(a_task()))
    assert not tasks.finish(replace(ended(a_task()), status="cancelled"))


def test_a_command_of_another_process_reaches_the_worker(tasks: Tasks, database: Database) -> None:
    tasks.add(a_task(1))
    tasks.add(a_task(2))
    other = Tasks(database, "ann")
    other.stop(a_task(1).id, None)
    other.answer(a_task(2).id, "a client", {"a": {"action": "accept"}})
    other.answer(a_task(2).id, "a client", {"a": {"action": "decline"}, "b": {"action": "cancel"}})
    first, second = sorted(tasks.wishes("here"), key=lambda wish: wish.id)
    assert first == TaskCommand(a_task(1).id, True, {})
    assert second == TaskCommand(a_task(2).id, False, {"a": {"action": "accept"}, "b": {"action": "cancel"}})
    assert tasks.wishes("here") == (first,)


def test_an_ended_task_accepts_no_commands(tasks: Tasks) -> None:
    tasks.add(a_task())
    tasks.finish(ended(a_task()))
    tasks.stop(a_task().id, None)
    tasks.answer(a_task().id, "a client", {"a": {}})
    assert not tasks.wishes("here")


def test_adding_a_task_removes_ended_ones_and_stops_at_the_limit(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    assert tasks.add(a_task(1))
    assert tasks.add(a_task(2))
    assert not tasks.add(a_task(3))
    assert tasks.add(a_task(3, principal="another"))
    assert tasks.add(a_task(4, at=NOW + KEPT_MS + 1))
    assert [task.id[-1] for task in tasks.list(0, limit=9)] == ["4"]


def test_a_list_can_be_filtered_by_id_prefix(tasks: Tasks) -> None:
    for number in (0xA << 124, 0xA1 << 120, 0xF << 124):
        tasks.add(a_task(number))
    assert {task.id[:2] for task in tasks.list(NOW, limit=9, prefix="a")} == {"a0", "a1"}
    assert {task.id[:2] for task in tasks.list(NOW, limit=9, prefix="a1")} == {"a1"}
    assert {task.id[:2] for task in tasks.list(NOW, limit=9, prefix="f")} == {"f0"}


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=4, max_size=4))
def test_any_text_is_stored_approximately(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    database = open_database(f"sqlite://{tmp_path_factory.mktemp('tasks')}/store.db")
    principal, identity, message, word = texts
    task = replace(a_task(principal=principal), identity=identity, message=message, detail={word: word})
    tasks = Tasks(database, "ann")
    assert tasks.add(task)
    found = tasks.get(task.id, principal, NOW)
    assert found is not None
    assert found.detail == {word: word}
    database.close()
