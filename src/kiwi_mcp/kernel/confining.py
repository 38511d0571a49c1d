"""Confining: how the process of a plan is held, from what its chain asks for."""

from __future__ import annotations

from dataclasses import replace

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import Plan, ProcessSpec


def confine(plan: Plan, chain: Chain) -> Plan:
    """Return the plan with the jail of its process written into it."""
    if plan.driver != "process" or not isinstance(plan.spec, ProcessSpec):
        return plan
    return replace(plan, jail=Jail(chain.isolation))
