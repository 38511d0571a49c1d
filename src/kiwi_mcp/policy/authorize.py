"""The gates between a plan and the world: integrity, then permission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import IntegrityMismatch, InvalidManifest, LockMismatch, SignatureRefused
from kiwi_mcp.domain.grants import Allow, Deny, Kind, Rights, Verdict
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.primitives.bounds import PORTS


def verify(chain: Chain, changes: Sequence[str], *, is_frozen: bool) -> tuple[str, ...]:
    """Refuse a chain with a link that was changed after signing, or is not sound; return what to tell the owner.

    `changes` are the differences from the lockfile: warnings by default, a refusal where the caller froze it. So is
    a chain that is not the one its tool was published on.
    """
    for link in chain.links:
        if link.integrity == "modified":
            expected = link.signature.hash if link.signature else ""
            raise IntegrityMismatch(link.id, expected=expected, actual=link.digest, where=str(link.origin.path))
        if link.trust == "tampered":
            raise SignatureRefused(
                f"The signature of {link.id!r} is not by the key that it names ({link.origin.path}).",
                suggestion="Take it from its publisher again; if it is yours, sign it again.",
                tool_id=link.id,
                signer=link.signer,
            )
    if chain.faults:
        raise InvalidManifest(chain.tool.id, chain.faults)
    if is_frozen and (changes or chain.drift):
        raise LockMismatch(chain.tool.id, [*changes, *chain.drift])
    revoked = (
        f"{link.identity} is signed with {link.signer}, a key that is revoked or has expired"
        for link in chain.links
        if link.trust == "revoked"
    )
    return (*revoked, *(f"lockfile: {change}" for change in changes), *chain.drift, *chain.notes, *chain.shadowed)


def permit(plan: Plan, rights: Rights) -> Plan:
    """Return the plan with the hosts that the owner grants and denies written into it."""
    if isinstance(plan.spec, HttpSpec):
        hosts, spec = rights.hosts, plan.spec
        # Whoever has a list of hosts is led to no other: where a redirect goes is not known before.
        redirects = spec.max_redirects if all(grant.is_public for grant in rights.grants) else 0
        return replace(plan, spec=replace(spec, granted=hosts.allow, denied=hosts.deny, max_redirects=redirects))
    return plan


def authorize(plan: Plan, rights: Rights) -> Verdict:
    """Return whether the rights cover the plan, and by which rule not."""
    verdict = rights.item_verdict([plan.identity, *(link for link, _ in plan.chain)])
    if isinstance(verdict, Deny):
        return verdict
    for kind, resource in uses(plan):
        verdict = rights.verdict(kind, resource)
        if isinstance(verdict, Deny):
            return verdict
    return Allow()


def uses(plan: Plan) -> Iterator[tuple[Kind, str]]:
    """Give what a plan uses besides its items: the host that it calls, the program that it starts, its variables."""
    match plan.spec:
        case HttpSpec(url=url):
            yield "host", _target(url)
        case ProcessSpec(argv=(program, *_)):
            yield "command", PurePosixPath(program).name
    for name in plan.variables:
        yield "variable", name


@lru_cache(maxsize=256)
def _target(url: str) -> str:
    target = urlsplit(url)
    host = target.hostname or ""
    try:
        port = target.port or PORTS.get(target.scheme, 0)
    except ValueError:  # no port is refused by the primitive, in its own words
        port = 0
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
