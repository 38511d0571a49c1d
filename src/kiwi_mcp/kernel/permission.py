"""Permission, told before anybody tries: whether the owner's policy lets an item run."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.policy.authorize import refusing_rule
from kiwi_mcp.policy.owner import owner_policy


class Permission:
    """What the policy says of the items of one catalog, as it stands now."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._grant = Grant()
        self.fault: KiwiError | None = None
        """Why the policy cannot be read; then nothing runs, and nothing is permitted."""
        try:
            self._grant = owner_policy(catalog.space.user).grant
        except KiwiError as fault:
            self.fault = fault

    def refusal(self, identity: str) -> str:
        """Return why an item may not run; empty where it may, as far as the rules about items go."""
        if self.fault or self._grant.items == Grant().items:
            return self.fault.message if self.fault else ""
        # A rule on something below it counts too, and what that is takes opening the item.
        return self.refusal_of([identity]) or (self.refusal_of(self._chain(identity)) if self._grant.items.deny else "")

    def refusal_of(self, identities: Sequence[str]) -> str:
        """Return why an item may not run, given what it stands on, itself first."""
        if self.fault:
            return self.fault.message
        denied = refusing_rule(self._grant, identities)
        if denied is None:
            return ""
        name, rule = denied
        return f"the owner's rule {rule!r} denies {name}" if rule else f"no rule of the owner's allows {name}"

    def _chain(self, identity: str) -> Sequence[str]:
        try:
            return [link.identity for link in self._catalog.resolve(identity).links]
        except KiwiError:  # it will not run for another reason, which whoever tries is told
            return [identity]
