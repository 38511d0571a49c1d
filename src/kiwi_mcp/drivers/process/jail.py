"""Jails of tools: what holds the process of a plan, with the folders that are made for it."""

from __future__ import annotations

from dataclasses import replace

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.isolation import Jail, strictest
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers.held import Hold, held_by
from kiwi_mcp.drivers.process.build import Build
from kiwi_mcp.drivers.process.environments import Environment


async def hold(plan: Plan, folders: tuple[str, ...], space: Space) -> Hold:
    """Return what will hold the process of a plan; refuse what nothing here can hold.

    `folders` are those with the files that run.
    """
    # A plan that does not say how its process is held gets the strictest jail.
    jail = plan.jail or Jail(strictest(()))
    return await held_by(replace(jail, readable=(*jail.readable, *folders, *_made_folders(plan))), space)


def _made_folders(plan: Plan) -> tuple[str, ...]:
    """Return the folders that are made for a plan: its dependencies, and what was compiled."""
    environment = Environment.from_json(as_object(plan.facts.get("environment")))
    build = Build.from_json(as_object(plan.facts.get("build")))
    return tuple(folder for folder in (environment.folder, build.folder) if folder)
