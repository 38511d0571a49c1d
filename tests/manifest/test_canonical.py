"""The fast canonical JSON writer and the library agree for any value."""

from __future__ import annotations

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.signatures import canonical

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values: st.SearchStrategy[Json] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
)


@given(values)
@settings(deadline=None, max_examples=80)
def test_canonical_json_is_what_rfc_8785_writes(value: Json) -> None:
    assert canonical(value) == rfc8785.dumps(value)


@pytest.mark.parametrize(
    "value", [300.0, -0.0, 1e15, 2**53 - 1, 0.1, 1e21, "\x00\x1f\x7f\u2028é", {"\U0001f600": 1, "\uffff": 2}]
)
def test_edge_cases_of_numbers_and_texts_match_too(value: Json) -> None:
    assert canonical(value) == rfc8785.dumps(value)
