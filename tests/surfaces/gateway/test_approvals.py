"""Approvals over HTTP: only the client of an owner token is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ElicitResult
from tests.surfaces.gateway.conftest import ServeTools, Tools

Mode = Literal["auto", "legacy"]
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
NOTE: dict[str, Any] = {"item_id": "post_note", "parameters": {"text": "hi"}}


@asynccontextmanager
async def agreeing(served: Tools, mode: Mode, kind: str) -> AsyncIterator[Client]:
    """A client that approves every form, with a token."""

    async def agree(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True, "always": "this tool"})

    secret = served.tokens.add(f"some-{kind}", [], can_write=False, can_use_tools=True, kind=kind)
    async with (
        httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {secret}"}, trust_env=False, verify=False, timeout=120
        ) as bare,
        Client(streamable_http_client(served.url, http_client=bare), mode=mode, elicitation_callback=agree) as client,
    ):
        yield client


def answer_in(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None
    answer: dict[str, Any] = result.structured_content
    return answer


@EACH_ERA
@pytest.mark.req("K4")
@pytest.mark.case("APPR-04")
async def test_an_approval_of_an_agent_is_not_an_approval(
    mode: Mode, serving_tools: ServeTools, project: Path, sent: list[str]
) -> None:
    async with (
        asyncio.timeout(120),
        serving_tools(project=project) as served,
        agreeing(served, mode, "agent") as client,
    ):
        waiting = answer_in(await client.call_tool("execute", NOTE))
        assert waiting["code"] == "approval_required"
        approve = {"action": "approve", "approval_id": waiting["approval_id"]}
        assert answer_in(await client.call_tool("approvals", approve))["code"] == "not_permitted"
        assert answer_in(await client.call_tool("execute", NOTE))["approval_id"] == waiting["approval_id"]
    assert sent == []


@EACH_ERA
@pytest.mark.req("K4")
async def test_an_owner_with_a_token_is_asked_by_their_client(
    mode: Mode, serving_tools: ServeTools, project: Path, sent: list[str]
) -> None:
    async with (
        asyncio.timeout(120),
        serving_tools(project=project) as served,
        agreeing(served, mode, "owner") as client,
    ):
        done = answer_in(await client.call_tool("execute", NOTE))
        assert done["status"] == "success"
        # Their model, which uses the same token, cannot approve by a call.
        refused = answer_in(await client.call_tool("approvals", {"action": "add_rule", "item": "*"}))
        assert refused["code"] == "not_permitted"
    assert sent == ['{"text":"hi"}']
