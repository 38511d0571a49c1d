"""From command line arguments to parameters of a tool."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidRequest, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.cli import inputs
from kiwi_mcp.surfaces.cli.inputs import from_words, read_object

SCHEMA: JsonObject = {
    "properties": {
        "word": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
        "either": {"type": ["string", "integer"]},
        "some_name": {"type": "string"},
    }
}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["word=3"], {"word": "3"}),
        (["count=3", "ratio=0.5"], {"count": 3, "ratio": 0.5}),
        (["flag=yes"], {"flag": True}),
        (["flag=0"], {"flag": False}),
        (["--flag"], {"flag": True}),
        (["--word", "a b", "--count=2"], {"word": "a b", "count": 2}),
        (["--some-name=x"], {"some_name": "x"}),
        (["list=[1, 2]", 'map={"a": 1}'], {"list": [1, 2], "map": {"a": 1}}),
        (["either=7"], {"either": "7"}),
        (["word=a=b"], {"word": "a=b"}),
        (["word="], {"word": ""}),
        (["word:=null", "other:=[true]"], {"word": None, "other": [True]}),
        (["count=three"], {"count": "three"}),
        (["lost=1"], {"lost": "1"}),
    ],
)
def test_arguments_become_values_by_the_types_of_the_tool(words: list[str], given: dict[str, Json]) -> None:
    assert from_words(words, SCHEMA) == given


@pytest.mark.parametrize("word", ["word", "-x", "count:={"])
def test_an_argument_that_is_not_a_parameter_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest):
        from_words([word], SCHEMA)


def test_json_is_read_from_an_argument_a_file_or_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "request.json").write_text('{"a": "ž"}', encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"a": 3}'))

    assert read_object('{"a": 1}') == {"a": 1}
    assert read_object(f"@{tmp_path}/request.json") == {"a": "ž"}
    assert read_object("-") == {"a": 3}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "@lost.json", "[" * 100_000, "@/"])
def test_input_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_object(text)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InvalidRequest):
        read_object(f"@{tmp_path}/request.json")


def test_endless_input_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_READ_LIMIT", 100)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 101))
    with pytest.raises(TooLarge):
        read_object("-")
