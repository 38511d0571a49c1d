"""YAML is read as its strict JSON subset."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, compact
from kiwi_mcp.manifest.document import read_yaml


def value_of(text: str) -> Json:
    return read_yaml(text, what="tool.yaml").value


def refusal(text: str) -> Issue:
    with pytest.raises(InvalidManifest) as refused:
        read_yaml(text, what="tool.yaml")
    return refused.value.issues[0]


@pytest.mark.case("BOMB-06")
@pytest.mark.parametrize(
    "text", ["no", "yes", "on", "off", "1:30", "2026-01-01", "0x10", "0o17", "1_000", ".inf", ".nan"]
)
def test_ambiguous_scalars_stay_text(text: str) -> None:
    assert value_of(f"a: {text}") == {"a": text}


@pytest.mark.case("BOMB-06")
@pytest.mark.parametrize("text", ["12345678901234567890", "1e999", "+1", "007", ".5"])
def test_numbers_without_a_json_form_stay_text(text: str) -> None:
    assert value_of(f"a: {text}") == {"a": text}


@pytest.mark.case("BOMB-06")
def test_a_version_is_read_as_written() -> None:
    assert value_of("version: 1.10\nother: 1.10\nconfig: {version: 2.0}") == {
        "version": "1.10",
        "other": 1.1,
        "config": {"version": "2.0"},
    }


def test_json_literals_and_numbers_have_their_types() -> None:
    text = "a: true\nb: False\nc: null\nd: ~\ne:\nf: -12\ng: 1.5e3\nh: 'true'\ni: \"1\""
    assert value_of(text) == {
        "a": True, "b": False, "c": None, "d": None, "e": None, "f": -12, "g": 1500.0, "h": "true", "i": "1",
    }  # fmt: skip


def test_keys_are_always_text() -> None:
    assert value_of("200: ok\ntrue: yes\nnull: x") == {"200": "ok", "true": "yes", "null": "x"}


@pytest.mark.case("BOMB-05")
def test_a_repeated_key_is_refused_with_its_line() -> None:
    issue = refusal("tool_id: a\nconfig:\n  url: x\n  url: y\n")
    assert (issue.place, issue.line) == ("config.url", 4)


@pytest.mark.case("BOMB-04")
@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system [id]",
        "a: !!python/name:os.system ''",
        "!!python/object:x.Y {}",
        "a: !!binary aGk=",
        "a: !!set {b}",
        "!!timestamp 2026-01-01: b",
        "%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system 1",
        "a: !!int twelve",
    ],
)
def test_tags_beyond_json_are_refused(text: str) -> None:
    assert "tag" in refusal(text).reason


@pytest.mark.case("BOMB-01")
def test_an_alias_bomb_is_refused_at_once() -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    started = time.process_time()
    issue = refusal("\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *levels]))
    assert "aliases" in issue.reason
    assert time.process_time() - started < 3


@pytest.mark.case("BOMB-02")
@pytest.mark.parametrize("text", ["[" * 5_000, "- " * 5_000, "{a: " * 5_000])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "deep" in refusal(text).reason


@pytest.mark.case("BOMB-02")
def test_aliases_cannot_nest_deeper_than_the_limit() -> None:
    levels = ["a0: &a0 " + "[" * 40 + "]" * 40]
    levels += [f"a{n}: &a{n} " + "[" * 40 + f"*a{n - 1}" + "]" * 40 for n in range(1, 30)]
    assert "deep" in refusal("\n".join(levels)).reason


@pytest.mark.case("BOMB-03")
@pytest.mark.parametrize("text", ["a: " + "x" * 10_000_000, "[" + "1," * 100_000 + "]"])
def test_a_large_document_is_refused_quickly(text: str) -> None:
    started = time.process_time()
    refusal(text)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\n---\nb: 2", "second document"),
        ("base: &b {x: 1}\nc: {<<: *b}", "merge"),
        ("a: *missing", "names nothing"),
        ("a: &a [*a]", "names nothing"),
        ("? [x]\n: y", "key"),
        ("a: [1,", "not YAML"),
        ("a: \x07", "not YAML"),
        ("a: b\0c", "NUL"),
        ('a: "\\0"', "NUL"),
        ("a: \ud800", "surrogate"),
    ],
)
def test_an_unreadable_document_gives_a_reason(text: str, reason: str) -> None:
    assert reason in refusal(text).reason


def test_a_trailing_empty_document_and_a_byte_order_mark_are_fine() -> None:
    assert value_of("\ufeffa: 1\n---\n") == {"a": 1}
    assert value_of("") is None


def test_every_value_has_its_line() -> None:
    lines = read_yaml("tool_id: a\n\nparameters:\n  - name: x\n    type: string\n", what="tool.yaml").lines
    assert lines["parameters[0].type"] == 5
    assert lines["tool_id"] == 1


def test_limits_are_parameters() -> None:
    with pytest.raises(InvalidManifest):
        read_yaml("a: [1, 2, 3]", what="x", max_nodes=3)
    assert read_yaml("[" * 100 + "]" * 100, what="x", max_depth=100).value


json_values: st.SearchStrategy[Json] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz<_", min_size=1), inner, max_size=4),
    max_leaves=20,
)


@given(value=json_values)
@settings(max_examples=30, deadline=None)
def test_compact_json_reads_as_itself(value: Json) -> None:
    # A version is text whatever was written, and is covered above; these keys never spell it.
    assert value_of(compact(value)) == value


@given(text=st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InvalidManifest):
        read_yaml(text, what="x")
