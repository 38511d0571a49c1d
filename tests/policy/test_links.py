"""Denying rules apply to every link of a chain and to every host of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.plugins.http_server import HttpReply, HttpRequest, http_server

from kiwi_mcp.domain.grants import Allow, Deny, Grant, Rights, Rules
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.policy.authorize import authorize

CHAIN = ("project/local/say@1.0.0", "user/local/plain_runtime@1.2.0", "builtin/kiwi/subprocess@1.0.0")
PLAN = Plan(
    CHAIN[0], "d" * 64, "process", tuple((identity, "d" * 64) for identity in CHAIN), ReadSpec("", "d" * 64), {}
)


@pytest.mark.parametrize("identity", CHAIN)
def test_denying_a_link_denies_the_items_on_it(identity: str) -> None:
    verdict = authorize(PLAN, Rights((Grant(items=Rules(allow=("*",), deny=(identity,))),)))

    assert isinstance(verdict, Deny)
    assert (verdict.rule, identity in verdict.reason) == (identity, True)


def test_allowing_an_item_allows_its_executors() -> None:
    assert authorize(PLAN, Rights((Grant(items=Rules(allow=("project/*",))),))) == Allow()
    assert isinstance(authorize(PLAN, Rights((Grant(items=Rules(allow=("user/*", "builtin/*"))),))), Deny)


@dataclass(slots=True)
class Service:
    """A service on loopback: it counts its requests and redirects them to a given address."""

    host: str
    redirect: str = ""
    paths: list[str] = field(default_factory=list)


@contextmanager
def listening() -> Iterator[Service]:
    def answer(request: HttpRequest) -> HttpReply:
        service.paths.append(request.path)
        return HttpReply(b"ok", 302, {"Location": service.redirect}) if service.redirect else HttpReply(b"ok")

    with http_server(answer) as host:
        service = Service(host)
        yield service


@pytest.fixture
def services(loopback: None) -> Iterator[tuple[Service, Service]]:
    with ExitStack() as stack:
        yield stack.enter_context(listening()), stack.enter_context(listening())


def called(project: Path, home: Path, url: str, hosts: Json) -> JsonObject:
    """Call an api tool with that URL under a policy of hosts."""
    tools = project / ".ai" / "tools"
    tools.mkdir(exist_ok=True)
    manifest = {"tool_id": "look_up", "tool_type": "api", "version": "1.0.0", "executor": "http_client"}
    (tools / "look_up.yaml").write_text(json.dumps({**manifest, "config": {"method": "GET", "url": url}}))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"hosts": hosts}))

    async def call() -> JsonObject:
        kernel = Kernel(project)
        try:
            # A rule of the owner's says yes to what it sends, so that the hosts alone decide.
            await kernel.call("execute", {"item_id": "look_up", "action": "sign"})
            await kernel.call("approvals", {"action": "add_rule", "item": "look_up"})
            return (await kernel.call("execute", {"item_id": "look_up"})).content
        finally:
            await kernel.aclose()

    return asyncio.run(call())


@pytest.mark.parametrize("rule", ["{host}", "127.0.0.1", "127.*", "*"])
@pytest.mark.parametrize("url", ["${SERVICE}/x", "http://${HOST}/x"])
def test_a_denied_host_from_a_variable_is_denied(
    url: str, rule: str, project: Path, home: Path, services: tuple[Service, Service]
) -> None:
    service, _ = services
    (project / ".env").write_text(f"HOST={service.host}\nSERVICE=http://{service.host}\n")
    denied = rule.format(host=service.host)

    response = called(project, home, url, {"allow": ["127.0.0.1"], "deny": [denied]})

    assert response["code"] in {"address_denied", "not_permitted"}
    assert service.paths == []
    assert called(project, home, url, {"allow": ["127.0.0.1"]})["result"] == "ok"


@pytest.mark.case("NET-13")
def test_a_denied_host_behind_a_redirect_is_denied(
    project: Path, home: Path, services: tuple[Service, Service]
) -> None:
    first, second = services
    first.redirect = f"http://{second.host}/there"
    url = f"http://{first.host}/here"

    response = called(project, home, url, {"allow": ["127.0.0.1"], "deny": [second.host]})

    assert response["code"] == "address_denied"
    assert (first.paths, second.paths) == (["/here"], [])
    assert called(project, home, url, {"allow": ["127.0.0.1"]})["result"] == "ok"
    assert second.paths == ["/there"]
