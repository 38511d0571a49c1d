"""Provenance: where items come from, as far as that was shown, and how strictly that holds what they run.

What ships with Kiwi is trusted. Whatever else there is counts as its owner's, a model's or nobody's by a record of its
exact content, which Kiwi makes when it is written or signed through it: no file says of itself where it comes from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from kiwi_mcp.catalog.seeds import vouched
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.isolation import Level, Provenance
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.watching import watched
from kiwi_mcp.manifest.digest import canonical, sha256_hex
from kiwi_mcp.policy.deployment import minimum
from kiwi_mcp.policy.floors import Holding, held, raised, unproven
from kiwi_mcp.store.authors import Authors

_MOST = 10_000
"""How many chains are remembered; beyond that all are looked up again."""
_SIGNED: Mapping[str, Provenance] = {
    "owner": "owner_written",
    "verified": "known_publisher",
    "tampered": "unknown",
    "revoked": "unknown",
}
"""Where an item comes from by who vouches for it with a signature."""
_Key: TypeAlias = tuple[str, ...]


class Origins:
    """Where the items of one user come from; what was looked up is remembered until the store changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[int, dict[_Key, Holding]] = (0, {})

    def held(self, chain: Chain) -> Holding:
        """Return how strictly a chain is held, and at least as strictly as this machine holds everything."""
        return raised(self._held(chain), minimum())

    def _held(self, chain: Chain) -> Holding:
        """Return how strictly a chain is held; where the store cannot be read, as what nobody knows is."""
        if all(link.origin.source == "builtin" for link in chain.links):
            return unproven(chain)
        try:
            authors = self._store.authors_if_any()
            if authors is None:
                return held(chain, [_provenance(link, chain, None) for link in chain.links])
            return self._remembered(chain, authors)
        except KiwiError:
            return replace(unproven(chain), is_looked_up=False)

    def of(self, tool: Tool) -> Provenance:
        """Return where one item comes from."""
        return self.held(Chain((tool,), "")).decisive.provenance

    def record(self, digests: Iterable[str], provenance: Provenance, actor: str, *, replaces: bool) -> None:
        """Write down where contents come from; what was recorded before stays, unless this replaces it."""
        self._store.authors().record(digests, provenance, actor, replaces=replaces)

    def forget(self) -> None:
        """Look everything up again: the store was closed, and when it changes counts anew from its next opening."""
        self._known = (0, {})

    def _remembered(self, chain: Chain, authors: Authors) -> Holding:
        stamp, key = authors.stamp(), _key(chain)
        if self._known[0] != stamp or len(self._known[1]) > _MOST:
            self._known = (stamp, {})
        known = self._known[1]
        if key not in known:
            known[key] = _looked_up(chain, authors)
        return known[key]


@dataclass(frozen=True, slots=True)
class Authorship:
    """One caller as an author; whoever is not the owner changes nothing that was recorded before."""

    origins: Origins
    actor: str
    is_owner: bool

    def writes(self, digests: Iterable[str], into: Source, over: Tool | None = None) -> None:
        """Record that contents are about to be written, in the place of what they are written over.

        What others write over code of unknown origin stays of unknown origin.
        """
        if self.is_owner:
            self._record(digests, "owner_written", into)
        elif over is None:
            self._record(digests, "model_written", into)
        else:
            written: Provenance = "unknown" if self.origins.of(over) == "unknown" else "model_written"
            self._record([digest for digest in digests if digest != over.digest], written, into)

    def vouches(self, tools: Iterable[Tool]) -> None:
        """Record that the owner stands by items as they are; that others sign or publish them says nothing."""
        own = [tool.digest for tool in tools if tool.origin.source in {"project", "user"}]
        if self.is_owner and own:
            self._record(own, "owner_written", "project")

    def copies(self, tools: Iterable[Tool], into: Source) -> None:
        """Record that items are about to be copied, which does not change where they come from."""
        for tool in tools:
            origin = self.origins.of(tool)
            # A publisher is known by the signature, which a copy bears as well.
            written: Provenance = origin if origin in {"owner_written", "model_written"} else "unknown"
            self._record([tool.digest], written, into, replaces=False)

    def _record(
        self, digests: Iterable[str], provenance: Provenance, into: Source, *, replaces: bool | None = None
    ) -> None:
        try:
            self.origins.record(
                digests, provenance, self.actor, replaces=self.is_owner if replaces is None else replaces
            )
        except KiwiError:
            # Without a record, what is in a project is nobody's, and what is in the user's space is the owner's.
            if into == "user" and provenance != "owner_written":
                raise


def chain_digest(chain: Chain) -> str:
    """Return the hash that names exactly this chain: every link of it, where it is, and every byte of each.

    What a project holds is named with the project: the same bytes in a clone are another chain.
    """
    links = [[link.identity, link.digest, home_of(link)] for link in chain.links]
    return sha256_hex(canonical([links, [[*one] for one in watched(chain)]]))


def home_of(link: Tool) -> str:
    """Return the folder that an item of a project is bound to; empty for what is the same everywhere."""
    return os.path.realpath(link.origin.base) if link.origin.source == "project" else ""


def _key(chain: Chain) -> _Key:
    links = (f"{link.identity} {link.digest} {link.trust} {home_of(link)}" for link in chain.links)
    return (chain.driver, *links, *(word for one in watched(chain) for word in one))


def _looked_up(chain: Chain, authors: Authors) -> Holding:
    recorded, relaxed = authors.look_up([link.digest for link in chain.links], chain_digest(chain))
    origins = [_provenance(link, chain, recorded.get(link.digest)) for link in chain.links]
    return held(chain, origins, relaxed if may_relax(origins, relaxed) else None)


def may_relax(origins: Iterable[Provenance], level: Level | None) -> bool:
    """Whether an owner may let a chain run under a level: not out of a sandbox what nobody vouches for."""
    return "unknown" not in origins or level in {"sandboxed", "restricted"}


def _provenance(link: Tool, chain: Chain, recorded: Provenance | None) -> Provenance:
    match link.origin.source:
        case "builtin":
            return "builtin"
        case "mcp":
            return "mcp_server"
        case "project" | "user" if chain.driver == "mcp":
            # A server is the program that its manifest names, which the owner accepted before anything of it is used.
            return "mcp_server"
        case "registry" if link.origin.namespace == BUILTIN_NAMESPACE and f"sha256:{link.digest}" in vouched():
            return "mcp_server" if chain.driver == "mcp" else "known_publisher"
    signed = _SIGNED.get(link.trust)
    if signed is not None and recorded in {None, "unknown"}:
        return signed
    return recorded or ("owner_written" if link.origin.source == "user" else "unknown")
