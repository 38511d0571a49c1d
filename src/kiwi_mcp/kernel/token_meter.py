"""The token cost of definitions and responses, the history of calls, and advice on what to send."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.mcp import Offer, Offers
from kiwi_mcp.domain.token_cost import ERROR, TokenCost, cost_of, cost_of_json, total
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.tool_names import callable_names, description_of, kind_of, names_of, offer_of
from kiwi_mcp.kernel.verb import Answer
from kiwi_mcp.kernel.verbs import BY_NAME, INSTRUCTIONS
from kiwi_mcp.policy import preferences
from kiwi_mcp.store.receipts import Receipts, ReceiptSummary


class SentDefinition(Struct, frozen=True):
    """A definition that is sent to every model, under the name that clients use."""

    name: str
    cost: TokenCost
    identity: str = ""
    """The identity of the item; empty for Kiwi's own."""


def all_sent(offers: Offers) -> Sequence[SentDefinition]:
    """Return what clients send to their model: Kiwi's instructions and meta-tools, then the owner's tools."""
    own = [
        SentDefinition("instructions", cost_of(INSTRUCTIONS)),
        *(SentDefinition(name, own_cost(name, offers.servers, offers.namespaces)) for name in offers.meta_tools),
    ]
    return [*own, *(SentDefinition(offer.name, offer_cost(offer), offer.identity) for offer in offers.tools)]


@cache
def own_cost(name: str, servers: tuple[str, ...] = (), namespaces: tuple[str, ...] = ()) -> TokenCost:
    """Return the cost of one of Kiwi's own tools, with some servers and namespaces in its description."""
    verb = BY_NAME[name]
    description = description_of(verb, servers, namespaces)
    return cost_of_json({"name": name, "description": description, "inputSchema": verb.input_schema()})


def offer_cost(offer: Offer) -> TokenCost:
    """Return the cost of the definition of an item in a client's tool list."""
    response: dict[str, Json] = {
        "name": offer.name,
        "description": offer.description or offer.title or offer.name,
        "inputSchema": offer.parameters,
    }
    return cost_of_json({**response, "outputSchema": offer.outputs} if offer.outputs else response)


OF_MODELS = frozenset({"mcp", "gateway"})
"""The surfaces with responses that a model reads."""
COUNTED = ("search", "load")
"""The verbs that a model uses to find items."""
DAYS = 30
"""For how many days responses are counted."""

_DELAY, _MAX_WAITING = 0.5, 16
"""After how many seconds the sizes of responses are written, and how many responses wait for that."""
_MAX_BYTES = 65_536
"""The maximum size of the file of one day."""
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Mean(Struct, frozen=True):
    """The average cost of a response, and the number of responses."""

    number: int
    cost: TokenCost

    def to_json(self) -> JsonObject:
        """Return it as JSON."""
        return {"answers": self.number, **self.cost.to_json()}


