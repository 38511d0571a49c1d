"""Ranking: the right card first, no card without a match, and deterministic answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.items import Source
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.port import Encoder, Floats, Hit
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import RankedHits, rank


def card(name: str, description: str = "", *, source: Source = "project", **facts: object) -> Card:
    made = Card(source, "local", name, "1.0.0", f"/{source}/{name}.yaml", name=name, description=description)
    return replace(made, **facts)


CARDS = (
    card("email_enricher", "Enrich email addresses with company data", tags=("crm",)),
    card("weather_forecast", "Get the weather forecast for coordinates", parameters=(("lat", "Latitude"), ("lon", ""))),
    card("github_create_pr", "Create a pull request in a repository"),
    card("slackMessages", "Sends messages to a channel"),
    card("translate_text", "Translate text into another language", category="language/tools"),
    card("read_web_page", "Read a web page and return its text"),
    card("post", "Put a letter into the box", source="mcp", server="outbox"),
)


class Topics:
    """An encoder that knows some topics: texts are near each other where they speak of the same ones."""

    name, dimension = "topics", 384
    _TOPICS = (("rain", "weather", "umbrella"), ("mail", "email", "letter"), ("code", "repository", "pull"))

    def encode(self, texts: Sequence[str]) -> Floats:
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for axis, topic in enumerate(self._TOPICS):
                row[axis] = sum(word in text.lower() for word in topic)
            row[len(self._TOPICS)] = 0.25 if not row.any() else 0.0  # what has none of them is about nothing else
        unit: Floats = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        return unit


def ranked(query: str, cards: Sequence[Card] = CARDS, *, limit: int = 10, encoder: Encoder | None = None) -> RankedHits:
    index = CardIndex(encoder.name if encoder else "")
    index.follow(cards)
    assert not index.catch_up(None, encoder, seconds=60)
    return rank(parse_query(query, encoder), [index], limit=limit)


def names(hits: Sequence[Hit]) -> list[str]:
    return [hit.card.tool_id for hit in hits]


def found(query: str, cards: Sequence[Card] = CARDS, *, limit: int = 10) -> list[str]:
    return names(ranked(query, cards, limit=limit).hits)


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
        ("outbox", "post"),
        ("transl", "translate_text"),
        ("wether", "weather_forecast"),
        ("emial", "email_enricher"),
        ("githubCreatePR", "github_create_pr"),
    ],
)
def test_a_request_in_words_finds_its_tool(query: str, first: str) -> None:
    assert found(query)[0] == first


@pytest.mark.req("K-SE-02")
def test_scores_are_between_zero_and_one_and_items_without_a_match_are_omitted() -> None:
    hits = ranked("weather text").hits

    assert {*names(hits)} == {"weather_forecast", "translate_text", "read_web_page"}
    assert all(0 < hit.score <= 1 for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert next(hit.why.words for hit in hits if hit.card.tool_id == "weather_forecast") == ("weather",)


@pytest.mark.parametrize("query", ["", "   ", "the of and", "zzzzqqq", "!!!", "\0", "\ud800"])
def test_a_query_without_a_match_finds_nothing(query: str) -> None:
    assert ranked(query) == RankedHits([], 0)


def test_the_exact_name_comes_first() -> None:
    loud = [card(f"x{number}", "page page page web page read") for number in range(20)]
    cards = (*loud, card("page", "Nothing to say"))

    hits = ranked("page", cards, limit=3).hits

    assert (hits[0].card.tool_id, hits[0].score, hits[0].why.is_exact) == ("page", 1.0, True)
    assert all(hit.score < 1 for hit in hits[1:])
    assert found("project/local/page@1.0.0", cards)[0] == "page"
    assert found("project/local/page", cards)[0] == "page"


@pytest.mark.req("E6")
def test_a_shared_name_finds_both_items_and_a_full_name_one() -> None:
    twins = (
        card("search", "Search issues", source="mcp", namespace="tracker", version="1", path="a", server="tracker"),
        card("search", "Search mail", source="mcp", namespace="mailbox", version="1", path="b", server="mailbox"),
    )

    assert [hit.score for hit in ranked("search", twins).hits] == [1.0, 1.0]
    hits = ranked("mcp/mailbox/search", twins).hits
    assert (hits[0].card.server, hits[0].score) == ("mailbox", 1.0)
    assert ranked("search mailbox", twins).hits[0].card.server == "mailbox"


@pytest.mark.case("UNI-05")
def test_the_built_in_one_of_two_similar_items_comes_first_with_its_source() -> None:
    cards = (
        card("python-runtime", "Runs Python files", source="project"),
        card("python_runtime", "Runs Python files", source="user"),
        card("python_runtime", "Runs Python files", source="builtin"),
    )

    for order in (cards, cards[::-1]):
        hits = ranked("run python files", order, limit=3).hits
        assert [hit.card.source for hit in hits] == ["builtin", "project", "user"]
        assert len({hit.score for hit in hits}) == 1


def test_common_words_have_little_weight() -> None:
    cards = (*(card(f"tool_{number}", "Send data to the service") for number in range(30)), card("fax", "Send a fax"))

    assert found("send data by fax", cards)[0] == "fax"


def test_question_words_do_not_outweigh_content_words() -> None:
    cards = (card("advice", "Recommend and explain anything"), card("rates", "The tax of a city"))

    assert found("can you recommend and explain a tax", cards)[0] == "rates"


def test_a_card_with_another_query_word_ranks_above_one_with_the_same_word_twice() -> None:
    loud = tuple(card(f"echo_{number}", "Film, film and film, film by film") for number in range(5))
    cards = (*loud, card("reviews", "Critics on a film"))

    assert found("film critics", cards)[0] == "reviews"


def test_a_part_with_few_common_words_finds_its_tool_beside_a_part_with_rare_words() -> None:
    rare = tuple(card(f"orbit_{number}", "Orbital elements of a minor planet asteroid") for number in range(8))
    common = tuple(card(f"send_{number}", "Send a parcel") for number in range(8))
    query = "Compute the orbital elements of the minor planet asteroid Ceres. Then send a mail."

    hits = names(ranked(query, (*rare, *common, card("post_mail", "Send a mail")), limit=4).hits)

    assert "post_mail" in hits


def test_a_request_for_three_things_finds_a_tool_for_each() -> None:
    noise = tuple(card(f"page_{number}", "Read a web page about a forecast") for number in range(20))
    query = "Get the weather forecast for Paris, then translate the text into French, and create a pull request for it"

    hits = ranked(query, (*CARDS, *noise), limit=4).hits

    answered = {hit.card.tool_id: hit.why.part for hit in hits}
    assert {"weather_forecast", "translate_text", "github_create_pr"} <= answered.keys()
    assert answered["weather_forecast"].startswith("Get the weather")
    assert answered["translate_text"].startswith("translate")
    assert answered["github_create_pr"].startswith("create a pull request")


def test_an_item_without_a_shared_word_is_found_by_meaning_and_marked() -> None:
    hits = ranked("will I need an umbrella", encoder=Topics()).hits

    assert hits[0].card.tool_id == "weather_forecast"
    assert hits[0].why.words == ()
    assert hits[0].why.meaning > 0.5
    assert "email_enricher" not in names(hits)


@pytest.mark.parametrize("encoder", [None, Topics()])
def test_the_best_hits_are_found_in_any_position_among_hundreds(encoder: Encoder | None) -> None:
    best = [card(f"rain_in_city_{number}", "Weather: rain in a city") for number in range(5)]
    others = [card(f"x{number}", f"Read a page about rain {'and more ' * (number % 40)}") for number in range(600)]

    answers = [
        ranked("rain in the city", [*others[:place], *best, *others[place:]], limit=8, encoder=encoder)
        for place in (0, 234)
    ]

    assert {*names(answers[0].hits)[:5]} == {one.tool_id for one in best}
    assert answers[0].total == len(best) + len(others)
    assert answers[1] == answers[0]


CLOCKS = (
    card("time", "Time and time zones: what time it is", source="project", tool_type="mcp_server"),
    card("times", "Time tables of trains", tool_type="mcp_server"),
    card("current_time", "Get the time in a time zone", source="mcp", server="time", tool_type="mcp_tool"),
    card("time_tables", "Find trains by the time they go", source="mcp", server="times", tool_type="mcp_tool"),
)


def is_server(one: Card) -> bool:
    return one.tool_type == "mcp_server"


@pytest.mark.parametrize("query", ["what time is it", "what time is it in Tokyo", "the time"])
@pytest.mark.parametrize("limit", [2, 10])
def test_a_server_ranks_below_runnable_items(query: str, limit: int) -> None:
    index = CardIndex()
    index.follow(CLOCKS)
    hits = rank(parse_query(query, None), [index], limit=limit, is_behind=is_server).hits
    assert {*names(hits)[:2]} == {"current_time", "time_tables"}


def test_a_server_requested_by_name_comes_first() -> None:
    first, *_ = ranked("time", CLOCKS).hits
    assert (first.card.tool_id, first.score) == ("time", 1.0)


def test_servers_are_ranked_among_themselves_as_usual() -> None:
    index = CardIndex()
    index.follow(CLOCKS)
    index.catch_up(None, None, seconds=60)
    need = parse_query("time tables of trains", None)
    servers = rank(need, [index], limit=10, keeps=is_server, is_behind=is_server).hits
    assert (
        names(servers) == names(ranked("time tables of trains", [*filter(is_server, CLOCKS)]).hits) == ["times", "time"]
    )
    assert servers[0].score > 0.6


def test_an_unencoded_item_ranks_by_its_words() -> None:
    index = CardIndex(Topics.name)
    index.follow(CARDS)
    index.catch_up(None, Topics(), seconds=60)
    index.follow((*CARDS, card("umbrella_weather", "Whether rain is ahead")))

    assert index.progress.encoded < index.progress.worded
    assert names(rank(parse_query("umbrella for the rain", Topics()), [index], limit=1).hits) == ["umbrella_weather"]


def test_an_unencoded_item_is_found_among_many_encoded_ones() -> None:
    many = tuple(card(f"shower_{number}", "About an umbrella") for number in range(400))
    index = CardIndex(Topics.name)
    index.follow(many)
    index.catch_up(None, Topics(), seconds=60)
    index.follow((*many, card("forecast", "Whether rain is ahead, and much else that this one tells of at length")))

    assert names(rank(parse_query("rain", Topics()), [index], limit=10).hits)[0] == "forecast"


def test_a_filtered_item_is_neither_shown_nor_counted() -> None:
    index = CardIndex()
    index.follow(CARDS)
    kept = rank(parse_query("text", None), [index], limit=5, keeps=lambda one: one.tool_id != "translate_text")

    assert (names(kept.hits), kept.total) == (["read_web_page"], 1)
    assert rank(parse_query("translate_text", None), [index], limit=5, keeps=lambda _: False) == RankedHits([], 0)


WORDS = ("mail", "send", "weather", "file", "read", "write", "search", "the", "user", "rain", "city", "page")
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
lists = st.lists(st.tuples(st.sampled_from(WORDS), texts), max_size=12, unique_by=lambda pair: pair[0])
queries = texts | st.text(max_size=40)
encoders: st.SearchStrategy[Encoder | None] = st.sampled_from([None, Topics()])


@pytest.mark.req("K-SE-02")
@given(some=lists, query=queries, limit=st.integers(0, 15), encoder=encoders)
@settings(max_examples=50, deadline=None)
def test_answers_are_limited_ordered_matching_and_independent_of_card_order(
    some: list[tuple[str, str]], query: str, limit: int, encoder: Encoder | None
) -> None:
    cards = tuple(card(*pair) for pair in some)

    hits, total = ranked(query, cards, limit=limit, encoder=encoder)

    assert len(hits) == min(limit, total)
    assert all(0 < hit.score <= 1 for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert all(hit.why.words or hit.why.meaning or hit.why.is_exact for hit in hits)
    assert (hits, total) == ranked(query, cards[::-1], limit=limit, encoder=encoder)


@given(query=queries, some=lists)
@settings(max_examples=30, deadline=None)
def test_no_card_without_a_similar_word_is_found_by_words(query: str, some: list[tuple[str, str]]) -> None:
    strangers = [card(f"x{number}", "kiwi quartz") for number, _ in enumerate(some)]

    assert not [hit for hit in ranked(query, strangers).hits if not hit.why.words]
    assert ranked(" ".join(word for word in WORDS), strangers) == RankedHits([], 0)
