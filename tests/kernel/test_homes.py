"""Where items are at home is told in few words, and found out once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kiwi_mcp.kernel.homes import Homes, homes_of, most
from kiwi_mcp.search.port import Card


def card(name: str, server: str = "", category: str = "") -> Card:
    return Card(identity=f"project/local/{name}@1.0.0", tool_id=name, server=server, category=category)


MAIL = (card("send", "outbox"), card("outbox", category="servers"), card("map", category="maps"))


def test_servers_and_categories_are_told_of_and_not_how_a_server_is_reached() -> None:
    assert homes_of(MAIL) == " Here: servers `outbox`; categories `maps`."
    assert homes_of([card("one"), card("two")]) == " Here: `one`, `two`."
    assert homes_of([]) == ""


def test_those_of_most_stand_first_and_the_rest_is_counted() -> None:
    names = ["seldom", *["often"] * 2, *(f"name_{number:02}" for number in range(20))]
    assert most(names).startswith("`often`, `name_00`")
    assert most(names).endswith("and 10 more")


def test_the_same_cards_are_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(known: Sequence[Card]) -> str:
        read.append(len(known))
        return homes_of(known)

    monkeypatch.setattr("kiwi_mcp.kernel.homes.homes_of", counted)
    homes, more = Homes(), (card("post", "inbox"),)
    assert homes.of([MAIL]) == homes.of([MAIL]) == " Here: servers `outbox`; categories `maps`."
    assert homes.of([MAIL, more]) == " Here: servers `inbox`, `outbox`; categories `maps`."
    assert homes.of([more]) == " Here: servers `inbox`."
    assert read == [3, 4, 1]
