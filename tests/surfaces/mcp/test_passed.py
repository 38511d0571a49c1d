"""Answers of MCP servers are passed on unchanged, limited to what the revision of the client supports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kiwi_mcp.domain.json import Json
from kiwi_mcp.surfaces.mcp.results import passed_call, passed_prompt, passed_resource

AUDIO: Json = {"type": "audio", "data": "UklGRg==", "mimeType": "audio/wav"}
LINK: Json = {"type": "resource_link", "uri": "a://b", "name": "b"}
SERVER_INFO = "io.modelcontextprotocol/serverInfo"


def kinds(blocks: Sequence[Json], revision: str) -> list[str]:
    result = passed_call({"content": blocks}, revision=revision)
    assert result is not None
    return [block.type for block in result.content]


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        ("2024-11-05", ["text", "text"]),
        ("2025-03-26", ["audio", "text"]),
        ("2025-06-18", ["audio", "resource_link"]),
        ("2026-07-28", ["audio", "resource_link"]),
    ],
)
def test_a_block_that_a_revision_does_not_support_becomes_text(revision: str, expected: list[str]) -> None:
    assert kinds([AUDIO, LINK], revision) == expected


@pytest.mark.parametrize(
    ("revision", "value", "is_kept"),
    [
        ("2025-03-26", {"a": 1}, False),
        ("2025-06-18", {"a": 1}, True),
        ("2025-11-25", [1], False),
        ("2026-07-28", [1], True),
    ],
)
def test_structured_content_is_sent_to_clients_that_support_it(revision: str, value: Json, *, is_kept: bool) -> None:
    result = passed_call({"content": [], "structuredContent": value}, revision=revision)
    assert result is not None
    assert (result.structured_content == value) is is_kept


def test_an_upstream_server_does_not_speak_for_kiwi() -> None:
    meta: Json = {SERVER_INFO: {"name": "behind", "version": "1"}, "own": 1}
    result = passed_resource(
        {"contents": [{"uri": "a://b", "text": ""}], "cacheScope": "public", "ttlMs": 7, "_meta": meta}
    )
    assert result is not None
    assert result.meta == {"own": 1}
    assert (result.ttl_ms, result.cache_scope) == (7, "private")


def test_an_invalid_answer_is_not_passed_on() -> None:
    assert passed_call({"content": [{"type": "odd"}]}, revision="2026-07-28") is None
    assert passed_prompt({"messages": [{"role": "ghost", "content": AUDIO}]}, revision="2026-07-28") is None
    assert passed_resource({"contents": []}) is None
