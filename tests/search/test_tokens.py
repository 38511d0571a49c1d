"""Words: split identifiers, and stems."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.search.tokens import stem, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("github_create-PR", ["github", "create", "pr"]),
        ("sendHTTPRequest2", ["send", "http", "request2"]),
        ("Grüße, Welt!", ["grüße", "welt"]),
        ("天气 forecast", ["天", "气", "forecast"]),
    ],
)
def test_text_is_split_into_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    "forms",
    [
        ("search", "searches", "searching", "searched"),
        ("translate", "translation", "translations", "translating", "translator"),
        ("query", "queries"),
        ("run", "running", "runs"),
        ("organize", "organise", "organizing"),
        ("payment", "payments"),
    ],
)
def test_forms_of_one_word_have_one_stem(forms: tuple[str, ...]) -> None:
    assert len({stem(form) for form in forms}) == 1


@given(st.text(max_size=80))
def test_any_text_has_words_and_stems(text: str) -> None:
    assert all(stem(word) for word in words(text))
