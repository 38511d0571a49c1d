"""Tools with declared hosts: they reach only those, and sent data is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Serve = Callable[..., tuple[str, list[JsonObject]]]

FETCH = """import urllib.error, urllib.request


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as fault:
        return [fault.code, fault.read().decode()]


def main(urls: list):
    return [fetch(url) for url in urls]
"""


def create(ask: Ask, hosts: list[str], **words: Json) -> Answer:
    item: JsonObject = {
        "tool_type": "script", "version": "1.0.0", "executor": "python_runtime", "description": "Fetch pages",
        "config": {"entrypoint": "main.py"}, "files": {"main.py": FETCH}, "needs": {"hosts": list(hosts)},
        "parameters": [{"name": "urls", "type": "array"}], **words,
    }  # fmt: skip
    return ask("execute", action="create", item_id="fetch", parameters=item)


def allow(home: Path, *hosts: str) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(f"hosts: {{allow: {json.dumps(hosts)}}}\n")


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("NET-05")
def test_a_tool_reaches_declared_hosts_that_the_owner_allows(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    host = urlsplit(address).netloc
    allow(home, host)
    assert not (made := create(ask, [host])).is_error, made.content

    response = ask(
        "execute", item_id="fetch", parameters={"urls": [f"{address}/page?q=1", "http://other.test/"]}
    ).content

    (first, second) = as_list(response["result"])
    assert first == [200, "welcome"]
    status, text = as_list(second)
    assert status == 403
    assert "needs.hosts" in as_object(json.loads(str(text)))["suggestion"]  # type: ignore[operator] # a sentence
    assert len(requests) == 1
    network = as_object(response["network"])
    rows = [as_object(row) for row in as_list(network["hosts"])]
    assert [(row["host"], row["verdict"], row["count"]) for row in rows] == [
        ("127.0.0.1", "allowed", 1),
        ("other.test", "denied", 1),
    ]
    assert "page" not in json.dumps(network)
    receipts = [as_object(one) for one in as_list(ask("audit", action="export").content["receipts"])]
    detail = as_object(json.loads(str(receipts[-1]["detail"])))
    assert as_object(detail["network"])["bytes_in"] == network["bytes_in"]


@pytest.mark.usefixtures("sandbox")
def test_a_failure_at_an_undeclared_host_is_explained(ask: Ask) -> None:
    failing = "import urllib.request\n\n\ndef main(urls: list):\n    urllib.request.urlopen(urls[0], timeout=120)\n"
    assert not create(ask, ["example.test"], files={"main.py": failing}).is_error

    response = ask("execute", item_id="fetch", parameters={"urls": ["http://other.test:8080/"]}).content

    suggestion = str(response["suggestion"])
    assert "denied port 8080 of other.test (it is not among the hosts to be reached)" in suggestion
    assert "needs: {hosts:" in suggestion


@pytest.mark.usefixtures("sandbox")
def test_a_private_host_needs_a_grant(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    allow(home, "127.0.0.1:1")
    create(ask, [urlsplit(address).netloc])

    response = ask("execute", item_id="fetch", parameters={"urls": [address]}).content

    assert response.get("code") == "not_permitted", response
    assert "hosts.allow" in str(response["suggestion"])
    assert requests == []


@pytest.mark.usefixtures("sandbox")
def test_the_strictest_level_has_no_network(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    host = urlsplit(address).netloc
    allow(home, host)
    create(ask, [host], isolation="restricted")

    response = ask("execute", item_id="fetch", parameters={"urls": [address]}).content

    assert response["code"] == "isolation_unavailable", response
    assert "has no network" in str(response["message"])
    assert requests == []


def test_sent_hosts_are_in_the_record_and_not_in_the_answer(ask: Ask, serve: Serve) -> None:
    address, _ = serve(lambda _: (200, {"content-type": "application/json"}, b'{"ok": true}'))
    host = urlsplit(address)
    item: JsonObject = {
        "tool_type": "api", "version": "1.0.0", "executor": "http_client", "description": "Post a word",
        "config": {"method": "POST", "url": f"{address}/words?key=1", "body_template": {"word": "hi"}},
    }  # fmt: skip
    made = ask("execute", action="create", item_id="post", parameters=item)
    assert not made.is_error, made.content

    response = ask("execute", item_id="post").content

    assert response["result"] == {"ok": True}
    assert "network" not in response
    receipts = [as_object(one) for one in as_list(ask("audit", action="export").content["receipts"])]
    detail = as_object(json.loads(str(receipts[-1]["detail"])))
    row: JsonObject = {"host": host.hostname, "port": host.port, "verdict": "allowed", "count": 1}
    sums: JsonObject = {"bytes_out": len(b'{"word":"hi"}'), "bytes_in": len(b'{"ok": true}')}
    assert detail["network"] == {"connections": 1, **sums, "hosts": [{**row, **sums}]}
