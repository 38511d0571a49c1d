from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.templates import ABSENT, render_header, render_url

HOSTILE = [
    "a&admin=1#",
    "../../admin",
    "%2e%2e",
    "@evil.test",
    "//evil",
    "a/b",
    "\\evil",
    "x?y",
    ";p",
    "${HOME}",
    "{x}",
    "é",
]
values = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.lists(st.sampled_from([*HOSTILE, ".", "..", "%", "/", ":", "@"]), min_size=1).map("".join),
    st.integers(),
    st.booleans(),
)


@pytest.mark.case("INJ-04")
@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_in_their_url_part(value: str) -> None:
    url = urlsplit(render_url("https://api.test:8443/v1/{x}/end?q={x}&k=1#{x}", {"x": value}))
    assert (url.scheme, url.netloc) == ("https", "api.test:8443")
    assert [unquote(part) for part in url.path.split("/")] == ["", "v1", value, "end"]
    assert parse_qsl(url.query) == [("q", value), ("k", "1")]
    assert unquote(url.fragment) == value


@pytest.mark.case("INJ-04")
@settings(max_examples=80, deadline=None)
@given(value=values, other=values)
def test_no_value_changes_scheme_host_prefix_or_the_number_of_segments(value: Json, other: Json) -> None:
    try:
        rendered = render_url("https://api.test:8443/v1/{a}/{a}{b}/x?q={b}#{a}", {"a": value, "b": other})
    except InvalidRequest:
        reject()
    url = urlsplit(rendered)
    assert (url.scheme, url.netloc) == ("https", "api.test:8443")
    assert url.path.startswith("/v1/")
    assert url.path.count("/") == 4
    assert not {".", "..", ""} & {unquote(part) for part in url.path.split("/")[1:]}
    assert url.query.count("=") == 1
    assert rendered.isascii()


@pytest.mark.case("INJ-04")
@pytest.mark.parametrize(("a", "b"), [(".", "."), ("..", ""), ("", ""), (".", "")])
def test_a_path_value_is_never_a_step_in_the_path(a: str, b: str) -> None:
    with pytest.raises(InvalidRequest, match="part of the URL's path"):
        render_url("https://h/x/{a}{b}/y", {"a": a, "b": b})


@pytest.mark.case("INJ-05")
@pytest.mark.parametrize("value", ["a\r\nX: 1", "a\nb", "a\0", "\x7f", "\x85", "\ud800"])
def test_control_characters_are_refused_in_every_part_of_a_url(value: str) -> None:
    for template in ("https://h/{x}", "https://h/?q={x}", "https://h/#{x}", "https://h/?q=a{x}"):
        with pytest.raises(InvalidRequest):
            render_url(template, {"x": value})


@pytest.mark.parametrize(
    "template",
    ["https://{x}/", "https://h:{x}/", "{x}://h/", "https://{x}@h/", "https://h{x}", "{x}", "/p/{x}", "${V}{x}/"],
)
def test_a_value_in_the_origin_is_an_issue_of_the_template(template: str) -> None:
    with pytest.raises(InvalidManifest):
        render_url(template, {"x": "a"})


def test_absent_values_drop_their_pair_and_lists_repeat_it() -> None:
    template = "https://h/p?a={a}&b={b}&c=1&d={d}"
    assert render_url(template, {"a": ABSENT, "b": ["x y", 2], "d": []}) == "https://h/p?b=x%20y&b=2&c=1"
    assert render_url("https://h/p?a={a}#f", {"a": ABSENT}) == "https://h/p#f"
    assert render_url("https://h/p?{a}", {"a": "x=1&y"}) == "https://h/p?x%3D1%26y"
    assert render_url("https://h/p?{k}={v}", {"k": "a&b", "v": {"n": 1}}) == "https://h/p?a%26b=%7B%22n%22%3A1%7D"


@pytest.mark.parametrize("template", ["https://h/{a}", "https://h/?q=x{a}", "https://h/?{a}=1", "https://h/#{a}"])
def test_an_absent_value_anywhere_else_is_an_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="`a` was not given"):
        render_url(template, {"a": ABSENT})


def test_variables_stay_unchanged() -> None:
    assert render_url("${SLACK_WEBHOOK_URL}", {}) == "${SLACK_WEBHOOK_URL}"
    assert render_url("${BASE:-https://h/x?y}/v1/{a}", {"a": "/"}) == "${BASE:-https://h/x?y}/v1/%2F"
    assert (
        render_url("https://${HOST}/p/${ID}?k=${KEY}&q={q}", {"q": "${KEY}"})
        == "https://${HOST}/p/${ID}?k=${KEY}&q=%24%7BKEY%7D"
    )


def test_the_weather_template_renders() -> None:
    template = "https://api.weather.com/v1/forecast?lat={lat}&lon={lon}&units=metric"
    assert (
        render_url(template, {"lat": -41.3, "lon": 174})
        == "https://api.weather.com/v1/forecast?lat=-41.3&lon=174&units=metric"
    )


@pytest.mark.case("INJ-05")
@pytest.mark.parametrize("value", ["a\r\nX-Admin: 1", "a\nb", "a\rb", "a\0b"])
def test_a_header_holds_one_line(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header"):
        render_header("v {x}", {"x": value})
    with pytest.raises(InvalidRequest, match="header"):
        render_header("{x}", {"x": value})


def test_a_header_is_text_with_variables_and_an_absent_one_is_omitted() -> None:
    assert render_header("Bearer ${TOKEN} {n}", {"n": 1}) == "Bearer ${TOKEN} 1"
    assert render_header("{n}", {"n": "${TOKEN}"}) == "$${TOKEN}"
    assert render_header("{n}", {"n": ABSENT}) is None
