"""Results of servers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.shared.exceptions import MCPError
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.json import Json, JsonObject, compact
from kiwi_mcp.domain.outcome import Outcome, Progress
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.driver import outcome_of, refused
from kiwi_mcp.drivers.mcp.server import ServerRequest
from kiwi_mcp.drivers.mcp.transport import _messages

CALL = ServerRequest("tools/call", "find")
SCHEMA: JsonObject = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def text(words: str) -> dict[str, Json]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("answer", "outputs", "result"),
    [
        ({"content": [text("hi")]}, {}, "hi"),
        ({"content": [text('{"a": 1}')]}, {}, '{"a": 1}'),
        ({"content": [text('{"a": 1}')]}, SCHEMA, {"a": 1}),
        ({"content": [text("plain")]}, SCHEMA, "plain"),
        ({"content": [text("x")], "structuredContent": {"a": 1}}, {}, {"a": 1}),
        ({"content": [], "structuredContent": None}, {}, None),
        ({"content": []}, {}, None),
        ({}, {}, None),
        ({"content": [text("a"), text("b")]}, {}, "a\nb"),
        ({"content": [{"type": "image", "mimeType": "image/png", "data": "cG5n"}]}, {},
         [{"type": "image", "mimeType": "image/png", "data": "cG5n"}]),
        ({"content": [{"type": "resource_link", "uri": "memo://x", "name": "x"}]}, {},
         [{"type": "resource_link", "uri": "memo://x", "name": "x"}]),
    ],
)  # fmt: skip
def test_a_result_becomes_the_simplest_value_and_is_preserved_in_full(
    answer: JsonObject, outputs: JsonObject, result: Json
) -> None:
    assert outcome_of(CALL, answer, outputs) == Outcome("success", result=result, passed=answer)


@pytest.mark.case("MCP-06")
def test_a_result_that_breaks_its_own_schema_is_an_error(bench: Bench) -> None:
    outcome = outcome_of(CALL, {"content": [], "structuredContent": {"a": "one"}}, SCHEMA)

    assert outcome.status == "error"
    assert outcome.message.startswith("The result is not what the tool declares: result.a")


@pytest.mark.usefixtures("processes")
def test_a_failing_tool_is_an_error_with_its_message_escaped(bench: Bench) -> None:
    outcome = bench.ask(bench.server(), "fail")

    assert (outcome.status, outcome.message) == ("error", "no such account")


@pytest.mark.usefixtures("processes")
def test_a_protocol_error_keeps_its_code_and_data(bench: Bench) -> None:
    outcome = bench.ask(bench.server(), "refuse")

    assert outcome.status == "error"
    assert outcome.message == "The server refused 'refuse' (-32001): not today"
    assert outcome.details == {"mcp_code": -32001, "mcp_data": {"why": "sunday"}}


@pytest.mark.usefixtures("processes")
def test_a_generic_server_error_does_not_end_the_connection(bench: Bench) -> None:
    assert bench.ask(bench.server(), "generic").status == "error"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_error_of_a_proxy_is_unavailable(status: int) -> None:
    assert refused("find", MCPError(-32603, "no", data={"http_status": status})).status == "unavailable"


@pytest.mark.parametrize(
    ("needed", "details"),
    [
        ({"elicitation": {}}, {"input_required": True}),
        ({"extensions": {"io.modelcontextprotocol/tasks": {}}}, {}),
    ],
)
def test_a_missing_client_capability_is_reported_as_a_question(needed: JsonObject, details: JsonObject) -> None:
    data: dict[str, Json] = {"requiredCapabilities": needed}
    found = refused("find", MCPError(-32021, "no", data=data)).details

    assert found == {"mcp_code": -32021, "mcp_data": data, **details}


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-05")
@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("picture", {}, {"content"}),
        ("fail", {}, {"content", "isError"}),
        ("greet", {"mcp_prompt_name": "greet"}, {"messages"}),
        ("memo", {"mcp_resource_uri": "memo://{who}"}, {"contents"}),
    ],
)
def test_the_answer_of_a_server_is_passed_on_unchanged(
    bench: Bench, name: str, config: dict[str, Json], words: set[str]
) -> None:
    passed = bench.ask(bench.server(), name, {"who": "Ann"}, **config).passed

    assert passed is not None
    assert passed.keys() == words


def test_a_result_that_breaks_its_schema_is_not_passed_on() -> None:
    assert outcome_of(CALL, {"content": [], "structuredContent": {"a": "one"}}, SCHEMA).passed is None


@pytest.mark.usefixtures("processes")
def test_a_prompt_and_a_resource_are_requested_with_their_own_methods(bench: Bench) -> None:
    server = bench.server()
    prompt = bench.ask(server, "greet", {"who": 7}, mcp_prompt_name="greet")
    resource = bench.ask(server, "memo", {"name": "tea"}, mcp_resource_uri="memo://{name}")

    assert prompt.result == {"messages": [{"role": "user", "content": text("Hello 7")}]}
    assert resource.result == "about memo://tea"


@pytest.mark.usefixtures("processes")
def test_progress_is_reported_without_control_characters(bench: Bench) -> None:
    response: list[Progress] = []
    bench.run(bench.call(bench.chain(bench.server(), "progress"), report=response.append))

    assert response == [Progress(f"step {step}", done=step, total=3) for step in (1, 2, 3)]


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
answers = st.fixed_dictionaries(
    {}, optional={"content": anything, "structuredContent": anything, "isError": anything, "resultType": anything}
)


@settings(max_examples=50, deadline=None)
@given(answer=answers, outputs=st.sampled_from([{}, SCHEMA]))
def test_any_server_answer_can_be_passed_on(answer: JsonObject, outputs: JsonObject) -> None:
    outcome = outcome_of(CALL, answer, outputs)
    compact([outcome.result, outcome.passed]).encode()


@settings(max_examples=50, deadline=None)
@given(line=st.binary(max_size=200) | anything.map(lambda value: str(value).encode(errors="replace")))
def test_any_server_output_is_a_message_or_ignored(line: bytes) -> None:
    list(_messages(line))


@settings(max_examples=50, deadline=None)
@given(words=st.text(alphabet=st.characters() | st.sampled_from("\x1b[]\x07\x9b31m;")))
def test_text_of_servers_contains_no_terminal_control(words: str) -> None:
    assert not {"\x1b", "\x07", "\x9b", "\r", "\x08"} & set(strip_controls(words))
