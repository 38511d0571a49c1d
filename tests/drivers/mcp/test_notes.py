"""Lines of servers' logs, for who listens; and proposals while an argument is typed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.drivers.mcp.talk import LONGEST_NOTE, MOST_NOTES, Talk


@pytest.mark.parametrize("habits", [("logs",), ("modern",)])
def test_lines_of_a_log_reach_the_caller_without_what_steers_a_terminal(bench: Bench, habits: tuple[str, ...]) -> None:
    lines: list[JsonObject] = []
    bench.run(bench.call(bench.chain(bench.server(*habits), "log"), note=lines.append))

    assert lines == [{"level": "info", "data": f"line {number}", "logger": "hostile"} for number in (0, 1)]


def test_a_server_of_the_old_era_is_asked_for_its_log_once_and_only_if_somebody_listens(bench: Bench) -> None:
    async def scenario() -> None:
        chain = bench.chain(bench.server("logs"), "echo")
        await bench.call(chain)
        assert not any(note.startswith("level") for note in bench.notes)
        for _ in range(3):
            await bench.call(chain, note=lambda _: None)

    bench.run(scenario())
    assert bench.notes.count("level info") == 1


def test_of_two_callers_on_one_pipe_neither_is_told_what_may_be_the_others(bench: Bench) -> None:
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
        talk = Talk(Caller(note=lines.append), asyncio.timeout(10))
        for one in params:
            talk.note(one)

    asyncio.run(scenario())
    return lines


def test_a_call_passes_on_only_so_many_lines() -> None:
    assert len(noted(*[{"data": "x"}] * (MOST_NOTES + 10))) == MOST_NOTES


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("x\x1b[1m" * 3_000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(params=st.dictionaries(st.sampled_from(["level", "data", "logger", "else"]), anything))
def test_whatever_a_server_logs_is_a_short_line_that_can_be_passed_on(params: JsonObject) -> None:
    [line] = noted(params)

    assert line.keys() <= {"level", "data", "logger"}
    assert "\x1b" not in str(line)
    assert len(compact(line).encode(errors="replace").decode()) < 2 * LONGEST_NOTE + 500


def test_a_server_proposes_what_an_argument_may_be(bench: Bench) -> None:
    async def scenario() -> list[list[str]]:
        server = bench.server("modern", "completes")
        prompt = bench.chain(server, "greet", mcp_prompt_name="greet")
        template = bench.chain(server, "memo", mcp_resource_uri="memo://{name}")
        return [
            await bench.driver.complete(chain, bench.space, {}, "who", "An", context, jail=bench.jail)
            for chain, context in [(prompt, {}), (template, {"other": "tea"}), (bench.chain(server, "echo"), {})]
        ]

    assert bench.run(scenario()) == [["Ana", "ref/prompt"], ["Ana", "ref/resource", "tea"], []]


def test_a_server_that_proposes_nothing_is_not_asked_to(bench: Bench) -> None:
    chain = bench.chain(bench.server("modern"), "greet", mcp_prompt_name="greet")

    assert bench.run(bench.driver.complete(chain, bench.space, {}, "who", "An", {}, jail=bench.jail)) == []
