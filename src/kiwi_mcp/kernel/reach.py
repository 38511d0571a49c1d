"""Reach: what servers may use beyond what everybody may, because their owner added or accepted them as they are."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.grants import Rights, Rules
from kiwi_mcp.domain.items import Needs, Tool


def reaching(rights: Rights, server: Tool, catalog: Catalog) -> Rights:
    """Return the owner's grants, plus the permissions they gave by adding or accepting a server as it is.

    The extension is the exact address of a server nearby, and the needs that its manifest declares. A rule that denies
    any of it still wins, and it opens nothing that the server itself names. A host that is a pattern, such as
    `*.example.com`, opens public addresses only, which need no rule.
    """
    near, needs = catalog.meant_hosts(server), server.manifest.needs
    if not near and (needs == Needs() or not catalog.is_meant(server)):
        return rights
    owner, *others = rights.grants
    meant = replace(
        owner,
        hosts=_with(owner.hosts, (*near, *(host for host in needs.hosts if "*" not in host))),
        read=_with(owner.read, (*needs.read, *needs.write)),
        write=_with(owner.write, needs.write),
    )
    return Rights((meant, *others))


def client_requests(server: Tool, catalog: Catalog) -> tuple[str, ...]:
    """Return what a server may ask of the client that calls it: nothing unless its owner accepted it as it is."""
    asked = server.manifest.needs.client
    return asked if asked and catalog.is_meant(server) else ()


def _with(rules: Rules, meant: Sequence[str]) -> Rules:
    added = tuple(text for text in dict.fromkeys(meant) if text not in rules.allow)
    return replace(rules, allow=(*rules.allow, *added)) if added else rules
