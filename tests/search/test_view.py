"""The summary of sources is short and computed once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.indexes import LocationSummary, describe_locations, list_names


def card(name: str, server: str = "", category: str = "") -> Card:
    return Card("project", "local", name, "1.0.0", server=server, category=category)


MAIL = (card("send", "outbox"), card("outbox", category="servers"), card("map", category="maps"))


def test_servers_and_categories_are_listed_without_their_commands_or_urls() -> None:
    assert describe_locations(MAIL) == " Here: servers `outbox`; categories `maps`."
    assert describe_locations([card("one"), card("two")]) == " Here: `one`, `two`."
    assert describe_locations([]) == ""


def test_the_largest_sources_come_first_and_the_rest_is_counted() -> None:
    names = ["seldom", *["often"] * 2, *(f"name_{number:02}" for number in range(20))]
    assert list_names(names).startswith("`often`, `name_00`")
    assert list_names(names).endswith("and 10 more")


def test_unchanged_cards_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(known: Sequence[Card]) -> str:
        read.append(len(known))
        return describe_locations(known)

    monkeypatch.setattr("kiwi_mcp.search.indexes.describe_locations", counted)
    homes, more = LocationSummary(), (card("post", "inbox"),)
    assert homes.of([MAIL]) == homes.of([MAIL]) == " Here: servers `outbox`; categories `maps`."
    assert homes.of([MAIL, more]) == " Here: servers `inbox`, `outbox`; categories `maps`."
    assert homes.of([more]) == " Here: servers `inbox`."
    assert read == [3, 4, 1]
