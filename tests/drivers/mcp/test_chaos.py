"""Servers that disappear: the call gets a result in time, other servers answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from time import monotonic
from typing import Any

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.outcome import Outcome

LOOK_UP = socket.getaddrinfo
URLS = {"http": "http://nowhere.invalid/mcp", "sse": "http://nowhere.invalid/sse", "websocket": "ws://nowhere.invalid/"}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(bench: Bench) -> list[int]:
    return [int(note.split()[1]) for note in bench.notes if note.startswith("start")]


@pytest.mark.usefixtures("processes")
@pytest.mark.req("I3")
def test_calls_are_unavailable_when_their_server_is_killed(bench: Bench) -> None:
    async def scenario() -> tuple[list[Outcome], Outcome]:
        server = bench.server()
        pid = int(str((await bench.call(bench.chain(server, "pid"))).result))
        calls = [asyncio.create_task(bench.call(bench.chain(server, "silence"))) for _ in range(5)]
        await bench.call(bench.chain(server, "echo"))
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*calls), await bench.call(bench.chain(server, "echo"), {"text": "back"})

    begun = monotonic()
    lost, next_one = bench.run(scenario())
    assert {outcome.status for outcome in lost} == {"unavailable"}
    assert all("SIGKILL" in outcome.message for outcome in lost)
    assert next_one.result == "back"
    assert monotonic() - begun < 40


@pytest.mark.req("I3")
@pytest.mark.parametrize("transport", URLS)
def test_a_server_with_an_unknown_host_name_is_unavailable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    def unknown(host: str, *rest: Any, **named: Any) -> Any:
        if host == "nowhere.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return LOOK_UP(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    begun = monotonic()
    outcome = bench.ask(bench.remote(URLS[transport], transport), "add")

    assert outcome.status == "unavailable"
    assert "nowhere.invalid" in outcome.message
    assert outcome.suggestion
    assert monotonic() - begun < 40


@pytest.mark.req("I3", "I4")
def test_a_server_with_an_endless_name_lookup_is_unavailable_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = threading.Event()

    def slow(host: str, *rest: Any, **named: Any) -> Any:
        if host == "nowhere.invalid":
            found.wait(60)
        return LOOK_UP("127.0.0.1", *rest, **named)

    async def scenario() -> tuple[Outcome, float]:
        begun = monotonic()
        try:
            return (
                await bench.call(bench.chain(bench.remote(URLS["http"], startup_timeout=0.5), "add")),
                monotonic() - begun,
            )
        finally:
            found.set()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    outcome, took = bench.run(scenario())

    assert (outcome.status, "within 0.5 seconds" in outcome.message) == ("unavailable", True)
    assert took < 30


@pytest.mark.usefixtures("processes")
@pytest.mark.req("I4")
@pytest.mark.parametrize(("server_limit", "tool_limit", "seconds"), [(5, 0.3, 0.3), (0.3, None, 0.3), (0.3, 0.6, 0.6)])
def test_the_timeout_of_a_tool_is_its_own_or_that_of_its_server(
    bench: Bench, server_limit: float, tool_limit: float | None, seconds: float
) -> None:
    async def scenario() -> tuple[Outcome, float]:
        link = bench.server(timeout=server_limit)
        await bench.call(bench.chain(link, "echo"))
        begun = monotonic()
        return await bench.call(bench.chain(link, "silence", timeout=tool_limit)), monotonic() - begun

    outcome, took = bench.run(scenario())
    assert (outcome.status, f"{seconds:g} seconds" in outcome.message) == ("timeout", True)
    assert seconds * 0.9 <= took < seconds + 20
    assert not any(map(is_alive, started(bench)))


WAYS = ["exit", "kill", "fork_and_exit", "long_line"]


@pytest.mark.usefixtures("processes")
@pytest.mark.req("I6")
@pytest.mark.parametrize("way", WAYS)
def test_crashes_of_one_kind_affect_no_other_tool_and_leave_no_child(bench: Bench, way: str) -> None:
    crash(bench, way, rounds=2)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.req("I6")
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_crashes_of_one_kind_affect_no_other_tool_and_leave_no_child(bench: Bench, way: str) -> None:
    crash(bench, way, rounds=20)


def crash(bench: Bench, way: str, *, rounds: int) -> None:
    """Let five servers at a time crash, and check that a good one answers meanwhile."""
    pid = os.getpid()

    async def scenario() -> None:
        good = bench.chain(bench.server(server_id="good"), "pid")
        first = (await bench.call(good)).result
        for number in range(rounds):
            servers = [bench.server(server_id=f"bad{number}_{one}", max_bytes=1_000_000) for one in range(5)]
            crashes = asyncio.gather(*(bench.call(bench.chain(bad, way), {"megabytes": 2}) for bad in servers))
            assert (await bench.call(good)).result == first
            assert {outcome.status for outcome in await crashes} == {"unavailable"}

    bench.run(scenario())
    assert os.getpid() == pid
    assert len(started(bench)) == 5 * rounds + 1
    assert not any(map(is_alive, started(bench)))
