"""Calls of clients of both eras: questions, tasks and cancellation; and no call runs twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import mcp_types as types
import pytest
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY, InMemorySubscriptionBus, ListenHandler
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.domain.calls import Caller, Question, no_answers, unheard
from kiwi_mcp.domain.errors import StoreUnavailable, Unanswered
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import TaskUse
from kiwi_mcp.domain.outcome import Progress, silent
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.tasks import KEPT_MS, LOST, STALE_MS, Task, Tasks
from kiwi_mcp.surfaces.mcp import calls as calls_module
from kiwi_mcp.surfaces.mcp import calls as parked_module
from kiwi_mcp.surfaces.mcp import tasks as tasks_module
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall, WaitingCalls
from kiwi_mcp.surfaces.mcp.protocol import Context
from kiwi_mcp.surfaces.mcp.running_call import Result
from kiwi_mcp.surfaces.mcp.tasks import EXTENSION, TaskManager, milliseconds

PATIENCE = 120.0
NAME: JsonObject = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
WHO = Question("elicitation/create", {"message": "Who?", "requestedSchema": NAME})
ROOTS = Question("roots/list", {})
ANN: JsonObject = {"action": "accept", "content": {"name": "Ann"}}
EVERYTHING: JsonObject = {"elicitation": {}, "sampling": {}, "roots": {}}
WITH_TASKS: JsonObject = {**EVERYTHING, "extensions": {EXTENSION: {}}}

Tool = Callable[[JsonObject, Caller], Awaitable[types.CallToolResult]]


def text(words: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=words)], is_error=is_error)


Found = TypeVar("Found")


async def eventually(look: Callable[[], Awaitable[Found]]) -> Found:
    """Return what is found at last."""
    for _ in range(int(PATIENCE * 100)):
        if found := await look():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def run(story: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PATIENCE):
            await story

    asyncio.run(limited())


@dataclass
class Client:
    """The client's end of one connection: requests out, replies in, questions answered as they come."""

    send: Callable[[SessionMessage], Awaitable[None]]
    capabilities: JsonObject
    is_modern: bool
    replies: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, JsonObject] = field(default_factory=dict)
    number: int = 0

    async def begin(self, method: str, params: Mapping[str, Any], capabilities: JsonObject | None = None) -> int:
        self.number += 1
        meta: dict[str, Any] = dict(params.get("_meta", {}))
        if self.is_modern:
            meta |= {
                types.PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
                types.CLIENT_CAPABILITIES_META_KEY: self.capabilities if capabilities is None else capabilities,
            }
        self.replies[self.number] = asyncio.get_running_loop().create_future()
        body = {**params, "_meta": meta} if meta else dict(params)
        request = types.JSONRPCRequest(jsonrpc="2.0", id=self.number, method=method, params=body)
        await self.send(SessionMessage(request))
        return self.number

    async def ask(self, method: str, params: Mapping[str, Any], capabilities: JsonObject | None = None) -> Any:
        reply = await self.replies[await self.begin(method, params, capabilities)]
        if "error" in reply:
            raise MCPError(**reply["error"])
        return reply["result"]

    async def call(self, name: str, capabilities: JsonObject | None = None, **more: Any) -> Any:
        return await self.ask("tools/call", {"name": name, "arguments": {}, **more}, capabilities)

    async def cancel(self, number: int) -> None:
        params = {"requestId": number}
        note = types.JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params)
        await self.send(SessionMessage(note))

    async def until(self, task_id: str, *statuses: str) -> Any:
        async def notified() -> Any:
            task = await self.ask("tasks/get", {"taskId": task_id})
            return task if task["status"] in statuses else None

        return await eventually(notified)

    async def take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            self.replies[message["id"]].set_result(message)
        elif "id" in message:
            self.asked.append(message)
            answer = types.JSONRPCResponse(
                jsonrpc="2.0", id=message["id"], result=dict(self.answers[message["method"]])
            )
            await self.send(SessionMessage(answer))
        else:
            self.notes.append(message)


