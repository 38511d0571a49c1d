"""The report on context: what every conversation is given, what an answer costs, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.offers import Offers
from kiwi_mcp.kernel.context.advice import Advice, advise
from kiwi_mcp.kernel.context.cost import ERROR, Cost, total
from kiwi_mcp.kernel.context.history import recall
from kiwi_mcp.kernel.context.sent import Sent, all_sent, offer_cost
from kiwi_mcp.kernel.context.tally import COUNTED, DAYS, Mean, Tally
from kiwi_mcp.kernel.offered import callable_names, kind_of, offer_of
from kiwi_mcp.kernel.permission import Permission
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.policy.preferences import FILE_NAME

_OWN_FILE = "sqlite:"
_DEAREST = 5


def tell(offers: Offers, tally: Tally, advice: Sequence[Advice] | None) -> JsonObject:
    """Return what context costs, in words; each thing that is sent, and the advice, for the owner alone."""
    sent, means = all_sent(offers), tally.means()
    every = total(one.cost for one in sent)
    if advice is None:
        return {"summary": _words(every), **every.to_json()}
    answers: dict[str, Json] = {verb: means[verb].to_json() for verb in COUNTED if verb in means}
    return {
        "summary": "; ".join(_summary(sent, means)),
        **every.to_json(),
        "sent": [_row(one) for one in sent],
        "answers": answers,
        "days": DAYS,
        "error": ERROR,
        "suggestions": [one.to_json() for one in advice],
    }


def _summary(sent: Sequence[Sent], means: Mapping[str, Mean]) -> Iterator[str]:
    yield f"{_words(total(one.cost for one in sent))} in every conversation, give or take a tenth"
    if own := sorted((one for one in sent if one.identity), key=lambda one: -one.cost.tokens):
        named = ", ".join(f"{one.name} {one.cost.tokens:,}" for one in own[:_DEAREST])
        more = ", …" if len(own) > _DEAREST else ""
        yield f"{total(one.cost for one in own).tokens:,} of them for your {len(own)} tools ({named}{more})"
    for verb, mean in means.items():
        yield f"{_words(mean.cost)} for the answer to a {verb}, on average of {mean.number:,}"


def _words(cost: Cost) -> str:
    return f"about {cost.tokens:,} tokens ({cost.bytes:,} bytes)"


def advice_for(catalog: Catalog, store: Store, offers: Offers, tally: Tally) -> Sequence[Advice]:
    """Return what the owner might change; nothing where the receipts cannot be read."""
    try:
        # A store of one's own holds one's own calls, whatever token they came by; in a shared one are those of others.
        actor = None if store.settings.url.startswith(_OWN_FILE) else store.actor.name
        history = recall(store.receipts(), datetime.now(UTC), actor=actor)
    except KiwiError:
        return ()
    permission = Permission(catalog)
    chosen_at = _written_at(catalog.space.user / FILE_NAME)
    return advise(
        history, all_sent(offers), tally.means(), lambda name: _priced(name, catalog, permission), chosen_at=chosen_at
    )


def _row(one: Sent) -> JsonObject:
    told: dict[str, Json] = {"name": one.name, **one.cost.to_json()}
    return {**told, "identity": one.identity} if one.identity else told


def _priced(full_name: str, catalog: Catalog, permission: Permission) -> Sent | None:
    """Return an item as it could be sent, under the shortest name that means it; None where it cannot be."""
    try:
        chain = catalog.resolve(full_name)
        if kind_of(chain) != "tool" or permission.refusal_of([link.identity for link in chain.links]):
            return None
        short = catalog.find(chain.tool.id).identity == chain.tool.identity
    except KiwiError:
        return None
    name = chain.tool.id if short else full_name
    return Sent(name, offer_cost(offer_of(chain, callable_names(chain.tool)[0])), chain.tool.identity)


def _written_at(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return None
