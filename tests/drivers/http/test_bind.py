"""Binding an API tool to one request, without sending it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.plan import HttpSpec, Plan, Retry
from kiwi_mcp.drivers.http import bind_request

PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {name: {} for name in ("word", "count", "flag", "words", "absent")},
}


def bound(config: JsonObject, **inputs: Json) -> Plan:
    manifest = Manifest("call", "api", "1.0.0", executor="http_client", config=config, parameters=PARAMETERS)
    tool = Tool(manifest, Location("project", Path("call.yaml"), Path()), digest="0" * 64)
    return bind_request(Chain((tool,), (TypeTraits("http"),)), inputs)


def request(config: JsonObject, **inputs: Json) -> HttpSpec:
    spec = bound({"method": "GET", "url": "https://a.test/", **config}, **inputs).spec
    assert isinstance(spec, HttpSpec)
    return spec


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({"url": "https://a.test/{word}"}, "https://a.test/a%20b%2Fc"),
        ({"url": "https://a.test/?q={word}&n={count}"}, "https://a.test/?q=a%20b%2Fc&n=3"),
        ({"url": "https://a.test/?q={absent}&n={count}"}, "https://a.test/?n=3"),
        ({"url": "https://a.test/?w={words}"}, "https://a.test/?w=x&w=y%26z"),
        ({"query": {"q": "{word}", "fixed": "a&b", "n": 7}}, "https://a.test/?q=a%20b%2Fc&fixed=a%26b&n=7"),
        ({"url": "https://a.test/?a=1#end", "query": {"q": "{count}"}}, "https://a.test/?a=1&q=3#end"),
        ({"url": "${BASE}/x/{count}"}, "${BASE}/x/3"),
        ({"auth": {"type": "api_key", "in": "query", "name": "k", "key": "${KEY}"}}, "https://a.test/?k=${KEY}"),
    ],
)
def test_values_are_encoded_for_their_place_in_the_url(config: JsonObject, url: str) -> None:
    assert request(config, word="a b/c", count=3, words=["x", "y&z"]).url == url


@pytest.mark.parametrize(
    ("auth", "headers", "basic"),
    [
        ({"type": "bearer", "token": "${T}"}, {"Authorization": "Bearer ${T}"}, None),
        ({"type": "api_key", "name": "X-Key", "key": "${T}"}, {"X-Key": "${T}"}, None),
        ({"type": "api_key", "key": "${T}"}, {"X-API-Key": "${T}"}, None),
        ({"type": "header", "header": "X-Key", "token": "${T}"}, {"X-Key": "${T}"}, None),
        ({"type": "bearer", "env_var": "T"}, {"Authorization": "Bearer ${T}"}, None),
        ({"type": "basic", "username": "ada", "password": "${T}"}, {}, ("ada", "${T}")),
    ],
)
def test_credentials_are_names_in_the_plan(
    auth: JsonObject, headers: JsonObject, basic: tuple[str, str] | None
) -> None:
    plan = bound({"method": "GET", "url": "https://a.test/", "auth": auth})

    assert isinstance(plan.spec, HttpSpec)
    assert plan.spec.headers == headers
    assert plan.spec.basic == basic
    assert plan.variables == ("T",)


def test_a_body_keeps_the_types_of_its_values_and_omits_absent_ones() -> None:
    template: Json = {
        "n": "{count}",
        "t": "n={count}",
        "flag": "{flag}",
        "list": ["{word}", "{absent}"],
        "gone": "{absent}",
    }

    spec = request({"method": "POST", "body_template": template}, count=3, flag=None, word="x")

    assert spec.body == {"n": 3, "t": "n=3", "flag": None, "list": ["x"]}
    assert spec.has_body
    assert not request({}).has_body


def test_an_argument_is_never_read_as_a_variable() -> None:
    config: JsonObject = {
        "method": "POST",
        "url": "https://a.test/{word}",
        "headers": {"X-Word": "{word}"},
        "body_template": ["{word}", "say {word}"],
    }

    assert bound(config, word="${HOME}").variables == ()


@pytest.mark.parametrize(
    ("written", "retry"),
    [
        (None, Retry()),
        (0, Retry(attempts=1)),
        (2, Retry(attempts=3)),
        ({"attempts": 4, "statuses": [500], "delay": 1, "max_delay": 9}, Retry(4, (500,), 1, 9)),
        ({"delay": 2}, Retry(attempts=3, delay=2)),
    ],
)
def test_a_retry_is_a_number_or_a_rule(written: Json, retry: Retry) -> None:
    assert request({"retry": written} if written is not None else {}).retry == retry


@pytest.mark.parametrize(
    ("config", "stream", "events"),
    [({}, "", 1_000), ({"stream": "sse"}, "sse", 1_000), ({"url": "wss://a.test/"}, "websocket", 1)],
)
def test_the_kind_of_stream_follows_from_the_config(config: JsonObject, stream: str, events: int) -> None:
    spec = request(config)

    assert (spec.stream, spec.max_events) == (stream, events)


def test_the_body_of_a_websocket_may_be_called_send() -> None:
    assert request({"url": "wss://a.test/", "send": {"say": "{word}"}}, word="hi").body == {"say": "hi"}


@pytest.mark.parametrize(
    ("method", "effect"), [("GET", "idempotent"), ("POST", "at_most_once"), ("DELETE", "at_most_once")]
)
def test_only_reading_requests_may_be_repeated(method: str, effect: str) -> None:
    assert bound({"method": method, "url": "https://a.test/"}).effect == effect


@pytest.mark.case("INJ-05")
def test_a_header_holds_no_line_break() -> None:
    with pytest.raises(InvalidRequest):
        request({"headers": {"X-Word": "{word}"}}, word="a\r\nb: c")
    assert request({"headers": {"X-Word": "{absent}", "X-More": "a {count}"}}, count=1).headers == {"X-More": "a 1"}