@dataclass
class World:
    """A server with scripted tools, and its clients."""

    database: Database
    tools: dict[str, tuple[Tool, TaskUse]] = field(default_factory=dict)
    task_after: float = 0.02
    runs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = self.new_calls()

        self.listen = ListenHandler(InMemorySubscriptionBus())

    def tasks(self) -> Tasks:
        return Tasks(self.database, "ann")

    def new_calls(self, principal: Callable[[Context], str] = lambda _: "ben") -> Calls:
        return Calls(self.tasks, task_after=lambda: self.task_after, principal=principal)

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> Result:
        tool, use = self.tools[params.name]
        arguments = params.arguments or {}

        async def work(caller: Caller) -> types.CallToolResult:
            self.runs.append(params.name)
            return await tool(arguments, caller)

        asked = ClientCall("tools/call", params.name, arguments, params.input_responses, params.request_state)
        return await self.calls.answer(context, asked, work, task=use)

    @asynccontextmanager
    async def client(self, capabilities: JsonObject = EVERYTHING, *, is_modern: bool = True) -> AsyncIterator[Client]:
        server: Server[dict[str, object]] = Server("kiwi", version="1")
        server.add_request_handler("tools/call", types.CallToolRequestParams, self.call_tool)
        server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, self.listen)
        self.calls.serve(server)
        to_server, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](64)
        outbound, from_server = anyio.create_memory_object_stream[SessionMessage](64)
        client = Client(to_server.send, capabilities, is_modern)

        async def listen() -> None:
            async for item in from_server:
                await client.take(json.loads(item.message.model_dump_json(by_alias=True, exclude_unset=True)))

        async with to_server, from_server, anyio.create_task_group() as group:
            group.start_soon(server.run, inbound, outbound, server.create_initialization_options())
            group.start_soon(listen)
            if not is_modern:
                who = {"name": "old", "version": "1"}
                greeting = {
                    "protocolVersion": LATEST_HANDSHAKE_VERSION,
                    "capabilities": capabilities,
                    "clientInfo": who,
                }
                await client.ask("initialize", greeting)
                done = types.JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")
                await client.send(SessionMessage(done))
            yield client
            group.cancel_scope.cancel()


@pytest.fixture
def world(sqlite_url: str) -> Iterator[World]:
    database = open_database(sqlite_url)
    yield World(database)
    database.close()


async def who(_: JsonObject, caller: Caller) -> types.CallToolResult:
    answers = await caller.ask({"user": WHO})
    return text(json.dumps(answers["user"]))


async def for_ever(_: JsonObject, caller: Caller) -> types.CallToolResult:
    caller.report(Progress("at it"))
    await asyncio.Event().wait()
    return text("never")


def said(result: Any) -> str:
    words: str = result["content"][0]["text"]
    return words


