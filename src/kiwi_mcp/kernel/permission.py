"""What the rules say about items before they run, and what servers may use because their owner accepted them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Deny, Grant, Rights, Rules, Verdict
from kiwi_mcp.domain.items import Needs, Tool
from kiwi_mcp.domain.mcp import Offers
from kiwi_mcp.policy.policy_files import rights_of

_EVERY = Grant().items
"""The rules about items where none are written."""


def all_of(server: str) -> str:
    """Return the name that represents all items of a server in rules about names."""
    return f"mcp/{server}/*@*"


def one_of(server: str, tool_id: str) -> str:
    """Return the name of an item of a server, with any version."""
    return f"mcp/{server}/{tool_id}@*"


def all_in(namespace: str) -> str:
    """Return the name that represents all published items of a namespace."""
    return f"registry/{namespace}/*@*"


def _reason(verdict: Verdict) -> str:
    return verdict.reason if isinstance(verdict, Deny) else ""


class ItemVisibility:
    """What the current rules say about the items of one catalog; the default rules are the owner's."""

    def __init__(self, catalog: Catalog, rights: Callable[[], Rights] | None = None) -> None:
        self._catalog = catalog
        self._rights = Rights()
        self.fault: KiwiError | None = None
        """Why the rules cannot be read; then nothing runs, and nothing is permitted."""
        try:
            self._rights = rights() if rights is not None else rights_of(catalog.space.user)
        except KiwiError as fault:
            self.fault = fault
        grants = self._rights.grants
        self._is_open = not self.fault and all(grant.items == _EVERY and not grant.hidden for grant in grants)
        # A rule on something below an item counts too, and what that is takes opening the item.
        self._is_deep = any(grant.items.deny or grant.is_whole for grant in grants)
        self._names_traits = any(grant.traits.allow or grant.traits.deny for grant in grants)
        self._hiding = [grant for grant in grants if grant.is_secretive or grant.is_whole]

    @property
    def hides(self) -> bool:
        """Whether some items may be hidden."""
        return bool(self._hiding)

    def is_hidden(self, identity: str) -> bool:
        """Whether an item is hidden: it is not on a list that limits the caller, or this machine, to what it names."""
        return any(isinstance(grant.verdict("item", identity), Deny) for grant in self._hiding)

    def seen(self, offers: Offers) -> Offers:
        """Return the part of the offers that the caller may know of."""
        tools, prompts, resources, templates = (
            tuple(one for one in some if not one.identity or not (self.fault or self.is_hidden(one.identity)))
            for some in (offers.tools, offers.prompts, offers.resources, offers.templates)
        )
        named = replace(offers, servers=(), namespaces=()) if self.fault else offers
        return replace(
            offers,
            tools=tools,
            prompts=prompts,
            resources=resources,
            templates=templates,
            servers=tuple(name for name in named.servers if not self.is_hidden(all_of(name))),
            namespaces=tuple(name for name in named.namespaces if not self.is_hidden(all_in(name))),
        )

    def is_server_hidden(self, server: Tool) -> bool:
        """Whether a server is hidden: its own item, and its items as a whole."""
        return self.is_hidden(server.identity) and self.is_hidden(all_of(server.id))

    def refusal(self, identity: str) -> str:
        """Return why an item may not run; empty where it may, as far as the rules about items go."""
        if self._is_open:
            return ""
        if not self._names_traits and ((reason := self.refusal_of([identity])) or not self._is_deep):
            return reason
        try:
            chain = self._catalog.resolve(identity)
        except KiwiError:  # it will not run for another reason, which the call itself reports
            return self.refusal_of([identity])
        links = [link.identity for link in chain.links]
        if self._names_traits:
            return _reason(self._rights.item_verdict(links, chain.item_traits))
        return self.refusal_of(links)

    def refusal_of(self, identities: Sequence[str]) -> str:
        """Return why an item may not run, given the identities of its chain, its own first."""
        if self.fault:
            return self.fault.message
        return _reason(self._rights.item_verdict(identities))


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


def _with(rules: Rules, meant: Sequence[str]) -> Rules:
    added = tuple(text for text in dict.fromkeys(meant) if text not in rules.allow)
    return replace(rules, allow=(*rules.allow, *added)) if added else rules
