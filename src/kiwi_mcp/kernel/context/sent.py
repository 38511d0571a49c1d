"""What stands in every conversation without being asked for, each thing with what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel.context.cost import Cost, cost_of, cost_of_json
from kiwi_mcp.kernel.naming import description_of
from kiwi_mcp.kernel.schemas import input_schema
from kiwi_mcp.kernel.verbs import BY_NAME, INSTRUCTIONS


class Sent(NamedTuple):
    """One thing that every model is given, by the name that clients know it by."""

    name: str
    cost: Cost
    identity: str = ""
    """The item that it is; empty for what is Kiwi's own."""


def all_sent(offers: Offers) -> Sequence[Sent]:
    """Return what clients put before their model: Kiwi's instructions and meta-tools, then the owner's tools."""
    own = [
        Sent("instructions", cost_of(INSTRUCTIONS)),
        *(Sent(name, own_cost(name, offers.servers, offers.namespaces)) for name in offers.meta_tools),
    ]
    return [*own, *(Sent(offer.name, offer_cost(offer), offer.identity) for offer in offers.tools)]


@cache
def own_cost(name: str, servers: tuple[str, ...] = (), namespaces: tuple[str, ...] = ()) -> Cost:
    """Return what the definition of one of Kiwi's own tools costs, where it names some servers and namespaces."""
    verb = BY_NAME[name]
    description = description_of(verb, servers, namespaces)
    return cost_of_json({"name": name, "description": description, "inputSchema": input_schema(verb.request)})


def offer_cost(offer: Offer) -> Cost:
    """Return what the definition of an item costs, as the list of a client has it."""
    told: dict[str, Json] = {
        "name": offer.name,
        "description": offer.description or offer.title or offer.name,
        "inputSchema": offer.parameters,
    }
    return cost_of_json({**told, "outputSchema": offer.outputs} if offer.outputs else told)
