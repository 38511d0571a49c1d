"""Reach: what servers may use beyond what everybody may, because their owner added or accepted them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.grants import Rights, Rules
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.needs import Needs


def reaching(rights: Rights, server: Tool, catalog: Catalog) -> Rights:
    """Return what the owner grants, with what they meant by adding or accepting a server as it is.

    That is the very address of a server nearby, and what its manifest says that it needs. A rule that denies any of it
    still wins, and nothing that the server names itself is reached thereby.
    """
    near, needs = catalog.meant_hosts(server), server.manifest.needs
    if not near and (needs == Needs() or not catalog.is_meant(server)):
        return rights
    owner, *others = rights.grants
    meant = replace(
        owner,
        hosts=_with(owner.hosts, (*near, *needs.hosts)),
        read=_with(owner.read, (*needs.read, *needs.write)),
        write=_with(owner.write, needs.write),
    )
    return Rights((meant, *others))


def _with(rules: Rules, meant: Sequence[str]) -> Rules:
    added = tuple(text for text in dict.fromkeys(meant) if text not in rules.allow)
    return replace(rules, allow=(*rules.allow, *added)) if added else rules
