"""The gates between a plan and the world: integrity, then permission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from urllib.parse import urlsplit

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidManifest, LockMismatch
from kiwi_mcp.domain.grants import Allow, Deny, Grant, Rules, Verdict
from kiwi_mcp.domain.plan import HttpSpec, Plan


def verify(chain: Chain, changes: Sequence[str], *, is_frozen: bool) -> tuple[str, ...]:
    """Refuse a chain with a link that was changed after signing, or is not sound; return what to tell the owner.

    `changes` are the differences from the lockfile: warnings by default, a refusal where the caller froze it. So is
    a chain that is not the one its tool was published on.
    """
    for link in chain.links:
        if link.integrity == "modified":
            expected = link.signature.hash if link.signature else ""
            raise IntegrityMismatch(link.id, expected=expected, actual=link.digest, where=str(link.origin.path))
    if chain.faults:
        raise InvalidManifest(chain.tool.id, chain.faults)
    if is_frozen and (changes or chain.drift):
        raise LockMismatch(chain.tool.id, [*changes, *chain.drift])
    return (*(f"lockfile: {change}" for change in changes), *chain.drift, *chain.notes, *chain.shadowed)


def permit(plan: Plan, grant: Grant) -> Plan:
    """Return the plan with the hosts that the owner grants and denies written into it."""
    if isinstance(plan.spec, HttpSpec):
        return replace(plan, spec=replace(plan.spec, granted=grant.hosts.allow, denied=grant.hosts.deny))
    return plan


def authorize(plan: Plan, grant: Grant) -> Verdict:
    """Return whether the grant covers the plan, and by which rule not."""
    denied = _refusing_rule(grant.items, plan.identity, plan.chain)
    if denied is not None:
        return Deny(_why("item", *denied), denied[1])
    if isinstance(plan.spec, HttpSpec):
        host = urlsplit(plan.spec.url).hostname or ""
        # Public hosts need no rule, so only a rule that denies counts here; the rest is the primitive's address check.
        if refused := grant.hosts.match(host):
            return Deny(_why("host", host, refused), refused)
    return Allow()


def refusing_rule(grant: Grant, identities: Sequence[str]) -> tuple[str, str] | None:
    """Return the item of a chain that a rule refuses, and the rule; empty where no rule allows the first.

    A rule that denies an item denies all that stands on it; what was asked for is all that needs to be allowed.
    """
    return _refused(grant.items, identities)


@lru_cache(maxsize=1_024)
def _refusing_rule(rules: Rules, identity: str, chain: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    # The same rules refuse the same items, so that each chain is held against them once.
    return _refused(rules, [identity, *(link for link, _ in chain)])


def _refused(rules: Rules, identities: Sequence[str]) -> tuple[str, str] | None:
    for place, identity in enumerate(identities):
        rule = rules.match(identity)
        if rule or (rule is not None and place == 0):
            return identity, rule
    return None


def _why(kind: str, name: str, rule: str) -> str:
    return f"the {kind} {name!r} is denied by the rule {rule!r}" if rule else f"no rule allows the {kind} {name!r}"
