"""Frequency: what everybody says counts less than what a request is about."""

from __future__ import annotations

import pytest

from kiwi_mcp.search import frequency
from kiwi_mcp.search.frequency import is_known, weight_of


def test_a_rare_word_counts_in_full_and_a_common_one_less() -> None:
    assert 0.5 <= weight_of("house") < weight_of("calendar") < weight_of("xylograph") == 1


@pytest.mark.parametrize("word", ["recommend", "wondering", "information"])
def test_a_word_by_which_people_ask_counts_less_than_any_that_says_what_for(word: str) -> None:
    assert 0.25 <= weight_of(word) < weight_of("house")


def test_without_a_list_of_words_only_those_by_which_people_ask_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequency, "_ranks", dict)

    assert (weight_of("house"), weight_of("recommend")) == (1, 0.5)


def test_a_word_that_people_write_is_no_slip() -> None:
    assert is_known("weather")
    assert not is_known("wether"[::-1])
