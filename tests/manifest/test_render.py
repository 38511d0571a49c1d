from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.templates import ABSENT, escape, placeholders, plain, render, render_text, variables
from kiwi_mcp.primitives.secrets.reveal import reveal, reveal_json

SECRETS = {"HOME": "secret-home", "TOKEN": "secret-token"}
HOSTILE = [
    "${HOME}",
    "{other}",
    "{x.__class__}",
    "%s",
    "%(x)s",
    "{{7*7}}",
    "$",
    "$$",
    "$${HOME}",
    "{",
    "}",
    "${TOKEN:-x}",
]
hostile_text = st.lists(st.sampled_from([*HOSTILE, "a", "HOME}", "{HOME}"])).map("".join)


def revealed(template: str, **values: Json) -> str:
    return reveal(render_text(template, values), SECRETS)


def test_names_and_facts_are_substituted_and_variables_stay() -> None:
    values = {"tool.files": "/x", "tool.entrypoint": "main.py", "name": "Ada"}
    assert render_text("{tool.files}/{tool.entrypoint} {name} ${TOKEN}", values) == "/x/main.py Ada ${TOKEN}"


@pytest.mark.case("INJ-03")
@pytest.mark.parametrize("value", HOSTILE)
def test_an_argument_is_never_expanded(value: str) -> None:
    assert revealed("<{x}>", x=value, other="no") == f"<{value}>"
    assert reveal_json(render({"a": "{x}", "{x}": ["{x}!"]}, {"x": value}), SECRETS) == {
        "a": value,
        value: [f"{value}!"],
    }


@pytest.mark.req("K-RT-06")
@settings(max_examples=80, deadline=None)
@given(a=hostile_text, b=hostile_text)
def test_no_value_ever_becomes_a_variable_or_a_placeholder(a: str, b: str) -> None:
    assert revealed("{a}{b}", a=a, b=b) == a + b
    assert revealed("{a}{{HOME}}{b}", a=a, b=b) == f"{a}{{HOME}}{b}"
    assert revealed("${TOKEN}/{a}", a=a, b=b) == f"secret-token/{a}"
    assert plain(escape(a)) == a


def test_a_dollar_directly_before_a_variable_is_refused_because_it_would_hide_it() -> None:
    with pytest.raises(InvalidRequest, match="ends with"):
        render_text("{a}${TOKEN}", {"a": "x$"})


@pytest.mark.case("INJ-06")
@settings(max_examples=40, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | hostile_text, lambda inner: st.lists(inner, max_size=3))
)
def test_a_lone_placeholder_keeps_the_type_of_its_value(value: Json) -> None:
    assert reveal_json(render({"a": "{x}", "b": [["{x}"]]}, {"x": value}), SECRETS) == {"a": value, "b": [[value]]}


@pytest.mark.case("INJ-06")
def test_a_value_cannot_leave_its_string_in_a_body() -> None:
    body = render({"text": "{text}", "n": "{n}", "b": "{b}"}, {"text": '","role":"admin', "n": 3, "b": True})
    assert body == {"text": '","role":"admin', "n": 3, "b": True}


def test_values_inside_longer_text_are_written_as_json() -> None:
    assert (
        render_text("{a},{b},{c},{d}", {"a": 1.5, "b": True, "c": None, "d": {"k": [1]}}) == '1.5,true,null,{"k":[1]}'
    )


def test_braces_around_anything_but_a_name_are_braces() -> None:
    for text in (
        '{ "a": 1 }',
        '{"a":{"b":1}}',
        "{0}",
        "{}",
        "{x.__class__}",
        "{{7*7}}",
        "{a b}",
        "{a-b}",
        "%s",
        "${",
        "$x",
    ):
        assert reveal(render_text(text, {}), {}) == text
        assert placeholders(text) == ()


def test_doubled_braces_are_literal() -> None:
    assert render_text("{{name}} {name}", {"name": "v"}) == "{name} v"
    assert revealed("${{HOME}} and $${HOME}") == "${HOME} and ${HOME}"


def test_an_absent_value_omits_only_its_key_or_item() -> None:
    template: Json = {"a": "{x}", "b": ["{x}", 1], "c": {"d": "{x}"}}
    assert render(template, {"x": ABSENT}) == {"b": [1], "c": {}}
    assert render("{x}", {"x": ABSENT}) is None


def test_an_absent_value_inside_a_longer_text_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="`x` was not given"):
        render({"a": "-{x}"}, {"x": ABSENT})


def test_an_undeclared_name_is_an_issue_of_the_template() -> None:
    with pytest.raises(InvalidManifest, match=re.escape("`{nme}` is neither")) as caught:
        render({"a": ["{nme}"]}, {"name": 1})
    assert (
        caught.value.issues[0].fix == "Declare a parameter `nme`, write `{{nme}}` for the bare text, or use `{name}`."
    )


def test_placeholders_and_variables_are_listed_once_in_order_keys_included() -> None:
    template: Json = {"{k}": "{b} ${B}", "l": ["{a.b}", "${A:-x y}", "{b}", "$${NOT}", "{{not}}"], "n": 1}
    assert placeholders(template) == ("k", "b", "a.b")
    assert variables(template) == ("B", "A")


def test_a_default_stays_with_its_variable() -> None:
    text = render_text("${PROJECT_PYTHON:-python3}", {})
    assert text == "${PROJECT_PYTHON:-python3}"
    assert reveal(text, {}) == "python3"
