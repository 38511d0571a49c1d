"""Advice on preferred tools, from conversations in the receipts, and only with enough data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.domain.token_cost import TokenCost
from kiwi_mcp.kernel.token_meter import (
    HISTORY_DAYS,
    MAX_ADVICE,
    Advice,
    CallHistory,
    Mean,
    PreferenceChange,
    SentDefinition,
    advise,
    call_history,
)
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import Receipts

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
MEANS = {"search": Mean(9, TokenCost(3_000, 800)), "load": Mean(9, TokenCost(2_000, 500))}
SEARCH = SentDefinition("search", TokenCost(1_000, 250))
WEATHER, MAIL, NOTES = "project/local/weather", "mcp/post/send", "user/local/notes"


def price(full_name: str, tokens: int = 100) -> SentDefinition | None:
    return SentDefinition(full_name.rpartition("/")[2], TokenCost(4 * tokens, tokens), f"{full_name}@1.0.0")


def sent(full_name: str, tokens: int = 100) -> SentDefinition:
    return SentDefinition(full_name.rpartition("/")[2], TokenCost(4 * tokens, tokens), f"{full_name}@1.0.0")


def history(*conversations: set[str], is_whole: bool = True, choices: tuple[PreferenceChange, ...] = ()) -> CallHistory:
    return CallHistory([frozenset(one) for one in conversations], NOW - timedelta(days=HISTORY_DAYS), is_whole, choices)


def test_a_tool_that_most_conversations_call_is_worth_sending() -> None:
    used = history({WEATHER}, {WEATHER, MAIL}, {WEATHER}, {WEATHER}, {MAIL}, {NOTES})
    (advice,) = advise(used, [SEARCH], MEANS, price, chosen_at=None)
    assert advice == Advice(
        "add",
        "weather",
        100,
        767,
        "called in 4 of 6 conversations: it costs 100 tokens in each, and spares a search and a load of 1,300",
    )
    assert advice.command == "kiwi prefer add weather"


def test_a_definition_that_costs_more_than_searching_is_not_proposed() -> None:
    used = history(*[{WEATHER}] * 6)
    assert advise(used, [SEARCH], MEANS, lambda name: price(name, 1_300), chosen_at=None) == []
    assert len(advise(used, [SEARCH], MEANS, lambda name: price(name, 1_299), chosen_at=None)) == 1


def test_a_tool_that_is_already_sent_or_cannot_be_is_not_proposed() -> None:
    used = history(*[{WEATHER, MAIL}] * 6)
    assert [*advise(used, [SEARCH, sent(WEATHER), sent(MAIL)], MEANS, price, chosen_at=None)] == []
    assert [*advise(used, [SEARCH], MEANS, lambda _: None, chosen_at=None)] == []


def test_the_most_expensive_unused_tools_are_proposed_for_removal_after_thirty_days() -> None:
    used = history(*[{WEATHER}] * 6)
    there = [SEARCH, sent(WEATHER), sent(MAIL, 40), sent(NOTES, 900)]
    found = advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=90))
    assert [(one.action, one.name, one.saves) for one in found] == [("remove", "notes", 900), ("remove", "send", 40)]
    assert found[0].why == "not called since 2026-05-02, in 6 conversations: it cost each 900 tokens"


def test_there_is_no_advice_without_enough_data() -> None:
    there = [SEARCH, sent(NOTES)]
    assert [*advise(history(*[{WEATHER}] * 4), there, MEANS, price, chosen_at=None)] == []
    young = history(*[{MAIL, WEATHER}] * 6, is_whole=False)
    assert {one.action for one in advise(young, there, MEANS, price, chosen_at=None)} == {"add"}


@pytest.mark.parametrize(
    ("word", "is_left"), [("notes", True), ("user/local/notes", True), ("user/*", True), ("other", False)]
)
def test_a_recently_chosen_tool_is_not_proposed_for_removal(word: str, is_left: bool) -> None:
    at = NOW - timedelta(days=3)
    used = history(*[{WEATHER}] * 6, choices=(PreferenceChange(word, at),))
    found = advise(used, [SEARCH, sent(WEATHER), sent(NOTES)], MEANS, price, chosen_at=at + timedelta(seconds=1))
    assert [one.name for one in found] == ([] if is_left else ["notes"])


def test_a_tool_of_unknown_age_is_not_proposed_for_removal() -> None:
    used, there = history(*[{WEATHER}] * 6), [SEARCH, sent(WEATHER), sent(NOTES)]
    assert [*advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=2))] == []  # written by hand
    assert len(advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=40))) == 1


def test_the_number_of_proposals_is_small() -> None:
    many = {f"user/local/tool_{number}" for number in range(40)}
    used = history(*[many] * 6)
    there = [SEARCH, *(sent(f"user/local/old_{number}") for number in range(40))]
    found = [one.action for one in advise(used, there, MEANS, price, chosen_at=None)]
    assert found == ["add"] * MAX_ADVICE + ["remove"] * MAX_ADVICE


def test_without_figures_only_the_cost_is_reported() -> None:
    (advice,) = advise(history(*[{WEATHER}] * 6), [SEARCH], {}, price, chosen_at=None)
    assert (advice.saves, advice.why) == (
        0,
        "called in 6 of 6 conversations: it costs 100 tokens in each, and spares a search and a load",
    )


Write = Callable[..., None]


@pytest.fixture
def receipts(tmp_path: Path) -> Receipts:
    return Receipts(open_database(f"sqlite://{tmp_path / 'registry.db'}"))


@pytest.fixture
def write(receipts: Receipts) -> Write:
    def add(full_name: str, ago: timedelta, **words: str) -> None:
        moment = int((NOW - ago).timestamp() * 1_000)
        item = full_name.rpartition("/")[2]
        plain = Receipt(run_id(moment, 0), iso(moment), "ana", "mcp", "run", item, "success", "standard")
        receipts.add(replace(plain, identity=f"{full_name}@1.0.0", **words))

    return add


def said(found: CallHistory) -> list[set[str]]:
    return [{*one} for one in found.conversations]


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def test_half_an_hour_without_calls_ends_a_conversation(receipts: Receipts, write: Write) -> None:
    for name, ago in ((WEATHER, 200), (MAIL, 175), (WEATHER, 150), (NOTES, 100), (MAIL, 90)):
        write(name, minutes(ago))
    found = call_history(receipts, NOW, actor=None)
    assert said(found) == [{WEATHER, MAIL}, {NOTES, MAIL}]
    assert (found.count(MAIL), found.count(WEATHER), found.count("absent")) == (2, 1, 0)


def test_calls_count_by_their_start_and_not_by_their_record(receipts: Receipts, write: Write) -> None:
    for name, ago in ((MAIL, 90), (WEATHER, 100), (NOTES, 10)):
        write(name, minutes(ago))
    assert said(call_history(receipts, NOW, actor=None)) == [{WEATHER, MAIL}, {NOTES}]
    assert call_history(receipts, NOW, actor=None).since == NOW - minutes(100)


def test_each_caller_and_surface_has_its_own_conversations_and_people_have_none(
    receipts: Receipts, write: Write
) -> None:
    write(WEATHER, minutes(30))
    write(MAIL, minutes(29), surface="gateway", actor="token:ben:1")
    write(NOTES, minutes(28), surface="cli")
    write(NOTES, minutes(27), surface="python")
    write(NOTES, minutes(26), action="create")
    write(NOTES, minutes(25))
    assert said(call_history(receipts, NOW, actor=None)) == [{WEATHER, NOTES}, {MAIL}]
    assert said(call_history(receipts, NOW, actor="ana")) == [{WEATHER, NOTES}]
    assert said(call_history(receipts, NOW, actor="ben")) == [{MAIL}]
    assert said(call_history(receipts, NOW, actor="be")) == []


def test_records_older_than_thirty_days_only_extend_the_known_period(receipts: Receipts, write: Write) -> None:
    assert call_history(receipts, NOW, actor=None) == CallHistory([], NOW, is_whole=False, choices=[])
    write(WEATHER, timedelta(days=12))
    young = call_history(receipts, NOW, actor=None)
    assert (young.is_whole, young.since) == (False, NOW - timedelta(days=12))
    write(MAIL, timedelta(days=2))
    assert said(call_history(receipts, NOW + timedelta(days=20), actor=None)) == [{MAIL}]
    assert call_history(receipts, NOW + timedelta(days=20), actor=None).is_whole


def test_recent_choices_of_the_owner_are_stored_with_their_time(receipts: Receipts, write: Write) -> None:
    write("post/*", minutes(5), action="prefer add", surface="cli", item="post/*")
    assert call_history(receipts, NOW, actor=None).choices == [PreferenceChange("post/*", NOW - minutes(5))]
