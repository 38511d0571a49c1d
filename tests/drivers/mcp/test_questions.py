"""Servers that ask questions: only the caller of that call is asked, with a time limit."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY
from pydantic import BaseModel
from tests.drivers.mcp.conftest import Bench, at

from kiwi_mcp.domain.calls import Answers, Ask, Note, Question, Questions
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.mcp import server_events
from kiwi_mcp.drivers.mcp.pool import MOST_FURTHER
from kiwi_mcp.drivers.mcp.server_events import MOST_QUESTIONS, with_defaults

pytestmark = pytest.mark.usefixtures("processes")

NAME: JsonObject = {"message": "Who are you?", "requestedSchema": {"type": "object", "properties": {}}, "odd": [1]}
PUT: JsonObject = {**NAME, "message": "MCP server hostile asks: Who are you?"}
"""The question as the caller is asked it."""
ANN: JsonObject = {"action": "accept", "content": {"name": "Ann"}}
ROOTS: JsonObject = {"roots": [{"uri": "file:///home/ann"}]}
SAID: JsonObject = {"role": "assistant", "content": {"type": "text", "text": "42"}, "model": "m"}
ANSWERS: dict[str, JsonObject] = {"elicitation/create": ANN, "roots/list": ROOTS, "sampling/createMessage": SAID}


def answering(heard: list[Questions]) -> Ask:
    """A caller who has an answer to everything."""

    async def ask(questions: Questions) -> Answers:
        heard.append(questions)
        return {key: ANSWERS[question.method] for key, question in questions.items()}

    return ask


def value_of(outcome: Outcome) -> Any:
    assert outcome.status == "success", outcome.message
    return json.loads(str(outcome.result))


def wanting(**questions: str) -> JsonObject:
    return {key: {"method": method, "params": NAME} for key, method in questions.items()}


@pytest.mark.req("K-MC-01")
@pytest.mark.parametrize("method", ANSWERS)
def test_a_server_of_the_handshake_era_asks_its_caller_during_a_call(bench: Bench, method: str) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"method": method, "params": NAME}
    outcome = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs, ask=answering(heard)))

    assert value_of(outcome) == {"result": ANSWERS[method]}
    put = PUT if method == "elicitation/create" else NAME
    assert [*heard[0].values()] == [Question(method, put)]  # type: ignore[arg-type] # the parameters are its words


def test_a_server_of_the_handshake_era_learns_once_what_it_may_ask(bench: Bench) -> None:
    bench.run(bench.call(bench.chain(bench.server("logs"), "echo")))

    declared = json.loads(next(note for note in bench.notes if note.startswith("client ")).removeprefix("client "))
    assert declared.keys() == {"elicitation", "roots", "sampling"}
    assert declared["elicitation"].keys() == {"form", "url"}


@pytest.mark.case("TR-F06")
@pytest.mark.parametrize(
    ("allowed", "capabilities"),
    [((), set()), (("questions",), {"elicitation"}), (("roots", "sampling"), {"roots", "sampling"})],
)
def test_a_server_learns_only_what_it_may_ask(bench: Bench, allowed: tuple[str, ...], capabilities: set[str]) -> None:
    bench.client = allowed

    async def scenario() -> Outcome:
        await bench.call(bench.chain(bench.server("logs"), "echo"), ask=answering([]))
        modern = bench.server("modern", server_id="newer")
        return await bench.call(bench.chain(modern, "meta"), ask=answering([]))

    meta = value_of(bench.run(scenario()))
    declared = json.loads(next(note for note in bench.notes if note.startswith("client ")).removeprefix("client "))
    assert declared.keys() == capabilities
    assert meta["io.modelcontextprotocol/clientCapabilities"].keys() == capabilities


@pytest.mark.case("TR-F06")
@pytest.mark.parametrize("method", ANSWERS)
def test_a_request_that_the_owner_did_not_allow_is_answered_with_an_error(bench: Bench, method: str) -> None:
    bench.client = ()
    heard: list[Questions] = []
    inputs: JsonObject = {"method": method, "params": NAME, "fails": True}
    failed = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs, ask=answering(heard)))

    assert heard == []
    assert failed.status == "error"
    assert "-32601" in failed.message
    assert "kiwi mcp allow hostile --" in failed.suggestion
    assert "input_required" not in failed.details


@pytest.mark.case("TR-F06")
def test_a_request_outside_a_call_is_refused(bench: Bench) -> None:
    bench.client = ()
    outcome = bench.ask(bench.server(), "ask_back")

    assert outcome.result == "asked"


@pytest.mark.case("TR-F06")
@pytest.mark.usefixtures("loopback")
def test_a_server_that_lacks_a_capability_reports_the_missing_grant(bench: Bench) -> None:
    bench.client = ()
    server = MCPServer("curious")

    @server.tool()
    async def sample(ctx: Context[Any, Any]) -> str:
        """Fails like a modern server with a client that has no model."""
        data: JsonObject = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "Client does not support sampling", data)

    async def work(address: str) -> None:
        outcome = await bench.call(bench.chain(bench.remote(f"{address}/mcp"), "sample"), ask=answering([]))
        assert outcome.status == "error"
        assert "is not allowed to use the models of clients" in outcome.message
        assert outcome.suggestion == "The owner can allow it: `kiwi mcp allow remote --sampling`."
        assert "mcp_code" not in outcome.details

    at(bench, server.streamable_http_app(), work)


def form(**fields: Json) -> JsonObject:
    return {"message": "Sign in", "requestedSchema": {"type": "object", "properties": fields}}


@pytest.mark.case("TR-F06")
@pytest.mark.parametrize(
    "params",
    [
        form(password={"type": "string"}),
        form(name={"type": "string"}, apiKey={"type": "string"}),
        form(github_token={"type": "string"}),
        form(otp={"type": "string"}),
        form(your_pin={"type": "string"}),
        form(x={"type": "string", "title": "Your API key"}),
        form(x={"type": "object", "properties": {"secret": {"type": "string"}}}),
        {"requestedSchema": {"allOf": [{"properties": {"passphrase": {}}}]}},
    ],
)
@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_a_form_with_a_secret_field_is_not_shown(
    bench: Bench, params: JsonObject, habits: tuple[str, ...], name: str
) -> None:
    heard: list[Questions] = []
    one: JsonObject = {"method": "elicitation/create", "params": params}
    inputs: JsonObject = {**one, "questions": {"a": one}}
    outcome = bench.run(bench.call(bench.chain(bench.server(*habits), name), inputs, ask=answering(heard)))

    assert heard == []
    answer = value_of(outcome)
    assert answer["answers"] == {"a": {"action": "decline"}} if habits else answer["error"]["code"] == -32602
    assert "which MCP forbids" in str(outcome.details["notices"])


@pytest.mark.parametrize(
    "params",
    [
        form(token_count={"type": "integer"}),
        form(max_tokens={"type": "integer"}),
        form(name={"type": "string", "title": "Key points"}),
        form(auth_mode={"type": "string"}),
        {"mode": "url", "message": "Sign in", "url": "https://example.com/password", "elicitationId": "1"},
    ],
)
def test_a_form_without_a_secret_field_is_shown(bench: Bench, params: JsonObject) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"method": "elicitation/create", "params": params}
    outcome = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs, ask=answering(heard)))

    assert value_of(outcome) == {"result": ANN}
    assert heard


def test_a_question_without_a_listener_is_refused_and_reported_if_the_call_fails(bench: Bench) -> None:
    async def scenario() -> tuple[Outcome, Outcome]:
        server = bench.server()
        asked: JsonObject = {"method": "elicitation/create", "params": NAME}
        return (
            await bench.call(bench.chain(server, "ask"), asked),
            await bench.call(bench.chain(server, "ask"), {**asked, "fails": True}),
        )

    without, failed = bench.run(scenario())
    assert "the caller cannot answer it" in value_of(without)["error"]["message"]
    assert without.details == {}
    assert failed.status == "error"
    assert failed.details == {"asked": ["elicitation/create"], "input_required": True}


def test_a_refused_roots_request_is_not_the_reason_for_a_failure(bench: Bench) -> None:
    inputs: JsonObject = {"method": "roots/list", "params": {}, "fails": True}
    outcome = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs))
    assert outcome.status == "error"
    assert outcome.details == {}
    assert "question" not in outcome.suggestion


def test_a_question_during_two_concurrent_calls_reaches_neither_caller(bench: Bench) -> None:
    heard: list[Questions] = []

    async def scenario() -> Outcome:
        server = bench.server()
        other = asyncio.create_task(bench.call(bench.chain(server, "silence"), ask=answering(heard)))
        await bench.call(bench.chain(server, "echo"))
        outcome = await bench.call(
            bench.chain(server, "ask"), {"method": "elicitation/create", "params": NAME}, ask=answering(heard)
        )
        other.cancel()
        return outcome

    assert "does not say to which it belongs" in value_of(bench.run(scenario()))["error"]["message"]
    assert heard == []


def test_a_question_of_an_abandoned_call_does_not_reach_the_next_caller(bench: Bench) -> None:
    heard: list[Questions] = []

    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "echo"))
        slow = asyncio.create_task(bench.call(bench.chain(server, "silence")))
        await bench.call(bench.chain(server, "echo"))
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        asked: JsonObject = {"method": "elicitation/create", "params": NAME}
        return await bench.call(bench.chain(server, "ask"), asked, ask=answering(heard))

    assert "1 without a waiting caller" in value_of(bench.run(scenario()))["error"]["message"]
    assert heard == []


ASKED: JsonObject = {"method": "elicitation/create", "params": NAME}


@pytest.mark.req("K-MC-01")
def test_a_late_question_of_an_abandoned_call_reaches_no_caller(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Questions] = []

    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "echo"))
        left = asyncio.create_task(bench.call(bench.chain(server, "ask_later"), ASKED, ask=answering(heard)))
        await bench.call(bench.chain(server, "echo"))
        left.cancel()
        await asyncio.wait({left})
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 60)
        return await bench.call(bench.chain(server, "provoke"), ask=answering(heard))

    assert "1 without a waiting caller" in value_of(bench.run(scenario()))["error"]["message"]
    assert heard == []


def test_an_abandoned_call_is_forgotten_when_the_server_answers_it(bench: Bench) -> None:
    heard: list[Questions] = []

    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "echo"))
        left = asyncio.create_task(bench.call(bench.chain(server, "slow"), {"seconds": 0.1}))
        await bench.call(bench.chain(server, "echo"))
        left.cancel()
        await asyncio.wait({left})
        await bench.call(bench.chain(server, "slow"), {"seconds": 0.3})  # by then the first is answered as well
        return await bench.call(bench.chain(server, "ask"), ASKED, ask=answering(heard))

    assert value_of(bench.run(scenario())) == {"result": ANN}


def test_after_too_many_abandoned_calls_a_connection_asks_no_questions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_events, "MOST_LEFT", 2)

    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "echo"))
        left = [asyncio.create_task(bench.call(bench.chain(server, "slow"), {"seconds": 0.1})) for _ in range(3)]
        await bench.call(bench.chain(server, "echo"))
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        await bench.call(bench.chain(server, "slow"), {"seconds": 0.3})
        return await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))

    assert "more than 2" in value_of(bench.run(scenario()))["error"]["message"]


@pytest.mark.req("K-MC-01")
def test_a_waiting_question_blocks_no_other_question(bench: Bench) -> None:
    async def scenario() -> None:
        server, is_asked, is_answered = bench.server(), asyncio.Event(), asyncio.Event()

        async def think(questions: Questions) -> Answers:
            is_asked.set()
            await is_answered.wait()
            return dict.fromkeys(questions, ANN)

        first = (await bench.call(bench.chain(server, "pid"))).result
        waiting = asyncio.create_task(bench.call(bench.chain(server, "ask"), ASKED, ask=think))
        await asyncio.wait_for(is_asked.wait(), 120)
        others = [bench.call(bench.chain(server, "ask"), ASKED, ask=answering([])) for _ in range(3)]
        assert [value_of(one) for one in await asyncio.gather(*others)] == [{"result": ANN}] * 3
        assert (await bench.call(bench.chain(server, "echo"), {"text": "on"})).result == "on"
        is_answered.set()
        assert value_of(await waiting) == {"result": ANN}
        # One after the other, they go on where they began.
        assert (await bench.call(bench.chain(server, "pid"), ask=answering([]))).result == first
        assert len([note for note in bench.notes if note.startswith("start")]) == 4

    bench.run(scenario())


def test_the_number_of_connections_for_questions_is_limited(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        server, is_answered = bench.server(), asyncio.Event()

        async def think(questions: Questions) -> Answers:
            await is_answered.wait()
            return dict.fromkeys(questions, ANN)

        await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))
        chain = bench.chain(server, "ask")
        calls = [asyncio.create_task(bench.call(chain, ASKED, ask=think)) for _ in range(7)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = [value_of(one.result()) for one in done]
        assert all("does not say to which it belongs" in one["error"]["message"] for one in refused)
        is_answered.set()
        return await asyncio.gather(*calls)

    bench.run(scenario())
    assert len([note for note in bench.notes if note.startswith("start")]) == 1 + MOST_FURTHER


def test_a_caller_that_can_answer_gets_no_connection_with_an_abandoned_call(bench: Bench) -> None:
    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))
        left = asyncio.create_task(bench.call(bench.chain(server, "silence")))
        await bench.call(bench.chain(server, "echo"))
        left.cancel()
        await asyncio.wait({left})
        return await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))

    assert value_of(bench.run(scenario())) == {"result": ANN}


def test_a_server_that_asks_only_for_roots_keeps_its_one_connection(bench: Bench) -> None:
    async def scenario() -> None:
        server, folders = bench.server(), {"method": "roots/list"}
        await bench.call(bench.chain(server, "ask"), folders, ask=answering([]))
        calls = [bench.call(bench.chain(server, "slow"), {"seconds": 0.1}, ask=answering([])) for _ in range(3)]
        await asyncio.gather(*calls)

    bench.run(scenario())
    assert len([note for note in bench.notes if note.startswith("start")]) == 1


class Name(BaseModel):
    name: str


def curious() -> MCPServer:
    server = MCPServer("curious")

    @server.tool()
    async def who(word: str, ctx: Context[Any, Any]) -> str:
        """Asks for a name, and says it with a word."""
        await ctx.info(f"asking for {word}")
        answer = await ctx.elicit(f"Who is {word}?", Name)
        return f"{word}: {answer.data.name if answer.action == 'accept' else answer.action}"

    return server


def by_word(questions: Questions) -> JsonObject:
    message = str(next(iter(questions.values())).params["message"])
    return {
        "action": "accept",
        "content": {"name": message.removeprefix("MCP server remote asks: Who is ").removesuffix("?").upper()},
    }


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-MC-01")
@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
def test_over_http_each_concurrent_caller_gets_its_own_questions_and_answers(bench: Bench) -> None:
    heard: dict[str, list[str]] = {word: [] for word in "abcd"}

    def caller(word: str) -> tuple[Ask, Note]:
        async def ask(questions: Questions) -> Answers:
            heard[word].append(str(next(iter(questions.values())).params["message"]))
            await asyncio.sleep(0.05)
            return {key: by_word(questions) for key in questions}

        return ask, lambda line: heard[word].append(str(line["data"]))

    async def work(address: str) -> None:
        server = bench.remote(f"{address}/mcp")
        bench.driver.eras[server.identity] = "legacy"
        chain, calls = bench.chain(server, "who"), []
        for word in heard:
            ask, note = caller(word)
            calls.append(bench.call(chain, {"word": word}, ask=ask, note=note))
        outcomes = await asyncio.gather(*calls)
        assert [outcome.result for outcome in outcomes] == [{"result": f"{word}: {word.upper()}"} for word in heard]

    at(bench, curious().streamable_http_app(), work)
    assert heard == {word: [f"asking for {word}", f"MCP server remote asks: Who is {word}?"] for word in heard}


@pytest.mark.req("K-MC-01")
def test_a_server_of_the_modern_era_asks_and_is_called_again_with_its_state(bench: Bench) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"questions": wanting(a="elicitation/create", b="roots/list"), "rounds": 3}
    chain = bench.chain(bench.server("modern"), "wonder")
    answer = value_of(bench.run(bench.call(chain, inputs, ask=answering(heard))))

    assert answer["answers"] == {"a": ANN, "b": ROOTS}
    assert answer["state"] == "3 opaque"
    assert len(heard) == 3
    assert heard[0]["a"] == Question("elicitation/create", PUT)


def test_a_server_that_wants_a_retry_gets_one_without_answers(bench: Bench) -> None:
    answer = value_of(bench.ask(bench.server("modern"), "wonder", {"rounds": 2}))

    assert (answer["answers"], answer["state"]) == (None, "2 opaque")


def test_a_server_that_asks_forever_is_abandoned(bench: Bench) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"questions": wanting(a="roots/list"), "rounds": 1_000}
    outcome = bench.run(bench.call(bench.chain(bench.server("modern"), "wonder"), inputs, ask=answering(heard)))

    assert (outcome.status, "more than 10 times" in outcome.message) == ("error", True)
    assert len(heard) == 11


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        (wanting(a="elicitation/create"), "the caller cannot answer it"),
        (wanting(a="files/delete"), "no question of this protocol"),
        ({str(number): {"method": "roots/list"} for number in range(MOST_QUESTIONS + 1)}, "33 questions at once"),
        ({"a": 7}, "no question of this protocol"),
    ],
)
def test_a_call_that_stops_at_a_question_reports_it(bench: Bench, questions: JsonObject, words: str) -> None:
    outcome = bench.ask(bench.server("modern"), "wonder", {"questions": questions})

    assert outcome.status == "error"
    assert words in outcome.message
    assert outcome.details["input_required"] is True
    assert outcome.suggestion


def test_an_unknown_result_type_is_an_error(bench: Bench) -> None:
    assert "does not know" in bench.ask(bench.server("modern"), "mystery").message


def test_each_modern_request_declares_what_its_caller_can_answer(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        chain = bench.chain(bench.server("modern", "tasks"), "meta")
        return [
            value_of(await bench.call(chain)),
            value_of(await bench.call(chain, ask=answering([]), note=lambda _: None)),
        ]

    alone, together = bench.run(scenario())
    tasks: JsonObject = {"io.modelcontextprotocol/tasks": {}}
    asked = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}, "extensions": tasks}
    assert alone["io.modelcontextprotocol/clientCapabilities"] == {"extensions": tasks}
    assert together["io.modelcontextprotocol/clientCapabilities"] == asked
    assert "io.modelcontextprotocol/logLevel" not in alone
    assert together["io.modelcontextprotocol/logLevel"] == "info"


@pytest.mark.req("I4")
@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_the_time_to_answer_a_question_does_not_count_as_call_time(
    bench: Bench, habits: tuple[str, ...], name: str
) -> None:
    async def slowly(questions: Questions) -> Answers:
        await asyncio.sleep(0.7)
        return dict.fromkeys(questions, ANN)

    inputs: JsonObject = {"method": "elicitation/create", "questions": wanting(a="elicitation/create")}
    outcome = bench.run(bench.call(bench.chain(bench.server(*habits), name, timeout=0.5), inputs, ask=slowly))

    assert outcome.status == "success", outcome.message


@pytest.mark.req("I4")
@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_a_caller_that_answers_too_late_has_not_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, habits: tuple[str, ...], name: str
) -> None:
    async def never(_: Questions) -> Answers:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(server_events, "THINKING", 0.2)
    inputs: JsonObject = {"method": "elicitation/create", "questions": wanting(a="elicitation/create"), "fails": True}
    started = monotonic()
    outcome = bench.run(bench.call(bench.chain(bench.server(*habits), name), inputs, ask=never))

    assert outcome.status == "error"
    assert outcome.details["input_required"] is True
    assert monotonic() - started < 60


@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_a_caller_that_leaves_is_not_asked_further(bench: Bench, habits: tuple[str, ...], name: str) -> None:
    states: list[str] = []

    async def scenario() -> None:
        asked = asyncio.Event()

        async def ask(_: Questions) -> Answers:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                states.append("withdrawn")
            return {}

        inputs: JsonObject = {"method": "elicitation/create", "questions": wanting(a="elicitation/create")}
        server = bench.server(*habits)
        call = asyncio.create_task(bench.call(bench.chain(server, name), inputs, ask=ask))
        await asyncio.wait_for(asked.wait(), 120)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await bench.call(bench.chain(server, "echo"), {"text": "on"})).result == "on"

    bench.run(scenario())
    assert states == ["withdrawn"]


@pytest.mark.parametrize("answers", [{}, {"b": ANN}])
def test_a_question_without_an_answer_stays_unanswered(bench: Bench, answers: Answers) -> None:
    async def ask(_: Questions) -> Answers:
        return answers

    inputs: JsonObject = {"questions": wanting(a="elicitation/create")}
    outcome = bench.run(bench.call(bench.chain(bench.server("modern"), "wonder"), inputs, ask=ask))

    assert "no answer to 'a'" in outcome.message


def test_a_caller_that_cannot_answer_gives_a_reason(bench: Bench) -> None:
    async def ask(_: Questions) -> Answers:
        raise Unanswered(["sampling/createMessage"], message="Your client has no model.", suggestion="Use another.")

    inputs: JsonObject = {"questions": wanting(a="sampling/createMessage")}
    outcome = bench.run(bench.call(bench.chain(bench.server("modern"), "wonder"), inputs, ask=ask))

    assert (outcome.status, outcome.message, outcome.suggestion) == (
        "error",
        "Your client has no model.",
        "Use another.",
    )


FORM: JsonObject = {
    "requestedSchema": {
        "type": "object",
        "properties": {"name": {"type": "string", "default": "Bob"}, "age": {"type": "integer", "default": 7}, "x": {}},
    }
}


@pytest.mark.parametrize(
    ("params", "answer", "whole"),
    [
        (FORM, {"action": "accept", "content": {"name": "Ann"}}, {"name": "Ann", "age": 7}),
        (FORM, {"action": "accept"}, {"name": "Bob", "age": 7}),
        (FORM, {"action": "decline"}, None),
        ({"mode": "url", "url": "https://example.com"}, {"action": "accept"}, None),
        ({"requestedSchema": 5}, {"action": "accept", "content": {"a": 1}}, {"a": 1}),
    ],
)
def test_an_omitted_form_field_has_its_default_value(params: JsonObject, answer: JsonObject, whole: Json) -> None:
    assert with_defaults(Question("elicitation/create", params), answer).get("content") == whole
