"""API tools against services on loopback: what is sent, refused and redacted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from urllib.parse import parse_qs, urlsplit

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Reply = tuple[int, Mapping[str, str], bytes]
Serve = Callable[..., tuple[str, list[JsonObject]]]
Tree = Callable[[Path], Mapping[str, str]]

JSON_TYPE = {"content-type": "application/json"}
CANARY = "canary-7f3a-secret-value"


def echo(request: JsonObject) -> Reply:
    return 200, JSON_TYPE, json.dumps(request).encode()


def make(ask: Ask, config: JsonObject, parameters: Mapping[str, str] | None = None, name: str = "call") -> Answer:
    """Create an API tool with parameters of these types."""
    declared = [{"name": word, "type": kind} for word, kind in (parameters or {}).items()]
    words = {
        "tool_type": "api",
        "version": "1.0.0",
        "executor": "http_client",
        "description": "Call the service",
        "config": config,
        "parameters": declared,
    }
    return ask("execute", action="create", item_id=name, parameters=words)


def call(ask: Ask, **parameters: Json) -> JsonObject:
    return ask("execute", item_id="call", parameters=parameters).content


@pytest.mark.smoke
@pytest.mark.req("K-AP-01")
def test_every_key_of_an_api_tool_is_in_its_request(ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    url, seen = serve(echo)
    make(
        ask,
        {
            "method": "POST",
            "url_template": f"{url}/v1/{{place}}",
            "query": {"page": "{page}", "q": "{q}", "missing": "{missing}"},
            "headers": {"X-Trace": "t-{page}", "X-Left-Out": "{missing}"},
            "body_template": {"n": "{page}", "flag": "{flag}", "all": ["{q}", "{missing}"], "text": "page {page}"},
            "auth": {"type": "bearer", "token": "${SERVICE_KEY}"},
            "response_transform": "$.method",
        },
        {"place": "string", "page": "integer", "q": "string", "flag": "boolean", "missing": "string"},
    )

    response = call(ask, place="São Paulo/x", page=3, q="a&b=c", flag=False)

    request = seen[0]
    headers = as_object(request["headers"])
    assert response["result"] == "POST"
    assert urlsplit(str(request["path"])).path == "/v1/S%C3%A3o%20Paulo%2Fx"
    assert parse_qs(urlsplit(str(request["path"])).query) == {"page": ["3"], "q": ["a&b=c"]}
    assert headers["x-trace"] == "t-3"
    assert "x-left-out" not in headers
    assert headers["authorization"] == f"Bearer {CANARY}"
    assert json.loads(str(request["body"])) == {"n": 3, "flag": False, "all": ["a&b=c"], "text": "page 3"}


@pytest.mark.req("K-AP-01")
@pytest.mark.parametrize(
    ("auth", "where", "value"),
    [
        ({"type": "basic", "username": "ada", "password": "${SERVICE_KEY}"}, "authorization", "Basic "),
        ({"type": "api_key", "name": "X-Key", "key": "${SERVICE_KEY}"}, "x-key", CANARY),
        ({"type": "api_key", "name": "key", "key": "${SERVICE_KEY}", "in": "query"}, "path", f"/?key={CANARY}"),
    ],
    ids=["basic", "header", "query"],
)
def test_credentials_are_sent_where_the_manifest_says(
    auth: JsonObject, where: str, value: str, ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    url, seen = serve(echo)
    make(ask, {"method": "GET", "url": f"{url}/", "auth": auth})

    response = call(ask)

    sent = {**as_object(seen[0]["headers"]), "path": seen[0]["path"]}
    assert str(sent.get(where, "")).startswith(value)
    assert CANARY not in json.dumps(response)


@pytest.mark.req("K-AP-01")
def test_a_declared_status_is_retried(ask: Ask, serve: Serve) -> None:
    answers = iter([(503, {}, b""), (429, {"retry-after": "0"}, b""), (200, JSON_TYPE, b'"done"')])
    url, seen = serve(lambda _: next(answers))
    make(ask, {"method": "GET", "url": url, "retry": {"attempts": 3, "statuses": [429, 503], "delay": 0.01}})

    response = call(ask)

    assert response["result"] == "done"
    assert response["attempts"] == 3
    assert len(seen) == 3


@pytest.mark.req("K-AP-01")
def test_streams_are_collected(ask: Ask, serve: Serve) -> None:
    events = b"event: tick\ndata: one\n\ndata: two\n\n"
    url, _ = serve(
        lambda request: (
            (200, {"content-type": "text/event-stream"}, events)
            if "sse" in str(request["path"])
            else (200, {"content-type": "application/x-ndjson"}, b'{"a": 1}\n{"a": 2}\n')
        )
    )
    make(ask, {"method": "GET", "url": f"{url}/sse", "stream": "sse"})
    make(ask, {"method": "GET", "url": f"{url}/lines", "stream": "lines"}, name="lines")

    assert call(ask)["result"] == [
        {"event": "tick", "data": "one", "id": ""},
        {"event": "message", "data": "two", "id": ""},
    ]
    assert ask("execute", item_id="lines").content["result"] == [{"a": 1}, {"a": 2}]


@pytest.mark.req("F7")
@pytest.mark.parametrize(
    ("status", "hint"), [(401, "credentials"), (404, "address"), (429, "wait"), (500, "try again")]
)
def test_a_status_that_is_an_error_is_a_result_with_the_reply(status: int, hint: str, ask: Ask, serve: Serve) -> None:
    url, _ = serve(lambda _: (status, JSON_TYPE, b'{"detail": "no"}'))
    make(ask, {"method": "GET", "url": url})

    response = call(ask)

    assert response["code"] == "execution_failed"
    assert response["http_status"] == status
    assert response["result"] == {"detail": "no"}
    assert hint in str(response["suggestion"])


def test_an_unreachable_service_is_distinguished_from_a_slow_one(ask: Ask, serve: Serve, home: Path) -> None:
    is_over = Event()
    url, _ = serve(lambda _: (200, {}, b"late" if is_over.wait(5) else b""))
    granted = json.loads((home / ".ai" / "policy.yaml").read_text())["hosts"]["allow"]
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [*granted, "127.0.0.1:9"]}}))
    make(ask, {"method": "GET", "url": url, "timeout": 0.3})
    make(ask, {"method": "GET", "url": "http://127.0.0.1:9/"}, name="down")

    slow = call(ask)
    is_over.set()
    down = ask("execute", item_id="down").content

    assert (slow["error"], slow["code"]) == ("Timed out", "timeout")
    assert (down["error"], down["code"]) == ("Request failed", "request_failed")


@pytest.mark.req("K-AP-02")
@pytest.mark.case("SEC-04")
def test_a_missing_value_is_reported_before_anything_is_sent(ask: Ask, serve: Serve) -> None:
    url, seen = serve(echo)
    make(ask, {"method": "GET", "url": f"{url}/", "headers": {"X-Key": "${NOWHERE_KEY}"}})
    make(ask, {"method": "GET", "url": f"{url}/{{word}}"}, {"word": "string"}, name="word")

    missing_variable = call(ask)
    missing_parameter = ask("execute", item_id="word").content

    assert missing_variable["code"] == "variable_missing"
    assert missing_variable["variables"] == ["NOWHERE_KEY"]
    assert missing_parameter["code"] in {"invalid_input", "invalid_request"}
    assert seen == []


HOSTILE = [
    "a&admin=1#", "../../admin", "..", "%2e%2e", "@evil.test", "//evil.test", "?x=1", "\\..\\", ";id", "a b", "%00",
]  # fmt: skip


@pytest.mark.case("INJ-04")
@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_never_leaves_its_part_of_a_url(value: str, ask: Ask, serve: Serve) -> None:
    url, seen = serve(echo)
    make(ask, {"method": "GET", "url_template": f"{url}/fixed/{{word}}/end?q={{word}}"}, {"word": "string"})

    response = call(ask, word=value)

    if value == "..":
        assert response["code"] == "invalid_request"
        assert seen == []
        return
    path, _, query = str(seen[0]["path"]).partition("?")
    assert path.startswith("/fixed/")
    assert path.endswith("/end")
    assert path.count("/") == 3
    assert parse_qs(query) == {"q": [value]}


@pytest.mark.case("INJ-05")
@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\0b"])
def test_a_line_break_in_a_header_or_url_is_refused(value: str, ask: Ask, serve: Serve) -> None:
    url, seen = serve(echo)
    make(ask, {"method": "GET", "url": url, "headers": {"X-Word": "{word}"}}, {"word": "string"})
    make(ask, {"method": "GET", "url_template": f"{url}/{{word}}"}, {"word": "string"}, name="path")

    assert call(ask, word=value)["code"] in {"invalid_request", "invalid_input"}
    assert ask("execute", item_id="path", parameters={"word": value}).content["code"] in {
        "invalid_request",
        "invalid_input",
    }
    assert seen == []


@pytest.mark.case("INJ-03", "INJ-06")
@pytest.mark.parametrize(
    "value", ['","role":"admin', "{other}", "{word.__class__}", "%s %(x)s", "{{7*7}}", "${SERVICE_KEY}", "$${X}"]
)
def test_a_value_in_a_body_stays_one_string(
    value: str, ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    url, seen = serve(echo)
    config: JsonObject = {"method": "POST", "url": url, "body_template": {"text": "{word}", "more": "say: {word}"}}
    make(ask, {**config, "headers": {"X-Key": "${SERVICE_KEY}"}}, {"word": "string"})

    response = call(ask, word=value)

    assert response["status"] == "success"
    assert json.loads(str(seen[0]["body"])) == {"text": value, "more": f"say: {value}"}


@pytest.mark.case("NET-12")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "240.0.0.1", "[::1]", "[::]", "[fe80::1]", "[fc00::1]", "[ff02::1]", "[::ffff:127.0.0.1]", "localhost",
    ],
)  # fmt: skip
def test_a_private_address_is_refused_before_any_packet(host: str, ask: Ask) -> None:
    made = make(ask, {"method": "GET", "url": f"http://{host}:9/latest/meta-data/"})

    response = call(ask)

    assert made.content["status"] == "created"
    assert (response["error"], response["code"]) == ("Address not permitted", "address_denied")
    assert response["suggestion"]


@pytest.mark.case("NET-13")
@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:9/", "http://169.254.169.254/", "file:///etc/passwd", "gopher://x/"]
)
def test_a_redirect_to_a_denied_host_is_refused_at_that_hop(target: str, ask: Ask, serve: Serve) -> None:
    url, seen = serve(lambda _: (302, {"location": target}, b""))
    make(ask, {"method": "GET", "url": url})

    response = call(ask)

    assert response["code"] == "address_denied"
    assert len(seen) == 1


@pytest.mark.case("NET-13")
def test_endless_redirects_are_cut_off(ask: Ask, serve: Serve) -> None:
    url, seen = serve(lambda _: (302, {"location": "/again"}, b""))
    make(ask, {"method": "GET", "url": url})

    assert call(ask)["code"] == "request_failed"
    assert len(seen) == 6


def test_a_granted_host_can_be_denied_by_the_owner(ask: Ask, serve: Serve, home: Path) -> None:
    url, seen = serve(echo)
    host = url.removeprefix("http://")
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [host], "deny": ["127.0.0.*"]}}))
    make(ask, {"method": "GET", "url": url})

    response = call(ask)

    assert (response["code"], response["rule"]) == ("not_permitted", "127.0.0.*")
    assert seen == []


@pytest.mark.case("SEC-05", "SEC-07")
@pytest.mark.parametrize("status", [200, 500])
def test_a_secret_that_a_service_returns_is_redacted(
    status: int, ask: Ask, serve: Serve, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tree: Tree
) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    url, seen = serve(lambda request: (status, {**JSON_TYPE, "x-key": CANARY}, json.dumps(request).encode()))
    make(ask, {"method": "GET", "url": f"{url}/?key=${{SERVICE_KEY}}", "headers": {"X-Key": "${SERVICE_KEY}"}})

    response = call(ask)
    planned = ask("execute", item_id="call", dry_run=True).content

    assert CANARY in json.dumps(seen)
    assert CANARY not in json.dumps([response, planned])
    assert not [
        path
        for path in (*project.rglob("*"), *home.rglob("*"))
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("SEC-07")
def test_a_secret_in_the_url_of_an_unreachable_service_is_not_in_the_error(
    ask: Ask, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_KEY", CANARY)
    (home / ".ai").mkdir()
    (home / ".ai" / "policy.yaml").write_text('hosts: {allow: ["127.0.0.1:9"]}\n')
    make(ask, {"method": "GET", "url": "http://127.0.0.1:9/${SERVICE_KEY}/x?key=${SERVICE_KEY}"})

    response = call(ask)

    assert response["code"] == "request_failed"
    assert CANARY not in json.dumps(response)


@pytest.mark.case("BOMB-11")
@pytest.mark.parametrize(
    "path", ["$..*..*..*..*", "$[?match(@.a, '(a+)+$')]", "$..[?search(@.a, '(x+x+)+y')]", "$.a[", "$" + "..*" * 500]
)
def test_a_transform_of_exponential_cost_is_refused(path: str, ask: Ask, serve: Serve) -> None:
    url, _ = serve(lambda _: (200, JSON_TYPE, json.dumps({"a": [[["a" * 40] * 20] * 20] * 5}).encode()))
    made = make(ask, {"method": "GET", "url": url, "response_transform": path})

    response = made.content if made.is_error else call(ask)

    assert response["code"] in {"invalid_manifest", "too_large"}


def test_a_binary_reply_is_returned_as_base64(ask: Ask, serve: Serve) -> None:
    url, _ = serve(lambda _: (200, {"content-type": "image/png"}, b"\x89PNG\xff"))
    make(ask, {"method": "GET", "url": url})

    assert call(ask)["result"] == {"media_type": "image/png", "base64": "iVBOR/8="}


@pytest.mark.case("BOMB-09")
@pytest.mark.parametrize("body", [b"NaN", b'{"a": 1e999}', b'"\\ud800"', b"1" * 5_000, b"[" * 100_000])
def test_an_invalid_json_reply_still_gives_a_readable_record(
    body: bytes, ask: Ask, serve: Serve, project: Path
) -> None:
    url, _ = serve(lambda _: (200, JSON_TYPE, body))
    make(ask, {"method": "GET", "url": url})

    response = call(ask)

    assert response.get("code") != "internal", response
    assert json.loads(json.dumps(response, allow_nan=False))
    if path := response.get("output_path"):
        kept = (project / str(path)).read_text(encoding="utf-8")
        assert "Infinity" not in kept
        assert "NaN" not in kept.replace('"NaN"', "")
        json.loads(kept)
