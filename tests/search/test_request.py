"""A request is read once: its words, its parts, what each word stands for here, and what it means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.request import MAX_QUERY, MAX_WORDS, Term, read_request, terms_of
from kiwi_mcp.search.words import stem


class Lengths:
    """An encoder that remembers what it was asked."""

    name, dimension = "lengths", 384

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> Floats:
        self.asked += texts
        return np.ones((len(texts), self.dimension), np.float32)


def terms(query: str, *descriptions: str) -> dict[str, Term]:
    index = Index()
    index.follow([Card(f"p/l/{number}", f"n{number}", description=said) for number, said in enumerate(descriptions)])
    return dict(terms_of(read_request(query, None), [index]))


def test_words_that_say_nothing_are_left_out_unless_there_are_no_others() -> None:
    assert dict(read_request("Send the mail to the boss", None).counted[0]) == {"send": 1, "mail": 1, "boss": 1}
    assert dict(read_request("the of the", None).counted[0]) == {"the": 2, "of": 1}


def test_a_request_of_several_parts_is_encoded_as_a_whole_and_in_parts() -> None:
    encoder = Lengths()
    request = read_request("Send the mail to Ann, then book a room for two", encoder)

    assert encoder.asked == [*request.texts]
    assert request.texts[1:] == ("Send the mail to Ann", "book a room for two")
    assert request.vectors is not None
    assert len(request.vectors) == len(request.counted) == 3
    assert request.counted[2].keys() < request.counted[0].keys()


def test_what_is_beyond_any_need_is_cut_off_and_an_empty_request_means_nothing() -> None:
    long = read_request(" ".join(f"word{number}" for number in range(5_000)), None)

    assert len(long.text) == MAX_QUERY
    assert len(long.counted[0]) == MAX_WORDS
    assert read_request("  ", Lengths()).vectors is None


def test_a_word_stands_for_itself_else_for_longer_ones_else_for_what_it_may_be_a_slip_of() -> None:
    said = ("translate words", "translation of pages", "weather")

    assert terms("weather", *said)["weather"].stems == {stem("weather"): 1.0}
    assert {*terms("trans", *said)["trans"].stems.values()} == {0.7}
    assert {*terms("wheather", *said)["wheather"].stems.values()} == {0.6}
    assert terms("xyzzy", *said)["xyzzy"].stems == {}


def test_the_rarest_word_comes_first_and_counts_most() -> None:
    found = terms("send a fax", "send mail", "send data", "send a fax")

    assert [*found] == ["fax", "send"]
    assert found["fax"].rarity > found["send"].rarity


def test_of_many_words_that_nobody_holds_the_first_few_are_taken_for_slips() -> None:
    right = [f"{'abcdefghijklmnopqrst'[number]}zwxqvk" for number in range(20)]
    found = terms(" ".join(f"{word[:3]}{word[4]}{word[3]}{word[5:]}" for word in right), " ".join(right))
    assert len(found) == 20
    assert {one for term in found.values() for one in term.stems} == {stem(word) for word in right[:8]}


def test_a_word_that_people_write_is_no_slip_of_another() -> None:
    assert terms("house", "mouse")["house"].stems == {}