class ResponseSizes:
    """The sizes of the responses of one user's kernels, in a cache folder; `is_counting` if models read them."""

    def __init__(self, cache: Path, *, is_counting: bool = False) -> None:
        self._folder = cache / "context"
        self.is_counting = is_counting
        self._waiting: list[tuple[str, JsonObject]] = []
        """Responses that are not measured yet: a caller does not wait for that."""
        self._lock = Lock()

    def count(self, verb: str, answer: Answer) -> Answer:
        """Return a response; if a model reads it and its verb is counted, its size is written soon."""
        # A page of an output is part of a result, not the cost of loading an item.
        if self.is_counting and verb in COUNTED and not (verb == "load" and "identity" not in answer.content):
            response = (verb, answer.content)
            with self._lock:  # other threads read the averages
                self._waiting.append(response)
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # without a loop, no caller waits
                self.flush()
                return answer
            if len(self._waiting) == 1:
                loop.call_later(_DELAY, self.flush)
            elif len(self._waiting) >= _MAX_WAITING:
                self.flush()
        return answer

    def flush(self) -> None:
        """Write the sizes of all responses."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for verb, content in waiting:
            with suppress(OSError, ValueError, TypeError, RecursionError):  # only a statistic is lost
                cost = cost_of_json(content)
                self._append(f"{verb} {cost.bytes} {cost.tokens}\n".encode())

    def means(self) -> Mapping[str, Mean]:
        """Return the average cost of a response of each verb that was used in these days."""
        self.flush()
        found: dict[str, list[tuple[int, int]]] = {}
        for verb, size, tokens in self._lines():
            found.setdefault(verb, []).append((size, tokens))
        return {
            verb: Mean(len(rows), TokenCost(*(round(sum(column) / len(rows)) for column in zip(*rows, strict=True))))
            for verb, rows in found.items()
        }

    def _append(self, line: bytes) -> None:
        path = self._folder / datetime.now(UTC).date().isoformat()
        try:
            file = os.open(path, _APPENDING, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, _APPENDING, 0o600)
        try:
            size = os.fstat(file).st_size
            if size < _MAX_BYTES:
                os.write(file, line)
        finally:
            os.close(file)
        if size == 0:  # a new day has begun
            for old in self._days()[DAYS:]:
                old.unlink(missing_ok=True)

    def _days(self) -> list[Path]:
        """Return the file of each day, the newest first."""
        try:
            return sorted(self._folder.iterdir(), reverse=True)
        except OSError:
            return []

    def _lines(self) -> Iterator[tuple[str, int, int]]:
        for path in islice(self._days(), DAYS):
            with suppress(OSError), path.open("rb") as file:
                for line in file.read(2 * _MAX_BYTES).decode(errors="replace").splitlines():
                    match line.split():
                        case [verb, size, tokens] if verb in COUNTED and size.isdecimal() and tokens.isdecimal():
                            yield verb, int(size), int(tokens)


HISTORY_DAYS = 30
MAX_RECEIPTS = 10_000
"""How many receipts are read, the newest first."""

_SILENCE, _MINUTE = timedelta(minutes=30), timedelta(minutes=1)


class PreferenceChange(Struct, frozen=True):
    """A change of what is always sent: the name or pattern that the owner wrote, and when."""

    word: str
    at: datetime


class CallHistory(Struct, frozen=True):
    """The full names of the items that each conversation called since some time."""

    conversations: Sequence[frozenset[str]]
    since: datetime
    is_whole: bool
    """Whether it covers all its days, or as many receipts as are read."""
    choices: Sequence[PreferenceChange] = ()

    def count(self, full_name: str) -> int:
        """Return the number of conversations that called an item."""
        return sum(full_name in called for called in self.conversations)


def call_history(receipts: Receipts, now: datetime, *, actor: str | None) -> CallHistory:
    """Return the history of the last days, of one actor or of all actors of the store."""
    # A long call is recorded after shorter ones that began later, and clocks may be set back.
    summaries = sorted(receipts.glance(MAX_RECEIPTS), key=attrgetter("at"))
    known = [one for one in summaries if actor is None or one.is_of(actor)]
    first = now - timedelta(days=HISTORY_DAYS)
    start = _moment(summaries[0]) if summaries else now
    recent = [one for one in known if _moment(one) >= first]
    return CallHistory(
        conversations=_conversations(one for one in recent if one.action == "run" and one.surface in OF_MODELS),
        since=max(start, first),
        is_whole=start <= first or len(summaries) == MAX_RECEIPTS,
        choices=[PreferenceChange(one.item, _moment(one)) for one in recent if one.action.startswith("prefer ")],
    )


def _conversations(calls: Iterable[ReceiptSummary]) -> Sequence[frozenset[str]]:
    """Return the items that each conversation called; `calls` are in order of time."""
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


def _moment(one: ReceiptSummary) -> datetime:
    return datetime.fromisoformat(one.at)


MAX_ADVICE = 5
"""How many items are proposed to add, and to remove."""
MIN_CONVERSATIONS = 5
"""With fewer conversations than this, there is no advice."""


class Advice(Struct, frozen=True):
    """A change that would save tokens."""

    action: Literal["add", "remove"]
    name: str
    """The name that the owner types."""
    tokens: int
    """The cost of its definition in every conversation."""
    saves: int
    """How many tokens the change saves in a conversation, on average; 0 if unknown."""
    why: str

    @property
    def command(self) -> str:
        """The command that makes the change."""
        return f"kiwi prefer {self.action} {self.name}"

    def to_json(self) -> JsonObject:
        """Return it as JSON."""
        return {**asdict(self), "command": self.command}


def advise(
    history: CallHistory,
    sent: Sequence[SentDefinition],
    means: Mapping[str, Mean],
    price: Callable[[str], SentDefinition | None],
    *,
    chosen_at: datetime | None,
) -> Sequence[Advice]:
    """Return advice, the most useful first; none if there are too few conversations.

    `price` gives the definition of an item that could be sent, by its full name. `chosen_at` is when the owner's
    preferences were last written.
    """
    if len(history.conversations) < MIN_CONVERSATIONS:
        return ()
    proposed = [*islice(_worth_sending(history, sent, means, price), MAX_ADVICE)]
    unused = sorted(_unused(history, sent, chosen_at), key=lambda advice: -advice.saves)
    return [*proposed, *unused[:MAX_ADVICE]]


def _worth_sending(
    history: CallHistory,
    sent: Sequence[SentDefinition],
    means: Mapping[str, Mean],
    price: Callable[[str], SentDefinition | None],
) -> Iterator[Advice]:
    """Yield the items that most conversations call and that cost less than finding them each time."""
    known = {one.identity.partition("@")[0] for one in sent}
    many = len(history.conversations)
    finding = sum(means[verb].cost.tokens for verb in COUNTED if verb in means)
    called = Counter(name for conversation in history.conversations for name in conversation)
    for full_name, count in called.most_common():
        if 2 * count <= many:
            return
        if full_name in known or (priced := price(full_name)) is None:
            continue
        tokens = priced.cost.tokens
        saves = round(finding * count / many) - tokens
        if finding and saves <= 0:
            continue
        response = f"it costs {tokens:,} tokens in each, and spares a search and a load"
        why = f"called in {count} of {many} conversations: {response}{f' of {finding:,}' if finding else ''}"
        yield Advice("add", priced.name, tokens, max(saves, 0), why)


def _unused(history: CallHistory, sent: Sequence[SentDefinition], chosen_at: datetime | None) -> Iterator[Advice]:
    """Yield the owner's tools that were never called, if they were available the whole time."""
    # Where a preference was edited by hand since the history began, it is not known since when definitions are sent.
    is_later = chosen_at is not None and chosen_at > history.since
    is_by_hand = is_later and not any(abs(one.at - chosen_at) < _MINUTE for one in history.choices if chosen_at)
    if not history.is_whole or is_by_hand:
        return
    called = frozenset[str]().union(*history.conversations)
    for one in sent:
        full_name = one.identity.partition("@")[0]
        names = (one.name, *names_of(*full_name.split("/", 2))) if full_name else ()
        is_new = any(fnmatchcase(name, choice.word) for choice in history.choices for name in names)
        if full_name and full_name not in called and not is_new:
            many, since = len(history.conversations), history.since.date()
            why = f"not called since {since}, in {many} conversations: it cost each {one.cost.tokens:,} tokens"
            yield Advice("remove", one.name, one.cost.tokens, one.cost.tokens, why)


