"""A request is parsed once: its words, its parts, the candidates of each word, and its meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.query import MAX_QUERY, MAX_WORDS, Term, parse_query, terms_of
from kiwi_mcp.search.tokens import stem


class Lengths:
    """An encoder that remembers what it was asked."""

    name, dimension = "lengths", 384

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.asked += texts
        return np.ones((len(texts), self.dimension), np.float32)


def terms(query: str, *descriptions: str) -> dict[str, Term]:
    index = CardIndex()
    index.follow([Card("project", "local", f"n{number}", description=said) for number, said in enumerate(descriptions)])
    return dict(terms_of(parse_query(query, None), [index]))


def test_stop_words_are_omitted_unless_there_are_no_others() -> None:
    assert dict(parse_query("Send the mail to the boss", None).counted[0]) == {"send": 1, "mail": 1, "boss": 1}
    assert dict(parse_query("the of the", None).counted[0]) == {"the": 2, "of": 1}


def test_a_request_of_several_parts_is_encoded_as_a_whole_and_in_parts() -> None:
    encoder = Lengths()
    request = parse_query("Send the mail to Ann, then book a room for two", encoder)

    assert encoder.asked == [*request.texts]
    assert request.texts[1:] == ("Send the mail to Ann", "book a room for two")
    assert request.vectors is not None
    assert len(request.vectors) == len(request.counted) == 3
    assert request.counted[2].keys() < request.counted[0].keys()


def test_an_overlong_request_is_cut_and_an_empty_one_matches_nothing() -> None:
    long = parse_query(" ".join(f"word{number}" for number in range(5_000)), None)

    assert len(long.text) == MAX_QUERY
    assert len(long.counted[0]) == MAX_WORDS
    assert parse_query("  ", Lengths()).vectors is None


def test_a_word_matches_itself_or_longer_words_or_likely_typos() -> None:
    said = ("translate words", "translation of pages", "weather")

    assert terms("weather", *said)["weather"].stems == {stem("weather"): 1.0}
    assert {*terms("trans", *said)["trans"].stems.values()} == {0.7}
    assert {*terms("wheather", *said)["wheather"].stems.values()} == {0.6}
    assert terms("xyzzy", *said)["xyzzy"].stems == {}


def test_the_rarest_word_comes_first_with_the_most_weight() -> None:
    found = terms("send a fax", "send mail", "send data", "send a fax")

    assert [*found] == ["fax", "send"]
    assert found["fax"].rarity > found["send"].rarity


def test_only_the_first_few_unknown_words_are_corrected() -> None:
    right = [f"{'abcdefghijklmnopqrst'[number]}zwxqvk" for number in range(20)]
    found = terms(" ".join(f"{word[:3]}{word[4]}{word[3]}{word[5:]}" for word in right), " ".join(right))
    assert len(found) == 20
    assert {one for term in found.values() for one in term.stems} == {stem(word) for word in right[:8]}


def test_a_known_word_is_not_a_typo_of_another() -> None:
    assert terms("house", "mouse")["house"].stems == {}
