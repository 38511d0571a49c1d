"""Confining: how the process of a plan is held, from where its chain comes from and what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.policy.floors import Holding
from kiwi_mcp.policy.reaching import NOTHING, reach

Judge: TypeAlias = Callable[[Chain], Holding]
"""Says how strictly a chain is held."""


def confine(plan: Plan, chain: Chain, space: Space, judge: Judge, rights: Rights) -> Plan:
    """Return the plan with the jail of its process written into it."""
    if not isinstance(plan.spec, ProcessSpec):
        return plan
    return replace(plan, jail=jail_of(of_server(chain) if plan.driver == "mcp" else chain, space, judge, rights))


def of_server(chain: Chain) -> Chain:
    """Return the links of a chain that are its server's: what is asked of a server does not run in its process."""
    return Chain(chain.links[1:], chain.driver)


def jail_of(chain: Chain, space: Space, judge: Judge, rights: Rights) -> Jail:
    """Return how the process of a chain is held: as strictly as it is judged, with what it needs and may have."""
    held = judge(chain)
    jail, given = Jail(held.level, provenance=held.provenance), reach(chain.needs, rights, space)
    if held.level == "trusted" or given == NOTHING:
        return jail
    return replace(
        jail,
        readable=given.readable,
        writable=given.writable,
        hidden=given.hidden,
        hosts=given.hosts,
        denied_hosts=given.denied_hosts,
        private_hosts=given.private_hosts,
    )
