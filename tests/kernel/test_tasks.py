"""The tasks verb: only the owner sees and stops background calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.store.tasks import KEPT_MS, Task, Tasks

Ask = Callable[..., Answer]


@pytest.fixture
def tasks(project: Path) -> Iterator[Tasks]:
    kernel = Kernel(project)
    yield kernel.tasks()
    asyncio.run(kernel.aclose())


def a_task(task_id: str, principal: str = "a client") -> Task:
    now = time.time_ns() // 1_000_000
    return Task(task_id, principal, "tools/call", "say", "here", now, now, now + KEPT_MS, now, message="half")


def test_the_owner_sees_the_tasks_of_all_clients(ask: Ask, tasks: Tasks) -> None:
    tasks.add(a_task("a" * 32))
    tasks.add(a_task("b" * 32, "another"))
    listed = map(as_object, as_list(ask("tasks").content["tasks"]))
    assert {(one["task_id"], one["principal"], one["status"]) for one in listed} == {
        ("a" * 32, "a client", "working"),
        ("b" * 32, "another", "working"),
    }


def test_one_task_is_shown_in_full_by_a_prefix_of_its_id(ask: Ask, tasks: Tasks) -> None:
    task = a_task("a" * 32)
    tasks.add(task)
    tasks.finish(replace(task, status="completed", detail={"content": []}))
    shown = ask("tasks", action="show", task_id="aaaa").content
    assert (shown["status"], shown["result"], shown["identity"]) == ("completed", {"content": []}, "say")


def test_a_task_is_asked_to_stop_unless_it_has_ended(ask: Ask, tasks: Tasks) -> None:
    task = a_task("a" * 32)
    tasks.add(task)
    assert "asked to stop" in str(ask("tasks", action="cancel", task_id=task.id).content["message"])
    assert [wish.is_unwanted for wish in tasks.wishes("here")] == [True]
    tasks.finish(replace(task, status="cancelled"))
    assert "over already" in str(ask("tasks", action="cancel", task_id=task.id).content["message"])


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"action": "show"}, "invalid_request"),
        ({"action": "show", "task_id": "aaa"}, "invalid_request"),
        ({"action": "show", "task_id": "cccc"}, "not_found"),
        ({"action": "show", "task_id": "c" * 32}, "not_found"),
        ({"action": "cancel", "task_id": "%' or 1=1"}, "not_found"),
        ({"action": "show", "task_id": "aaaaaa"}, "invalid_request"),
        ({"action": "start"}, "invalid_request"),
    ],
)
def test_an_unknown_or_ambiguous_task_is_refused(ask: Ask, tasks: Tasks, request_: dict[str, str], code: str) -> None:
    tasks.add(a_task("a" * 32))
    tasks.add(a_task("a" * 31 + "b"))
    assert ask("tasks", **request_).content["code"] == code


async def test_only_the_owner_sees_all_tasks(project: Path) -> None:
    async def story() -> Answer:
        kernel = Kernel(project, is_owner=False)
        try:
            return await kernel.call("tasks", {})
        finally:
            await kernel.aclose()

    assert (await story()).content["code"] == "not_permitted"
