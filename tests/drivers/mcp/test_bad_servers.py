"""Servers that misbehave: each case ends with a result in time and affects no other server."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Outcome

pytestmark = pytest.mark.usefixtures("processes")


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def beside(bench: Bench, outcome: asyncio.Task[Outcome]) -> tuple[Outcome, float]:
    """The outcome of a call, and how long the slowest answer of a good server beside it took."""
    good, slowest = bench.chain(bench.server(server_id="good"), "echo"), 0.0
    await bench.call(good, {"text": "warm"})
    while not outcome.done():
        started = monotonic()
        assert (await bench.call(good, {"text": "here"})).result == "here"
        slowest = max(slowest, monotonic() - started)
        await asyncio.sleep(0.01)
    return await outcome, slowest


def drive(
    bench: Bench, name: str, inputs: JsonObject, *habits: str, startup_timeout: float = 60, timeout: float = 60
) -> tuple[Outcome, float]:
    """Call a tool of a bad server beside a good one."""

    async def scenario() -> tuple[Outcome, float]:
        chain = bench.chain(bench.server(*habits, startup_timeout=startup_timeout), name, timeout=timeout)
        return await beside(bench, asyncio.create_task(bench.call(chain, inputs)))

    return bench.run(scenario())


GOOD: Mapping[str, tuple[str, JsonObject, str]] = {
    "garbage between messages": ("noise", {}, "after the noise"),
    "half a message": ("half", {}, "whole"),
    "replies to unknown ids": ("unknown_ids", {}, "yours"),
    "two replies to one id": ("twice", {}, "first"),
    "invalid UTF-8": ("bad_utf8", {}, "caf\ufffd"),
    "half a character": ("surrogate", {}, "?"),
    "questions of its own": ("ask_back", {}, "asked"),
}


@pytest.mark.case("MCP-01", "MCP-04")
@pytest.mark.parametrize("habit", GOOD)
def test_a_server_with_protocol_quirks_is_still_understood(bench: Bench, habit: str) -> None:
    name, inputs, result = GOOD[habit]
    outcome, slowest = drive(bench, name, inputs)

    assert (outcome.status, outcome.result) == ("success", result)
    assert slowest < 20


FATAL: Mapping[str, tuple[str, JsonObject, str, str]] = {
    "a line of 100 MB": ("long_line", {"megabytes": 100}, "unavailable", "16,000,000"),
    "no end of a line": ("no_newline", {}, "timeout", "1.5 seconds"),
    "no answer": ("silence", {}, "timeout", "1.5 seconds"),
    "an exit in the middle": ("exit", {}, "unavailable", "exit code 3"),
    "a kill in the middle": ("kill", {}, "unavailable", "SIGKILL"),
    "a fork and an exit": ("fork_and_exit", {}, "unavailable", "exit code 0"),
    "a number that is none": ("nan", {}, "timeout", "1.5 seconds"),
    "100,000 parts": ("many_blocks", {}, "error", "100,000"),
    "an endless flood": ("flood", {"thousands": 1_000}, "unavailable", "notifications"),
}


@pytest.mark.req("I3", "I4")
@pytest.mark.case("MCP-02", "MCP-03", "MCP-05", "MCP-09")
@pytest.mark.parametrize("habit", FATAL)
def test_a_failing_server_gives_a_result_in_time_while_others_answer(bench: Bench, habit: str) -> None:
    name, inputs, status, words = FATAL[habit]
    outcome, slowest = drive(bench, name, inputs, timeout=1.5 if status == "timeout" else 60)

    assert outcome.status == status
    assert words in outcome.message
    assert outcome.suggestion
    assert slowest < 20


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("dies_at_start", "did not start: it ended with exit code 1. It said: no licence found"),
        ("mute", "did not greet within 1.5 seconds"),
        ("never_reads", "did not greet within 1.5 seconds"),
        ("old_version", "1999-01-01"),
    ],
)
@pytest.mark.case("MCP-02", "MCP-12")
def test_a_server_that_fails_the_handshake_is_unavailable_with_a_reason(bench: Bench, habit: str, words: str) -> None:
    outcome, slowest = drive(bench, "echo", {}, habit, startup_timeout=1.5 if "1.5" in words else 60)

    assert outcome.status == "unavailable"
    assert words in outcome.message
    assert slowest < 20


def test_lines_that_a_package_runner_prints_first_are_skipped(bench: Bench) -> None:
    assert bench.ask(bench.server("chatty_start"), "echo", {"text": "hi"}).result == "hi"


def test_noise_is_reported_once(bench: Bench) -> None:
    async def scenario() -> list[Json]:
        chain = bench.chain(bench.server(), "noise")
        return [(await bench.call(chain)).details.get("notices") for _ in range(3)]

    assert bench.run(scenario()) == [["The server printed 5 line(s) among its messages that are none."], None, None]


def test_a_flood_that_ends_is_dropped_counted_and_reported(bench: Bench) -> None:
    outcome = bench.ask(bench.server(), "flood", {"thousands": 4})

    assert outcome.result == "after the flood"
    assert "were dropped" in str(outcome.details["notices"])


def test_the_last_output_of_a_server_contains_no_secret(bench: Bench) -> None:
    async def scenario() -> Outcome:
        server = bench.server(env={"KEY": "${API_KEY}"})
        return await bench.call(bench.chain(server, "exit"), secrets={"API_KEY": "s3cr3t-value"})

    outcome = bench.run(scenario())
    assert "s3cr3t" not in repr(outcome)
    assert "[redacted:API_KEY]" in outcome.logs.stderr


@pytest.mark.req("I4")
def test_a_request_that_times_out_is_cancelled_at_the_server(bench: Bench) -> None:
    async def scenario() -> Outcome:
        server = bench.server()
        slow = asyncio.create_task(bench.call(bench.chain(server, "silence", timeout=0.3)))
        while not slow.done():
            await bench.call(bench.chain(server, "echo"))
            await asyncio.sleep(0.01)
        await bench.call(bench.chain(server, "echo"))
        return await slow

    assert bench.run(scenario()).status == "timeout"
    assert bench.notes[1:] == ["cancelled", "end"]


def test_a_request_is_cancelled_when_its_caller_leaves(bench: Bench) -> None:
    async def scenario() -> None:
        server = bench.server()
        await bench.call(bench.chain(server, "echo"))
        left = asyncio.create_task(bench.call(bench.chain(server, "silence")))
        await asyncio.sleep(0.05)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await bench.call(bench.chain(server, "echo"))

    bench.run(scenario())
    assert bench.notes[1:] == ["cancelled", "end"]


def test_a_silent_server_is_restarted_for_the_next_call(bench: Bench) -> None:
    async def scenario() -> Outcome:
        server = bench.server()
        assert (await bench.call(bench.chain(server, "silence", timeout=0.3))).status == "timeout"
        return await bench.call(bench.chain(server, "echo"), {"text": "back"})

    assert bench.run(scenario()).result == "back"
    assert [note.split()[0] for note in bench.notes].count("start") == 2


@pytest.mark.req("I6")
def test_a_hundred_crashes_do_not_affect_the_kernel_and_other_tools(bench: Bench) -> None:
    async def scenario() -> int:
        good = bench.chain(bench.server(server_id="good"), "pid")
        first = (await bench.call(good)).result
        for number in range(20):
            bad = bench.chain(bench.server(server_id=f"bad{number}"), "kill")
            crashed = await asyncio.gather(*(bench.call(bad) for _ in range(5)))
            assert {outcome.status for outcome in crashed} == {"unavailable"}
            assert (await bench.call(good)).result == first
        return open_files()

    assert bench.run(scenario()) < 60


def test_memory_stays_flat_while_servers_misbehave(bench: Bench) -> None:
    async def scenario() -> int:
        sizes = []
        for number in range(3):
            server = bench.server(server_id=f"big{number}", max_bytes=4_000_000)
            assert (await bench.call(bench.chain(server, "long_line"))).status == "unavailable"
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return sizes[-1] - sizes[0]

    assert bench.run(scenario()) < 30_000
