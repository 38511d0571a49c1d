"""Definitions pinned by digest, compared, without secrets; how a server is launched, masked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import unified_diff

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import (
    Definition,
    OfferKind,
    ServerListing,
    ServerRecord,
    State,
    id_of,
    name_of,
    pinned,
    variables_of,
)
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.secret import is_secret, looks_secret
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.primitives.secrets.redaction import redacted

_KIND = "kiwi.mcp/1"
"""Which statement is hashed, so that a later one can never be taken for it."""
_MAX_BYTES = 256_000
"""The most that one definition may have, in bytes."""
_MAX_NAME = 1_000
"""The most that a name, an address or a template may have, in bytes."""


class ServerOffer(Struct, frozen=True):
    """One thing that a server offers now."""

    kind: OfferKind
    name: str
    definition: JsonObject
    digest: str


def offers_of(server: str, listing: ServerListing, issues: list[Issue]) -> tuple[ServerOffer, ...]:
    """Return what a server offers that can be pinned; what cannot becomes an issue."""
    return tuple(_offers(server, listing, issues))


def unlisted(listing: ServerListing) -> AbstractSet[OfferKind]:
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
    offers: Sequence[ServerOffer],
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


def _offers(server: str, listing: ServerListing, issues: list[Issue]) -> Iterator[ServerOffer]:
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
                issues.append(Issue(place, error.message, "The server must fix it; the other definitions are stored."))
                continue
            if fault := _fault(kind, name, data):
                issues.append(Issue(place, fault, "It is left out; the rest is kept.", severity="warning"))
                continue
            yield ServerOffer(kind, name, definition, sha256_hex(data))


def _fault(kind: OfferKind, name: str, data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        return f"has a definition of more than {_MAX_BYTES:,} bytes"
    if len(name.encode()) > _MAX_NAME:
        return f"has a name of more than {_MAX_NAME:,} bytes"
    if kind == "template" and variables_of(as_text(name)) is None:
        return "is a template of a form that is not filled"
    return ""


def _renewed(old: Definition, offer: ServerOffer, now: str) -> Definition:
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


def without_secrets(listing: ServerListing, secrets: Mapping[str, str]) -> ServerListing:
    """Return a listing without the value of any secret in it: a server may say what it was started with."""
    if not secrets:
        return listing

    def clean(value: JsonObject) -> JsonObject:
        return as_object(redacted(Outcome("success", result=value), secrets).result)

    def text(value: str) -> str:
        return redacted(Outcome("success", message=value), secrets).message

    return replace(
        listing,
        server_info=clean(listing.server_info),
        instructions=text(listing.instructions),
        tools=tuple(map(clean, listing.tools)),
        prompts=tuple(map(clean, listing.prompts)),
        resources=tuple(map(clean, listing.resources)),
        templates=tuple(map(clean, listing.templates)),
        issues=tuple(replace(one, place=text(one.place), reason=text(one.reason)) for one in listing.issues),
    )


_LAUNCH = ("transport", "command", "args", "env", "cwd", "url", "headers", "auth")
"""What of a config says how a server is reached; the rest are limits."""
_REFERENCE = lazy_pattern(r"\$\{[^{}]*\}")
_MASK = "…"


def launch_of(config: JsonObject) -> JsonObject:
    """Return how a server is reached, of all that its config says: two servers that are reached alike are one."""
    return {word: config[word] for word in _LAUNCH if config.get(word) not in (None, {}, [])}


def launch_summary(server: Tool) -> JsonObject:
    """Return what is kept of a manifest that the owner accepts: how the server is reached, with secrets masked."""
    words = {
        word: _masked(word, value) for word, value in server.manifest.config.items() if word in _LAUNCH
    }  # in the order of the manifest, as its owner reads it
    needs = server.manifest.needs.to_json()
    return {**words, "needs": needs} if needs else words


def difference(server: Tool, record: ServerRecord) -> str:
    """Return how a server is reached otherwise than when its manifest was accepted, as a person reads it."""
    if not record.words:
        return f"What it said before is not known. Look at {server.origin.path}."
    before, after = (
        json.dumps(words, indent=2, ensure_ascii=False) for words in (record.words, launch_summary(server))
    )
    lines = unified_diff(before.splitlines(), after.splitlines(), "accepted", "now", lineterm="", n=2)
    return "\n".join(lines) or f"It is reached as before; something else changed. Look at {server.origin.path}."


def _masked(name: str, value: Json) -> Json:
    match value:
        case str():
            return _MASK if _is_secret(name, value) else value
        case Mapping():
            return {word: _masked(word, inner) for word, inner in value.items()}
        case list() | tuple():
            return _masked_words(value)
        case _:
            return value


def _masked_words(words: Sequence[Json]) -> list[Json]:
    """Return the words of a command; the one that follows on `--token` is a secret."""
    pairs = zip(["", *map(text_of, words)], words, strict=False)
    return [_masked(before if _is_flag(before) and not _is_flag(text_of(word)) else "", word) for before, word in pairs]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word


def _is_secret(name: str, value: str) -> bool:
    literal = _REFERENCE.sub("", value)
    return is_secret(name, value) if literal == value else looks_secret(literal)
