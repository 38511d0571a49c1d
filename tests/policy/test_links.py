"""The owner's deny rules reach every link of a chain, and every host that a request comes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

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
def test_a_rule_that_denies_a_link_denies_what_stands_on_it(identity: str) -> None:
    verdict = authorize(PLAN, Rights((Grant(items=Rules(allow=("*",), deny=(identity,))),)))

    assert isinstance(verdict, Deny)
    assert (verdict.rule, identity in verdict.reason) == (identity, True)


def test_a_rule_that_allows_an_item_allows_what_it_stands_on() -> None:
    assert authorize(PLAN, Rights((Grant(items=Rules(allow=("project/*",))),))) == Allow()
    assert isinstance(authorize(PLAN, Rights((Grant(items=Rules(allow=("user/*", "builtin/*"))),))), Deny)


@dataclass(slots=True)
class Service:
    """A service on loopback: it counts the requests it gets, and sends them on where it was told to."""

    host: str
    redirect: str = ""
    paths: list[str] = field(default_factory=list)


@contextmanager
def listening() -> Iterator[Service]:
    class Reply(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            service.paths.append(self.path)
            self.send_response(302 if service.redirect else 200)
            if service.redirect:
                self.send_header("Location", service.redirect)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own signature
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Reply) as server:
        service = Service(f"127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join(5)


@pytest.fixture
def services() -> Iterator[tuple[Service, Service]]:
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
            return (await kernel.call("execute", {"item_id": "look_up"})).content
        finally:
            await kernel.aclose()

    return asyncio.run(call())


@pytest.mark.parametrize("rule", ["{host}", "127.0.0.1", "127.*", "*"])
@pytest.mark.parametrize("url", ["${SERVICE}/x", "http://${HOST}/x"])
def test_a_denied_host_is_denied_when_it_comes_out_of_a_variable(
    url: str, rule: str, project: Path, home: Path, services: tuple[Service, Service]
) -> None:
    service, _ = services
    (project / ".env").write_text(f"HOST={service.host}\nSERVICE=http://{service.host}\n")
    denied = rule.format(host=service.host)

    told = called(project, home, url, {"allow": ["127.0.0.1"], "deny": [denied]})

    assert told["code"] in {"address_denied", "not_permitted"}
    assert service.paths == []
    assert called(project, home, url, {"allow": ["127.0.0.1"]})["result"] == "ok"


@pytest.mark.case("NET-13")
def test_a_denied_host_is_denied_when_a_redirect_leads_there(
    project: Path, home: Path, services: tuple[Service, Service]
) -> None:
    first, second = services
    first.redirect = f"http://{second.host}/there"
    url = f"http://{first.host}/here"

    told = called(project, home, url, {"allow": ["127.0.0.1"], "deny": [second.host]})

    assert told["code"] == "address_denied"
    assert (first.paths, second.paths) == (["/here"], [])
    assert called(project, home, url, {"allow": ["127.0.0.1"]})["result"] == "ok"
    assert second.paths == ["/there"]
