"""Pins: what a server lists, held against what the owner accepted of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import Definition, OfferKind, State, id_of, name_of, pinned, variables_of
from kiwi_mcp.manifest.digest import canonical, sha256_hex

_KIND = "kiwi.mcp/1"
"""Which statement is hashed, so that a later one can never be taken for it."""
_MAX_BYTES = 256_000
"""The most that one definition may have, in bytes."""
_MAX_NAME = 1_000
"""The most that a name, an address or a template may have, in bytes."""


class Listing(Protocol):
    """What a server said of itself and of each thing it offers."""

    @property
    def server_info(self) -> JsonObject:
        """Its name and version."""

    @property
    def protocol_version(self) -> str:
        """The revision that is spoken with it."""

    @property
    def era(self) -> str:
        """The era of that revision."""

    @property
    def instructions(self) -> str:
        """How it wants to be used."""

    @property
    def tools(self) -> tuple[JsonObject, ...]:
        """Its tools."""

    @property
    def prompts(self) -> tuple[JsonObject, ...]:
        """Its prompts."""

    @property
    def resources(self) -> tuple[JsonObject, ...]:
        """Its resources."""

    @property
    def templates(self) -> tuple[JsonObject, ...]:
        """Its templates of resources."""

    @property
    def issues(self) -> tuple[Issue, ...]:
        """What was not sound, and was left out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One thing that a server offers now."""

    kind: OfferKind
    name: str
    definition: JsonObject
    digest: str


def offers_of(server: str, listing: Listing, issues: list[Issue]) -> tuple[Offer, ...]:
    """Return what a server offers that can be pinned; what cannot becomes an issue."""
    return tuple(_offers(server, listing, issues))


def unlisted(listing: Listing) -> AbstractSet[OfferKind]:
    """Return the kinds of things that a server could not list although it has them."""
    words: dict[str, OfferKind] = {
        "tools": "tool",
        "prompts": "prompt",
        "resources": "resource",
        "resourceTemplates": "template",
    }
    return {words[issue.place] for issue in listing.issues if issue.place in words}


def merged(
    known: Sequence[Definition],
    offers: Sequence[Offer],
    *,
    is_accepted: bool,
    now: str,
    untouched: AbstractSet[OfferKind] = frozenset(),
) -> tuple[Definition, ...]:
    """Return what is known after a listing.

    What is as it was accepted stays accepted. What differs has changed, and what was never accepted is new, unless
    `is_accepted`. What is not offered any more is gone, and remembered; kinds that are `untouched` were not listed.
    """
    before = {(one.kind, one.name): one for one in known}
    taken = {one.tool_id for one in known}
    numbers: dict[str, int] = {}
    after: list[Definition] = []
    for offer in offers:
        old = before.pop((offer.kind, offer.name), None)
        if old is None:
            tool_id = id_of(offer.kind, offer.definition, taken, numbers)
            taken.add(tool_id)
            fresh = Definition(offer.kind, offer.name, tool_id, "new", offer.definition, offer.digest, seen_at=now)
            after.append(_accepted(fresh, now) if is_accepted else fresh)
        else:
            after.append(_renewed(old, offer, now))
    left = (one if one.kind in untouched else replace(one, state="gone") for one in before.values())
    return tuple(sorted((*after, *left), key=lambda one: (one.kind, one.name)))


def accepted(known: Sequence[Definition], wanted: AbstractSet[str], *, now: str) -> tuple[Definition, ...]:
    """Return what is known once the owner has accepted some items, by their names, as they are offered now."""
    return tuple(
        _accepted(one, now) if one.tool_id in wanted and one.state in {"new", "changed"} else one for one in known
    )


def _offers(server: str, listing: Listing, issues: list[Issue]) -> Iterator[Offer]:
    kinds: tuple[tuple[OfferKind, tuple[JsonObject, ...]], ...] = (
        ("tool", listing.tools),
        ("prompt", listing.prompts),
        ("resource", listing.resources),
        ("template", listing.templates),
    )
    for kind, definitions in kinds:
        for one in definitions:
            definition = pinned(one)
            name = name_of(kind, definition)
            place = f"{kind} {name[:100]}"
            try:
                data = canonical({"kind": _KIND, "server": server, "type": kind, "definition": definition})
            except KiwiError as error:
                issues.append(Issue(place, error.message, "The server must mend it; the rest is kept."))
                continue
            if fault := _fault(kind, name, data):
                issues.append(Issue(place, fault, "It is left out; the rest is kept.", severity="warning"))
                continue
            yield Offer(kind, name, definition, sha256_hex(data))


def _fault(kind: OfferKind, name: str, data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        return f"has a definition of more than {_MAX_BYTES:,} bytes"
    if len(name.encode()) > _MAX_NAME:
        return f"has a name of more than {_MAX_NAME:,} bytes"
    if kind == "template" and variables_of(as_text(name)) is None:
        return "is a template of a form that is not filled"
    return ""


def _renewed(old: Definition, offer: Offer, now: str) -> Definition:
    state: State = "new" if old.accepted is None else "accepted" if offer.digest == old.accepted_digest else "changed"
    return Definition(
        old.kind,
        old.name,
        old.tool_id,
        state,
        offer.definition,
        offer.digest,
        old.accepted,
        old.accepted_digest,
        old.seen_at if offer.digest == old.digest else now,
        old.accepted_at,
    )


def _accepted(one: Definition, now: str) -> Definition:
    return replace(one, state="accepted", accepted=one.offered, accepted_digest=one.digest, accepted_at=now)
