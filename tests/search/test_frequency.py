"""Word frequency: common words have less weight."""

from __future__ import annotations

import pytest

from kiwi_mcp.search import tokens
from kiwi_mcp.search.tokens import is_known, word_weight


def test_a_rare_word_has_full_weight_and_a_common_one_less() -> None:
    assert 0.5 <= word_weight("house") < word_weight("calendar") < word_weight("xylograph") == 1


@pytest.mark.parametrize("word", ["recommend", "wondering", "information"])
def test_a_question_word_has_less_weight_than_a_content_word(word: str) -> None:
    assert 0.25 <= word_weight(word) < word_weight("house")


def test_without_a_frequency_list_only_question_words_have_less_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_ranks", dict)

    assert (word_weight("house"), word_weight("recommend")) == (1, 0.5)


def test_a_known_word_is_not_a_typo() -> None:
    assert is_known("weather")
    assert not is_known("wether"[::-1])
