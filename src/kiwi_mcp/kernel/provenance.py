"""Provenance: where items come from, as far as that is proven, and how strictly their processes are isolated.

Items that ship with Kiwi are trusted. Every other item counts as written by its owner, by a model or by an unknown
author. That depends on a record of its exact content, which Kiwi makes when the item is written or signed through Kiwi:
no file can declare its own origin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.release import shipped_digests
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.isolation import Level, Provenance
from kiwi_mcp.domain.items import Chain, Source, Tool, TypeTraits
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.policy.isolation import IsolationDecision, decide_isolation, default_isolation, external_code, raised
from kiwi_mcp.policy.policy_files import minimum

_MOST = 10_000
"""How many chains are remembered; beyond that all are looked up again."""
_SIGNED: Mapping[str, Provenance] = {
    "owner": "owner_written",
    "verified": "known_publisher",
    "tampered": "unknown",
    "revoked": "unknown",
}
"""Where an item comes from by who vouches for it with a signature."""
_TRUSTED: frozenset[Provenance] = frozenset({"builtin", "owner_written", "known_publisher"})
"""The origins that the owner trusts to give a model instructions."""
_OriginOf: TypeAlias = Callable[[int, Chain, Provenance | None], Provenance]
"""Returns the origin of the link at a position, for what is recorded about its content."""


class Provenances:
    """Where the items of one user come from; what was looked up is remembered until the store changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[int, dict[tuple[str, ...], IsolationDecision]] = (0, {})

    def held(self, chain: Chain) -> IsolationDecision:
        """Return the isolation of a chain, at least as strict as the minimum of this machine."""
        return raised(self._decided(chain, provenance_of), minimum())

    def authored(self, chain: Chain) -> IsolationDecision:
        """Return the isolation of a chain by the authors of its links alone.

        Secrets depend on this: the manifest of a server that a model wrote gets none, although the process of an
        accepted server has a provenance of its own.
        """
        return raised(self._decided(chain, _author_in_chain), minimum())

    def _decided(self, chain: Chain, origin_of: _OriginOf) -> IsolationDecision:
        """Return the isolation of a chain; if the store cannot be read, that of code of unknown origin."""
        if all(link.origin.is_built_in for link in chain.links):
            return default_isolation(chain)
        try:
            authors = self._store.authors_if_any()
            if authors is None:
                return decide_isolation(chain, [origin_of(at, chain, None) for at in range(len(chain.links))])
            links = (f"{link.identity} {link.digest} {link.trust} {home_of(link)}" for link in chain.links)
            code = (word for one in external_code(chain) for word in one)
            stamp = authors.stamp()
            key = (origin_of.__name__, chain.traits[0].lifetime, *links, *code)
            if self._known[0] != stamp or len(self._known[1]) > _MOST:
                self._known = (stamp, {})
            known = self._known[1]
            if key not in known:
                recorded, relaxed = authors.look_up([link.digest for link in chain.links], chain_digest(chain))
                origins = [origin_of(at, chain, recorded.get(link.digest)) for at, link in enumerate(chain.links)]
                known[key] = decide_isolation(chain, origins, relaxed if may_relax(origins, relaxed) else None)
            return known[key]
        except KiwiError:
            return replace(default_isolation(chain), is_looked_up=False)

    def of(self, tool: Tool) -> Provenance:
        """Return who wrote one item."""
        return self.authored(Chain((tool,), (TypeTraits(),))).decisive.provenance

    def recorded(self, digest: str) -> Provenance | None:
        """Return what is recorded about a content; None where nothing is, or the store cannot be read."""
        with suppress(KiwiError):
            authors = self._store.authors_if_any()
            return authors.look_up([digest], "")[0].get(digest) if authors else None
        return None

    def may_instruct(self, tool: Tool) -> bool:
        """Whether a model may follow what an item says: its type gives instructions, and its origin is trusted."""
        return tool.manifest.result_kind == "instructions" and self.of(tool) in _TRUSTED

    def record(self, digests: Iterable[str], provenance: Provenance, actor: str, *, replaces: bool) -> None:
        """Write down where contents come from; what was recorded before stays, unless this replaces it."""
        self._store.authors().record(digests, provenance, actor, replaces=replaces)

    def forget(self) -> None:
        """Look everything up again: the store was closed, and its change counter restarts at its next opening."""
        self._known = (0, {})


class AuthorshipLog(Struct, frozen=True):
    """One caller as an author; a caller other than the owner cannot change earlier records."""

    origins: Provenances
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
        """Record that the owner vouches for items as they are; a signature or publication by others changes nothing."""
        own = [tool.digest for tool in tools if tool.origin.is_editable]
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
            # Without a record, an item in a project has no known author, and an item in the user's space is the
            # owner's.
            if into == "user" and provenance != "owner_written":
                raise


def chain_digest(chain: Chain) -> str:
    """Return the hash that names exactly this chain: every link, all that the item names, where each is, every byte.

    What a project holds is named with the project: the same bytes in a clone are another chain.
    """
    items = (*chain.links, *(one.tool for one in chain.references))
    links = [[link.identity, link.digest, home_of(link)] for link in items]
    return sha256_hex(canonical([links, [[*one] for one in external_code(chain)]]))


def home_of(link: Tool) -> str:
    """Return the folder that an item of a project is bound to; empty for what is the same everywhere."""
    return os.path.realpath(link.origin.base) if link.origin.is_in_project else ""


def may_relax(origins: Iterable[Provenance], level: Level | None) -> bool:
    """Whether an owner may let a chain run at a level: code of unknown origin must stay in a sandbox."""
    return "unknown" not in origins or level in {"sandboxed", "restricted"}


def provenance_of(at: int, chain: Chain, recorded: Provenance | None) -> Provenance:
    """Return where the code of a link comes from: from an MCP server, or from its author.

    A server is the program that its manifest names, which the owner accepted before anything of it is used. A published
    server that is not one of Kiwi's own is only as trusted as its publisher.
    """
    link = chain.links[at]
    is_served = chain.server is not None and chain.traits[at].defined_by == "server"
    if is_served and (not link.origin.is_published or _is_shipped(link)):
        return "builtin" if link.origin.is_built_in else "mcp_server"
    return author_of(link, recorded)


def author_of(link: Tool, recorded: Provenance | None) -> Provenance:
    """Return who wrote a link, by its signature and by the record of its content."""
    if link.origin.is_built_in:
        return "builtin"
    if link.origin.server:
        return "mcp_server"
    if _is_shipped(link):
        return "known_publisher"
    signed = _SIGNED.get(link.trust)
    if signed is not None and recorded in {None, "unknown"}:
        return signed
    return recorded or ("owner_written" if link.origin.is_in_user_space else "unknown")


def _author_in_chain(at: int, chain: Chain, recorded: Provenance | None) -> Provenance:
    return author_of(chain.links[at], recorded)


def _is_shipped(link: Tool) -> bool:
    """Whether a published link is exactly one that ships with Kiwi."""
    is_kiwis = link.origin.is_published and link.origin.namespace == BUILTIN_NAMESPACE
    return is_kiwis and f"sha256:{link.digest}" in shipped_digests()
