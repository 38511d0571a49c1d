"""The opening answers do not depend on the number of known MCP tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord
from kiwi_mcp.domain.token_cost import cost_of_json
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.store.mcp_definitions import McpDefinitions
from kiwi_mcp.store.open import open_database
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import build_server, tool_lists
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

MOST_TOKENS = 900
SERVER = """\
tool_id: many
tool_type: mcp_server
version: 1.0.0
executor: subprocess
config: {transport: stdio, command: sh}
"""


def offered(number: int) -> Definition:
    schema: JsonObject = {"type": "object", "properties": {"text": {"type": "string"}}}
    said: JsonObject = {"name": f"tool_{number}", "description": f"Does {number}", "inputSchema": schema}
    digest = sha256(compact(said).encode()).hexdigest()
    name = f"tool_{number}"
    return Definition("tool", name, name, "accepted", said, digest, accepted=said, accepted_digest=digest)


def know(project: Path, user: Path, count: int) -> None:
    """Store a number of accepted tools of a server of the project."""
    path = project / ".ai" / "tools" / "mcp" / "many.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SERVER, encoding="utf-8")
    settings = registry_settings(user)
    database = open_database(settings.url)
    key = ServerKey(str(project / ".ai"), "many")
    seen = "2026-01-01T00:00:00.000Z"
    record = ServerRecord(key, "project/local/many@1.0.0", str(path), digest_of(project, user), seen_at=seen)
    McpDefinitions(database, settings.actor.name).change(key, lambda *_: (record, [*map(offered, range(count))]))
    database.close()


def digest_of(project: Path, user: Path) -> str:
    async def asked() -> str:
        kernel = Kernel(project, user=user)
        try:
            return str((await kernel.call("load", {"item_id": "many", "source": "project"})).content["digest"])
        finally:
            await kernel.aclose()

    return asyncio.run(asked())


def listed(project: Path, user: Path) -> Mapping[str, str]:
    async def rehearsed() -> Mapping[str, str]:
        kernel = Kernel(project, user=user, is_owner=False)
        changes = ToolListWatcher(kernel)
        calls = Calls(None, task_after=lambda: 5.0, principal=lambda _: "")
        try:
            return await tool_lists(build_server(kernel, calls=calls, changes=changes))
        finally:
            await changes.aclose()
            await calls.aclose()
            await kernel.aclose()

    return asyncio.run(rehearsed())


@pytest.mark.req("D5", "E5")
@pytest.mark.parametrize("preferences", ["", "always_send: {mcp/many/tool_5: true}\n"])
def test_the_tool_list_is_identical_with_ten_and_with_ten_thousand_known_tools(
    tmp_path: Path, preferences: str
) -> None:
    found = []
    for count in (10, 1_000, 10_000):
        project, user = tmp_path / str(count) / "project", tmp_path / str(count) / "user"
        user.mkdir(parents=True)
        know(project, user, count)
        if preferences:
            (user / "preferences.yaml").write_text(preferences, encoding="utf-8")
        found.append(listed(project, user))

    assert found[0] == found[1] == found[2]
    if not preferences:  # the bound on Kiwi's own definitions holds whatever is known
        assert all(cost_of_json(json.loads(answer)["tools"]).tokens < MOST_TOKENS for answer in found[2].values())
    assert ("many_tool_5" in found[0]["legacy"]) is bool(preferences)
