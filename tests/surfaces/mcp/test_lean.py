"""The fast path of a call over stdio: it answers like the SDK, byte for byte."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import JSONRPCMessage
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.domain.calls import Caller, Question
from kiwi_mcp.domain.errors import Internal, NotFound
from kiwi_mcp.domain.items import ItemType
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.handshake import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
    VERSION_KEY,
    HandshakeResult,
    LineBuffer,
    StdioPipe,
)
from kiwi_mcp.surfaces.mcp.server import FastPath
from kiwi_mcp.surfaces.mcp.stdio_server import serve
from kiwi_mcp.surfaces.mcp.tool_list import ONLY_META_TOOLS

PATIENCE = 120.0
CLIENT: JsonObject = {"name": "a client", "version": "1"}
ENVELOPE: JsonObject = {VERSION_KEY: LATEST_MODERN_VERSION, CAPABILITIES_KEY: {}, CLIENT_KEY: CLIENT}
every_revision = pytest.mark.parametrize("version", [*HANDSHAKE_PROTOCOL_VERSIONS, LATEST_MODERN_VERSION])


@dataclass
class FakeKernel:
    """A kernel that does what the query of a search says."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[str] = field(default_factory=list)

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        match payload.get("query"):
            case "refuse":
                return Answer(NotFound("It is not there.", suggestion="Look again.").to_response(), is_error=True)
            case "incident":
                return Answer(Internal("c0ffee").to_response(), is_error=True, exit_code=70)
            case "fall over":
                raise RuntimeError("over")
            case "tell":
                caller.report(Progress("half", 1, 2))
                caller.note({"level": "warning", "data": {"said": "aloud"}, "logger": "a tool"})
                await asyncio.sleep(0.05)
            case "ask":
                question = Question("elicitation/create", {"message": "Why?", "requestedSchema": {"type": "object"}})
                return Answer({"answers": dict(await caller.ask({"why": question}))})
            case "wait":
                self.begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.05)
                    self.ended.append("tidily")
        return Answer({"verb": verb, "asked": dict(payload)})

    async def offers(self) -> Offers:
        return ONLY_META_TOOLS

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        return ()

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:
        return None

    def offers_mark(self) -> str:
        return ""

    async def aclose(self) -> None:
        """Let go."""


@dataclass
class Talk:
    """The client's end of the pipes."""

    to_server: int
    replies: asyncio.StreamReader

    def say(self, *messages: JsonObject) -> None:
        os.write(self.to_server, b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    async def hear(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.replies.readline()

    async def open(self, version: str, capabilities: JsonObject | None = None) -> None:
        """Open the conversation; when this returns, the server has heard all of it."""
        if version == LATEST_MODERN_VERSION:
            self.say({"jsonrpc": "2.0", "id": "open", "method": "server/discover", "params": {"_meta": ENVELOPE}})
            await self.hear()
            return
        params: JsonObject = {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": CLIENT}
        self.say({"jsonrpc": "2.0", "id": "open", "method": "initialize", "params": params})
        await self.hear()
        self.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
        self.say({"jsonrpc": "2.0", "id": "heard", "method": "ping"})
        await self.hear()


@asynccontextmanager
async def conversation(kernel: FakeKernel) -> AsyncIterator[Talk]:
    (inbound, to_server), (from_server, outbound) = os.pipe(), os.pipe()
    reader = asyncio.StreamReader(limit=32_000_000)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_server, "rb", buffering=0)
    )
    calls = Calls(None, task_after=lambda: 60.0, principal=lambda _: "ben")
    served = asyncio.create_task(
        serve(kernel, StdioPipe(inbound, outbound), HandshakeResult(LineBuffer(), []), calls=calls)
    )
    try:
        yield Talk(to_server, reader)
    finally:
        with suppress(OSError):
            os.close(to_server)
        async with asyncio.timeout(PATIENCE):
            await served
        transport.close()


def a_call(version: str, number: Json, params: JsonObject, **meta: Json) -> JsonObject:
    marks = {**(ENVELOPE if version == LATEST_MODERN_VERSION else {}), **meta}
    marked = {**params, "_meta": marks} if marks else params
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": marked}


def search(query: str) -> JsonObject:
    return {"name": "search", "arguments": {"query": query}}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each message was seen to on the short way, in order."""
    seen: list[bool] = []
    takes = FastPath.takes

    def noting(self: FastPath, message: JSONRPCMessage) -> bool:
        seen.append(takes(self, message))
        return seen[-1]

    monkeypatch.setattr(FastPath, "takes", noting)
    return seen


def said(version: str, message: JsonObject, lines: int = 1) -> list[bytes]:
    """Return what a server says to one message of an open conversation."""

    async def story() -> list[bytes]:
        async with conversation(FakeKernel()) as talk:
            await talk.open(version)
            talk.say(message)
            return [await talk.hear() for _ in range(lines)]

    return asyncio.run(story())


def both_ways(version: str, message: JsonObject, monkeypatch: pytest.MonkeyPatch, lines: int = 1) -> list[bytes]:
    """Return what is said on the short way, once it is what the SDK's way says."""
    short = said(version, message, lines)
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "takes", lambda *_: False)
        assert short == said(version, message, lines)
    return short


