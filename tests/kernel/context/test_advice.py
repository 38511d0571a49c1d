"""Advice on what to send: from conversations as receipts tell them, and only where enough is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kiwi_mcp.domain.receipt import Receipt
from kiwi_mcp.domain.run import iso, run_id
from kiwi_mcp.kernel.context.advice import MOST, Advice, advise
from kiwi_mcp.kernel.context.cost import Cost
from kiwi_mcp.kernel.context.history import DAYS, Choice, History, recall
from kiwi_mcp.kernel.context.sent import Sent
from kiwi_mcp.kernel.context.tally import Mean
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import Receipts

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
MEANS = {"search": Mean(9, Cost(3_000, 800)), "load": Mean(9, Cost(2_000, 500))}
SEARCH = Sent("search", Cost(1_000, 250))
WEATHER, MAIL, NOTES = "project/local/weather", "mcp/post/send", "user/local/notes"


def price(full_name: str, tokens: int = 100) -> Sent | None:
    return Sent(full_name.rpartition("/")[2], Cost(4 * tokens, tokens), f"{full_name}@1.0.0")


def sent(full_name: str, tokens: int = 100) -> Sent:
    return Sent(full_name.rpartition("/")[2], Cost(4 * tokens, tokens), f"{full_name}@1.0.0")


def history(*conversations: set[str], is_whole: bool = True, choices: tuple[Choice, ...] = ()) -> History:
    return History([frozenset(one) for one in conversations], NOW - timedelta(days=DAYS), is_whole, choices)


def test_what_most_conversations_call_is_worth_sending() -> None:
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


def test_what_is_dearer_than_finding_it_stays_where_it_is() -> None:
    used = history(*[{WEATHER}] * 6)
    assert advise(used, [SEARCH], MEANS, lambda name: price(name, 1_300), chosen_at=None) == []
    assert len(advise(used, [SEARCH], MEANS, lambda name: price(name, 1_299), chosen_at=None)) == 1


def test_what_is_sent_or_cannot_be_is_not_proposed() -> None:
    used = history(*[{WEATHER, MAIL}] * 6)
    assert [*advise(used, [SEARCH, sent(WEATHER), sent(MAIL)], MEANS, price, chosen_at=None)] == []
    assert [*advise(used, [SEARCH], MEANS, lambda _: None, chosen_at=None)] == []


def test_what_nobody_called_for_thirty_days_is_proposed_for_leaving_the_dearest_first() -> None:
    used = history(*[{WEATHER}] * 6)
    there = [SEARCH, sent(WEATHER), sent(MAIL, 40), sent(NOTES, 900)]
    found = advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=90))
    assert [(one.action, one.name, one.saves) for one in found] == [("remove", "notes", 900), ("remove", "send", 40)]
    assert found[0].why == "not called since 2026-05-02, in 6 conversations: it cost each 900 tokens"


def test_nothing_is_said_before_enough_is_known() -> None:
    there = [SEARCH, sent(NOTES)]
    assert [*advise(history(*[{WEATHER}] * 4), there, MEANS, price, chosen_at=None)] == []
    young = history(*[{MAIL, WEATHER}] * 6, is_whole=False)
    assert {one.action for one in advise(young, there, MEANS, price, chosen_at=None)} == {"add"}


@pytest.mark.parametrize(
    ("word", "is_left"), [("notes", True), ("user/local/notes", True), ("user/*", True), ("other", False)]
)
def test_what_was_chosen_of_late_has_its_time_to_prove_itself(word: str, is_left: bool) -> None:
    at = NOW - timedelta(days=3)
    used = history(*[{WEATHER}] * 6, choices=(Choice(word, at),))
    found = advise(used, [SEARCH, sent(WEATHER), sent(NOTES)], MEANS, price, chosen_at=at + timedelta(seconds=1))
    assert [one.name for one in found] == ([] if is_left else ["notes"])


def test_nothing_is_proposed_for_leaving_while_it_is_not_known_since_when_it_is_there() -> None:
    used, there = history(*[{WEATHER}] * 6), [SEARCH, sent(WEATHER), sent(NOTES)]
    assert [*advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=2))] == []  # written by hand
    assert len(advise(used, there, MEANS, price, chosen_at=NOW - timedelta(days=40))) == 1


def test_no_more_is_proposed_than_can_be_read_at_a_glance() -> None:
    many = {f"user/local/tool_{number}" for number in range(40)}
    used = history(*[many] * 6)
    there = [SEARCH, *(sent(f"user/local/old_{number}") for number in range(40))]
    found = [one.action for one in advise(used, there, MEANS, price, chosen_at=None)]
    assert found == ["add"] * MOST + ["remove"] * MOST


def test_without_figures_the_cost_alone_is_told() -> None:
    (advice,) = advise(history(*[{WEATHER}] * 6), [SEARCH], {}, price, chosen_at=None)
    assert (advice.saves, advice.why) == (
        0,
        "called in 6 of 6 conversations: it costs 100 tokens in each, and spares a search and a load",
    )


# --- conversations, from receipts ---


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
        receipts.add(replace(plain, identity=f"{full_name}@1.0.0", **words))  # type: ignore[arg-type]  # texts, for texts

    return add


def said(found: History) -> list[set[str]]:
    return [{*one} for one in found.conversations]


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def test_half_an_hour_of_silence_ends_a_conversation(receipts: Receipts, write: Write) -> None:
    for name, ago in ((WEATHER, 200), (MAIL, 175), (WEATHER, 150), (NOTES, 100), (MAIL, 90)):
        write(name, minutes(ago))
    found = recall(receipts, NOW, actor=None)
    assert said(found) == [{WEATHER, MAIL}, {NOTES, MAIL}]
    assert (found.count(MAIL), found.count(WEATHER), found.count("absent")) == (2, 1, 0)


def test_calls_count_by_when_they_began_and_not_by_when_they_were_written_down(
    receipts: Receipts, write: Write
) -> None:
    for name, ago in ((MAIL, 90), (WEATHER, 100), (NOTES, 10)):
        write(name, minutes(ago))
    assert said(recall(receipts, NOW, actor=None)) == [{WEATHER, MAIL}, {NOTES}]
    assert recall(receipts, NOW, actor=None).since == NOW - minutes(100)


def test_each_caller_and_each_way_has_conversations_of_its_own_and_people_have_none(
    receipts: Receipts, write: Write
) -> None:
    write(WEATHER, minutes(30))
    write(MAIL, minutes(29), surface="gateway", actor="token:ben:1")
    write(NOTES, minutes(28), surface="cli")
    write(NOTES, minutes(27), surface="python")
    write(NOTES, minutes(26), action="create")
    write(NOTES, minutes(25))
    assert said(recall(receipts, NOW, actor=None)) == [{WEATHER, NOTES}, {MAIL}]
    assert said(recall(receipts, NOW, actor="ana")) == [{WEATHER, NOTES}]
    assert said(recall(receipts, NOW, actor="ben")) == [{MAIL}]
    assert said(recall(receipts, NOW, actor="be")) == []


def test_what_is_older_than_thirty_days_tells_only_how_far_back_is_known(receipts: Receipts, write: Write) -> None:
    assert recall(receipts, NOW, actor=None) == History([], NOW, is_whole=False, choices=[])
    write(WEATHER, timedelta(days=12))
    young = recall(receipts, NOW, actor=None)
    assert (young.is_whole, young.since) == (False, NOW - timedelta(days=12))
    write(MAIL, timedelta(days=2))
    assert said(recall(receipts, NOW + timedelta(days=20), actor=None)) == [{MAIL}]
    assert recall(receipts, NOW + timedelta(days=20), actor=None).is_whole


def test_what_the_owner_chose_of_late_is_remembered_with_its_time(receipts: Receipts, write: Write) -> None:
    write("post/*", minutes(5), action="prefer add", surface="cli", item="post/*")
    assert recall(receipts, NOW, actor=None).choices == [Choice("post/*", NOW - minutes(5))]
