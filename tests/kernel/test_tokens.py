"""Tokens of the gateway: the owner makes, lists and removes them, and no receipt holds one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Caller, Principal
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.policy.tokens import TokenStore

ADA: dict[str, Json] = {"action": "add", "name": "ada", "tools": True, "namespaces": ["acme"]}


@pytest.fixture
async def kernel(project: Path, home: Path) -> AsyncIterator[Kernel]:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai/registry.yaml").write_text("audit: verbose\n")
    kernel = Kernel(project, user=home / ".ai")
    yield kernel
    await kernel.aclose()


async def test_a_token_is_added_listed_and_removed(kernel: Kernel, home: Path) -> None:
    added = (await kernel.call("tokens", ADA)).content
    assert {**added, "token": ""} == {
        "name": "ada",
        "as": "agent",
        "token": "",
        "warnings": ["everyone who has it can run here what you can run."],
    }
    assert TokenStore(home / ".ai").identify(as_text(added["token"])) == Principal("agent", "ada")

    (listed,) = map(as_object, as_list((await kernel.call("tokens", {})).content["tokens"]))
    assert (listed["name"], listed["namespaces"], listed["right"], listed["tools"]) == ("ada", ["acme"], "read", True)
    assert "token" not in listed

    removed = (await kernel.call("tokens", {"action": "remove", "name": "ada"})).content
    assert removed == {"name": "ada", "removed": True}
    assert (await kernel.call("tokens", {"action": "remove", "name": "ada"})).content["code"] == "not_found"


async def test_a_token_that_may_manage_is_an_owner_token_with_a_warning(kernel: Kernel, home: Path) -> None:
    added = (await kernel.call("tokens", {"action": "add", "name": "ci", "manage": True})).content
    assert (added["as"], added["manage"]) == ("owner", True)
    assert "approve calls and change rules" in str(added["warnings"])
    (stored,) = TokenStore(home / ".ai").all()
    assert (stored.kind, stored.can_use_tools, stored.can_manage) == ("owner", True, True)
    (listed,) = map(as_object, as_list((await kernel.call("tokens", {})).content["tokens"]))
    assert listed["manage"] is True


@pytest.mark.parametrize("kind", ["agent", "service"])
async def test_only_an_owner_token_may_manage(kind: str, kernel: Kernel, home: Path) -> None:
    refused = (await kernel.call("tokens", {"action": "add", "name": "ci", "manage": True, "as": kind})).content
    assert refused["code"] == "invalid_request"
    assert TokenStore(home / ".ai").all() == ()


async def test_the_receipt_of_a_token_names_its_user_and_holds_no_token(kernel: Kernel, home: Path) -> None:
    token = as_text((await kernel.call("tokens", ADA)).content["token"])
    (receipt,) = as_list((await kernel.call("audit", {"did": "tokens add"})).content["receipts"])
    assert (as_object(receipt)["item"], as_object(receipt)["status"]) == ("ada", "success")
    await kernel.aclose()
    assert token
    assert not [path for path in home.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]


async def test_no_token_is_added_if_its_receipt_cannot_be_written(kernel: Kernel, home: Path) -> None:
    (home / ".ai/state").mkdir()
    (home / ".ai/state/registry.db").mkdir()
    assert (await kernel.call("tokens", ADA)).content["code"] == "store_unavailable"
    assert TokenStore(home / ".ai").all() == ()


@pytest.mark.parametrize("request_", [ADA, {"action": "list"}, {"action": "remove", "name": "ada"}])
async def test_only_the_owner_sees_or_changes_tokens(request_: dict[str, Json], project: Path, home: Path) -> None:
    kernel = Kernel(project, user=home / ".ai", is_owner=False)
    try:
        for caller in (Caller(), Caller(name="token:ada", identity=Principal("agent", "ada"), is_direct=True)):
            refused = (await kernel.call("tokens", request_, caller)).content
            assert refused["code"] == "not_permitted"
            assert as_text(refused["suggestion"]).startswith("Ask the owner to type `kiwi up token ")
    finally:
        await kernel.aclose()
    assert TokenStore(home / ".ai").all() == ()


def test_verbs_about_secrets_keys_tokens_and_relaxed_tools_have_no_route() -> None:
    local = {verb.wire[0] for verb in every_verb() if verb.is_local}
    assert local >= {"secrets", "key", "tokens", "relax"}
    assert all(verb.is_local for verb in every_verb() if verb.wire[0] in {"secrets", "key", "tokens", "relax"})
