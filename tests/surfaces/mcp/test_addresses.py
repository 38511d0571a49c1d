"""Resource URIs and their templates."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.mcp import match
from kiwi_mcp.surfaces.mcp.tool_list import KNOWLEDGE, tail


@pytest.mark.parametrize(
    ("template", "uri", "filled"),
    [
        ("test://row/{number}/end", "test://row/7/end", {"number": "7"}),
        ("test://{a}/{b}", "test://x%20y/z", {"a": "x y", "b": "z"}),
        ("file:///{+path}", "file:///a/b?c", {"path": "a/b?c"}),
        ("test://row/{number}/end", "test://row/7/8/end", None),
        ("test://row/{number}", "test://row/", None),
        ("test://row/{number}/end", "test://row/7/en", None),
        ("test://{a}{b}", "test://xy", None),
        ("test://plain", "test://plain", None),
    ],
)
def test_a_uri_matches_its_template(template: str, uri: str, filled: dict[str, str] | None) -> None:
    assert match(template, uri) == filled


@given(st.text(min_size=1), st.text(min_size=1))
def test_substituted_values_are_parsed_back(first: str, second: str) -> None:
    uri = f"test://{quote(first, safe='')}/x/{quote(second, safe='')}"
    assert match("test://{a}/x/{b}", uri) == {"a": first, "b": second}


def test_a_kiwi_uri_names_its_item() -> None:
    assert tail("kiwi://knowledge/a%20b", KNOWLEDGE) == "a b"
    assert tail("kiwi://other/a", KNOWLEDGE) == ""
