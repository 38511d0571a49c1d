"""Requests of every dialect for any conversation: valid, and only appended to. Messages survive the round trip."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.drivers.llm.conftest import chain_of
from tests.plugins.scripted_model import (
    DIALECT_NAMES,
    MODEL,
    PATHS,
    ModelRequest,
    ScriptedCall,
    ScriptedModel,
    ScriptedTurn,
    request_faults,
    stream_of,
)

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import (
    Message,
    MessagePart,
    Prompt,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolDefinition,
    ToolResultPart,
)
from kiwi_mcp.drivers.llm.dialects import DIALECTS
from kiwi_mcp.drivers.llm.model import Conversation
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model
from kiwi_mcp.primitives.http.sse import Events, LineSplitter

dialects = pytest.mark.parametrize("dialect", DIALECT_NAMES)
TOOLS = (ToolDefinition("search", "Find things", {"type": "object", "properties": {}}),)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.sampled_from(["call_1", "call_2", "a:b", "", "x" * 50])
json_texts = st.dictionaries(texts, texts | st.integers() | st.none(), max_size=3).map(json.dumps)
arguments = json_texts | texts | st.sampled_from(["", "{", "[1]", '{"a":1}x'])
calls = st.builds(ToolCallPart, ids, st.just("search"), arguments)
results = st.builds(ToolResultPart, ids, st.just("search"), texts, st.booleans(), texts.map(str.strip))
thoughts = st.builds(
    ReasoningPart, texts, st.sampled_from(["p", "q"]), st.sampled_from([MODEL, "n"]), st.sampled_from(["", "c2ln"])
)
replies = st.lists(st.builds(TextPart, texts) | calls | thoughts, max_size=4)
messages = st.one_of(
    st.lists(st.builds(TextPart, texts), max_size=2).map(lambda parts: Message("user", tuple(parts))),
    replies.map(lambda parts: Message("assistant", tuple(parts))),
    st.lists(results, max_size=3).map(lambda parts: Message("tool", tuple(parts))),
)
conversations = st.lists(messages, max_size=8)


def choice_of(dialect: str) -> ModelChoice:
    config: JsonObject = {"dialect": dialect, "url": f"https://a.test{PATHS[dialect]}", "models": {MODEL: {}}}
    return choose_model(chain_of(config, "p"), model=MODEL)


def opaque_for(dialect: str, message: Message) -> Message:
    """Return a message with reasoning in the opaque form that the dialect's own reader makes."""
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    parts = [
        ReasoningPart(part.text, part.provider, part.model, json.dumps(item))
        if isinstance(part, ReasoningPart) and part.opaque and dialect == "openai_responses"
        else part
        for part in message.parts
    ]
    return Message(message.role, tuple(parts))


@dialects
@settings(max_examples=25, deadline=None)
@given(conversation=conversations, system=texts.map(str.strip))
def test_any_conversation_is_a_valid_request(dialect: str, conversation: list[Message], system: str) -> None:
    own = tuple(opaque_for(dialect, message) for message in conversation)

    body, _ = Conversation(choice_of(dialect)).request(Prompt(system, TOOLS, own, 64))

    assert request_faults(dialect, body) == []


@dialects
@settings(max_examples=25, deadline=None)
@given(conversation=conversations, sizes=st.lists(st.integers(1, 64), min_size=9, max_size=9))
def test_a_conversation_that_grows_is_sent_as_one_that_is_rendered_at_once(
    dialect: str, conversation: list[Message], sizes: list[int]
) -> None:
    choice, history = choice_of(dialect), list[Message]()
    grown = Conversation(choice)
    for size, message in zip(sizes, conversation, strict=False):
        history.append(opaque_for(dialect, message))
        made = grown.request(Prompt("System.", TOOLS, history, size))

        assert made == Conversation(choice).request(Prompt("System.", TOOLS, tuple(history), size))
        assert made[1] == sha256(made[0]).hexdigest()


@dialects
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(texts, st.lists(json_texts, max_size=3), texts), min_size=1, max_size=6))
def test_each_request_of_a_thread_begins_with_the_one_before(
    dialect: str, turns: list[tuple[str, list[str], str]]
) -> None:
    model, history = ScriptedModel(), [Message("user", (TextPart("Begin."),))]
    conversation = Conversation(choice_of(dialect))
    for number, (text, asked, output) in enumerate(turns):
        body, _ = conversation.request(Prompt("System.", TOOLS, history, 64))
        model.default = lambda _: ScriptedTurn("ok")
        model.receive(_request(dialect, body))
        made_calls = [ToolCallPart(f"c{number}_{index}", "search", one) for index, one in enumerate(asked)]
        history.append(Message("assistant", (TextPart(text), *made_calls)))
        if made_calls:
            found = [ToolResultPart(call.id, "search", output, label="outside") for call in made_calls]
            history.append(Message("tool", tuple(found)))

    assert model.faults == []


def _request(dialect: str, body: bytes) -> ModelRequest:
    return ModelRequest(dialect, {}, body, json.loads(body))


def events_of(dialect: str, turn: ScriptedTurn, size: int) -> list[str]:
    """Return the events of a turn, received in pieces of a size."""
    data = b"".join(stream_of(dialect, turn))
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    if DIALECTS[dialect].stream == "sse":
        events = Events()
        return [event.data for chunk in chunks for event in events.feed(chunk)]
    lines = LineSplitter()
    return [line for chunk in chunks for line in lines.feed(chunk) if line]


