"""Answers that contain secrets: returned as secrets, and the rest never quotes the request."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode

import pytest

from kiwi_mcp.domain.errors import RequestFailed
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.request import prepare
from kiwi_mcp.primitives.http.token_request import TokenReply, take

pytestmark = pytest.mark.usefixtures("loopback")


def taken(answer: Json, spec: HttpSpec, status: int = 200) -> tuple[TokenReply, str, str]:
    """What is taken from an answer, and the head and body of the request."""
    heard: list[str] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        heard.extend((head, (await reader.readexactly(size)).decode()))
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        writer.close()

    async def scenario() -> TokenReply:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/token"
            whole = HttpSpec(
                "POST", url, spec.headers, spec.body, has_body=True, basic=spec.basic, granted=("127.0.0.1",), timeout=5
            )
            own = {"REFRESH": Secret("refresh-value")}
            try:
                return await take(whole, words=("access_token",), secrets={"CLIENT": "client/value"}, own=own)
            finally:
                await client.aclose()

    return asyncio.run(scenario()), heard[0], heard[1]


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def test_a_secret_is_removed_from_the_answer_and_the_rest_stays() -> None:
    found, _, sent = taken({"access_token": "new-value", "expires_in": 5}, HttpSpec("", "", FORM, {"a": "${REFRESH}"}))

    assert sent == "a=refresh-value"
    assert found.content == {"expires_in": 5}
    assert {word: secret.reveal() for word, secret in found.secrets.items()} == {"access_token": "new-value"}
    assert "new-value" not in repr(found)


def test_a_secret_that_is_returned_unchanged_is_still_redacted() -> None:
    found, _, _ = taken({"access_token": "refresh-value"}, HttpSpec("", "", FORM, {"a": "${REFRESH}"}))

    assert found.secrets["access_token"].is_same(Secret("refresh-value"))
    assert not found.secrets["access_token"].is_same(Secret("another"))


@pytest.mark.case("SEC-07")
def test_an_answer_does_not_quote_the_request() -> None:
    answer: Json = {"error": "unknown refresh-value", "more": [{"client": "client%2Fvalue"}]}

    found, _, _ = taken(answer, HttpSpec("", "", FORM, {"a": "${REFRESH}"}), status=400)

    assert found.status == 400
    assert found.content == {"error": "unknown [redacted:REFRESH]", "more": [{"client": "[redacted:CLIENT]"}]}


def test_a_name_and_a_password_are_quoted_before_joining() -> None:
    _, head, _ = taken({}, HttpSpec("", "", FORM, {}, basic=("my client", "${CLIENT}")))

    word = head.partition("uthorization: Basic ")[2].partition("\r\n")[0]
    assert b64decode(word) == b"my%20client:client%2Fvalue"


@pytest.mark.parametrize("answer", ["", "no json", "[1]", '{"access_token": 5}', '{"access_token": ""}', "[" * 100_000])
def test_an_answer_that_is_not_an_object_is_empty(answer: str) -> None:
    found, _, _ = taken(answer, HttpSpec("", "", FORM, {}))

    assert (found.content, dict(found.secrets)) == ({}, {})


@pytest.mark.case("SEC-07")
async def test_a_failure_does_not_quote_the_request() -> None:
    async def scenario() -> None:
        spec = HttpSpec("POST", "http://127.0.0.1:9/${CLIENT}", granted=("127.0.0.1",), timeout=5)
        try:
            await take(spec, secrets={"CLIENT": "client-value"})
        finally:
            await client.aclose()

    with pytest.raises(RequestFailed, match=r"redacted:CLIENT") as failure:
        await scenario()
    assert "client-value" not in str(failure.value)


def test_a_request_with_its_secrets_in_place_is_not_shown() -> None:
    spec = HttpSpec("GET", "https://example.com/", {"Authorization": "Bearer ${TOKEN}"})
    request = prepare(spec, {"TOKEN": "t-secret"})
    assert ("Authorization", "Bearer t-secret") in request.headers
    assert repr(request) == "WireRequest(…)"