_MAX_NAMED = 5


def context_report(offers: Offers, sizes: ResponseSizes, advice: Sequence[Advice] | None) -> JsonObject:
    """Return the cost of context; each definition and the advice are for the owner alone."""
    sent, means = all_sent(offers), sizes.means()
    every = total(one.cost for one in sent)
    if advice is None:
        return {"summary": _cost_text(every), **every.to_json()}
    answers: dict[str, Json] = {verb: means[verb].to_json() for verb in COUNTED if verb in means}
    return {
        "summary": "; ".join(_summary(sent, means)),
        **every.to_json(),
        "sent": [
            {"name": one.name, **one.cost.to_json(), **({"identity": one.identity} if one.identity else {})}
            for one in sent
        ],
        "answers": answers,
        "days": DAYS,
        "error": ERROR,
        "suggestions": [one.to_json() for one in advice],
    }


def _summary(sent: Sequence[SentDefinition], means: Mapping[str, Mean]) -> Iterator[str]:
    yield f"{_cost_text(total(one.cost for one in sent))} in every conversation, give or take a tenth"
    if own := sorted((one for one in sent if one.identity), key=lambda one: -one.cost.tokens):
        named = ", ".join(f"{one.name} {one.cost.tokens:,}" for one in own[:_MAX_NAMED])
        more = ", …" if len(own) > _MAX_NAMED else ""
        yield f"{total(one.cost for one in own).tokens:,} of them for your {len(own)} tools ({named}{more})"
    for verb, mean in means.items():
        yield f"{_cost_text(mean.cost)} for the answer to a {verb}, on average of {mean.number:,}"


def _cost_text(cost: TokenCost) -> str:
    return f"about {cost.tokens:,} tokens ({cost.bytes:,} bytes)"


def advice_for(catalog: Catalog, store: Store, offers: Offers, sizes: ResponseSizes) -> Sequence[Advice]:
    """Return advice for the owner; none if the receipts cannot be read."""
    try:
        # A local store holds the owner's calls only, with any token; a shared store also holds those of others.
        actor = None if store.settings.url.startswith("sqlite:") else store.actor.name
        history = call_history(store.receipts(), datetime.now(UTC), actor=actor)
    except KiwiError:
        return ()
    permission = ItemVisibility(catalog)
    chosen_at = None
    with suppress(OSError):
        chosen_at = datetime.fromtimestamp(preferences.preferences_file(catalog.space.user).stat().st_mtime, UTC)
    return advise(
        history, all_sent(offers), sizes.means(), lambda name: _priced(name, catalog, permission), chosen_at=chosen_at
    )


def _priced(full_name: str, catalog: Catalog, permission: ItemVisibility) -> SentDefinition | None:
    """Return the definition of an item under the shortest name that finds it; None if it cannot be sent."""
    try:
        chain = catalog.resolve(full_name)
        if kind_of(chain) != "tool" or permission.refusal_of([link.identity for link in chain.links]):
            return None
        short = catalog.find(chain.tool.id).identity == chain.tool.identity
    except KiwiError:
        return None
    name = chain.tool.id if short else full_name
    return SentDefinition(name, offer_cost(offer_of(chain, callable_names(chain.tool)[0])), chain.tool.identity)
