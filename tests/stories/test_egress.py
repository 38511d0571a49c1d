"""Tools that name the hosts they need: they reach those and no others, and what left is in the record."""

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
        with urllib.request.urlopen(url, timeout=10) as answer:
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


@pytest.mark.case("NET-05")
def test_a_tool_reaches_the_hosts_that_it_names_and_the_owner_allows(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    host = urlsplit(address).netloc
    allow(home, host)
    assert not (made := create(ask, [host])).is_error, made.content

    told = ask("execute", item_id="fetch", parameters={"urls": [f"{address}/page?q=1", "http://other.test/"]}).content

    (first, second) = as_list(told["result"])
    assert first == [200, "welcome"]
    status, text = as_list(second)
    assert status == 403
    assert "needs.hosts" in as_object(json.loads(str(text)))["suggestion"]  # type: ignore[operator] # a sentence
    assert len(requests) == 1
    network = as_object(told["network"])
    rows = [as_object(row) for row in as_list(network["hosts"])]
    assert [(row["host"], row["verdict"], row["count"]) for row in rows] == [
        ("127.0.0.1", "allowed", 1),
        ("other.test", "denied", 1),
    ]
    assert "page" not in json.dumps(network)
    receipts = [as_object(one) for one in as_list(ask("audit", action="export").content["receipts"])]
    detail = as_object(json.loads(str(receipts[-1]["detail"])))
    assert as_object(detail["network"])["bytes_in"] == network["bytes_in"]


def test_a_tool_that_fails_at_a_host_that_it_does_not_name_is_told_so(ask: Ask) -> None:
    failing = "import urllib.request\n\n\ndef main(urls: list):\n    urllib.request.urlopen(urls[0], timeout=10)\n"
    assert not create(ask, ["example.test"], files={"main.py": failing}).is_error

    told = ask("execute", item_id="fetch", parameters={"urls": ["http://other.test:8080/"]}).content

    suggestion = str(told["suggestion"])
    assert "denied port 8080 of other.test (it is not among the hosts to be reached)" in suggestion
    assert "needs: {hosts:" in suggestion


def test_what_is_not_public_needs_the_owner_s_word(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    allow(home, "127.0.0.1:1")
    create(ask, [urlsplit(address).netloc])

    told = ask("execute", item_id="fetch", parameters={"urls": [address]}).content

    assert told.get("code") == "not_permitted", told
    assert "hosts.allow" in str(told["suggestion"])
    assert requests == []


def test_the_strictest_level_has_no_network_at_all(ask: Ask, serve: Serve, home: Path) -> None:
    address, requests = serve(lambda _: (200, {}, b"welcome"))
    host = urlsplit(address).netloc
    allow(home, host)
    create(ask, [host], isolation="restricted")

    told = ask("execute", item_id="fetch", parameters={"urls": [address]}).content

    assert told["code"] == "isolation_unavailable", told
    assert "has no network" in str(told["message"])
    assert requests == []


def test_what_a_request_sent_is_in_the_record_and_not_in_the_answer(ask: Ask, serve: Serve) -> None:
    address, _ = serve(lambda _: (200, {"content-type": "application/json"}, b'{"ok": true}'))
    host = urlsplit(address)
    item: JsonObject = {
        "tool_type": "api", "version": "1.0.0", "executor": "http_client", "description": "Post a word",
        "config": {"method": "POST", "url": f"{address}/words?key=1", "body_template": {"word": "hi"}},
    }  # fmt: skip
    made = ask("execute", action="create", item_id="post", parameters=item)
    assert not made.is_error, made.content

    told = ask("execute", item_id="post").content

    assert told["result"] == {"ok": True}
    assert "network" not in told
    receipts = [as_object(one) for one in as_list(ask("audit", action="export").content["receipts"])]
    detail = as_object(json.loads(str(receipts[-1]["detail"])))
    row: JsonObject = {"host": host.hostname, "port": host.port, "verdict": "allowed", "count": 1}
    sums: JsonObject = {"bytes_out": len(b'{"word":"hi"}'), "bytes_in": len(b'{"ok": true}')}
    assert detail["network"] == {"connections": 1, **sums, "hosts": [{**row, **sums}]}
