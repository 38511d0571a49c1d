from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.server.runner import ServerRunner
from mcp_types import PROTOCOL_VERSION_META_KEY, methods
from mcp_types.jsonrpc import jsonrpc_message_adapter
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.mcp.handshake import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
    VERSION_KEY,
    Handshake,
    StdioPipe,
    greet,
    is_envelope,
    is_handshake,
    load_prepared,
    load_tools,
    read,
)

CLIENT: JsonObject = {"name": "a client", "version": "1"}


def line(method: str, params: Json = None, number: Json = 1) -> bytes:
    message: dict[str, Json] = {"jsonrpc": "2.0", "method": method}
    if number is not None:
        message["id"] = number
    if params is not None:
        message["params"] = params
    return json.dumps(message).encode()


def handshake(version: str = LATEST_HANDSHAKE_VERSION, number: Json = 1) -> bytes:
    return line("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT}, number)


def envelope(**more: Json) -> JsonObject:
    return {"_meta": {VERSION_KEY: LATEST_MODERN_VERSION, CAPABILITIES_KEY: {}, CLIENT_KEY: CLIENT, **more}}


def greeting() -> Handshake:
    prepared = load_prepared()
    return Handshake(prepared, load_tools(prepared, ""))


def result(reply: bytes | None) -> dict[str, Json]:
    assert reply
    found: dict[str, Json] = json.loads(reply)["result"]
    return found


INITIALIZED = line("notifications/initialized", number=None)


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
def test_every_handshake_revision_is_accepted_as_offered(version: str) -> None:
    assert result(greeting().answer(handshake(version)))["protocolVersion"] == version


@pytest.mark.parametrize("version", ["1999-01-01", "2026-07-28", "", "latest"])
def test_another_revision_is_answered_with_the_latest_handshake_revision(version: str) -> None:
    assert result(greeting().answer(handshake(version)))["protocolVersion"] == LATEST_HANDSHAKE_VERSION


def test_the_opening_of_both_eras_is_answered_through_the_tool_list() -> None:
    old, new = greeting(), greeting()
    assert old.answer(handshake())
    assert old.answer(INITIALIZED) == b""
    assert result(old.answer(line("ping"))) == {}
    assert not old.listed
    assert result(old.answer(line("tools/list", {"_meta": {"progressToken": 3}})))["tools"]
    assert bool(old.listed)
    assert old.heard == [handshake(), INITIALIZED]

    assert "capabilities" in result(new.answer(line("server/discover", envelope())))
    assert result(new.answer(line("tools/list", envelope())))["resultType"] == "complete"
    assert new.listed is not None
    assert new.heard == [line("server/discover", envelope())]


def test_no_tool_asks_for_a_project() -> None:
    said = greeting()
    said.answer(handshake())
    tools = result(said.answer(line("tools/list")))["tools"]
    assert isinstance(tools, list)
    assert {tool["name"]: tool["inputSchema"].get("required", []) for tool in tools} == {
        "search": ["query"],
        "load": ["item_id"],
        "execute": [],
        "help": [],
    }


@pytest.mark.parametrize(
    "odd",
    [
        b"<html>",
        b"\xef\xbb\xbf" + handshake(),
        b"\xff",
        b'{"jsonrpc":"2.0","id":1,"method":"ini',
        b"[" * 5_000,
        b"[]",
        b"null",
        handshake(number=1.5),
        handshake(number=True),
        handshake(number=2**60),
        handshake().replace(b'"2.0"', b'"1.0"'),
        handshake().replace(b"a client", b"\\ud800"),
        handshake().replace(b'"1"', b"NaN"),
        line("initialize"),
        line("initialize", {"protocolVersion": "2025-06-18"}),
        line("initialize", number=None),
        line("ping"),
        line("tools/list"),
        line("tools/list", {"_meta": {VERSION_KEY: LATEST_MODERN_VERSION}}),
        line("tools/list", {"_meta": {VERSION_KEY: "2030-01-01", CAPABILITIES_KEY: {}}}),
        line("tools/list", {"cursor": "x", **envelope()}),
        line("ping", envelope()),
        line("versions", envelope()),
        INITIALIZED,
    ],
)
def test_an_uncertain_opening_is_left_to_the_sdk(odd: bytes) -> None:
    said = greeting()
    assert said.answer(odd) is None
    assert said.heard == []


def test_a_mix_of_both_eras_is_left_to_the_sdk() -> None:
    old, new = greeting(), greeting()
    old.answer(handshake())
    assert old.answer(line("server/discover", envelope())) is None
    assert old.answer(handshake()) is None
    new.answer(line("server/discover", envelope()))
    assert new.answer(handshake()) is None
    assert new.answer(line("tools/list")) is None


# What a client may put into its handshake, right or wrong: the names are the ones that shapes know, and near misses.
NAMES = st.sampled_from(
    [
        *("roots", "sampling", "elicitation", "experimental", "extensions", "tasks", "tools", "form", "url", "list"),
        *("listChanged", "list_changed", "context", "requests", "create", "createMessage", "cancel", "x", "*"),
    ]
)
VALUES: st.SearchStrategy[Json] = st.recursive(
    st.sampled_from([None, True, False, 0, 1.5, "", "text"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CLIENT_NAMES = st.sampled_from(["name", "version", "title", "description", "websiteUrl", "website_url", "icons", "y"])
ICONS = st.lists(
    st.dictionaries(st.sampled_from(["src", "mimeType", "sizes", "theme"]), st.sampled_from(["", "x", []]), max_size=3),
    max_size=2,
)
CLIENTS = st.builds(
    lambda base, more: {**base, **more},
    st.sampled_from([CLIENT, {}]),
    st.dictionaries(CLIENT_NAMES, VALUES | ICONS, max_size=2),
)
CAPABILITIES = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=2), max_size=3)
METAS = st.none() | st.dictionaries(st.sampled_from(["progressToken", "progress_token", VERSION_KEY, "z"]), VALUES)


@pytest.mark.slow
@given(CAPABILITIES, CLIENTS, METAS, st.text(max_size=3))
@settings(deadline=None, max_examples=80)
def test_no_handshake_is_accepted_that_the_sdk_would_refuse(
    capabilities: JsonObject, client: JsonObject, meta: JsonObject | None, version: str
) -> None:
    params: dict[str, Json] = {"protocolVersion": version, "capabilities": capabilities, "clientInfo": client}
    if meta is not None:
        params["_meta"] = meta
    if read(line("initialize", params)) is not None and is_handshake(dict(params)):
        methods.validate_client_request("initialize", LATEST_HANDSHAKE_VERSION, params)
        ServerRunner._negotiate_initialize(params)
        jsonrpc_message_adapter.validate_json(line("initialize", params), by_name=False)


@given(CAPABILITIES, CLIENTS | st.none(), st.dictionaries(st.sampled_from(["progressToken", "z"]), VALUES))
@settings(deadline=None, max_examples=80)
def test_no_envelope_is_accepted_that_the_sdk_would_refuse(
    capabilities: JsonObject, client: JsonObject | None, more: JsonObject
) -> None:
    meta = {VERSION_KEY: LATEST_MODERN_VERSION, CAPABILITIES_KEY: capabilities, **more}
    if client is not None:
        meta[CLIENT_KEY] = client
    if is_envelope({"_meta": meta}, LATEST_MODERN_VERSION):
        for method in ("server/discover", "tools/list"):
            methods.validate_client_request(method, LATEST_MODERN_VERSION, {"_meta": meta})


def test_the_envelope_has_the_name_that_the_sdk_uses() -> None:
    assert VERSION_KEY == PROTOCOL_VERSION_META_KEY


@pytest.mark.parametrize(
    "capabilities",
    [
        {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {"form": {}, "url": {}}},
        {"tools": True, "prompts": True, "resources": True, "logging": False, "roots": {"listChanged": False}},
        {"tasks": {"list": {}, "cancel": {}, "requests": {"sampling": {"createMessage": {}}}}},
        {"extensions": {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html"]}}},
    ],
)
def test_declarations_of_current_clients_are_answered_at_once(capabilities: JsonObject) -> None:
    client: JsonObject = {"name": "c", "version": "1", "title": "C", "icons": [{"src": "data:,", "sizes": ["any"]}]}
    params: JsonObject = {"protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": client}
    assert greeting().answer(line("initialize", params))


def spoken(data: bytes) -> tuple[bytes, list[bytes], list[bytes]]:
    """What stage one replies to a whole stream, what it heard, and which lines it left."""
    (inbound, theirs), (ours, outbound) = os.pipe(), os.pipe()
    try:
        os.write(theirs, data)
        os.close(theirs)
        opening = greet(StdioPipe(inbound, outbound), greeting())
        os.close(outbound)
        opening.lines.feed(os.read(inbound, 1))
        left = []
        while (one := opening.lines.take()) is not None:
            left.append(one)
        return os.read(ours, 1_000_000), opening.heard, left
    finally:
        os.close(inbound)
        os.close(ours)


def test_lines_after_the_tool_list_are_left_unread() -> None:
    rest = line("tools/call", {"name": "help"}, 3)
    data = b"\r\n".join([handshake(), b"", INITIALIZED, line("tools/list", number=2), rest, b"half"])
    replies, heard, left = spoken(data)
    assert [json.loads(reply)["id"] for reply in replies.splitlines()] == [1, 2]
    assert [one.strip() for one in heard] == [handshake(), INITIALIZED]
    assert [one.strip() for one in left] == [rest, b"half"]


def test_the_first_invalid_line_and_all_after_it_are_left_unread() -> None:
    _, heard, left = spoken(b"\n".join([b"<html>", handshake()]))
    assert heard == []
    assert left == [b"<html>", handshake()]


@pytest.mark.usefixtures("processes")
def test_stage_one_imports_nothing_large() -> None:
    program = (
        "import json, re, signal, fcntl, sys, importlib; before = set(sys.modules);"
        "import kiwi_mcp.surfaces.start, kiwi_mcp.surfaces.mcp.handshake, kiwi_mcp.surfaces.mcp.handshake;"
        "print(*sorted(set(sys.modules) - before))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    others = {name for name in shown.stdout.split() if not name.startswith("kiwi_mcp")}
    assert others <= {"__future__", "atexit", "collections.abc", "gc"}
