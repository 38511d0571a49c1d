"""Requests to a scripted model in every dialect: replies, broken streams, failures and retries."""

from __future__ import annotations

import pytest
from tests.drivers.llm.conftest import Ask, chain_of
from tests.plugins.scripted_model import (
    DIALECT_NAMES,
    KEY,
    MODEL,
    ScriptedModel,
    ScriptedTurn,
    break_off,
    empty,
    endless,
    fail,
    html,
    say,
    use,
    use_text,
)

from kiwi_mcp.domain.errors import ModelFailed
from kiwi_mcp.domain.messages import (
    Message,
    ModelReply,
    Prompt,
    ReasoningPart,
    ReplyDelta,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolDefinition,
    ToolResultPart,
)
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.drivers.llm.model import Conversation, bind_request, error_classes
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model

TOOLS = (
    ToolDefinition("search", "Find things", {"type": "object", "properties": {"query": {"type": "string"}}}),
    ToolDefinition("help", "Explain", {}),
)
STREAMS_TEXT = ("openai_chat", "openai_responses", "anthropic")
"""Dialects in which arguments are streamed as text."""
dialects = pytest.mark.parametrize("dialect", DIALECT_NAMES)


def asks(*messages: Message, system: str = "Be brief.", max_output: int = 256) -> Prompt:
    first = Message("user", (TextPart("What is new?"),))
    return Prompt(system, TOOLS, (first, *messages), max_output, cache_key="thread-1")


def chosen(model: ScriptedModel, dialect: str, **more: object) -> ModelChoice:
    return choose_model(chain_of(model.config(dialect, **more)), tier="fast")


def answered(reply: ModelReply, *labels: str) -> tuple[Message, Message]:
    results = [
        ToolResultPart(call.id, call.name, f"result of {call.name}", label=labels[0] if labels else "")
        for call in reply.calls
    ]
    return Message("assistant", reply.parts), Message("tool", tuple(results))


