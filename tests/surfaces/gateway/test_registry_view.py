"""The registry as a caller of the gateway sees it: by the namespaces and the right to write of its token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel

TOOL = "tool_id: {name}\ntool_type: script\nversion: 1.0.0\ndescription: Says {name}.\nexecutor: bash_runtime\n"
SCRIPT = "config: {entrypoint: main.sh}\n"


def write(project: Path, name: str) -> None:
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(TOOL.format(name=name) + SCRIPT)
    (folder / "main.sh").write_text("echo canary-of-the-source\n")


class Gateway:
    """A gateway with the private item `public/secret` and the public item `public/open` in its registry."""

    def __init__(self, served: Tools) -> None:
        self.served = served
        add = served.tokens.add
        self.other = add("other", ["acme"], can_write=True, can_use_tools=True, can_author=True)
        self.member = add("member", ["public"], can_write=True, can_use_tools=True, can_author=True)
        self.reader = add("reader", ["public"], can_write=False, can_use_tools=True, can_author=True)
        self.owner = add(
            "me", ["acme"], can_write=False, can_use_tools=True, kind="owner", can_author=True, can_manage=True
        )

    async def send(self, token: str, path: str, **body: Json) -> httpx2.Response:
        address = self.served.url.removesuffix("/mcp") + f"/v1/{path}"
        return await self.served.bare.post(address, json=body, headers={"Authorization": f"Bearer {token}"})


@pytest.fixture
async def gateway(serving_tools: ServeTools, project: Path, sandbox: None) -> AsyncIterator[Gateway]:
    async with published(serving_tools, project) as gateway:
        yield gateway


@asynccontextmanager
async def published(serving_tools: ServeTools, project: Path) -> AsyncIterator[Gateway]:
    owner = Kernel(project)
    for name, visibility in (("secret", "private"), ("open", "public")):
        write(project, name)
        parameters = {"visibility": visibility}
        answer = await owner.call("execute", {"action": "publish", "item_id": name, "parameters": parameters})
        assert answer.content["status"] == "published", answer.content
    await owner.aclose()
    for path in sorted((project / ".ai/tools").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    async with serving_tools(project=project) as served:
        yield Gateway(served)


def names(response: httpx2.Response) -> set[str]:
    assert response.status_code == 200, response.text
    return {one["name"] for one in response.json()["items"] if one["namespace"] != "kiwi"}


async def test_the_list_shows_private_items_to_members_only(gateway: Gateway) -> None:
    assert names(await gateway.send(gateway.other, "registry/list")) == {"open"}
    assert names(await gateway.send(gateway.reader, "registry/list")) == {"open", "secret"}
    assert names(await gateway.send(gateway.owner, "registry/list")) == {"open", "secret"}


NAMING: list[tuple[str, dict[str, Json]]] = [
    ("registry/versions", {"item_id": "public/secret"}),
    ("registry/versions", {"item_id": "secret"}),
    ("registry/diff", {"item_id": "public/secret", "from": "1.0.0", "to": "1.0.0"}),
    ("registry/verify", {"item_id": "public/secret"}),
    ("load", {"item_id": "registry/public/secret"}),
    ("load", {"item_id": "secret"}),
    ("load", {"item_id": "registry/public/secret@9.9.9"}),
    ("run", {"item_id": "registry/public/secret", "parameters": {}}),
    ("why", {"item_id": "registry/public/secret"}),
    ("tool/validate", {"item_id": "registry/public/secret"}),
    ("registry/yank", {"item_id": "public/secret@1.0.0", "reason": "x"}),
    ("registry/deprecate", {"item_id": "public/secret@1.0.0"}),
    ("registry/rollback", {"item_id": "public/secret"}),
    ("registry/pull", {"item_id": "public/secret"}),
]


async def test_a_private_item_does_not_exist_for_other_namespaces(gateway: Gateway) -> None:
    for path, body in NAMING:
        answer = await gateway.send(gateway.other, path, **body)

        assert answer.status_code == 404, (path, answer.text)
        assert answer.json()["code"] in {"tool_not_found", "not_found"}
        assert "1.0.0" not in answer.text.replace("@1.0.0", "")
        assert "canary" not in answer.text


async def test_members_and_the_owner_load_a_private_item(gateway: Gateway) -> None:
    for token in (gateway.reader, gateway.owner):
        answer = await gateway.send(token, "load", item_id="registry/public/secret")
        assert answer.status_code == 200, answer.text


async def test_the_search_finds_private_items_for_members_only(gateway: Gateway) -> None:
    for token, expected in ((gateway.other, False), (gateway.reader, True)):
        answer = await gateway.send(token, "search", query="says secret", source="registry")
        assert ("registry/public/secret" in answer.text) is expected, answer.text


async def test_a_private_item_over_mcp_does_not_exist_for_other_namespaces(gateway: Gateway) -> None:
    async with gateway.served.client(gateway.other) as client:
        loaded = await client.call_tool("load", {"item_type": "tool", "item_id": "registry/public/secret"})
        listed = await client.call_tool("execute", {"action": "list"})

    assert loaded.is_error
    assert "canary" not in str(loaded.content)
    assert "public/secret" not in str(listed.structured_content)
    assert "public/open" in str(listed.structured_content)


WRITING: list[tuple[str, dict[str, Json]]] = [
    ("registry/publish", {"item_id": "fresh", "visibility": "public"}),
    ("registry/yank", {"item_id": "public/open@1.0.0", "reason": "x"}),
    ("registry/deprecate", {"item_id": "public/open"}),
    ("registry/rollback", {"item_id": "public/open"}),
    ("registry/pull", {"item_id": "public/open"}),
]


async def test_a_token_without_the_right_to_write_changes_nothing(gateway: Gateway, project: Path) -> None:
    write(project, "fresh")
    for path, body in WRITING:
        answer = await gateway.send(gateway.reader, path, **body)

        assert (answer.status_code, answer.json()["code"]) == (403, "not_permitted"), (path, answer.text)
        assert "may read the registry" in answer.json()["message"]
    listed = await gateway.send(gateway.owner, "registry/versions", item_id="public/open")
    assert "yanked" not in listed.text
    assert "deprecated" not in listed.text


async def test_a_token_writes_to_its_own_namespaces_only(gateway: Gateway, project: Path) -> None:
    write(project, "fresh")
    foreign = await gateway.send(gateway.other, "registry/publish", item_id="fresh", namespace="public")
    yanked = await gateway.send(gateway.other, "registry/yank", item_id="public/open@1.0.0", reason="x")
    own = await gateway.send(gateway.other, "registry/publish", item_id="fresh")
    listed = await gateway.send(gateway.owner, "registry/versions", item_id="acme/fresh")

    assert (foreign.status_code, yanked.status_code) == (403, 403), (foreign.text, yanked.text)
    assert own.json()["identity"] == "registry/acme/fresh@1.0.0", own.text
    assert listed.json()["versions"][0]["published_by"] == "other"


async def test_a_private_item_is_made_public_by_members_only(gateway: Gateway, project: Path) -> None:
    write(project, "secret")
    refused = await gateway.send(gateway.other, "registry/publish", item_id="secret", namespace="public")
    own = await gateway.send(gateway.other, "registry/publish", item_id="secret", visibility="public")
    assert refused.status_code == 403, refused.text
    assert own.json().get("namespace") == "acme", own.text
    assert names(await gateway.send(gateway.other, "registry/list")) == {"open", "secret"}

    private = await gateway.send(gateway.other, "registry/versions", item_id="public/secret")
    assert private.status_code == 404, private.text

    member = await gateway.send(gateway.member, "registry/publish", item_id="secret", visibility="public")
    assert member.json()["visibility"] == "public", member.text
    shown = await gateway.send(gateway.other, "registry/versions", item_id="public/secret")
    assert shown.status_code == 200
