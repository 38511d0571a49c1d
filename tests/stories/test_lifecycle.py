"""Tools that appear, disappear, block and crash: the client is informed and nothing else is affected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from tests.stories.conftest import House, Placed

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject

PLAIN: JsonObject = {"type": "object"}
NAP = f"60.{os.getpid()}"
"""A number of seconds that no other process sleeps for."""
Answer = dict[str, Any]


@pytest.fixture(autouse=True)
async def agreed(house: House) -> None:
    """The owner has agreed to all that servers do: they note what they do, and some are reached over the network."""
    await house.own("approvals", action="add_rule", item="*")


def tool(name: str, description: str = "", **words: Json) -> JsonObject:
    return {"name": name, "description": description or f"Does {name}", "inputSchema": PLAIN, **words}


def script(house: House, name: str, text: str, **config: Json) -> None:
    manifest: JsonObject = {
        "tool_id": name, "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
        "description": f"Does {name}", "config": {"entrypoint": "main.sh", **config},
    }  # fmt: skip
    house.write(f"tools/{name}/tool.yaml", manifest)
    house.write(f"tools/{name}/main.sh", text)


async def add(house: House, placed: Placed, server: str = "placed", **config: Json) -> None:
    """Add the server as the owner, with these words in its manifest."""
    words: JsonObject = {"transport": "stdio", **placed.command, **config}
    notes: JsonObject = {"write": [str(placed.folder)]}
    await house.own(
        "mcp", action="add", server=server, manifest={"executor": "subprocess", "config": words, "needs": notes}
    )


async def reach(house: House, host: str, **words: Json) -> None:
    """Grant a host, and add the server that is reached there."""
    house.settle("policy.yaml", {"hosts": {"allow": [host]}})
    await house.own("mcp", action="add", server="placed", url=f"http://{host}/mcp", **words)


async def ask(client: Client, verb: str, **request: Json) -> Answer:
    return dict((await client.call_tool(verb, dict(request))).structured_content)


async def run(client: Client, item: str, **parameters: Json) -> Answer:
    return await ask(client, "execute", item_id=item, parameters=parameters)


async def found(client: Client, query: str) -> dict[str, Answer]:
    return {card["name"]: card for card in (await ask(client, "search", query=query))["results"]}


async def followed(client: Client, query: str, holds: Callable[[dict[str, Answer]], bool]) -> dict[str, Answer]:
    """Search until what is found is as expected."""
    while not holds(cards := await found(client, query)):  # noqa: ASYNC110 - only searching tells
        await asyncio.sleep(0.02)
    return cards


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process cannot set an event of this one
        await asyncio.sleep(0.01)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running(words: str) -> list[int]:
    """The processes that have these words in their command line; a server's own folder is such a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it may have ended meanwhile
            found += [int(path.parent.name)] if words in path.read_text(errors="replace").replace("\0", " ") else []
    return found


def children(pid: int) -> list[str]:
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.smoke
@pytest.mark.req("I2")
async def test_a_server_starts_at_the_first_call_and_stops_after_its_idle_time(house: House, placed: Placed) -> None:
    placed.offer(tool("greet"))
    await add(house, placed, idle_timeout=0.3)

    async with house.client() as client:
        assert "greet" in await found(client, "greet")
        await ask(client, "load", item_id="greet")
        assert len(placed.noted("starts")) == 1  # when it was added
        for _ in range(3):
            assert (await run(client, "greet"))["status"] == "success"
        assert len(placed.noted("starts")) == 2
        assert running(str(placed.folder))
        await until(lambda: not running(str(placed.folder)))
        assert (await run(client, "greet"))["status"] == "success"
        assert len(placed.noted("starts")) == 3
    assert not running(str(placed.folder))


@pytest.mark.req("I3", "I5")
async def test_a_server_killed_during_a_call_is_unavailable_and_not_called_twice(house: House, placed: Placed) -> None:
    placed.offer(tool("greet"), tool("crash"))
    await add(house, placed)
    script(house, "local", "echo here")

    async with house.client() as client:
        crashed = await client.call_tool("execute", {"item_id": "crash"})
        assert crashed.is_error
        assert crashed.structured_content["code"] == "unavailable"
        assert crashed.structured_content["suggestion"]
        assert placed.noted("calls") == ["crash"]
        assert (await run(client, "local"))["result"] == "here"
        assert (await run(client, "greet", who="Ann"))["result"] == {"greeting": "Hello Ann"}
    assert placed.noted("calls") == ["crash", "greet"]


@pytest.mark.req("I3", "I7")
async def test_a_server_that_refuses_connections_is_unavailable_until_it_returns(house: House, placed: Placed) -> None:
    placed.offer(tool("greet"))
    with placed.listening() as (port, _):
        await reach(house, f"127.0.0.1:{port}")
    house.settle("preferences.yaml", {"always_send": {"greet": {"as": "greet"}}})
    script(house, "local", "echo here")

    async with house.client() as client:
        assert "greet" in [one.name for one in (await client.list_tools()).tools]
        assert "greet" in await found(client, "greet")
        gone = await client.call_tool("greet", {})
        assert gone.is_error
        assert gone.structured_content["code"] == "unavailable"
        assert (await run(client, "local"))["result"] == "here"
        with placed.listening(port):
            assert (await client.call_tool("greet", {"who": "Ann"})).structured_content == {"greeting": "Hello Ann"}


