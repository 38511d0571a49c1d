"""The access checks of `/mcp`: tool tokens, sessions, and limits for each client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.surfaces.gateway import mcp
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint

ENVELOPE: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}
HELP: JsonObject = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "help", "arguments": {}, "_meta": ENVELOPE},
}
NEW = {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "tools/call", "mcp_name": "help"}
HANDSHAKE: JsonObject = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": LATEST_HANDSHAKE_VERSION,
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
PING: JsonObject = {"jsonrpc": "2.0", "id": 2, "method": "ping"}


def run(serving_tools: ServeTools, story: Callable[[Tools], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(120), serving_tools() as served:
            await story(served)

    asyncio.run(in_time())


async def opened(served: Tools, token: str) -> Mapping[str, str]:
    """Open a session, and return the headers of a request in it."""
    answer = await served.post(token, HANDSHAKE)
    assert answer.status_code == 200, answer.text
    return {"mcp_session_id": answer.headers["mcp-session-id"], "mcp_protocol_version": LATEST_HANDSHAKE_VERSION}


@pytest.mark.case("GW-01", "GW-02")
@pytest.mark.parametrize("body", [HELP, HANDSHAKE])
def test_without_a_token_for_tools_no_tools_are_served(serving_tools: ServeTools, body: JsonObject) -> None:
    async def story(served: Tools) -> None:
        headers = NEW if body is HELP else {}
        reader = served.tokens.add("reader", ["acme"], can_write=True)
        for token in ("", "kiwi_wrong", "a.b.c", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJlIn0."):
            answer = await served.post(token, body, **headers)
            assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (401, "token_refused")
            assert answer.headers["www-authenticate"] == "Bearer"
        refused = await served.post(reader, body, **headers)
        assert (refused.status_code, refused.json()["error"]["data"]["code"]) == (403, "not_permitted")
        assert "--tools" in refused.json()["error"]["message"]
        assert (await served.post(served.token(), body, **headers)).status_code == 200

    run(serving_tools, story)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_shows_why_it_was_refused(serving_tools: ServeTools, mode: Literal["auto", "legacy"]) -> None:
    async def refusal(served: Tools, token: str) -> str:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, trust_env=False, verify=False) as http:
            with pytest.raises(BaseExceptionGroup) as refused:
                async with Client(streamable_http_client(served.url, http_client=http), mode=mode):
                    pass
        fault: BaseException = refused.value
        while isinstance(fault, BaseExceptionGroup):
            (fault,) = fault.exceptions
        assert isinstance(fault, MCPError)
        return fault.message

    async def story(served: Tools) -> None:
        assert "`kiwi up token add`" in await refusal(served, "kiwi_wrong")
        reader = served.tokens.add("reader", ["acme"], can_write=True)
        assert await refusal(served, reader) == (
            "This token may not use tools. Ask the owner for one that may: `kiwi up token add NAME --tools`."
        )

    run(serving_tools, story)


def test_old_token_rows_allow_no_tools_and_unknown_values_are_refused(home: Path) -> None:
    tokens = TokenStore(home / ".ai")
    secret = tokens.add("eve", [], can_write=False, can_use_tools=True)
    file = home / ".ai" / "state" / "tokens.json"
    rows = json.loads(file.read_text())
    for word in (None, "true", 1):
        rows["tokens"][0]["tools"] = word
        file.write_text(json.dumps(rows))
        with pytest.raises(Unavailable, match="tools"):
            TokenStore(home / ".ai").find(secret)
    del rows["tokens"][0]["tools"]
    file.write_text(json.dumps(rows))
    found = TokenStore(home / ".ai").find(secret)
    assert found is not None
    assert not found.can_use_tools


@pytest.mark.case("GW-04", "GW-05")
def test_foreign_origins_and_host_names_are_refused(serving_tools: ServeTools) -> None:
    async def story(served: Tools) -> None:
        token = served.token()
        for headers in ({"host": "evil.test"}, {"origin": "http://evil.test"}, {"origin": "null"}):
            for body, era in ((HELP, NEW), (HANDSHAKE, {})):
                answer = await served.post(token, body, **headers, **era)
                assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (403, "not_permitted")
        assert (await served.post(token, HELP, host="kiwi.test", **NEW)).status_code == 200

    run(serving_tools, story)


def test_a_session_is_valid_only_for_the_token_that_opened_it(serving_tools: ServeTools) -> None:
    async def story(served: Tools) -> None:
        ada, eve = served.token("ada"), served.token("eve")
        session = await opened(served, ada)
        assert (await served.post(ada, PING, **session)).status_code == 200
        stolen = await served.post(eve, PING, **session)
        unknown = await served.post(eve, PING, **{**session, "mcp_session_id": "0" * 32})
        assert (stolen.status_code, stolen.text) == (unknown.status_code, unknown.text)
        assert stolen.status_code == 404
        words = {"Authorization": f"Bearer {eve}", "Mcp-Session-Id": session["mcp_session_id"]}
        for method in ("GET", "DELETE"):
            answer = await served.bare.request(method, served.url, headers={**words, "Accept": "text/event-stream"})
            assert answer.status_code == 404
        assert (await served.post(ada, PING, **session)).status_code == 200

    run(serving_tools, story)


def test_a_reused_token_name_does_not_inherit_a_session(serving_tools: ServeTools) -> None:
    async def story(served: Tools) -> None:
        session = await opened(served, served.token("ada"))
        served.tokens.remove("ada")
        assert (await served.post(served.token("ada"), PING, **session)).status_code == 404

    run(serving_tools, story)


def test_one_token_cannot_use_all_sessions(serving_tools: ServeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_SESSIONS_EACH", 3)

    async def story(served: Tools) -> None:
        greedy, other = served.token("greedy"), served.token("other")
        for _ in range(3):
            await opened(served, greedy)
        assert (await served.post(greedy, HANDSHAKE)).status_code == 503
        await opened(served, other)

    run(serving_tools, story)


def test_an_unused_session_ends(serving_tools: ServeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_IDLE_SECONDS", 0.05)

    async def story(served: Tools) -> None:
        token = served.token()
        session = await opened(served, token)
        while (await served.post(token, PING, **session)).status_code == 200:  # noqa: ASYNC110 - the server's own clock
            await asyncio.sleep(0.2)
        assert (await served.post(token, PING, **session)).status_code == 404

    run(serving_tools, story)


def test_one_token_cannot_use_all_memory(serving_tools: ServeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_endpoint, "_AT_ONCE", 2)

    async def story(served: Tools) -> None:
        greedy, other = served.token("greedy"), served.token("other")
        mcp = [await opened(served, greedy) for _ in range(3)]
        words = {"Authorization": f"Bearer {greedy}", "Accept": "text/event-stream"}
        streams = []
        for session in mcp:
            headers = {**words, **{name.replace("_", "-"): value for name, value in session.items()}}
            request = served.bare.build_request("GET", served.url, headers=headers)
            streams.append(await served.bare.send(request, stream=True))
        assert [stream.status_code for stream in streams] == [200, 200, 503]
        assert streams[2].headers["retry-after"]
        assert (await served.post(greedy, HELP, **NEW)).status_code == 200  # who listens may still call
        assert (await served.post(other, HELP, **NEW)).status_code == 200
        for stream in streams:
            await stream.aclose()

    run(serving_tools, story)


@pytest.mark.case("GW-09")
def test_a_body_over_the_limit_is_refused_in_any_encoding(serving_tools: ServeTools) -> None:
    async def story(served: Tools) -> None:
        token, large = served.token(), "x" * 5_000_000

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(80):
                yield b"x" * 65_536

        declared = await served.post(token, large, **NEW)
        words = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        streamed = await served.bare.post(served.url, content=pieces(), headers=words)
        for answer in (declared, streamed):
            assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (413, "too_large")
        assert (await served.post(token, HELP, **NEW)).status_code == 200

    run(serving_tools, story)


@pytest.mark.case("GW-09")
def test_a_missing_body_times_out(serving_tools: ServeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.surfaces.gateway.registry._BODY_SECONDS", 0.2)

    async def story(served: Tools) -> None:
        host, port = urlsplit(served.url).hostname or "", urlsplit(served.url).port or 0
        reader, writer = await asyncio.open_connection(host, port, family=socket.AF_INET)
        head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.token()}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode())
        assert b" 408 " in await reader.readline()
        writer.close()

    run(serving_tools, story)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000])
def test_an_invalid_message_is_reported_and_the_next_one_is_answered(serving_tools: ServeTools, text: str) -> None:
    async def story(served: Tools) -> None:
        token = served.token()
        session = await opened(served, token)
        for headers in (NEW, session):
            assert (await served.post(token, text, **headers)).status_code == 400
        assert (await served.post(token, PING, **session)).status_code == 200

    run(serving_tools, story)


async def test_a_read_only_server_has_no_tools(serving_tools: ServeTools) -> None:
    async with serving_tools(is_read_only=True) as served:
        answer = await served.post(served.token(), HELP, **NEW)
        assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (404, "not_found")
