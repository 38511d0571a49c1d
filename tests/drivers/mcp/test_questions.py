"""Servers that ask before they answer: the caller of that call is asked, nobody else, and not for ever."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import pytest
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel
from tests.drivers.mcp.conftest import Bench, at

from kiwi_mcp.domain.caller import Answers, Ask, Note, Question, Questions
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.mcp import switchboard, talk
from kiwi_mcp.drivers.mcp.pool import MOST_FURTHER
from kiwi_mcp.drivers.mcp.questions import MOST_QUESTIONS, with_defaults

NAME: JsonObject = {"message": "Who are you?", "requestedSchema": {"type": "object", "properties": {}}, "odd": [1]}
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


def told(outcome: Outcome) -> Any:
    assert outcome.status == "success", outcome.message
    return json.loads(str(outcome.result))


def wanting(**questions: str) -> JsonObject:
    return {key: {"method": method, "params": NAME} for key, method in questions.items()}


@pytest.mark.req("K-MC-01")
@pytest.mark.parametrize("method", ANSWERS)
def test_a_server_of_the_old_era_asks_its_caller_in_the_middle_of_a_call(bench: Bench, method: str) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"method": method, "params": NAME}
    outcome = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs, ask=answering(heard)))

    assert told(outcome) == {"result": ANSWERS[method]}
    assert [*heard[0].values()] == [Question(method, NAME)]  # type: ignore[arg-type] # the parameters are its words


def test_a_server_of_the_old_era_is_told_once_what_may_be_asked(bench: Bench) -> None:
    bench.run(bench.call(bench.chain(bench.server("logs"), "echo")))

    declared = json.loads(next(note for note in bench.notes if note.startswith("client ")).removeprefix("client "))
    assert declared.keys() == {"elicitation", "roots", "sampling"}
    assert declared["elicitation"].keys() == {"form", "url"}


def test_a_question_that_nobody_can_answer_is_refused_and_told_where_the_call_fails(bench: Bench) -> None:
    async def scenario() -> tuple[Outcome, Outcome]:
        server = bench.server()
        asked: JsonObject = {"method": "elicitation/create", "params": NAME}
        return (
            await bench.call(bench.chain(server, "ask"), asked),
            await bench.call(bench.chain(server, "ask"), {**asked, "fails": True}),
        )

    without, failed = bench.run(scenario())
    assert "nobody is there to answer it" in told(without)["error"]["message"]
    assert without.details == {}
    assert failed.status == "error"
    assert failed.details == {"asked": ["elicitation/create"], "input_required": True}


def test_a_call_that_fails_after_nobody_told_it_of_folders_failed_for_another_reason(bench: Bench) -> None:
    inputs: JsonObject = {"method": "roots/list", "params": {}, "fails": True}
    outcome = bench.run(bench.call(bench.chain(bench.server(), "ask"), inputs))
    assert outcome.status == "error"
    assert outcome.details == {}
    assert "question" not in outcome.suggestion


def test_of_two_callers_on_one_pipe_neither_is_asked_what_may_be_the_others(bench: Bench) -> None:
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

    assert "does not say to which it belongs" in told(bench.run(scenario()))["error"]["message"]
    assert heard == []


def test_what_a_call_that_was_left_asks_is_not_asked_of_the_next_caller(bench: Bench) -> None:
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

    assert "1 that nobody waits for" in told(bench.run(scenario()))["error"]["message"]
    assert heard == []


ASKED: JsonObject = {"method": "elicitation/create", "params": NAME}


@pytest.mark.req("K-MC-01")
def test_what_a_call_that_was_left_asks_much_later_is_asked_of_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    assert "1 that nobody waits for" in told(bench.run(scenario()))["error"]["message"]
    assert heard == []


def test_a_call_that_was_left_is_forgotten_once_the_server_has_answered_it(bench: Bench) -> None:
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

    assert told(bench.run(scenario())) == {"result": ANN}


def test_of_more_calls_that_were_left_than_are_told_apart_nothing_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "MOST_LEFT", 2)

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

    assert "more than 2" in told(bench.run(scenario()))["error"]["message"]


@pytest.mark.req("K-MC-01")
def test_a_question_that_waits_keeps_nobody_else_from_being_asked(bench: Bench) -> None:
    async def scenario() -> None:
        server, is_asked, is_answered = bench.server(), asyncio.Event(), asyncio.Event()

        async def think(questions: Questions) -> Answers:
            is_asked.set()
            await is_answered.wait()
            return dict.fromkeys(questions, ANN)

        first = (await bench.call(bench.chain(server, "pid"))).result
        waiting = asyncio.create_task(bench.call(bench.chain(server, "ask"), ASKED, ask=think))
        await asyncio.wait_for(is_asked.wait(), 10)
        others = [bench.call(bench.chain(server, "ask"), ASKED, ask=answering([])) for _ in range(3)]
        assert [told(one) for one in await asyncio.gather(*others)] == [{"result": ANN}] * 3
        assert (await bench.call(bench.chain(server, "echo"), {"text": "on"})).result == "on"
        is_answered.set()
        assert told(await waiting) == {"result": ANN}
        # One after the other, they go on where they began.
        assert (await bench.call(bench.chain(server, "pid"), ask=answering([]))).result == first
        assert len([note for note in bench.notes if note.startswith("start")]) == 4

    bench.run(scenario())


def test_a_server_gets_only_so_many_connections_to_ask_over(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        server, is_answered = bench.server(), asyncio.Event()

        async def think(questions: Questions) -> Answers:
            await is_answered.wait()
            return dict.fromkeys(questions, ANN)

        await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))
        chain = bench.chain(server, "ask")
        calls = [asyncio.create_task(bench.call(chain, ASKED, ask=think)) for _ in range(7)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = [told(one.result()) for one in done]
        assert all("does not say to which it belongs" in one["error"]["message"] for one in refused)
        is_answered.set()
        return await asyncio.gather(*calls)

    bench.run(scenario())
    assert len([note for note in bench.notes if note.startswith("start")]) == 1 + MOST_FURTHER


def test_whoever_can_be_asked_gets_no_connection_on_which_a_call_was_left(bench: Bench) -> None:
    async def scenario() -> Outcome:
        server = bench.server()
        await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))
        left = asyncio.create_task(bench.call(bench.chain(server, "silence")))
        await bench.call(bench.chain(server, "echo"))
        left.cancel()
        await asyncio.wait({left})
        return await bench.call(bench.chain(server, "ask"), ASKED, ask=answering([]))

    assert told(bench.run(scenario())) == {"result": ANN}


def test_a_server_that_asks_for_folders_only_keeps_its_one_connection(bench: Bench) -> None:
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
    return {"action": "accept", "content": {"name": message.removeprefix("Who is ").removesuffix("?").upper()}}


@pytest.mark.req("K-MC-01")
@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
def test_over_http_each_of_many_callers_is_asked_and_told_what_is_theirs(bench: Bench) -> None:
    heard: dict[str, list[str]] = {word: [] for word in "abcd"}

    def caller(word: str) -> tuple[Ask, Note]:
        async def ask(questions: Questions) -> Answers:
            heard[word].append(str(next(iter(questions.values())).params["message"]))
            await asyncio.sleep(0.05)
            return {key: by_word(questions) for key in questions}

        return ask, lambda line: heard[word].append(str(line["data"]))

    async def work(address: str) -> None:
        server = bench.remote(f"{address}/mcp")
        bench.driver.eras.remember(server.identity, "legacy")
        chain, calls = bench.chain(server, "who"), []
        for word in heard:
            ask, note = caller(word)
            calls.append(bench.call(chain, {"word": word}, ask=ask, note=note))
        outcomes = await asyncio.gather(*calls)
        assert [outcome.result for outcome in outcomes] == [{"result": f"{word}: {word.upper()}"} for word in heard]

    at(bench, curious().streamable_http_app(), work)
    assert heard == {word: [f"asking for {word}", f"Who is {word}?"] for word in heard}


@pytest.mark.req("K-MC-01")
def test_a_server_of_the_new_era_asks_back_and_is_asked_again_with_its_state(bench: Bench) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"questions": wanting(a="elicitation/create", b="roots/list"), "rounds": 3}
    chain = bench.chain(bench.server("modern"), "wonder")
    answer = told(bench.run(bench.call(chain, inputs, ask=answering(heard))))

    assert answer["answers"] == {"a": ANN, "b": ROOTS}
    assert answer["state"] == "3 opaque"
    assert len(heard) == 3
    assert heard[0]["a"] == Question("elicitation/create", NAME)


def test_a_server_that_wants_only_another_try_gets_it_without_answers(bench: Bench) -> None:
    answer = told(bench.ask(bench.server("modern"), "wonder", {"rounds": 2}))

    assert (answer["answers"], answer["state"]) == (None, "2 opaque")


def test_a_server_that_asks_for_ever_is_given_up(bench: Bench) -> None:
    heard: list[Questions] = []
    inputs: JsonObject = {"questions": wanting(a="roots/list"), "rounds": 1_000}
    outcome = bench.run(bench.call(bench.chain(bench.server("modern"), "wonder"), inputs, ask=answering(heard)))

    assert (outcome.status, "more than 10 times" in outcome.message) == ("error", True)
    assert len(heard) == 11


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        (wanting(a="elicitation/create"), "nobody is there to answer it"),
        (wanting(a="files/delete"), "no question of this protocol"),
        ({str(number): {"method": "roots/list"} for number in range(MOST_QUESTIONS + 1)}, "33 questions at once"),
        ({"a": 7}, "no question of this protocol"),
    ],
)
def test_a_call_that_stops_at_a_question_says_so(bench: Bench, questions: JsonObject, words: str) -> None:
    outcome = bench.ask(bench.server("modern"), "wonder", {"questions": questions})

    assert outcome.status == "error"
    assert words in outcome.message
    assert outcome.details["input_required"] is True
    assert outcome.suggestion


def test_a_kind_of_answer_that_is_not_known_is_an_error(bench: Bench) -> None:
    assert "does not know" in bench.ask(bench.server("modern"), "mystery").message


def test_each_request_of_the_new_era_says_what_its_caller_can_be_asked(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        chain = bench.chain(bench.server("modern", "tasks"), "meta")
        return [
            told(await bench.call(chain)),
            told(await bench.call(chain, ask=answering([]), note=lambda _: None)),
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
def test_the_time_to_think_is_not_the_time_of_the_call(bench: Bench, habits: tuple[str, ...], name: str) -> None:
    async def slowly(questions: Questions) -> Answers:
        await asyncio.sleep(0.7)
        return dict.fromkeys(questions, ANN)

    inputs: JsonObject = {"method": "elicitation/create", "questions": wanting(a="elicitation/create")}
    outcome = bench.run(bench.call(bench.chain(bench.server(*habits), name, timeout=0.5), inputs, ask=slowly))

    assert outcome.status == "success", outcome.message


@pytest.mark.req("I4")
@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_a_caller_who_thinks_for_too_long_has_not_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, habits: tuple[str, ...], name: str
) -> None:
    async def never(_: Questions) -> Answers:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(talk, "THINKING", 0.2)
    inputs: JsonObject = {"method": "elicitation/create", "questions": wanting(a="elicitation/create"), "fails": True}
    started = monotonic()
    outcome = bench.run(bench.call(bench.chain(bench.server(*habits), name), inputs, ask=never))

    assert outcome.status == "error"
    assert outcome.details["input_required"] is True
    assert monotonic() - started < 5


@pytest.mark.parametrize(("habits", "name"), [((), "ask"), (("modern",), "wonder")])
def test_a_caller_who_leaves_is_asked_no_longer(bench: Bench, habits: tuple[str, ...], name: str) -> None:
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
        await asyncio.wait_for(asked.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await bench.call(bench.chain(server, "echo"), {"text": "on"})).result == "on"

    bench.run(scenario())
    assert states == ["withdrawn"]


@pytest.mark.parametrize("answers", [{}, {"b": ANN}])
def test_a_question_without_its_answer_is_not_answered(bench: Bench, answers: Answers) -> None:
    async def ask(_: Questions) -> Answers:
        return answers

    inputs: JsonObject = {"questions": wanting(a="elicitation/create")}
    outcome = bench.run(bench.call(bench.chain(bench.server("modern"), "wonder"), inputs, ask=ask))

    assert "no answer to 'a'" in outcome.message


def test_a_caller_who_cannot_be_asked_this_says_why(bench: Bench) -> None:
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
def test_a_field_that_was_left_out_of_a_form_has_the_value_that_the_form_gives_it(
    params: JsonObject, answer: JsonObject, whole: Json
) -> None:
    assert with_defaults(Question("elicitation/create", params), answer).get("content") == whole
