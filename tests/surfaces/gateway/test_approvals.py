"""The owner's word over HTTP: a visitor's client is asked where the visitor is the owner, and nobody else's is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ElicitResult

from kiwi_mcp.surfaces.gateway.tokens import Tokens

Mode = Literal["auto", "legacy"]
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
NOTE: dict[str, Any] = {"item_id": "post_note", "parameters": {"text": "hi"}}


class Served(Protocol):
    url: str
    tokens: Tokens


class Serve(Protocol):
    def __call__(self, *, project: Path | None = None) -> AbstractAsyncContextManager[Served]: ...


@asynccontextmanager
async def agreeing(served: Served, mode: Mode, kind: str) -> AsyncIterator[Client]:
    """A client that says yes to every form, with a token that stands for somebody."""

    async def agree(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True, "always": "this tool"})

    secret = served.tokens.add(f"some-{kind}", [], can_write=False, can_use_tools=True, kind=kind)
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, trust_env=False, timeout=30) as bare,
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
def test_an_agents_own_yes_is_no_approval(mode: Mode, serving_tools: Serve, project: Path, sent: list[str]) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(60),
            serving_tools(project=project) as served,
            agreeing(served, mode, "agent") as client,
        ):
            waiting = answer_in(await client.call_tool("execute", NOTE))
            assert waiting["code"] == "approval_required"
            approve = {"action": "approve", "approval_id": waiting["approval_id"]}
            assert answer_in(await client.call_tool("approvals", approve))["code"] == "not_permitted"
            assert answer_in(await client.call_tool("execute", NOTE))["approval_id"] == waiting["approval_id"]

    asyncio.run(story())
    assert sent == []


@EACH_ERA
@pytest.mark.req("K4")
def test_an_owner_with_a_token_is_asked_by_their_client(
    mode: Mode, serving_tools: Serve, project: Path, sent: list[str]
) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(60),
            serving_tools(project=project) as served,
            agreeing(served, mode, "owner") as client,
        ):
            done = answer_in(await client.call_tool("execute", NOTE))
            assert done["status"] == "success"
            # Their model, which uses the same token, cannot approve by a call.
            refused = answer_in(await client.call_tool("approvals", {"action": "add_rule", "item": "*"}))
            assert refused["code"] == "not_permitted"

    asyncio.run(story())
    assert sent == ['{"text":"hi"}']
