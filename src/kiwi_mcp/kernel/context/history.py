"""The history: which items the owner's models called in each conversation of late, as the receipts tell it.

No client says where a conversation begins. Calls of one caller by one way count as one, as long as no half hour of
silence lies between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import NamedTuple

from kiwi_mcp.kernel.context.tally import OF_MODELS
from kiwi_mcp.store.receipts import Glance, Receipts

DAYS = 30
LOOKED_AT = 10_000
"""How many receipts are looked through, from the newest back."""

_SILENCE = timedelta(minutes=30)


class Choice(NamedTuple):
    """An item that the owner chose to be always sent, by the word they wrote, and when."""

    word: str
    at: datetime


@dataclass(frozen=True, slots=True)
class History:
    """What was called since a moment: for each conversation, the full names of its items."""

    conversations: Sequence[frozenset[str]]
    since: datetime
    is_whole: bool
    """Whether it reaches back as far as it is meant to: to the first of its days, or over all receipts looked at."""
    choices: Sequence[Choice] = ()

    def count(self, full_name: str) -> int:
        """Return in how many conversations an item was called."""
        return sum(full_name in called for called in self.conversations)


def recall(receipts: Receipts, now: datetime, *, actor: str | None) -> History:
    """Return the history of the last days, of one actor or of everybody in the store."""
    # A long call is written down after shorter ones that began later, and clocks are set back.
    glances = sorted(receipts.glance(LOOKED_AT), key=attrgetter("at"))
    known = [glance for glance in glances if actor is None or glance.is_of(actor)]
    first = now - timedelta(days=DAYS)
    start = _moment(glances[0]) if glances else now
    recent = [glance for glance in known if _moment(glance) >= first]
    return History(
        conversations=_conversations(one for one in recent if one.action == "run" and one.surface in OF_MODELS),
        since=max(start, first),
        is_whole=start <= first or len(glances) == LOOKED_AT,
        choices=[Choice(one.item, _moment(one)) for one in recent if one.action.startswith("prefer ")],
    )


def _conversations(calls: Iterable[Glance]) -> Sequence[frozenset[str]]:
    """Return what was called in each conversation; the calls come in their order."""
    found: list[set[str]] = []
    open_at: dict[tuple[str, str], tuple[datetime, set[str]]] = {}
    for call in calls:
        who, at = (call.actor, call.surface), _moment(call)
        last, called = open_at.get(who, (None, set[str]()))
        if last is None or at - last > _SILENCE:
            called = set()
            found.append(called)
        open_at[who] = at, called
        if call.identity:
            called.add(call.identity.partition("@")[0])
    return [frozenset(called) for called in found if called]


def _moment(glance: Glance) -> datetime:
    return datetime.fromisoformat(glance.at)
