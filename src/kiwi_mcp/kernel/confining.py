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
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.seen import seen_by
from kiwi_mcp.kernel.watching import watched
from kiwi_mcp.policy.floors import Holding
from kiwi_mcp.policy.reaching import reach, seen

Judge: TypeAlias = Callable[[Chain], Holding]
"""Says how strictly a chain is held."""
_OF_TOOLS = Limits()
_OF_SERVERS = Limits(memory_bytes=2_147_483_648, cpus=2.0, cpu_seconds=86_400, tmp_bytes=1_073_741_824)
"""A server answers many calls, for as long as it is used."""
_FRESH = 5.0
"""For how long what a server may see is taken to be what it was, in seconds: looking may mean going through folders."""
_Held: TypeAlias = tuple[Jail, tuple[str, ...]]
"""A jail, and what there is to say about what it gives."""
_jails: dict[tuple[object, ...], tuple[float, _Held]] = {}
_JAILS_KEPT = 256
_OWNERS = ("user", "builtin")
"""Where what a manifest says is the owner's word, or Kiwi's."""


def confine(plan: Plan, chain: Chain, space: Space, judge: Judge, rights: Rights, *, is_meant: bool = False) -> Plan:
    """Return the plan with the jail of its process written into it; `is_meant` is of a server that was accepted."""
    if not isinstance(plan.spec, ProcessSpec):
        return plan
    if plan.driver == "mcp":
        jail, warnings = _kept(of_server(chain), plan.spec, space, judge, rights, is_meant=is_meant)
    else:
        jail, warnings = _held(chain, space, judge, rights)
    # What runs and is in no digest of an item is part of the plan, so that a word about the plan is about it too.
    code = {"code": dict(beside)} if (beside := watched(chain)) else {}
    return replace(plan, jail=jail, warnings=(*plan.warnings, *warnings), facts={**plan.facts, **code})


def of_server(chain: Chain) -> Chain:
    """Return the links of a chain that are its server's: what is asked of a server does not run in its process."""
    return Chain(chain.links[1:], chain.driver, project=chain.project)


def jail_of_server(
    server: Chain, spec: ProcessSpec, space: Space, judge: Judge, rights: Rights, *, is_meant: bool
) -> Jail:
    """Return how the process of a server is held."""
    return _kept(server, spec, space, judge, rights, is_meant=is_meant)[0]


def _kept(server: Chain, spec: ProcessSpec, space: Space, judge: Judge, rights: Rights, *, is_meant: bool) -> _Held:
    """Return the jail of a server, found out anew every few seconds: its process lives on."""
    said = tuple((one.read, one.write, one.hosts, one.commands, one.is_public) for one in rights.grants)
    links, held = tuple((link.identity, link.digest) for link in server.links), judge(server)
    key = (links, spec.argv, spec.cwd, spec.env.get("PATH"), held.level, held.provenance, space, said, is_meant)
    known = _jails.get(key)
    if known is None or monotonic() > known[0]:
        if len(_jails) >= _JAILS_KEPT:
            _jails.clear()
        jail, warnings = _held(server, space, judge, rights)
        jail, more = seeing(jail, server.tool, spec, space, rights, is_meant=is_meant)
        known = _jails[key] = (monotonic() + _FRESH, (jail, (*warnings, *more)))
    return known[1]


def seeing(
    jail: Jail, server: Tool, spec: ProcessSpec, space: Space, rights: Rights, *, is_meant: bool = False
) -> _Held:
    """Return the jail of a server with what its command names: what is given is in the plan, and asked about."""
    if jail.level in {"trusted", "standard"}:  # it sees what its owner sees
        return jail, ()
    config = server.manifest.config
    has_folder, is_placed = bool(config.get("cwd")), "/" in as_text(config.get("command"))
    found = seen_by(spec, has_folder=has_folder, is_placed=is_placed)
    is_owners = is_meant or server.origin.source in _OWNERS
    given = seen(found.named, found.programs, jail, rights, space, is_owners=is_owners)
    readable, hidden = (*jail.readable, *given.readable), (*jail.hidden, *given.hidden)
    return replace(jail, readable=readable, hidden=hidden), given.warnings


def _held(chain: Chain, space: Space, judge: Judge, rights: Rights) -> _Held:
    """Return how the process of a chain is held: as strictly as it is judged, with what it needs and may have."""
    held = judge(chain)
    limits = _OF_SERVERS if chain.driver == "mcp" else _OF_TOOLS
    jail, given = Jail(held.level, limits=limits, provenance=held.provenance), reach(chain.needs, rights, space)
    if held.level == "trusted":
        return jail, ()
    jail = replace(
        jail,
        readable=given.readable,
        writable=given.writable,
        hidden=given.hidden,
        hosts=given.hosts,
        denied_hosts=given.denied_hosts,
        private_hosts=given.private_hosts,
    )
    return jail, given.warnings
