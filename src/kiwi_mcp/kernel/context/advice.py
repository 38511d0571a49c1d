"""Advice: what to send always and what to leave to be searched for, from how it was used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from typing import Literal, NamedTuple

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.context.history import History
from kiwi_mcp.kernel.context.sent import Sent
from kiwi_mcp.kernel.context.tally import COUNTED, Mean
from kiwi_mcp.kernel.offered import names_of

MOST = 5
"""How many items are proposed for the one, and for the other."""
FEWEST = 5
"""Of how few conversations nothing can be told yet."""


class Advice(NamedTuple):
    """One change that would cost less."""

    action: Literal["add", "remove"]
    name: str
    """As it is typed."""
    tokens: int
    """What its definition costs in every conversation."""
    saves: int
    """How many tokens the change saves in a conversation, on average; 0 where that is not known."""
    why: str

    @property
    def command(self) -> str:
        """What the owner types."""
        return f"kiwi prefer {self.action} {self.name}"

    def to_json(self) -> JsonObject:
        """Return it in words."""
        return {**self._asdict(), "command": self.command}


def advise(
    history: History,
    sent: Sequence[Sent],
    means: Mapping[str, Mean],
    price: Callable[[str], Sent | None],
    *,
    chosen_at: datetime | None,
) -> Sequence[Advice]:
    """Return what to change, the most useful first; nothing where too little is known.

    `price` gives an item that could be sent, by its full name, with the name that it is typed by and what it costs;
    `chosen_at` is when the owner's preferences were last written.
    """
    if len(history.conversations) < FEWEST:
        return ()
    proposed = [*islice(_worth_sending(history, sent, means, price), MOST)]
    unused = sorted(_unused(history, sent, chosen_at), key=lambda advice: -advice.saves)
    return [*proposed, *unused[:MOST]]


def _worth_sending(
    history: History, sent: Sequence[Sent], means: Mapping[str, Mean], price: Callable[[str], Sent | None]
) -> Iterator[Advice]:
    """Give the items that most conversations call, and that cost less than finding them each time."""
    there = {one.identity.partition("@")[0] for one in sent}
    many = len(history.conversations)
    finding = sum(means[verb].cost.tokens for verb in COUNTED if verb in means)
    called = Counter(name for conversation in history.conversations for name in conversation)
    for full_name, count in called.most_common():
        if 2 * count <= many:
            return
        if full_name in there or (priced := price(full_name)) is None:
            continue
        tokens = priced.cost.tokens
        saves = round(finding * count / many) - tokens
        if finding and saves <= 0:
            continue
        told = f"it costs {tokens:,} tokens in each, and spares a search and a load"
        why = f"called in {count} of {many} conversations: {told}{f' of {finding:,}' if finding else ''}"
        yield Advice("add", priced.name, tokens, max(saves, 0), why)


def _unused(history: History, sent: Sequence[Sent], chosen_at: datetime | None) -> Iterator[Advice]:
    """Give the owner's tools that nobody called, as far as they were there to be called all the time."""
    if not history.is_whole or not _is_settled(history, chosen_at):
        return
    called = frozenset[str]().union(*history.conversations)
    for one in sent:
        full_name = one.identity.partition("@")[0]
        if full_name and full_name not in called and not _is_new(one, history):
            many, since = len(history.conversations), history.since.date()
            why = f"not called since {since}, in {many} conversations: it cost each {one.cost.tokens:,} tokens"
            yield Advice("remove", one.name, one.cost.tokens, one.cost.tokens, why)


def _is_settled(history: History, chosen_at: datetime | None) -> bool:
    """Whether it is known since when things are sent: nothing was written by hand since the history began."""
    if chosen_at is None or chosen_at <= history.since:
        return True
    return any(abs((choice.at - chosen_at).total_seconds()) < 60 for choice in history.choices)  # noqa: PLR2004 - a minute


def _is_new(one: Sent, history: History) -> bool:
    names = (one.name, *names_of(*one.identity.partition("@")[0].split("/", 2)))
    return any(fnmatchcase(name, choice.word) for choice in history.choices for name in names)