def test_a_handshake_client_is_asked_while_it_waits(world: World) -> None:
    async def both(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text(json.dumps(await caller.ask({"a": WHO, "b": ROOTS})))

    async def story() -> None:
        world.tools["both"] = (both, "never")
        async with world.client(is_modern=False) as client:
            client.answers = {"elicitation/create": ANN, "roots/list": {"roots": [{"uri": "file:///x", "odd": 1}]}}
            answers = json.loads(said(await client.call("both")))
            assert answers == {"a": ANN, "b": {"roots": [{"uri": "file:///x", "odd": 1}]}}
            assert [one["method"] for one in client.asked] == ["elicitation/create", "roots/list"]
            assert client.asked[0]["params"]["requestedSchema"] == NAME

    run(story())


@pytest.mark.parametrize("is_modern", [True, False])
def test_a_client_is_asked_only_what_it_declares(world: World, is_modern: bool) -> None:
    refused: list[Unanswered] = []

    async def asks(question: JsonObject, caller: Caller) -> types.CallToolResult:
        assert caller.capabilities == {"sampling": {}}
        for one in (WHO, ROOTS, Question("sampling/createMessage", {"messages": [], "maxTokens": 1, "tools": [{}]})):
            with pytest.raises(Unanswered) as info:
                await caller.ask({"x": one})
            refused.append(info.value)
        return text("ok")

    async def story() -> None:
        world.tools["asks"] = (asks, "never")
        async with world.client({"sampling": {}}, is_modern=is_modern) as client:
            assert said(await client.call("asks")) == "ok"
            assert not client.asked
        assert [word in one.message for one, word in zip(refused, ("elicitation.form", "roots", "tools"), strict=True)]

    run(story())


def test_a_client_without_capabilities_cannot_be_asked(world: World) -> None:
    async def asks(_: JsonObject, caller: Caller) -> types.CallToolResult:
        assert caller.ask is no_answers
        return text("ok")

    async def story() -> None:
        world.tools["asks"] = (asks, "never")
        for is_modern in (True, False):
            async with world.client({}, is_modern=is_modern) as client:
                assert said(await client.call("asks")) == "ok"

    run(story())


def test_a_form_needs_form_support_and_a_url_needs_url_support(world: World) -> None:
    there: JsonObject = {"mode": "url", "message": "Go there", "url": "https://x", "elicitationId": "1"}

    async def asks(_: JsonObject, caller: Caller) -> types.CallToolResult:
        with pytest.raises(Unanswered, match=r"elicitation\.form"):
            await caller.ask({"x": WHO})
        await caller.ask({"x": Question("elicitation/create", there)})
        return text("ok")

    async def story() -> None:
        world.tools["asks"] = (asks, "never")
        async with world.client({"elicitation": {"url": {}}}) as client:
            asked = await client.call("asks")
            assert asked["inputRequests"]["x"]["params"]["url"] == "https://x"

    run(story())


def test_a_modern_client_returns_with_the_answer_and_the_call_continues(world: World) -> None:
    async def story() -> None:
        world.tools["who"] = (who, "never")
        async with world.client() as client:
            asked = await client.call("who")
            assert asked["resultType"] == "input_required"
            assert asked["inputRequests"]["user"]["params"]["message"] == "Who?"
            done = await client.call("who", inputResponses={"user": ANN}, requestState=asked["requestState"])
            assert json.loads(said(done)) == ANN
            assert world.runs == ["who"]

    run(story())


def test_a_state_is_valid_once_and_only_for_its_own_call(world: World) -> None:
    async def story() -> None:
        world.tools |= {"who": (who, "never"), "other": (who, "never")}
        async with world.client() as client:
            state = (await client.call("who"))["requestState"]
            given = {"inputResponses": {"user": ANN}, "requestState": state}
            for name, more in (
                ("other", given),
                ("who", {**given, "arguments": {"a": 1}}),
                ("who", {**given, "requestState": state + "x"}),
                ("who", {**given, "requestState": ""}),
            ):
                with pytest.raises(MCPError, match="is gone") as refused:
                    await client.call(name, **more)
                assert refused.value.code == types.INVALID_PARAMS
            assert json.loads(said(await client.call("who", **given))) == ANN
            with pytest.raises(MCPError, match="is gone"):
                await client.call("who", **given)
            assert world.runs == ["who"]

    run(story())


def test_only_the_asked_client_can_answer_and_a_new_process_knows_no_question(world: World) -> None:
    names = iter(["ann", "ann", "bob", "bob"])

    async def story() -> None:
        world.tools["who"] = (who, "never")
        world.calls = world.new_calls(lambda _: next(names))
        async with world.client() as client:
            state = (await client.call("who"))["requestState"]
            with pytest.raises(MCPError, match="is gone"):
                await client.call("who", requestState=state)
        await world.calls.aclose()
        world.calls = world.new_calls()
        async with world.client() as client:
            with pytest.raises(MCPError, match="Nothing ran"):
                await client.call("who", requestState=state)
            assert world.runs == ["who"]

    run(story())


def test_missing_answers_are_requested_again_under_the_same_keys(world: World) -> None:
    async def two(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text(json.dumps(await caller.ask({"a": WHO, "b": WHO})))

    async def story() -> None:
        world.tools["two"] = (two, "never")
        async with world.client() as client:
            first = await client.call("two")
            given = {"a": ANN, "unknown": ANN}
            second = await client.call("two", inputResponses=given, requestState=first["requestState"])
            assert set(second["inputRequests"]) == {"b"}
            assert second["requestState"] != first["requestState"]
            wrong: JsonObject = {"b": {"roots": []}}
            third = await client.call("two", inputResponses=wrong, requestState=second["requestState"])
            assert set(third["inputRequests"]) == {"b"}
            done = await client.call("two", inputResponses={"b": ANN}, requestState=third["requestState"])
            assert json.loads(said(done)) == {"a": ANN, "b": ANN}
            assert world.runs == ["two"]

    run(story())


def test_answers_sent_with_the_call_are_used_when_needed(world: World) -> None:
    async def story() -> None:
        world.tools["who"] = (who, "never")
        async with world.client() as client:
            assert json.loads(said(await client.call("who", inputResponses={"user": ANN, "odd": ANN}))) == ANN
            assert (await client.call("who", inputResponses={"odd": ANN}))["resultType"] == "input_required"

    run(story())


def test_a_question_of_kiwi_is_answered_only_by_the_asked_client(world: World) -> None:
    own = Question(WHO.method, WHO.params, is_own=True)

    async def approved(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text(json.dumps(await caller.ask({"approval": own})))

    async def story() -> None:
        world.tools |= {"approved": (approved, "never"), "task": (approved, "always")}
        async with world.client(WITH_TASKS) as client:
            guessed = {"approval": ANN, "approval-1": ANN, "approval-2": ANN}
            asked = await client.call("approved", inputResponses=guessed)
            (key,) = asked["inputRequests"]
            again = await client.call("approved", inputResponses=guessed, requestState=asked["requestState"])
            assert again["resultType"] == "input_required"
            done = await client.call("approved", inputResponses={key: ANN}, requestState=again["requestState"])
            assert json.loads(said(done)) == {"approval": ANN}
            # What is known of the question of one call says nothing of that of another.
            other = await client.call("approved", inputResponses={key: ANN})
            assert other["inputRequests"].keys() != {key}
            task = (await client.call("task", inputResponses=guessed))["taskId"]
            await client.ask("tasks/update", {"taskId": task, "inputResponses": guessed})
            waiting = await client.until(task, "input_required")
            await client.ask(
                "tasks/update", {"taskId": task, "inputResponses": dict.fromkeys(waiting["inputRequests"], ANN)}
            )
            await client.until(task, "completed")
        await world.calls.aclose()

    run(story())


def test_a_key_is_never_used_twice_in_one_call(world: World) -> None:
    async def twice(_: JsonObject, caller: Caller) -> types.CallToolResult:
        first, second = await caller.ask({"a": WHO}), await caller.ask({"a": WHO})
        return text(json.dumps([first, second]))

    async def story() -> None:
        world.tools["twice"] = (twice, "never")
        async with world.client() as client:
            first = await client.call("twice")
            second = await client.call("twice", inputResponses={"a": ANN}, requestState=first["requestState"])
            (key,) = second["inputRequests"]
            assert key != "a"
            done = await client.call("twice", inputResponses={key: ANN}, requestState=second["requestState"])
            assert json.loads(said(done)) == [{"a": ANN}, {"a": ANN}]

    run(story())


def test_the_number_of_calls_that_wait_for_answers_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(arguments: JsonObject, caller: Caller) -> types.CallToolResult:
        try:
            return await who(arguments, caller)
        except Unanswered as reason:
            return text(reason.message, is_error=True)

    async def story() -> None:
        world.tools["waits"] = (waits, "never")
        monkeypatch.setattr(parked_module, "MOST_PARKED", 3)
        async with world.client() as client:
            asked = [await client.call("waits") for _ in range(3)]
            refused = await client.call("waits")
            assert refused["isError"]
            assert "wait for answers already" in said(refused)
            state = asked[0]["requestState"]
            assert json.loads(said(await client.call("waits", inputResponses={"user": ANN}, requestState=state))) == ANN
            assert (await client.call("waits"))["resultType"] == "input_required"
        await world.calls.aclose()

    run(story())


def test_a_call_is_stopped_if_its_client_does_not_return(world: World) -> None:
    stopped = asyncio.Event()

    async def waits(arguments: JsonObject, caller: Caller) -> types.CallToolResult:
        try:
            return await who(arguments, caller)
        except asyncio.CancelledError:
            stopped.set()
            raise

    async def story() -> None:
        world.tools["waits"] = (waits, "never")
        world.calls._parked = WaitingCalls(seconds=0.05)
        async with world.client() as client:
            state = (await client.call("waits"))["requestState"]
            await stopped.wait()
            with pytest.raises(MCPError, match="is gone"):
                await client.call("waits", inputResponses={"user": ANN}, requestState=state)
        await world.calls.aclose()

    run(story())


def test_a_cancelled_call_ends_its_work_once_without_an_error(world: World) -> None:
    begun, tidied = asyncio.Event(), asyncio.Event()

    async def untidy(_: JsonObject, caller: Caller) -> types.CallToolResult:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            tidied.set()
        return text("never")

    async def story() -> None:
        world.tools["untidy"] = (untidy, "never")
        async with world.client() as client:
            await client.cancel(await _begun(client, "untidy", begun))
            await tidied.wait()

    run(story())


async def _begun(client: Client, name: str, begun: asyncio.Event) -> int:
    number = await client.begin("tools/call", {"name": name, "arguments": {}})
    await begun.wait()
    return number


def test_a_call_without_a_listener_reports_no_progress(world: World) -> None:
    heard: list[tuple[bool, bool]] = []

    async def tells(_: JsonObject, caller: Caller) -> types.CallToolResult:
        heard.append((caller.report is not silent, caller.note is not unheard))
        caller.report(Progress("half", 1, 2))
        caller.note({"level": "warning", "data": "careful", "logger": "tool"})
        caller.note({"level": "debug", "data": "noise"})
        return text("ok")

    async def story() -> None:
        world.tools["tells"] = (tells, "auto")
        level = {"io.modelcontextprotocol/logLevel": "info"}
        async with world.client() as client:
            await client.call("tells")
            assert not client.notes
            await client.call("tells", _meta={"progressToken": 7, **level})
            notes = {note["method"]: note["params"] for note in client.notes}
            assert notes.keys() == {"notifications/message", "notifications/progress"}
            assert notes["notifications/message"] == {"level": "warning", "data": "careful", "logger": "tool"}
        async with world.client(is_modern=False) as client:
            await client.call("tells")
            assert [note["method"] for note in client.notes] == ["notifications/message"]
        assert heard == [(False, False), (True, True), (False, True)]

    run(story())


def test_a_long_call_becomes_a_task_with_a_result_to_read_later(world: World) -> None:
    go_on = asyncio.Event()

    async def slow(_: JsonObject, caller: Caller) -> types.CallToolResult:
        caller.report(Progress("halfway", 1, 2))
        await go_on.wait()
        return text("done")

    async def story() -> None:
        world.tools["slow"] = (slow, "auto")
        async with world.client(WITH_TASKS) as client:
            created = await client.call("slow")
            assert created["resultType"] == "task"
            assert created["status"] == "working"
            assert not {"result", "error", "inputRequests", "requestState", "task"} & created.keys()
            kept = world.tasks().get(created["taskId"], "ben", milliseconds())
            assert kept is not None
            assert kept.identity == "slow"
            seen = await client.ask("tasks/get", {"taskId": created["taskId"]})
            assert (seen["status"], seen["statusMessage"], seen["resultType"]) == (
                "working",
                "halfway (1/2)",
                "complete",
            )
            go_on.set()
            done = await client.until(created["taskId"], "completed")
            assert said(done["result"]) == "done"
            assert done["ttlMs"] >= 3_600_000
        await world.calls.aclose()
        world.calls = world.new_calls()
        async with world.client(WITH_TASKS) as client:
            again = await client.ask("tasks/get", {"taskId": created["taskId"]})
            assert said(again["result"]) == "done"
            assert again["createdAt"] == created["createdAt"]

    run(story())


def test_a_short_call_and_a_client_without_tasks_get_no_task(world: World) -> None:
    async def slow(_: JsonObject, caller: Caller) -> types.CallToolResult:
        await asyncio.sleep(0.1)
        return text("done")

    async def quick(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text("done")

    async def story() -> None:
        world.tools |= {"slow": (slow, "auto"), "quick": (quick, "auto"), "always": (slow, "always")}
        async with world.client(WITH_TASKS) as client:
            assert said(await client.call("quick")) == "done"
        async with world.client() as client:
            assert said(await client.call("slow")) == "done"
            assert said(await client.call("always")) == "done"
            assert (await client.call("always", WITH_TASKS))["resultType"] == "task"
        async with world.client(is_modern=False) as client:
            assert said(await client.call("always")) == "done"
            with pytest.raises(MCPError) as unknown:
                await client.ask("tasks/get", {"taskId": "x"})
            assert unknown.value.code == types.METHOD_NOT_FOUND
        await world.calls.aclose()

    run(story())


def test_a_task_only_call_is_refused_for_a_client_without_tasks(world: World) -> None:
    async def story() -> None:
        world.tools["required"] = (for_ever, "required")
        async with world.client() as client:
            for request in (
                client.call("required"),
                client.ask("tasks/get", {"taskId": "x"}),
                client.ask("tasks/update", {"taskId": "x", "inputResponses": {}}),
                client.ask("tasks/cancel", {"taskId": "x"}),
            ):
                with pytest.raises(MCPError) as refused:
                    await request
                assert refused.value.code == types.MISSING_REQUIRED_CLIENT_CAPABILITY
                assert refused.value.data == {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
        assert not world.runs

    run(story())


def test_a_task_asks_and_partial_answers_leave_the_rest_open(world: World) -> None:
    async def two(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text(json.dumps(await caller.ask({"a": WHO, "b": WHO})))

    async def story() -> None:
        world.tools["two"] = (two, "always")
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("two"))["taskId"]
            waiting = await client.until(task, "input_required")
            assert set(waiting["inputRequests"]) == {"a", "b"}
            ack = await client.ask("tasks/update", {"taskId": task, "inputResponses": {"a": ANN, "no": ANN}})
            assert ack.keys() == {"resultType", "_meta"}
            assert set((await client.until(task, "input_required"))["inputRequests"]) == {"b"}
            await client.ask("tasks/update", {"taskId": task, "inputResponses": {"b": ANN}})
            done = await client.until(task, "completed")
            assert json.loads(said(done["result"])) == {"a": ANN, "b": ANN}
        await world.calls.aclose()

    run(story())


def test_a_question_before_the_task_is_answered_by_a_repeated_call(world: World) -> None:
    async def story() -> None:
        async def late(arguments: JsonObject, caller: Caller) -> types.CallToolResult:
            answered = await who(arguments, caller)
            await asyncio.sleep(0.1)
            return answered

        world.tools["late"] = (late, "auto")
        async with world.client(WITH_TASKS) as client:
            asked = await client.call("late")
            assert "taskId" not in asked
            created = await client.call("late", inputResponses={"user": ANN}, requestState=asked["requestState"])
            assert created["resultType"] == "task"
            done = await client.until(created["taskId"], "completed")
            assert json.loads(said(done["result"])) == ANN
            assert world.runs == ["late"]
        await world.calls.aclose()

    run(story())


def test_a_cancelled_task_ends_and_may_be_cancelled_again(world: World) -> None:
    async def story() -> None:
        world.tools["long"] = (for_ever, "always")
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("long"))["taskId"]
            assert (await client.ask("tasks/cancel", {"taskId": task})).keys() == {"resultType", "_meta"}
            await client.until(task, "cancelled")
            await client.ask("tasks/cancel", {"taskId": task})
            assert (await client.until(task, "cancelled"))["status"] == "cancelled"
        await world.calls.aclose()

    run(story())


def test_a_failing_tool_completes_and_a_protocol_error_fails(world: World) -> None:
    async def fails(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text("no", is_error=True)

    async def breaks(_: JsonObject, caller: Caller) -> types.CallToolResult:
        raise MCPError(-32000, "broken", {"why": "so"})

    async def bursts(_: JsonObject, caller: Caller) -> types.CallToolResult:
        raise RuntimeError("secret words")

    async def story() -> None:
        world.tools |= {"fails": (fails, "always"), "breaks": (breaks, "always"), "bursts": (bursts, "always")}
        async with world.client(WITH_TASKS) as client:
            ended = {}
            for name in world.tools:
                ended[name] = await client.until((await client.call(name))["taskId"], "completed", "failed")
            assert ended["fails"]["result"]["isError"]
            assert ended["breaks"]["error"] == {"code": -32000, "message": "broken", "data": {"why": "so"}}
            assert "incident" in ended["bursts"]["error"]["message"]
            assert "secret" not in json.dumps(ended["bursts"])
            assert "result" not in ended["bursts"]
        await world.calls.aclose()

    run(story())


def test_a_task_is_visible_only_to_its_principal(world: World) -> None:
    principal = ["ann"]

    async def story() -> None:
        world.tools["long"] = (for_ever, "always")
        world.calls = world.new_calls(lambda _: principal[0])
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("long"))["taskId"]
            principal[0] = "bob"
            for method in ("tasks/get", "tasks/cancel", "tasks/update"):
                with pytest.raises(MCPError) as unknown:
                    await client.ask(method, {"taskId": task, "inputResponses": {}})
                assert unknown.value.code == types.INVALID_PARAMS
            principal[0] = "ann"
            assert (await client.until(task, "working"))["status"] == "working"
        await world.calls.aclose()

    run(story())


def test_stopping_kiwi_stops_its_tasks_and_reports_it(world: World) -> None:
    async def story() -> None:
        world.tools["long"] = (for_ever, "always")
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("long"))["taskId"]
            await world.calls.aclose()
            world.calls = world.new_calls()
        async with world.client(WITH_TASKS) as client:
            response = await client.until(task, "failed")
            assert "stopped it" in response["error"]["message"]

    run(story())


def test_a_task_of_a_dead_process_is_not_reported_as_running(world: World) -> None:
    async def story() -> None:
        world.tools["long"] = (for_ever, "always")
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("long"))["taskId"]
            with world.database.transaction() as transaction:  # as if its process had been silent for that time
                transaction.write("update tasks set beat_at = beat_at - ?, owner = 'dead'", (STALE_MS + 1_000,))
            old, world.calls = world.calls, world.new_calls()
        async with world.client(WITH_TASKS) as client:
            assert (await client.until(task, "failed"))["error"] == LOST
        await old.aclose()
        assert world.tasks().get(task, "ben", milliseconds()).status == "failed"  # type: ignore[union-attr]  # it is there

    run(story())


def test_another_process_reads_answers_and_stops_a_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world.tools |= {"who": (who, "always"), "long": (for_ever, "always")}
        monkeypatch.setattr(tasks_module, "LOOK_SECONDS", 0.01)
        other = TaskManager(world.tasks)
        async with world.client(WITH_TASKS) as client:
            asks, runs = (await client.call("who"))["taskId"], (await client.call("long"))["taskId"]

            async def is_asked() -> bool:
                return (await other.get(asks, "ben")).status == "input_required"

            await eventually(is_asked)
            assert "user" in (await other.get(asks, "ben")).detail
            await other.update(asks, "ben", {"user": ANN})
            await other.cancel(runs, "ben")
            assert json.loads(said((await client.until(asks, "completed"))["result"])) == ANN
            await client.until(runs, "cancelled")
            await other.cancel(runs, "ben")
        await world.calls.aclose()

    run(story())


def test_without_a_task_store_the_client_waits_or_learns_that_nothing_ran(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(_: JsonObject, caller: Caller) -> types.CallToolResult:
        await asyncio.sleep(0.1)
        return text("done")

    async def story() -> None:
        world.tools |= {"auto": (slow, "auto"), "always": (slow, "always"), "required": (slow, "required")}
        monkeypatch.setattr(tasks_module, "MOST_RUNNING", 0)
        async with world.client(WITH_TASKS) as client:
            assert said(await client.call("auto")) == "done"
            assert said(await client.call("always")) == "done"
            with pytest.raises(MCPError, match="Nothing ran"):
                await client.call("required")
        monkeypatch.setattr(tasks_module, "MOST_RUNNING", 9)
        world.database.close()
        async with world.client(WITH_TASKS) as client:
            assert said(await client.call("auto")) == "done"
        assert world.runs == ["auto", "always", "auto"]

    run(story())


def test_a_result_too_large_to_store_reports_its_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LARGEST_RESULT", 1_000)

    async def large(_: JsonObject, caller: Caller) -> types.CallToolResult:
        return text("x" * 5_000)

    async def story() -> None:
        world.tools["large"] = (large, "always")
        async with world.client(WITH_TASKS) as client:
            done = await client.until((await client.call("large"))["taskId"], "completed")
            assert "5,0" in said(done["result"])
        await world.calls.aclose()

    run(story())


def test_a_cancelled_request_leaves_no_task_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # The client cancels in the very moment in which its call becomes a task.
    kept: list[str] = []

    async def story() -> None:
        world.tools["long"] = (for_ever, "auto")
        async with world.client(WITH_TASKS) as client:
            number = await client.begin("tools/call", {"name": "long", "arguments": {}})
            desk = world.calls._manager
            assert desk is not None
            original = desk.open

            async def cancelled_meanwhile(*words: Any) -> Any:
                await client.cancel(number)
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(0.05)
                task = await original(*words)
                kept.append(task.id if task else "")
                return task

            monkeypatch.setattr(desk, "open", cancelled_meanwhile)

            async def is_over() -> str:
                task = world.tasks().get(kept[0], "ben", milliseconds()) if kept else None
                return task.status if task is not None and task.is_over else ""

            assert await eventually(is_over) == "cancelled"

    run(story())


def test_a_listening_client_is_notified_of_its_tasks(world: World) -> None:
    async def story() -> None:
        world.tools["who"] = (who, "always")
        async with world.client(WITH_TASKS) as client:
            task = (await client.call("who"))["taskId"]
            heard: JsonObject = {"notifications": {"taskIds": [task, "unknown"], "toolsListChanged": True}}
            number = await client.begin("subscriptions/listen", heard)

            async def latest(status: str) -> Any:
                return [one["params"] for one in client.notes[1:] if one["params"]["status"] == status][-1:]

            (asked,) = await eventually(lambda: latest("input_required"))
            assert asked["_meta"] == {SUBSCRIPTION_ID_META_KEY: number}
            assert asked["inputRequests"].keys() == {"user"}
            await client.ask("tasks/update", {"taskId": task, "inputResponses": {"user": ANN}})
            (done,) = await eventually(lambda: latest("completed"))
            assert json.loads(said(done["result"])) == ANN
            first = client.notes[0]
            assert first["method"] == "notifications/subscriptions/acknowledged"
            assert first["params"]["notifications"] == {"toolsListChanged": True, "taskIds": [task]}
            assert {one["method"] for one in client.notes[1:]} == {"notifications/tasks"}
            with pytest.raises(MCPError) as refused:
                await client.ask("subscriptions/listen", heard, EVERYTHING)
            assert refused.value.code == types.MISSING_REQUIRED_CLIENT_CAPABILITY
        await world.calls.aclose()

    run(story())


def test_one_undeliverable_task_blocks_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "_READ_SECONDS", 0.01)
    go_on = asyncio.Event()

    async def slow(_: JsonObject, caller: Caller) -> types.CallToolResult:
        await go_on.wait()
        return text("done")

    async def story() -> None:
        world.tools["slow"] = (slow, "always")
        desk = world.calls._manager
        assert desk is not None
        original, faults = desk.get, [types.INTERNAL_ERROR, types.INTERNAL_ERROR, types.INVALID_PARAMS]

        async def faulty(task_id: str, principal: str) -> Any:
            if is_acknowledged() and task_id == first and faults:
                raise MCPError(faults.pop(0), "not now")
            return await original(task_id, principal)

        def is_acknowledged() -> bool:
            return bool(client.notes)

        async with world.client(WITH_TASKS) as client:
            first, second = [(await client.call("slow"))["taskId"] for _ in range(2)]
            monkeypatch.setattr(desk, "get", faulty)
            await client.begin("subscriptions/listen", {"notifications": {"taskIds": [first, second, second]}})

            async def is_over() -> bool:
                return not faults

            await eventually(is_over)
            go_on.set()

            async def ended() -> list[str]:
                return [one["params"]["taskId"] for one in client.notes[1:] if one["params"]["status"] == "completed"]

            assert await eventually(ended) == [second]
            assert client.notes[0]["params"]["notifications"]["taskIds"] == [first, second]
        await world.calls.aclose()

    run(story())


def test_tasks_of_other_processes_are_read_in_limited_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(tasks_module, "_MOST_READ", 2)
    reads: list[str] = []

    async def story() -> None:
        now = milliseconds()
        ids = [f"{number:032x}" for number in range(6)]
        for task_id in ids:
            world.tasks().add(Task(task_id, "ben", "tools/call", "x", "elsewhere", now, now, now + KEPT_MS, now))
        desk = world.calls._manager
        assert desk is not None
        original = desk.get

        async def counted(task_id: str, principal: str) -> Any:
            if client.notes:
                reads.append(task_id)
            return await original(task_id, principal)

        monkeypatch.setattr(desk, "get", counted)
        async with world.client(WITH_TASKS) as client:
            await client.begin("subscriptions/listen", {"notifications": {"taskIds": ids}})

            async def all_notified() -> bool:
                desk._announce()  # however much happens here
                return len(client.notes) == 1 + len(ids)

            begun = time.monotonic()
            await eventually(all_notified)
            assert time.monotonic() - begun > 0.35
        assert reads[:6] == ids
        await world.calls.aclose()

    run(story())


def test_a_failing_store_and_its_recovery_are_reported_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "kiwi")
    tries: list[float] = []

    class Failing:
        """A store that fails for a while."""

        is_down = False

        def __call__(self) -> Tasks:
            if self.is_down:
                tries.append(time.monotonic())
                raise StoreUnavailable("The disk is full.", suggestion="Make room.")
            return world.tasks()

    async def story() -> None:
        store = Failing()
        world.tools["long"] = (for_ever, "always")
        world.calls = Calls(store, task_after=lambda: 0.0, principal=lambda _: "ben")
        monkeypatch.setattr(tasks_module, "LOOK_SECONDS", 0.01)
        async with world.client(WITH_TASKS) as client:
            await client.call("long")
            store.is_down = True

            async def is_tried() -> bool:
                return len(tries) >= 5

            await eventually(is_tried)
            store.is_down = False

            async def is_back() -> bool:
                return any("again" in record.message for record in caplog.records)

            await eventually(is_back)
        assert [record.message.partition(":")[0].partition(",")[0] for record in caplog.records] == [
            "tasks cannot be kept for now",
            "tasks are kept again",
        ]
        assert tries[4] - tries[3] > tries[1] - tries[0]
        await world.calls.aclose()

    run(story())


def test_a_server_without_a_store_has_no_tasks(world: World) -> None:
    async def story() -> None:
        world.tools["long"] = (who, "always")
        world.calls = calls_module.Calls(None, task_after=lambda: 0.0, principal=lambda _: "")
        async with world.client(WITH_TASKS) as client:
            assert (await client.call("long"))["resultType"] == "input_required"
            with pytest.raises(MCPError) as unknown:
                await client.ask("tasks/get", {"taskId": "x"})
            assert unknown.value.code == types.METHOD_NOT_FOUND
        await world.calls.aclose()

    run(story())
