"""JSON and TOML are read strictly."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.manifest.document import read_json, read_toml


@pytest.mark.case("BOMB-05")
def test_a_repeated_key_in_json_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="twice"):
        read_json('{"tool_id": "a", "tool_id": "b"}', what="tool.json")


@pytest.mark.case("BOMB-05")
def test_the_last_repeated_key_is_named() -> None:
    keys = [f'"{number}":1' for number in [*range(20_000), 19_999]]
    with pytest.raises(InvalidManifest, match="the key '19999' stands twice"):
        read_json(f"{{{','.join(keys)}}}", what="tool.json")


@pytest.mark.case("BOMB-02")
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 20_000, "[" * 65 + "]" * 65])
def test_deep_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match="deep"):
        read_json(text, what="tool.json")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '"\\ud800"', '"\\u0000"', '{"\\u0000": 1}'])
def test_values_that_json_cannot_carry_are_refused(text: str) -> None:
    with pytest.raises(InvalidManifest):
        read_json(text, what="tool.json")


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5_000])
def test_a_number_beyond_common_precision_stays_text(digits: str) -> None:
    assert read_json(digits, what="tool.json").value == digits


def test_a_syntax_error_has_its_line() -> None:
    with pytest.raises(InvalidManifest) as refused:
        read_json('{\n"a":\n}', what="tool.json")
    assert refused.value.issues[0].line == 3


@pytest.mark.case("BOMB-03")
def test_size_and_count_are_limited() -> None:
    with pytest.raises(InvalidManifest, match="larger"):
        read_json('"' + "x" * 300_000 + '"', what="tool.json")
    with pytest.raises(InvalidManifest, match="values"):
        read_json("[" + "1," * 30_000 + "1]", what="tool.json")
    assert read_json("[" + "1," * 30_000 + "1]", what="big", max_nodes=40_000).value


@pytest.mark.case("BOMB-06")
def test_a_version_stays_text_in_json_and_toml() -> None:
    assert read_json('{"version": 1.10, "a": 1.10}', what="x").value == {"version": "1.10", "a": 1.1}
    assert read_toml("version = 1.10\na = 1.10\nd = 2026-01-01", what="x").value == {
        "version": "1.10",
        "a": 1.1,
        "d": "2026-01-01",
    }


@pytest.mark.parametrize("text", ["a = nan", "a = 1\na = 2", "a = " + "[" * 5_000, "a = " + "9" * 5_000, "a = "])
def test_unusable_toml_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest):
        read_toml(text, what="tool.toml")
