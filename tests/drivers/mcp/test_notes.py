"""Log lines of servers for listeners, and completion of arguments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.drivers.mcp.server_events import LONGEST_NOTE, MOST_NOTES, CallerChannel


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("habits", [("logs",), ("modern",)])
def test_log_lines_reach_the_caller_without_control_characters(bench: Bench, habits: tuple[str, ...]) -> None:
    lines: list[JsonObject] = []
    bench.run(bench.call(bench.chain(bench.server(*habits), "log"), note=lines.append))

    assert lines == [{"level": "info", "data": f"line {number}", "logger": "hostile"} for number in (0, 1)]


@pytest.mark.usefixtures("processes")
def test_a_server_of_the_handshake_era_gets_its_log_level_once_and_only_for_a_listener(bench: Bench) -> None:
    async def scenario() -> None:
        chain = bench.chain(bench.server("logs"), "echo")
        await bench.call(chain)
        assert not any(note.startswith("level") for note in bench.notes)
        for _ in range(3):
            await bench.call(chain, note=lambda _: None)

    bench.run(scenario())
    assert bench.notes.count("level info") == 1


@pytest.mark.usefixtures("processes")
def test_log_lines_of_two_concurrent_callers_reach_neither_of_them(bench: Bench) -> None:
    lines: list[JsonObject] = []

    async def scenario() -> None:
        server = bench.server("logs")
        await bench.call(bench.chain(server, "echo"), note=lines.append)
        other = asyncio.create_task(bench.call(bench.chain(server, "silence"), note=lines.append))
        await bench.call(bench.chain(server, "echo"))
        await bench.call(bench.chain(server, "log"), note=lines.append)
        other.cancel()

    bench.run(scenario())
    assert lines == []


def noted(*params: JsonObject) -> list[JsonObject]:
    lines: list[JsonObject] = []

    async def scenario() -> None:
        talk = CallerChannel(Caller(note=lines.append), asyncio.timeout(10))
        for one in params:
            talk.note(one)

    asyncio.run(scenario())
    return lines


def test_the_number_of_log_lines_per_call_is_limited() -> None:
    assert len(noted(*[{"data": "x"}] * (MOST_NOTES + 10))) == MOST_NOTES


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("x\x1b[1m" * 3_000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(params=st.dictionaries(st.sampled_from(["level", "data", "logger", "else"]), anything))
def test_any_log_message_becomes_a_short_line(params: JsonObject) -> None:
    [line] = noted(params)

    assert line.keys() <= {"level", "data", "logger"}
    assert "\x1b" not in str(line)
    assert len(compact(line).encode(errors="replace").decode()) < 2 * LONGEST_NOTE + 500


@pytest.mark.usefixtures("processes")
def test_a_server_completes_the_value_of_an_argument(bench: Bench) -> None:
    async def scenario() -> list[list[str]]:
        server = bench.server("modern", "completes")
        prompt = bench.chain(server, "greet", mcp_prompt_name="greet")
        template = bench.chain(server, "memo", mcp_resource_uri="memo://{name}")
        return [
            await bench.complete(chain, "who", "An", context)
            for chain, context in [(prompt, {}), (template, {"other": "tea"}), (bench.chain(server, "echo"), {})]
        ]

    assert bench.run(scenario()) == [["Ana", "ref/prompt"], ["Ana", "ref/resource", "tea"], []]


@pytest.mark.usefixtures("processes")
def test_a_server_without_completion_is_not_asked(bench: Bench) -> None:
    chain = bench.chain(bench.server("modern"), "greet", mcp_prompt_name="greet")

    assert bench.run(bench.complete(chain, "who", "An", {})) == []
