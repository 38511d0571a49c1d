"""Keyword search: the right card first, nothing that does not match, and the same answer every time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.search.keywords import Keywords
from kiwi_mcp.search.port import Card, Hit, Search


def card(name: str, description: str = "", *, source: str = "project", **facts: object) -> Card:
    made = Card(f"{source}/local/{name}@1.0.0", name, name, description, source=source, path=f"/{source}/{name}.yaml")
    return replace(made, **facts)  # type: ignore[arg-type]  # each test names fields of the card


CARDS = (
    card("email_enricher", "Enrich email addresses with company data", tags=("crm",)),
    card("weather_forecast", "Get the weather forecast for coordinates", parameters=(("lat", "Latitude"), ("lon", ""))),
    card("github_create_pr", "Create a pull request in a repository"),
    card("slackMessages", "Sends messages to a channel"),
    card("translate_text", "Translate text into another language", category="language/tools"),
    card("read_web_page", "Read a web page and return its text"),
)


def found(query: str, cards: Sequence[Card] = CARDS, *, limit: int = 10) -> list[str]:
    return [hit.card.tool_id for hit in Keywords().rank(query, cards, limit=limit)]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("weather", "weather_forecast"),
        ("what will the weather be tomorrow", "weather_forecast"),
        ("enriching an e-mail address", "email_enricher"),
        ("pull requests", "github_create_pr"),
        ("translation", "translate_text"),
        ("slack message", "slackMessages"),
        ("latitude", "weather_forecast"),
        ("crm", "email_enricher"),
        ("language", "translate_text"),
        ("transl", "translate_text"),
        ("wether", "weather_forecast"),
        ("emial", "email_enricher"),
        ("githubCreatePR", "github_create_pr"),
    ],
)
def test_a_need_in_words_finds_its_tool(query: str, first: str) -> None:
    assert found(query)[0] == first


@pytest.mark.req("K-SE-02")
def test_scores_lie_between_nought_and_one_and_what_does_not_match_is_left_out() -> None:
    hits = Keywords().rank("weather text", CARDS, limit=10)

    assert {hit.card.tool_id for hit in hits} == {"weather_forecast", "translate_text", "read_web_page"}
    assert all(0 < hit.score <= 1 for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert next(hit.why for hit in hits if hit.card.tool_id == "weather_forecast") == ("weather",)


@pytest.mark.parametrize("query", ["", "   ", "the of and", "zzzzqqq", "!!!", "\0", "\ud800"])
def test_a_query_without_a_match_finds_nothing(query: str) -> None:
    assert found(query) == []


def test_the_exact_name_comes_first_whatever_else_speaks_of_it() -> None:
    loud = [card(f"x{number}", "page page page web page read") for number in range(20)]
    cards = (*loud, card("page", "Nothing to say"))

    hits = Keywords().rank("page", cards, limit=3)

    assert (hits[0].card.tool_id, hits[0].score) == ("page", 1.0)
    assert all(hit.score < 1 for hit in hits[1:])
    assert found("project/local/page@1.0.0", cards)[0] == "page"


@pytest.mark.case("UNI-05")
def test_of_two_look_alikes_the_built_in_one_comes_first_and_the_source_is_shown() -> None:
    cards = (
        card("python-runtime", "Runs Python files", source="project"),
        card("python_runtime", "Runs Python files", source="user"),
        card("python_runtime", "Runs Python files", source="builtin"),
    )

    for order in (cards, cards[::-1]):
        hits = Keywords().rank("run python files", order, limit=3)
        assert [hit.card.source for hit in hits] == ["builtin", "project", "user"]
        assert len({hit.score for hit in hits}) == 1


def test_common_words_count_little() -> None:
    cards = (*(card(f"tool_{number}", "Send data to the service") for number in range(30)), card("fax", "Send a fax"))

    assert found("send data by fax", cards)[0] == "fax"


def test_a_changed_list_of_cards_is_followed() -> None:
    search: Search = Keywords()
    before = tuple(search.rank("weather", CARDS, limit=5))
    without = tuple(one for one in CARDS if one.tool_id != "weather_forecast")

    assert search.rank("weather", without, limit=5) == []
    assert tuple(search.rank("weather", CARDS, limit=5)) == before
    changed = tuple(replace(one, description="Speaks of penguins") for one in CARDS)
    assert len(search.rank("penguins", changed, limit=10)) == len(CARDS)
    assert search.rank("coordinates", changed, limit=10) == []


def test_a_list_that_grows_in_place_is_followed() -> None:
    search, cards = Keywords(), list(CARDS)
    assert search.rank("penguin", cards, limit=5) == []

    cards.append(card("penguin", "A bird"))

    assert [hit.card.tool_id for hit in search.rank("penguin", cards, limit=5)] == ["penguin"]


WORDS = ("mail", "send", "weather", "file", "read", "write", "search", "the", "user", "data", "city", "page")
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
lists = st.lists(st.tuples(st.sampled_from(WORDS), texts), max_size=12, unique_by=lambda pair: pair[0])


@given(first=lists, second=lists, query=texts | st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_answer_depends_on_the_cards_and_not_on_what_was_indexed_before(
    first: list[tuple[str, str]], second: list[tuple[str, str]], query: str
) -> None:
    old, new = tuple(card(*pair) for pair in first), tuple(card(*pair) for pair in second)
    search = Keywords()
    search.rank(query, old, limit=20)

    followed = search.rank(query, new, limit=20)

    assert followed == Keywords().rank(query, tuple(reversed(new)), limit=20)
    assert all(0 < hit.score <= 1 and hit.why for hit in followed)


def test_ten_thousand_cards_are_answered_in_a_few_milliseconds() -> None:
    chance = random.Random(7)
    vocabulary = [f"w{chance.randrange(10**6)}" for _ in range(3_000)]

    def text(length: int) -> str:
        return " ".join(vocabulary[int(chance.paretovariate(1.1)) % 3_000] for _ in range(length))

    cards = tuple(card(f"tool_{number}", text(12)) for number in range(10_000))
    search = Keywords()
    search.rank("warm", cards, limit=1)
    queries = [text(4) for _ in range(20)] + [vocabulary[1]]
    hits: list[Sequence[Hit]] = []
    spent = []
    for query in queries:
        start = time.process_time()
        hits.append(search.rank(query, cards, limit=10))
        spent.append(time.process_time() - start)

    assert all(0 < len(one) <= 10 for one in hits)
    assert sorted(spent)[len(spent) // 2] < 0.05
