"""The store of a user: opened on demand, reopened when the settings name another, and never a delay."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel.store import Store

UNREACHABLE = "postgresql://127.0.0.1:1/kiwi"
"""A store that is not there."""


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    machine = a_machine("ann")
    machine.script("local", says="here")
    return machine


def checks(machine: Machine) -> list[JsonObject]:
    found = as_list(machine.ask("doctor").content["checks"])
    return [as_object(one) for one in found if as_object(one)["check"] == "store"]


def in_one_session(machine: Machine, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        try:
            await story()
        finally:
            await machine.kernel.aclose()

    asyncio.run(whole())


@pytest.mark.usefixtures("sandbox")
def test_the_store_is_created_at_the_first_call_with_the_built_in_items(ann: Machine) -> None:
    assert not (ann.user / "state").exists()
    (check,) = checks(ann)
    assert check["status"] == "ok"
    assert re.search(r"\b[1-9]\d versions, as ann", str(check["detail"]))
    assert (ann.user / "state" / "registry.db").exists()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("E1")
def test_without_the_registry_local_tools_run_and_other_calls_give_the_reason(ann: Machine) -> None:
    ann.vouch("local")
    ann.settle(url=UNREACHABLE)

    ran = ann.do("run", "local")
    assert ran["result"] == "here"
    assert "not available" in json.dumps(ran["warnings"])
    assert ann.names("local", "local") == ann.names("local", "all") == ["local"]
    response = ann.ask("search", query="local", source="all").content
    assert "not available" in json.dumps(response["warnings"])

    for action in ("publish", "pull", "versions", "diff", "verify", "list", "rollback", "deprecate"):
        assert ann.refused(action, "local") == "store_unavailable"
    assert ann.refused("run", "elsewhere") == "store_unavailable"
    assert ann.ask("search", query="local", source="registry").content["code"] == "store_unavailable"
    assert ann.ask("load", item_id="elsewhere").content["code"] == "store_unavailable"
    assert ann.ask("registry", action="show").content["code"] == "store_unavailable"
    (check,) = checks(ann)
    assert (check["status"], bool(check["fix"])) == ("problem", True)


@pytest.mark.usefixtures("sandbox")
def test_invalid_settings_refuse_only_what_needs_them(ann: Machine) -> None:
    ann.vouch("local")
    ann.settle(namespaces=["KIWI"])

    for action in ("publish", "versions", "list"):
        assert ann.refused(action, "local") == "invalid_manifest"
    ran = ann.do("run", "local")
    assert (ran["result"], "cannot be a namespace" in json.dumps(ran["warnings"])) == ("here", True)
    (check,) = checks(ann)
    assert "cannot be a namespace" in str(check["detail"])


def test_an_unavailable_store_does_not_delay_each_call(ann: Machine) -> None:
    ann.settle(url=UNREACHABLE)
    store = Store(ann.user)
    with pytest.raises(StoreUnavailable) as first:
        store.registry()
    with pytest.raises(StoreUnavailable) as second:
        store.runs()
    assert second.value is first.value


@pytest.mark.usefixtures("sandbox")
def test_a_change_of_settings_is_seen_by_the_next_call(a_machine: MakeMachine, tmp_path: Path) -> None:
    one, two = f"sqlite://{tmp_path}/one.db", f"sqlite://{tmp_path}/two.db"
    ann = a_machine("ann", url=one)
    ann.publish("a", says="one")
    ann.settle(url=two)
    ann.publish("b", says="two")

    async def ask(verb: str, **request: Any) -> JsonObject:
        return (await ann.kernel.call(verb, request)).content

    async def names() -> list[str]:
        found = as_list((await ask("search", query="says a word", source="registry"))["results"])
        return sorted(str(as_object(one)["name"]) for one in found if as_object(one)["tool_type"] == "script")

    async def story() -> None:
        assert (await ask("execute", item_id="b"))["result"] == "two"
        assert await names() == ["b"]
        ann.settle(url=one)  # its log is exactly as long
        assert (await ask("execute", item_id="a"))["result"] == "one"
        assert (await ask("execute", item_id="b"))["code"] == "tool_not_found"
        assert await names() == ["a"]
        ann.settle(url=UNREACHABLE)
        assert (await ask("execute", item_id="a"))["code"] == "store_unavailable"
        ann.settle(url=two)
        assert (await ask("execute", item_id="b"))["result"] == "two"

    in_one_session(ann, story)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-04")
def test_an_actor_who_leaves_a_namespace_loses_it_with_the_next_call(a_machine: MakeMachine) -> None:
    ann = a_machine("ann", namespaces=["acme"])
    ann.publish("secret", says="psst", visibility="private")

    async def ask(verb: str, **request: Any) -> JsonObject:
        return (await ann.kernel.call(verb, request)).content

    async def story() -> None:
        assert (await ask("execute", item_id="secret"))["result"] == "psst"
        assert (await ask("search", query="secret", source="registry"))["total"] == 1
        ann.settle(namespaces=["public"])
        assert (await ask("search", query="secret", source="registry"))["total"] == 0
        assert (await ask("execute", item_id="registry/acme/secret"))["code"] == "tool_not_found"

    in_one_session(ann, story)


@pytest.mark.usefixtures("sandbox")
def test_items_published_by_another_process_are_seen_by_the_next_call(a_machine: MakeMachine, store_url: str) -> None:
    ann, bob = a_machine("ann", url=store_url), a_machine("bob", url=store_url)
    bob.script("news", says="first")

    async def story() -> None:
        async def ask(machine: Machine, **request: Any) -> JsonObject:
            return (await machine.kernel.call("execute", request)).content

        assert (await ask(ann, item_id="news"))["code"] == "tool_not_found"
        assert (await ask(bob, item_id="news", action="publish"))["status"] == "published"
        assert (await ask(ann, item_id="news"))["result"] == "first"
        bob.script("news", "1.1.0", says="second")
        assert (await ask(bob, item_id="news", action="publish"))["status"] == "published"
        assert (await ask(ann, item_id="news"))["result"] == "second"
        assert (await ask(bob, item_id="news", action="rollback"))["latest"] == "1.0.0"
        assert (await ask(ann, item_id="news"))["result"] == "first"
        await bob.kernel.aclose()

    in_one_session(ann, story)


@pytest.mark.usefixtures("sandbox")
def test_the_variable_selects_the_store_of_every_call(
    ann: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_REGISTRY", f"sqlite://{tmp_path}/elsewhere.db")
    ann.do("publish", "local")
    assert (tmp_path / "elsewhere.db").exists()
    assert not (ann.user / "state" / "registry.db").exists()
    assert "elsewhere.db" in str(ann.ask("registry", action="show").content["registry"])


@pytest.mark.usefixtures("processes")
def test_the_kernel_loads_no_database_and_no_server() -> None:
    program = (
        "import sys, kiwi_mcp.kernel\n"
        "print([name for name in ('pysqlite3', 'sqlite3', 'psycopg', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