@pytest.mark.req("I3")
async def test_a_server_with_an_unknown_host_name_is_unavailable(
    house: House, placed: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed.offer(tool("greet"))
    script(house, "local", "echo here")
    known, look_up = ["greeter.test"], socket.getaddrinfo

    def looked_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host == "greeter.test" and not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1" if host == "greeter.test" else host, *rest, **named)

    async def story(client: Client) -> None:
        lost = await run(client, "greet")
        assert (lost["code"], lost["status"]) == ("unavailable", "unavailable")
        assert "greeter.test" in lost["message"]
        assert (await run(client, "local"))["result"] == "here"

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    with placed.listening() as (port, _):
        await reach(house, f"greeter.test:{port}")
        known.clear()
        async with house.client() as client:
            await story(client)


@pytest.mark.req("I7")
async def test_a_missing_server_stops_nothing_and_is_reported_to_its_owner(house: House, placed: Placed) -> None:
    script(house, "local", "echo here")
    placed.folder.mkdir()  # nothing is in it, so that the server ends at once
    await add(house, placed)
    house.settle("preferences.yaml", {"always_send": {"placed/greet": True, "local": True}})

    async with house.client() as client:
        assert [one.name for one in (await client.list_tools()).tools][4:] == ["local"]
        (row,) = (await ask(client, "mcp", action="list"))["servers"]
        assert row["status"] == "down"
        notices = (await ask(client, "help"))["installation"]["notices"]
        assert any("placed/greet" in notice for notice in notices)
        assert (await run(client, "mcp/placed/greet"))["code"] == "tool_not_found"
        placed.offer(tool("greet"))
        await ask(client, "mcp", action="refresh", server="placed")
        assert (await client.call_tool("placed_greet", {"who": "Ann"})).structured_content["greeting"] == "Hello Ann"


@pytest.mark.slow
@pytest.mark.req("I4")
async def test_the_timeout_of_a_call_is_that_of_the_tool_its_source_or_the_default(
    house: House, placed: Placed
) -> None:
    placed.offer(tool("hang"), tool("greet"))
    await add(house, placed, timeout=0.8)
    await add(house, placed, server="patient")
    own: JsonObject = {"tool_type": "mcp_tool", "executor": "placed", "version": "1.0.0", "description": "Hangs"}
    house.write("tools/quick.yaml", {"tool_id": "quick", **own, "config": {"mcp_tool_name": "hang", "timeout": 0.4}})
    script(house, "sleeper", f"exec sleep {NAP}", timeout=0.5)
    script(house, "unhurried", "true")

    async with house.client() as client:
        planned = {
            name: (await ask(client, "execute", item_id=name, dry_run=True))["plan"]["spec"]["timeout"]
            for name in ("quick", "mcp/placed/hang", "mcp/patient/hang", "sleeper", "unhurried")
        }
        assert planned == {
            "quick": 0.4, "mcp/placed/hang": 0.8, "mcp/patient/hang": 60.0, "sleeper": 0.5, "unhurried": 300.0,
        }  # fmt: skip
        for name in ("quick", "mcp/placed/hang", "sleeper"):
            begun = monotonic()
            late = await run(client, name)
            assert (late["code"], late["status"]) == ("timeout", "timeout")
            assert planned[name] * 0.9 <= monotonic() - begun < planned[name] + 20
        assert (await run(client, "mcp/placed/greet"))["status"] == "success"
    assert not running(NAP)
    assert not running(str(placed.folder))


@pytest.mark.slow
@pytest.mark.req("C1", "C8", "E2")
async def test_search_follows_servers_that_appear_change_and_disappear_during_a_session(
    house: House, placed: Placed
) -> None:
    placed.offer(tool("announce"), tool("greet", "Greet a person"))

    async with house.client() as client:
        assert await found(client, "greet") == {}
        await house.command("mcp", "add", "placed", "--", sys.executable, *map(str, placed.command["args"]))  # type: ignore[arg-type]  # a list
        assert (await found(client, "greet"))["greet"]["description"] == "Greet a person"
        manifest = (house.project / ".ai" / "tools" / "mcp" / "placed.yaml").read_text()
        assert "reet" not in manifest  # its location, and none of its content

        after = [tool("announce"), tool("greet", "Greet everybody"), tool("wave", "Wave at a person")]
        await run(client, "announce", offers={"tools": after})
        cards = await followed(client, "wave greet", lambda cards: "wave" in cards)
        assert (cards["wave"]["state"], cards["greet"]["state"]) == ("new", "changed")
        assert cards["greet"]["description"] == "Greet a person"  # as it was accepted
        assert (await run(client, "greet"))["code"] == "definition_changed"

        await house.command("mcp", "accept", "placed")
        cards = await found(client, "wave greet")
        assert cards["greet"]["description"] == "Greet everybody"
        assert not {"state"} & cards["greet"].keys() & cards["wave"].keys()
        assert (await run(client, "wave"))["status"] == "success"

        await run(client, "announce", offers={"tools": [tool("announce")]})
        await followed(client, "wave greet", lambda cards: not cards)
        assert (await run(client, "greet"))["code"] == "tool_not_found"
        await house.command("mcp", "remove", "placed")
        assert await found(client, "announce") == {}


@pytest.mark.slow
@pytest.mark.req("I8")
@pytest.mark.parametrize("place", ["started here", "at an address"])
async def test_a_server_is_replaced_by_its_next_version_during_a_session(
    place: str, house: House, placed: Placed
) -> None:
    placed.offer(tool("greet"), tool("hang"))
    named: JsonObject = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
    port = 0

    async def story(client: Client) -> None:
        assert (await run(client, "greet"))["identity"] == "mcp/placed/greet@1.0.0"
        hanging = asyncio.create_task(run(client, "hang"))
        await until(lambda: placed.noted("calls")[-1] == "hang")
        placed.offer(tool("greet", "Greet by name", inputSchema=named), tool("hang"), version="2.0.0")
        for pid in running(str(placed.folder)):  # what it noted is its number in its sandbox
            with suppress(ProcessLookupError):  # gone with the one before
                os.kill(pid, signal.SIGKILL)
        assert (await hanging)["code"] == "unavailable"
        if port:
            stack.enter_context(placed.listening(port))
        assert (await run(client, "greet"))["status"] == "success"  # what was accepted still holds for this one
        cards = await followed(client, "greet", lambda cards: "state" in cards["greet"])
        assert (cards["greet"]["state"], cards["greet"]["identity"]) == ("changed", "mcp/placed/greet@2.0.0")
        await house.command("mcp", "accept", "placed")
        assert (await ask(client, "load", item_id="greet"))["parameters"]["required"] == ["who"]
        assert (await run(client, "greet"))["code"] == "invalid_input"
        assert (await run(client, "greet", who="Ann"))["result"] == {"greeting": "Hello Ann"}

    with ExitStack() as stack:
        if place == "at an address":
            port, _ = stack.enter_context(placed.listening())
            await reach(house, f"127.0.0.1:{port}")
        else:
            await add(house, placed)
        async with house.client() as client:
            await story(client)


@pytest.mark.req("I9")
async def test_the_upgrade_of_kiwi_by_a_restart_is_documented() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "your-mcp-servers.md"
    assert "After upgrading Kiwi itself, restart your client." in guide.read_text()


def serving(house: House) -> StdioServerParameters:
    """How a client starts Kiwi."""
    words = ["-m", "kiwi_mcp", "serve", "--project", str(house.project)]
    surroundings = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    return StdioServerParameters(command=sys.executable, args=words, env=surroundings, cwd=house.project)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("I5", "I6")
@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.soak)])
async def test_crashes_affect_neither_kiwi_nor_other_tools(house: House, placed: Placed, rounds: int) -> None:
    placed.offer(tool("greet"), tool("crash"))
    await add(house, placed, server="steady")
    shaky = [f"shaky{number}" for number in range(5)]
    for server in shaky:
        await add(house, placed, server=server)
    script(house, "abort", "kill -SEGV $$")

    async with asyncio.timeout(100), Client(serving(house), read_timeout_seconds=120) as client:
        await ask(client, "help")
        (kiwi,) = running(str(house.project))
        for _ in range(rounds):
            crashes = [run(client, f"mcp/{server}/crash") for server in shaky]
            ended = await asyncio.gather(*crashes, *(run(client, "abort") for _ in range(5)))
            assert [answer["status"] for answer in ended] == ["unavailable"] * 5 + ["error"] * 5
            greeted = [run(client, f"mcp/{server}/greet", who="Ann") for server in ("steady", *shaky)]
            for answer in await asyncio.gather(*greeted):
                assert answer["result"] == {"greeting": "Hello Ann"}
        assert is_alive(str(kiwi))
    assert placed.noted("calls").count("crash") == 5 * rounds  # and as many scripts, each once
    assert not running(str(placed.folder))


@pytest.mark.usefixtures("processes")
@pytest.mark.slow
@pytest.mark.req("I1")
async def test_an_in_process_item_starts_nothing(house: House) -> None:
    house.write("knowledge/tea.md", "---\nid: tea\ntitle: Tea\nversion: 1.0.0\n---\n\nAt five.\n")

    async with asyncio.timeout(120), Client(serving(house), read_timeout_seconds=120) as client:
        assert (await run(client, "tea"))["result"]["content"].strip() == "At five."
        (kiwi,) = running(str(house.project))
        assert children(kiwi) == []
    assert not running(str(house.project))