@pytest.mark.req("K-TH-01", "F1", "F5")
@dialects
async def test_a_model_calls_tools_and_then_answers(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    choice, deltas = chosen(scripted_model, dialect), list[ReplyDelta]()
    scripted_model.will(say("I look.") & use("search", query="söme\n news") & use("help"), say("Nothing is new."))

    first = await ask_model(asks(), choice, deltas=deltas)
    second = await ask_model(asks(*answered(first, "from the web")), choice)

    assert first.text == "I look."
    assert [(call.name, call.arguments) for call in first.calls] == [
        ("search", '{"query": "s\\u00f6me\\n news"}'),
        ("help", "{}"),
    ]
    assert len({call.id for call in first.calls}) == 2
    assert (first.stop, second.stop) == ("calls", "end")
    assert first.usage == TokenUsage(input=100, output=20)
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == "I look."
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["search", "help"]
    assert second.text == "Nothing is new."
    assert scripted_model.requests[1].tool_names == ["search", "help"]
    assert b"result of search" in scripted_model.requests[1].body


@dialects
async def test_fifty_requests_each_begin_with_the_bytes_of_the_one_before(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    choice, messages = chosen(scripted_model, dialect), list[Message]()
    for turn in range(50):
        scripted_model.will(say(f"Turn {turn}.", reasoning="hm") & use("search", query=f"{turn}") & use("help"))
        reply = await ask_model(asks(*messages), choice)
        messages += answered(reply, "from outside")
        if turn % 7 == 0:
            messages.append(Message("user", (TextPart(f"Also look at {turn}."),)))

    assert len(scripted_model.requests) == 50
    assert scripted_model.faults == []


@dialects
async def test_reasoning_is_sent_back_to_the_model_that_made_it_alone(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    choice = chosen(scripted_model, dialect, quirks=["reasoning_content"])
    scripted_model.will(say("Hm.", reasoning="Let me think about it.") & use("help"), say("A."), say("B."))

    reply = await ask_model(asks(), choice)
    thought = next(part for part in reply.parts if isinstance(part, ReasoningPart))
    assert (thought.text, thought.provider, thought.model) == ("Let me think about it.", "local_llm", MODEL)
    await ask_model(asks(*answered(reply)), choice)
    foreign = [ReasoningPart(p.text, p.provider, "other", p.opaque) if p is thought else p for p in reply.parts]
    await ask_model(asks(Message("assistant", tuple(foreign)), answered(reply)[1], system="Other."), choice)

    own, other = (request.body.decode() for request in scripted_model.requests[1:])
    secret = thought.opaque or thought.text
    assert ("think about it" in own) == (dialect != "gemini")
    assert "think about it" not in other
    assert secret not in other


@dialects
async def test_a_stream_that_breaks_keeps_complete_calls_and_drops_the_partial_one(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    scripted_model.will(break_off(say("I look.") & use("search", query="one") & use("search", query="two")))

    reply = await ask_model(asks(), chosen(scripted_model, dialect))

    assert reply.stop == "broken"
    assert [call.arguments for call in reply.calls] == ['{"query": "one"}']
    assert reply.text == "I look."


@dialects
async def test_the_next_request_after_a_broken_stream_is_valid(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    choice = chosen(scripted_model, dialect)
    scripted_model.will(break_off(say("A long text that is cut off.")), say("Yes."))

    reply = await ask_model(asks(), choice)
    after = await ask_model(asks(Message("assistant", reply.parts)), choice)

    assert reply.stop == "broken"
    assert after.text == "Yes."


@pytest.mark.parametrize("dialect", STREAMS_TEXT)
@pytest.mark.parametrize("arguments", ['{"query": ', "nonsense", '["a"]', '{"a":\n\t1,  "a":2}', '{"x": 1e400}'])
async def test_arguments_are_the_exact_text_of_the_model(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str, arguments: str
) -> None:
    choice = chosen(scripted_model, dialect)
    scripted_model.will(use_text("search", arguments), say("Sorry."))

    reply = await ask_model(asks(), choice)
    again = await ask_model(asks(*answered(reply)), choice)

    assert [call.arguments for call in reply.calls] == [arguments]
    assert again.text == "Sorry."


@pytest.mark.parametrize("dialect", ["gemini", "ollama"])
async def test_a_call_that_the_server_could_not_read_is_a_clear_error(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    scripted_model.will(use_text("search", '{"query": '))

    with pytest.raises(ModelFailed) as caught:
        await ask_model(asks(), chosen(scripted_model, dialect))

    assert caught.value.kind == "invalid"


@dialects
async def test_a_rate_limit_is_waited_for_as_long_as_the_provider_asks(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    scripted_model.will(fail(429, retry_after="7"), fail(503), say("Now."))
    waits: list[float] = []

    reply = await ask_model(asks(), chosen(scripted_model, dialect), waits=waits)

    assert reply.text == "Now."
    assert waits == [7.0, 4.0]


@dialects
async def test_three_retries_are_the_most(scripted_model: ScriptedModel, ask_model: Ask, dialect: str) -> None:
    scripted_model.will(*[fail(529, "Overloaded.")] * 4)
    waits: list[float] = []

    with pytest.raises(ModelFailed, match="Overloaded") as caught:
        await ask_model(asks(), chosen(scripted_model, dialect), waits=waits)

    assert waits == [2.0, 4.0, 8.0]
    assert (caught.value.kind, caught.value.details["attempts"]) == ("server", 4)


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        (fail(401, "Bad key."), "auth"),
        (fail(403), "auth"),
        (fail(400, "No such parameter."), "invalid"),
        (fail(422), "invalid"),
        (fail(404, "No such model."), "invalid"),
        (fail(429, "You exceeded your current quota."), "quota"),
        (fail(429, retry_after="3600"), "rate_limit"),
        (fail(400, "prompt is too long: 300000 tokens"), "context"),
        (html(), "invalid"),
        (ScriptedTurn(how="json"), "invalid"),
        (empty(), "invalid"),
        (break_off(say("x")), "connection"),
    ],
)
@dialects
async def test_a_failure_that_waiting_does_not_help_is_not_repeated(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str, turn: ScriptedTurn, kind: str
) -> None:
    scripted_model.will(turn)

    with pytest.raises(ModelFailed) as caught:
        await ask_model(asks(), chosen(scripted_model, dialect))

    assert caught.value.kind == kind
    assert caught.value.suggestion
    assert KEY not in str(caught.value.to_response())
    assert len(scripted_model.requests) == 1


@dialects
async def test_an_endless_stream_is_closed(scripted_model: ScriptedModel, ask_model: Ask, dialect: str) -> None:
    scripted_model.will(endless())

    with pytest.raises(ModelFailed, match="did not end") as caught:
        await ask_model(asks(max_output=16), chosen(scripted_model, dialect))

    assert caught.value.kind == "invalid"


@dialects
async def test_a_silent_stream_ends_with_a_timeout(scripted_model: ScriptedModel, ask_model: Ask, dialect: str) -> None:
    scripted_model.will(ScriptedTurn(how="silent"))

    with pytest.raises(ModelFailed) as caught:
        await ask_model(asks(), chosen(scripted_model, dialect), idle=0.05)

    assert caught.value.kind == "timeout"
    assert len(scripted_model.requests) == 1


async def test_a_server_that_is_not_there_is_tried_again(ask_model: Ask) -> None:
    choice, waits = ModelChoice("p", "openai_chat", "m", "http://127.0.0.1:9/v1/chat/completions"), list[float]()

    with pytest.raises(ModelFailed) as caught:
        await ask_model(asks(), choice, waits=waits)

    assert caught.value.kind == "connection"
    assert waits == [2.0, 4.0, 8.0]


@dialects
async def test_tokens_that_are_not_counted_are_estimated(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    scripted_model.will(ScriptedTurn("Twelve chars", usage=(0, 0, 0)))

    reply = await ask_model(asks(), chosen(scripted_model, dialect))

    assert reply.usage.is_estimated
    assert reply.usage.output == 3
    assert reply.usage.input > 50


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "gemini"])
async def test_tokens_from_the_cache_are_counted_apart(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    scripted_model.will(ScriptedTurn("Hi.", usage=(100, 90, 5)))

    reply = await ask_model(asks(), chosen(scripted_model, dialect))

    assert reply.usage == TokenUsage(input=10, cache_read=90, output=5)


@pytest.mark.parametrize(("said", "stop"), [("length", "length"), ("filtered", "filtered")])
@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "gemini"])
async def test_why_a_model_stopped_is_reported(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str, said: str, stop: str
) -> None:
    scripted_model.will(ScriptedTurn("So far", stop=said))  # type: ignore[arg-type]  # a parameter of the test

    assert (await ask_model(asks(), chosen(scripted_model, dialect))).stop == stop


async def test_a_call_that_the_limit_of_tokens_cut_is_dropped(scripted_model: ScriptedModel, ask_model: Ask) -> None:
    turn = use("help") & use_text("search", '{"query": "lon')
    scripted_model.will(ScriptedTurn(calls=turn.calls, stop="length"))

    reply = await ask_model(asks(), chosen(scripted_model, "openai_chat"))

    assert reply.stop == "length"
    assert [call.name for call in reply.calls] == ["help"]


@dialects
async def test_a_wrong_key_is_refused_and_never_shown(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str
) -> None:
    if dialect == "ollama":
        pytest.skip("has no keys")

    with pytest.raises(ModelFailed) as caught:
        await ask_model(asks(), chosen(scripted_model, dialect), key="wrong-secret")

    assert caught.value.kind == "auth"
    assert "wrong-secret" not in str(caught.value.to_response())


@dialects
def test_a_plan_shows_names_and_hashes_and_has_limits(dialect: str) -> None:
    config = {"dialect": dialect, "url": "https://models.test/v1", "auth": "Bearer ${MODEL_KEY}"}
    choice = choose_model(chain_of({**config, "models": {"m": {}}}), model="m")

    plan = bind_request(asks(), Conversation(choice), chain_of(config))

    assert isinstance(plan.spec, HttpSpec)
    assert plan.variables == ("MODEL_KEY",)
    assert plan.driver == "llm"
    assert (plan.facts["provider"], plan.facts["model"]) == ("local_llm", "m")
    assert len(str(plan.facts["request_sha256"])) == 64
    assert plan.spec.max_events < 10_000
    assert plan.spec.max_bytes < 10_000_000
    assert "What is new?" not in str(plan.to_json())


def test_every_class_of_failures_says_what_to_do() -> None:
    kinds = {row.kind for row in error_classes()}

    assert kinds == {
        "quota",
        "rate_limit",
        "timeout",
        "connection",
        "auth",
        "context",
        "cancelled",
        "server",
        "invalid",
    }
    assert all(row.suggestion and row.max >= row.base for row in error_classes())


@pytest.mark.parametrize(
    "call", [ToolCallPart("functions.search:0", "search", "{}"), ToolCallPart("call_1", "search", "{}")]
)
@dialects
async def test_ids_of_another_provider_are_replaced(
    scripted_model: ScriptedModel, ask_model: Ask, dialect: str, call: ToolCallPart
) -> None:
    result = ToolResultPart(call.id, "search", "found")
    twice = [Message("assistant", (call,)), Message("tool", (result,))] * 2
    scripted_model.will(say("Fine."))

    assert (await ask_model(asks(*twice), chosen(scripted_model, dialect))).text == "Fine."
