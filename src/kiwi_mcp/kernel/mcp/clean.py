"""Listings without secrets: what a server offers may be kept, what it was started with may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.kernel.mcp.pins import Listing
from kiwi_mcp.kernel.redaction import redacted


def without_secrets(listing: Listing, secrets: Mapping[str, str]) -> Listing:
    """Return a listing without the value of any secret in it: a server may say what it was started with."""
    if not secrets:
        return listing

    def clean(value: JsonObject) -> JsonObject:
        return as_object(redacted(Outcome("success", result=value), secrets).result)

    def text(value: str) -> str:
        return redacted(Outcome("success", message=value), secrets).message

    return _Clean(
        server_info=clean(listing.server_info),
        protocol_version=listing.protocol_version,
        era=listing.era,
        instructions=text(listing.instructions),
        tools=tuple(map(clean, listing.tools)),
        prompts=tuple(map(clean, listing.prompts)),
        resources=tuple(map(clean, listing.resources)),
        templates=tuple(map(clean, listing.templates)),
        issues=tuple(replace(one, place=text(one.place), reason=text(one.reason)) for one in listing.issues),
    )


@dataclass(frozen=True, slots=True)
class _Clean:
    """A listing that may be kept."""

    server_info: JsonObject
    protocol_version: str
    era: str
    instructions: str
    tools: tuple[JsonObject, ...]
    prompts: tuple[JsonObject, ...]
    resources: tuple[JsonObject, ...]
    templates: tuple[JsonObject, ...]
    issues: tuple[Issue, ...]
