"""Servers over the network: streamable HTTP in both eras, SSE, WebSocket, and their failures."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from tests.drivers.mcp.conftest import Bench, at
from websockets.asyncio.server import ServerConnection, serve

from kiwi_mcp.domain.errors import AddressDenied
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.mcp import ServerListing
from kiwi_mcp.domain.outcome import Outcome, Progress

pytestmark = pytest.mark.usefixtures("loopback")


def offering() -> MCPServer:
    """A server of the official SDK."""
    server = MCPServer("friendly", instructions="Ask me")

    @server.tool()
    def add(a: int, b: int) -> dict[str, int]:
        """Adds."""
        return {"sum": a + b}

    @server.tool()
    async def count(ctx: Context[Any, Any]) -> str:
        """Counts, and tells how far it is."""
        for number in range(3):
            await ctx.report_progress(number + 1, 3, f"number {number + 1}")
        return "counted"

    @server.tool()
    async def sleep(seconds: float) -> str:
        """Sleeps."""
        await asyncio.sleep(seconds)
        return "awake"

    @server.tool()
    async def change(ctx: Context[Any, Any]) -> str:
        """Says that the list has changed."""
        await ctx.notify_tools_changed()
        return "changed"

    @server.prompt()
    def greet(who: str) -> str:
        return f"Hello {who}"

    @server.resource("memo://{name}")
    def memo(name: str) -> str:
        return f"about {name}"

    return server


async def everything(bench: Bench, server: Tool) -> tuple[ServerListing, list[Outcome]]:
    outcomes = [
        await bench.call(bench.chain(server, "add"), {"a": 1, "b": 2}),
        await bench.call(bench.chain(server, "greet", mcp_prompt_name="greet"), {"who": "Ann"}),
        await bench.call(bench.chain(server, "memo", mcp_resource_uri="memo://{name}"), {"name": "tea"}),
    ]
    return await bench.list_items(server), outcomes


def check(listing: ServerListing, outcomes: list[Outcome], era: str) -> None:
    added, greeted, read = outcomes
    assert added.result == {"sum": 3}
    assert "Hello Ann" in json.dumps(greeted.result)
    assert read.result == "about tea"
    assert listing.era == era
    assert {tool["name"] for tool in listing.tools} == {"add", "change", "count", "sleep"}
    assert [prompt["name"] for prompt in listing.prompts] == ["greet"]
    assert [template["uriTemplate"] for template in listing.templates] == ["memo://{name}"]
    assert listing.instructions == "Ask me"


@pytest.mark.req("K-MC-01", "K-MC-05")
def test_streamable_http_gives_tools_prompts_and_resources(bench: Bench) -> None:
    async def work(address: str) -> None:
        listing, outcomes = await everything(bench, bench.remote(f"{address}/mcp"))
        check(listing, outcomes, "modern")

    at(bench, offering().streamable_http_app(), work)


@pytest.mark.smoke
@pytest.mark.req("K-MC-01", "K-MC-05")
def test_streamable_http_of_the_handshake_era_works(bench: Bench) -> None:
    async def work(address: str) -> None:
        server = bench.remote(f"{address}/mcp")
        bench.driver.eras[server.identity] = "legacy"
        listing, outcomes = await everything(bench, server)
        check(listing, outcomes, "legacy")

    at(bench, offering().streamable_http_app(), work)


@pytest.mark.req("K-MC-01", "K-MC-05")
def test_sse_servers_work(bench: Bench) -> None:
    async def work(address: str) -> None:
        listing, outcomes = await everything(bench, bench.remote(f"{address}/sse", "sse"))
        check(listing, outcomes, "legacy")

    at(bench, offering().sse_app(), work)


@pytest.mark.parametrize(("path", "transport"), [("mcp", "http"), ("sse", "sse")])
def test_progress_and_time_limits_work_over_http(bench: Bench, path: str, transport: str) -> None:
    response: list[Progress] = []

    async def work(address: str) -> None:
        server = bench.remote(f"{address}/{path}", transport)
        counted = await bench.call(bench.chain(server, "count"), report=response.append)
        assert counted.result in ("counted", {"result": "counted"})
        late = await bench.call(bench.chain(server, "sleep", timeout=0.3), {"seconds": 30})
        assert late.status == "timeout"
        assert (await bench.call(bench.chain(server, "add"), {"a": 1, "b": 1})).result == {"sum": 2}

    friendly = offering()
    at(bench, friendly.sse_app() if transport == "sse" else friendly.streamable_http_app(), work)
    assert [(step.message, step.done, step.total) for step in response][-1] == ("number 3", 3.0, 3.0)


def test_a_server_of_the_modern_era_announces_changes_to_listeners(bench: Bench) -> None:
    async def work(address: str) -> None:
        changed: asyncio.Queue[str] = asyncio.Queue()
        bench.driver.on_change = changed.put_nowait
        server = bench.remote(f"{address}/mcp")
        async with asyncio.timeout(120):
            while changed.empty():  # the first call may come before the subscription stands
                await bench.call(bench.chain(server, "change"))
            assert await changed.get() == server.identity

    at(bench, offering().streamable_http_app(), work)


def test_calls_over_http_are_concurrent(bench: Bench) -> None:
    async def work(address: str) -> None:
        chain = bench.chain(bench.remote(f"{address}/mcp"), "sleep")
        async with asyncio.timeout(120):
            outcomes = await asyncio.gather(*(bench.call(chain, {"seconds": 0.5}) for _ in range(20)))
        assert {outcome.status for outcome in outcomes} == {"success"}

    at(bench, offering().streamable_http_app(), work)


@pytest.mark.smoke
@pytest.mark.req("K-MC-01")
async def test_a_websocket_server_works(bench: Bench) -> None:
    async def answer(connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.headers["Authorization"] == "Bearer t0ken"
        async for message in connection:
            asked = json.loads(message)
            match asked["method"]:
                case "initialize":
                    result: dict[str, Json] = {
                        "protocolVersion": asked["params"]["protocolVersion"],
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "socket", "version": "1"},
                    }
                case "tools/call":
                    result = {"content": [{"type": "text", "text": asked["params"]["arguments"]["text"]}]}
                case _:
                    if "id" in asked:
                        error = {"code": -32601, "message": "no"}
                        await connection.send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}))
                    continue
            await connection.send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}))

    async def scenario() -> Outcome:
        async with serve(answer, "127.0.0.1", 0, subprotocols=None) as listener:
            port = listener.sockets[0].getsockname()[1]
            auth: Json = {"type": "bearer", "token": "${TOKEN}"}
            server = bench.remote(f"ws://127.0.0.1:{port}/mcp", "websocket", auth=auth)
            try:
                return await bench.call(bench.chain(server, "echo"), {"text": "hi"}, secrets={"TOKEN": "t0ken"})
            finally:
                await bench.driver.aclose()

    assert (await scenario()).result == "hi"


@pytest.mark.req("I3")
@pytest.mark.parametrize("transport", ["http", "sse", "websocket"])
def test_a_server_that_refuses_connections_is_unavailable(bench: Bench, transport: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        scheme = "ws" if transport == "websocket" else "http"
        server = bench.remote(f"{scheme}://127.0.0.1:{taken.getsockname()[1]}/mcp", transport)
        outcome = bench.ask(server, "add")

    assert outcome.status == "unavailable"
    assert "no connection" in outcome.message


@pytest.mark.parametrize("transport", ["http", "sse", "websocket"])
def test_an_address_that_the_owner_did_not_grant_is_denied(bench: Bench, transport: str) -> None:
    scheme = "ws" if transport == "websocket" else "http"

    with pytest.raises(AddressDenied):
        bench.ask(bench.remote(f"{scheme}://127.0.0.2:9/mcp", transport), "add")


@pytest.mark.case("MCP-13")
def test_a_redirect_to_another_origin_is_refused(bench: Bench) -> None:
    visited: list[str] = []

    async def away(request: Request) -> Response:
        visited.append(request.headers.get("authorization", ""))
        return RedirectResponse("http://127.0.0.1:9/elsewhere", status_code=307)

    async def work(address: str) -> None:
        server = bench.remote(f"{address}/mcp", headers={"Authorization": "Bearer ${TOKEN}"})
        outcome = await bench.call(bench.chain(server, "add"), secrets={"TOKEN": "t0ken-value"})
        assert outcome.status == "unavailable"
        assert "not followed" in outcome.message

    at(bench, Starlette(routes=[Route("/mcp", away, methods=["POST", "GET"])]), work)
    assert set(visited) == {"Bearer t0ken-value"}


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_a_refusing_status_is_reported(bench: Bench, status: int) -> None:
    async def no(_: Request) -> Response:
        return PlainTextResponse("no", status_code=status)

    async def work(address: str) -> None:
        outcome = await bench.call(bench.chain(bench.remote(f"{address}/mcp"), "add"))
        assert outcome.status == "unavailable"
        assert ("requires a token" if status == 401 else f"answered {status}") in outcome.message

    at(bench, Starlette(routes=[Route("/mcp", no, methods=["POST", "GET"])]), work)


@pytest.mark.case("MCP-13", "MCP-05")
def test_an_endless_response_is_cut_off(bench: Bench) -> None:
    async def endless(request: Request) -> Response:
        asked = json.loads(await request.body())
        return Response(
            b'{"jsonrpc": "2.0", "id": %d, "result": {"x": "' % asked["id"] + b"x" * 3_000_000,
            media_type="application/json",
        )

    async def work(address: str) -> None:
        server = bench.remote(f"{address}/mcp", max_bytes=1_000_000)
        outcome = await bench.call(bench.chain(server, "add"))
        assert outcome.status == "unavailable"
        assert "1,000,000" in outcome.message

    at(bench, Starlette(routes=[Route("/mcp", endless, methods=["POST", "GET"])]), work)


async def test_a_replaced_server_gets_a_new_handshake(bench: Bench) -> None:
    """A server of one era is stopped, and one of the other era listens at the same address."""

    results: list[object] = []
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = bench.remote(f"http://127.0.0.1:{bound.getsockname()[1]}/mcp")
        chain = bench.chain(server, "add")
        for _ in range(2):
            app = offering().streamable_http_app()
            bench.driver.eras[server.identity] = "legacy"
            runner = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none"))
            task = asyncio.create_task(runner.serve(sockets=[bound.dup()]))
            results.append((await bench.call(chain, {"a": 1, "b": 2})).result)
            runner.should_exit = runner.force_exit = True
            await task
    results.append((await bench.call(chain, {"a": 1, "b": 2})).status)
    await bench.driver.aclose()
    assert results == [{"sum": 3}, {"sum": 3}, "unavailable"]


@pytest.mark.parametrize(("code", "calls"), [(-32600, 1), (-32601, 1), (-32022, 2)])
def test_a_call_is_resent_only_if_the_server_cannot_have_received_it(bench: Bench, code: int, calls: int) -> None:
    asked: list[str] = []

    async def answer(request: Request) -> Response:
        message = json.loads(await request.body())
        asked.append(message["method"])
        if message["method"] == "initialize":
            version = message["params"]["protocolVersion"]
            about = {"name": "odd", "version": "1"}
            said: dict[str, Json] = {"result": {"protocolVersion": version, "capabilities": {}, "serverInfo": about}}
        else:
            said = {"error": {"code": code if message["method"] == "tools/call" else -32601, "message": "no"}}
        if "id" not in message:
            return Response(status_code=202)
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], **said})

    async def work(address: str) -> None:
        outcome = await bench.call(bench.chain(bench.remote(f"{address}/mcp"), "pay"))
        assert (outcome.status, outcome.details["mcp_code"]) == ("error", code)

    at(bench, Starlette(routes=[Route("/mcp", answer, methods=["POST"])]), work)
    assert asked.count("tools/call") == calls


def test_an_sse_event_may_have_the_size_of_a_message_and_a_larger_one_is_reported(bench: Bench) -> None:
    server = MCPServer("large")

    @server.tool()
    def fill(size: int) -> str:
        return "x" * size

    async def work(address: str) -> None:
        remote = bench.remote(f"{address}/sse", "sse", max_bytes=5_000_000)
        filled = await bench.call(bench.chain(remote, "fill"), {"size": 2_000_000})
        assert filled.status == "success"
        outcome = await bench.call(bench.chain(remote, "fill"), {"size": 6_000_000})
        assert outcome.status == "unavailable"
        assert "event exceeded the 5000000 byte limit" in outcome.message

    at(bench, server.sse_app(), work)


HEADER: Json = {"type": "string", "x-mcp-header": "Region"}
BAD: Json = {"type": "string", "x-mcp-header": "Region\r\nX-Evil"}


@pytest.mark.parametrize(
    ("properties", "listed", "headers"),
    [
        ({"where": HEADER}, {}, ["=?base64?w5xiZXI=?="]),
        ({}, {"where": HEADER}, [None, "=?base64?w5xiZXI=?="]),
        ({"where": BAD}, {"where": BAD}, [None, None]),
    ],
)
def test_arguments_that_a_server_wants_as_headers_are_sent_as_headers(
    bench: Bench, properties: JsonObject, listed: JsonObject, headers: list[str | None]
) -> None:
    heard: list[str | None] = []

    async def answer(request: Request) -> Response:
        asked = json.loads(await request.body())
        assert "x-evil" not in request.headers
        whole: dict[str, Json] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        said: dict[str, Json] = {"result": whole}
        match asked["method"]:
            case "server/discover":
                whole |= {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
            case "tools/list":
                whole["tools"] = [{"name": "find", "inputSchema": {"type": "object", "properties": listed}}]
            case "tools/call":
                heard.append(request.headers.get("mcp-param-region"))
                if heard[-1] is None:
                    said = {"error": {"code": -32020, "message": "Header mismatch"}}
        status = 400 if "error" in said else 200
        return JSONResponse({"jsonrpc": "2.0", "id": asked["id"], **said}, status_code=status)

    async def work(address: str) -> None:
        schema: JsonObject = {"type": "object", "properties": properties}
        await bench.call(bench.chain(bench.remote(f"{address}/mcp"), "find", None, schema), {"where": "Über"})

    at(bench, Starlette(routes=[Route("/mcp", answer, methods=["POST"])]), work)
    assert heard == headers
