"""Confining: how the process of a plan is held, from where its chain comes from and what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import TypeAlias

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.isolation import Jail, Limits
from kiwi_mcp.domain.needs import Needs
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.policy.floors import Holding
from kiwi_mcp.policy.reaching import NOTHING, reach

Judge: TypeAlias = Callable[[Chain], Holding]
"""Says how strictly a chain is held."""
_OF_TOOLS = Limits()
_OF_SERVERS = Limits(memory_bytes=2_147_483_648, cpus=2.0, cpu_seconds=86_400, tmp_bytes=1_073_741_824)
"""A server answers many calls, for as long as it is used."""
_FRESH = 5.0
"""For how long what a server may see is taken to be what it was, in seconds: looking may mean going through folders."""
_jails: dict[tuple[object, ...], tuple[float, Jail]] = {}
_JAILS_KEPT = 256


def confine(plan: Plan, chain: Chain, space: Space, judge: Judge, rights: Rights) -> Plan:
    """Return the plan with the jail of its process written into it."""
    if not isinstance(plan.spec, ProcessSpec):
        return plan
    if plan.driver == "mcp":
        return replace(plan, jail=_kept(of_server(chain), space, judge, rights))
    return replace(plan, jail=jail_of(chain, space, judge, rights))


def of_server(chain: Chain) -> Chain:
    """Return the links of a chain that are its server's: what is asked of a server does not run in its process."""
    return Chain(chain.links[1:], chain.driver)


def _kept(server: Chain, space: Space, judge: Judge, rights: Rights) -> Jail:
    """Return the jail of a server that needs something, found out anew every few seconds: its process lives on."""
    if server.needs == Needs():
        return jail_of(server, space, judge, rights)
    said = tuple((one.read, one.write, one.hosts, one.commands, one.is_public) for one in rights.grants)
    key = (tuple((link.identity, link.digest) for link in server.links), judge(server).level, space, said)
    known = _jails.get(key)
    if known is None or monotonic() > known[0]:
        if len(_jails) >= _JAILS_KEPT:
            _jails.clear()
        known = _jails[key] = (monotonic() + _FRESH, jail_of(server, space, judge, rights))
    return known[1]


def jail_of(chain: Chain, space: Space, judge: Judge, rights: Rights) -> Jail:
    """Return how the process of a chain is held: as strictly as it is judged, with what it needs and may have."""
    held = judge(chain)
    limits = _OF_SERVERS if chain.driver == "mcp" else _OF_TOOLS
    jail, given = Jail(held.level, limits=limits, provenance=held.provenance), reach(chain.needs, rights, space)
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