@dialects
@settings(max_examples=25, deadline=None)
@given(
    text=texts,
    reasoning=texts,
    asked=st.lists(json_texts, max_size=3),
    size=st.integers(1, 200),
)
def test_a_reply_survives_its_stream(dialect: str, text: str, reasoning: str, asked: list[str], size: int) -> None:
    made = tuple(ScriptedCall("search", one, f"call_{number}") for number, one in enumerate(asked))
    turn = ScriptedTurn(text, reasoning, made)
    reader = DIALECTS[dialect].reader(choice_of(dialect))

    deltas = [delta for event in events_of(dialect, turn, size) for delta in reader.feed(event)]
    reply = reader.finish()

    assert reply.text == text
    assert "".join(part.text for part in reply.parts if isinstance(part, ReasoningPart)) == reasoning
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == [
        (one.id, "search", one.arguments) for one in made
    ]
    assert reply.stop == ("calls" if made else "end")
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == text


@dialects
@settings(max_examples=25, deadline=None)
@given(text=texts, asked=st.lists(json_texts, max_size=3), end=st.integers(0, 60))
def test_a_stream_that_ends_anywhere_has_no_partial_calls(dialect: str, text: str, asked: list[str], end: int) -> None:
    made = tuple(ScriptedCall("search", one, f"call_{number}") for number, one in enumerate(asked))
    events = events_of(dialect, ScriptedTurn(text, "", made), 1_000)
    reader = DIALECTS[dialect].reader(choice_of(dialect))

    for event in events[:end]:
        reader.feed(event)
    reply = reader.finish()

    whole = [one.arguments for one in made]
    assert [call.arguments for call in reply.calls] == whole[: len(reply.calls)]
    assert text.startswith(reply.text)
    assert reply.stop == "broken" or end >= len(events) - 3


@dialects
@settings(max_examples=25, deadline=None)
@given(parts=replies)
def test_what_a_model_said_is_sent_back_unchanged(dialect: str, parts: list[MessagePart]) -> None:
    known = [part for part in parts if not isinstance(part, ToolCallPart) or _is_object(part.arguments)]
    prompt = Prompt("", (), (Message("assistant", tuple(known)),), 64)
    body, _ = Conversation(choice_of(dialect)).request(prompt)

    sent = json.loads(body)
    for part in known:
        if isinstance(part, TextPart) and part.text.strip():
            assert part.text in "".join(_strings(sent))
        if isinstance(part, ToolCallPart):
            written = (
                json.dumps(part.arguments)[1:-1].encode() if dialect in {"openai_chat", "openai_responses"} else b""
            )
            assert (json.loads(part.arguments) in _objects(sent)) or _contains(written, body)


def _contains(written: bytes, body: bytes) -> bool:
    return json.loads(b'"' + written + b'"') in _strings(json.loads(body))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _strings(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for inner in value.values() for text in _strings(inner)]
        case list():
            return [text for inner in value for text in _strings(inner)]
        case _:
            return []


def _objects(value: object) -> list[object]:
    match value:
        case dict():
            return [value, *(found for inner in value.values() for found in _objects(inner))]
        case list():
            return [found for inner in value for found in _objects(inner)]
        case _:
            return []


@dialects
def test_unknown_events_are_ignored(dialect: str) -> None:
    reader = DIALECTS[dialect].reader(choice_of(dialect))

    assert reader.feed('{"type": "response.news", "choices": [], "x": [1]}') == []
    assert reader.finish().stop == "broken"


@dialects
def test_a_label_stands_beside_the_output(dialect: str) -> None:
    call, result = (
        ToolCallPart("c1", "search", "{}"),
        ToolResultPart("c1", "search", "the output", label="from the web"),
    )
    history = (Message("user", (TextPart("Go."),)), Message("assistant", (call,)), Message("tool", (result,)))

    sent = _strings(json.loads(Conversation(choice_of(dialect)).request(Prompt("", TOOLS, history, 64))[0]))

    assert "the output" in sent
    assert any("from the web" in text and "the output" not in text for text in sent)


def test_quirks_change_the_request_of_a_server() -> None:
    config: JsonObject = {
        "dialect": "openai_chat",
        "url": "https://a.test/v1",
        "models": {"m": {"temperature": 1}},
        "cap_field": "max_tokens",
        "quirks": ["no_stream_options", "no_temperature", "short_ids", "plain_content"],
    }
    call, result = ToolCallPart("call_1", "search", "{}"), ToolResultPart("call_1", "search", "out", label="outside")
    history = (Message("user", (TextPart("Go."),)), Message("assistant", (call,)), Message("tool", (result,)))

    data, _ = Conversation(choose_model(chain_of(config), model="m")).request(Prompt("", (), history, 64))

    body = json.loads(data)
    assert body.keys() == {"model", "stream", "max_tokens", "messages"}
    reply, tool, label = body["messages"][1:]
    assert reply["tool_calls"][0]["id"] == tool["tool_call_id"]
    assert len(tool["tool_call_id"]) == 9
    assert tool["content"] == "out"
    assert label == {"role": "user", "content": "search: outside"}
