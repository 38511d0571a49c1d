"""The API of the gateway: each verb has a route, and access is that of the verb."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.calls import NO_CALLER, Caller
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.store.remote.http import INDEX
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint
from kiwi_mcp.surfaces.gateway.auth import VisitedKernel
from kiwi_mcp.surfaces.gateway.server import path_of


async def send(served: Tools, token: str, path: str, body: Json = None) -> httpx2.Response:
    address = served.url.removesuffix("/mcp") + path
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
        if path in {"/openapi.json", INDEX}:
            return await client.get(address, headers=headers)
        return await client.post(address, json={} if body is None else body, headers=headers)


async def test_a_verb_is_called_by_its_group_and_name(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        token = served.tokens.add("ada", (), can_write=False, can_use_tools=True)

        listed = await send(served, token, "/v1/runs/list", {"limit": 5})
        helped = await send(served, token, "/v1/help", {"topic": "search"})

    assert (listed.status_code, listed.json()) == (200, {"runs": [], "next": None})
    assert helped.json()["topic"] == "search"


def manager(served: Tools) -> str:
    return served.tokens.add("ci", (), can_write=False, can_use_tools=True, kind="owner", can_manage=True)


@pytest.mark.parametrize("path", ["/v1/audit/list", "/v1/approvals/rules/list", "/v1/tasks/list"])
async def test_only_a_token_that_may_manage_calls_a_verb_of_the_owner(
    path: str, serving_tools: ServeTools, project: Path
) -> None:
    async with serving_tools(project=project) as served:
        agent = served.tokens.add("ada", (), can_write=False, can_use_tools=True, can_author=True)
        owner = served.tokens.add("me", (), can_write=False, can_use_tools=True, can_author=True, kind="owner")
        reader = served.tokens.add("bob", ("acme",), can_write=True, kind="owner")

        refusals = [await send(served, token, path) for token in (agent, owner)]
        listed = await send(served, manager(served), path)
        without_tools = await send(served, reader, path)
        without_token = await send(served, "", path)

    for refused in refusals:
        assert (refused.status_code, refused.json()["code"]) == (403, "not_permitted")
        assert "Only the owner may call" in refused.json()["message"]
        assert "`kiwi up token add NAME --manage`" in refused.json()["suggestion"]
    assert listed.status_code == 200
    assert (without_tools.status_code, without_token.status_code) == (403, 401)


async def test_a_call_over_mcp_is_not_direct_with_a_token_of_the_owner(
    serving_tools: ServeTools, project: Path
) -> None:
    async with serving_tools(project=project) as served:
        owner = served.tokens.add("me", (), can_write=False, can_use_tools=True, kind="owner")
        async with served.client(owner) as client:
            result = await client.call_tool("audit", {"action": "list"})

    assert result.is_error
    assert "Only the owner may call" in str(result.content)


async def test_a_token_that_may_manage_is_refused_over_mcp(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        answer = await served.post(manager(served), {"jsonrpc": "2.0", "id": 1, "method": "ping"})

    assert answer.status_code == 403
    assert "A token that may manage is not accepted here." in answer.json()["error"]["message"]


class Blocked:
    """Calls of a kernel that wait until the test lets them end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end, self.is_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def call(_: VisitedKernel, verb: str, payload: JsonObject, caller: Caller = NO_CALLER) -> Answer:
            self.has_begun.set()
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.is_cancelled.set()
                raise
            return Answer({})

        monkeypatch.setattr(VisitedKernel, "call", call)


async def test_requests_to_the_api_and_over_mcp_share_one_limit_per_token(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_AT_ONCE", 1)
    blocked = Blocked(monkeypatch)
    async with asyncio.timeout(120), serving_tools(project=project) as served:
        greedy, other = served.token("greedy"), served.token("other")
        first = asyncio.create_task(send(served, greedy, "/v1/run", {"item_id": "say"}))
        await blocked.has_begun.wait()

        second = await send(served, greedy, "/v1/run", {"item_id": "say"})
        over_mcp = await served.post(greedy, {"jsonrpc": "2.0", "id": 1, "method": "ping"})
        of_another = await send(served, other, "/openapi.json")
        blocked.may_end.set()

        assert (second.status_code, over_mcp.status_code, of_another.status_code) == (503, 503, 200)
        assert second.headers["retry-after"]
        assert (await first).status_code == 200
        assert (await send(served, greedy, "/v1/run", {"item_id": "say"})).status_code == 200


async def test_a_removed_token_ends_its_requests_to_the_api(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)
    blocked = Blocked(monkeypatch)
    async with asyncio.timeout(120), serving_tools(project=project) as served:
        running = asyncio.create_task(send(served, served.token("eve"), "/v1/run", {"item_id": "say"}))
        await blocked.has_begun.wait()
        served.tokens.remove("eve")
        await blocked.is_cancelled.wait()
        answer = await running

    assert (answer.status_code, "The token was removed" in answer.json()["message"]) == (401, True)


async def test_a_call_of_the_api_has_the_time_limit_of_an_mcp_call(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(120), serving_tools(project=project, seconds=0.0) as served:
        token = served.token()
        of_registry = await send(served, token, INDEX)
        helped = await send(served, token, "/v1/help")
        blocked = Blocked(monkeypatch)
        monkeypatch.setattr(mcp_endpoint, "_CALL_SECONDS", 0.05)
        late = await send(served, token, "/v1/run", {"item_id": "say"})

    assert "took too long" in of_registry.json()["message"]
    assert helped.status_code == 200
    assert (late.status_code, blocked.is_cancelled.is_set()) == (503, True)


async def test_a_body_over_the_limit_is_refused(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        answer = await send(served, served.token(), "/v1/help", {"topic": "x" * 5_000_000})

    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


async def test_a_read_only_server_has_no_api(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project, is_read_only=True) as served:
        answer = await send(served, served.token(), "/v1/help")

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_every_fault_of_a_body_is_listed(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        token = served.tokens.add("ada", (), can_write=False, can_use_tools=True)

        faulty = await send(served, token, "/v1/runs/list", {"limit": 5_000, "statu": "error", "since": 3})
        action = await send(served, token, "/v1/runs/list", {"action": "prune"})
        no_object = await send(served, token, "/v1/runs/list", [1])

    assert faulty.status_code == 400
    assert sorted(issue["place"] for issue in faulty.json()["issues"]) == ["limit", "since", "statu"]
    assert (action.status_code, no_object.status_code) == (400, 400)


async def test_a_local_verb_has_no_route(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        token = served.tokens.add("me", (), can_write=False, can_use_tools=True, can_author=True, kind="owner")
        answer = await send(served, token, "/v1/init")

    assert answer.status_code == 404


async def test_the_openapi_document_lists_every_route_with_its_types(serving_tools: ServeTools, project: Path) -> None:
    async with serving_tools(project=project) as served:
        token = served.tokens.add("ada", (), can_write=False, can_use_tools=True)
        document = (await send(served, token, "/openapi.json")).json()

    assert [*document["paths"]] == [path_of(verb) for verb in every_verb() if not verb.is_local]
    operation = document["paths"]["/v1/runs/list"]["post"]
    assert operation["operationId"] == "runs_list"
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]["limit"]["maximum"] == 1_000