@every_revision
@pytest.mark.parametrize(
    "params",
    [
        search("anything"),
        search("refuse"),
        search("incident"),
        search("fall over"),
        search("ask"),
        search("\x00 ünï \ud83e\udd5d"),
        {"name": "search"},
        {"name": "nothing_of_that_name", "arguments": {}},
        {"name": "search", "arguments": ["no object"]},
        {"name": 7},
        {},
        {"name": "search", "arguments": None, "more": 1},
    ],
)
def test_the_fast_path_answers_like_the_sdk(
    version: str, params: JsonObject, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways(version, a_call(version, 7, params), monkeypatch)
    assert taken[-1]


@every_revision
def test_progress_and_log_lines_come_before_the_answer(
    version: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = {"progressToken": "p", "io.modelcontextprotocol/logLevel": "info"}
    heard = both_ways(version, a_call(version, "a word", search("tell"), **wants), monkeypatch, lines=3)
    methods = [json.loads(line).get("method") for line in heard]
    assert sorted(methods[:2]) == ["notifications/message", "notifications/progress"]
    assert methods[2] is None
    assert taken[-1]


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=9), VALUES, max_size=3), number=st.integers(-9, 9) | st.text())
def test_any_request_is_answered_the_same_on_both_paths(arguments: dict[str, Json], number: int | str) -> None:
    message = a_call(LATEST_HANDSHAKE_VERSION, number, {"name": "help", "arguments": arguments})
    with pytest.MonkeyPatch.context() as patch:
        both_ways(LATEST_HANDSHAKE_VERSION, message, patch)


async def test_a_call_before_the_handshake_is_left_to_the_sdk(taken: list[bool]) -> None:
    async with conversation(FakeKernel()) as talk:
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 1, search("x")), a_call(LATEST_HANDSHAKE_VERSION, 2, search("y")))
        assert {json.loads(await talk.hear())["error"]["code"] for _ in range(2)} == {-32602}
    assert taken == [False, False]


def test_a_call_of_the_other_era_is_left_to_the_sdk(taken: list[bool]) -> None:
    (refused,) = said(LATEST_HANDSHAKE_VERSION, a_call(LATEST_MODERN_VERSION, 1, search("x")))
    assert json.loads(refused)["error"]["code"] == -32600
    (refused,) = said(LATEST_MODERN_VERSION, a_call(LATEST_HANDSHAKE_VERSION, 1, search("x")))
    assert json.loads(refused)["error"]["code"] == -32602
    assert True not in taken


async def test_a_client_that_can_be_asked_is_asked_on_the_fast_path(taken: list[bool]) -> None:
    async with conversation(FakeKernel()) as talk:
        await talk.open(LATEST_HANDSHAKE_VERSION, {"elicitation": {}})
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 1, search("ask")))
        question = json.loads(await talk.hear())
        assert question["method"] == "elicitation/create"
        talk.say({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"a": "b"}}})
        answer = json.loads(await talk.hear())["result"]["structuredContent"]
        assert answer == {"answers": {"why": {"action": "accept", "content": {"a": "b"}}}}
    assert taken.count(True) == 1


async def test_calls_run_concurrently_and_a_repeated_id_does_no_harm() -> None:
    kernel = FakeKernel()
    async with conversation(kernel) as talk:
        await talk.open(LATEST_HANDSHAKE_VERSION)
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 1, search("wait")))
        await asyncio.wait_for(kernel.begun.wait(), PATIENCE)
        talk.say(*(a_call(LATEST_HANDSHAKE_VERSION, number, search("x")) for number in (1, 2, 3)))
        assert sorted([json.loads(await talk.hear())["id"] for _ in range(3)]) == [1, 2, 3]
        talk.say({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "1"}})
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 4, search("x")))
        assert json.loads(await talk.hear())["id"] == 4


@every_revision
@pytest.mark.req("K-PR-04")
async def test_a_cancelled_call_is_cleaned_up_and_not_answered(version: str, taken: list[bool]) -> None:
    kernel = FakeKernel()

    async with conversation(kernel) as talk:
        await talk.open(version)
        talk.say(a_call(version, 5, search("wait")))
        await asyncio.wait_for(kernel.begun.wait(), PATIENCE)
        talk.say({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}})
        talk.say(a_call(version, 6, search("x")))
        assert json.loads(await talk.hear())["id"] == 6
    assert kernel.ended == ["tidily"]
    assert taken.count(True) == 2


async def test_a_call_may_be_cancelled_in_the_same_batch() -> None:
    async with conversation(FakeKernel()) as talk:
        await talk.open(LATEST_HANDSHAKE_VERSION)
        off: JsonObject = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}}
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 5, search("wait")), off, off)
        talk.say(a_call(LATEST_HANDSHAKE_VERSION, 5, search("x")))
        assert b'"x"' in await talk.hear()


def leave(talk: Talk) -> None:
    os.close(talk.to_server)


@every_revision
@pytest.mark.parametrize("way", [FastPath.takes, lambda *_: False], ids=["short", "the SDK's"])
async def test_the_end_of_a_connection_cancels_its_calls_with_a_message(
    version: str, way: Callable[[FastPath, JSONRPCMessage], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FastPath, "takes", way)
    kernel = FakeKernel()

    async with conversation(kernel) as talk:
        await talk.open(version)
        talk.say(a_call(version, 5, search("wait")))
        await asyncio.wait_for(kernel.begun.wait(), PATIENCE)
        leave(talk)
        last = await talk.hear()
    assert json.loads(last) == {"jsonrpc": "2.0", "id": 5, "error": {"code": -32000, "message": "Connection closed"}}
    assert kernel.ended == ["tidily"]
