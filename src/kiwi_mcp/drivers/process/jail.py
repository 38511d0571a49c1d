"""Jails: what a tool's process is left with where its chain asks for that, and the run of a process so held.

What this machine can hold processes by is found out once, when the first tool asks for it. A process that cannot be
held as was asked is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Jail, Level, strictest
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.domain.outcome import Outcome, Report
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.process.build import Build
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.primitives import subprocess
from kiwi_mcp.primitives.user_namespace import owner_map
from kiwi_mcp.sandbox.bubblewrap import NOBODY
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.levels import in_order
from kiwi_mcp.sandbox.port import Confined
from kiwi_mcp.sandbox.standing import Standing, choose, examine, forget, policy_digest, recall

_found: dict[Path, tuple[Standing, ...]] = {}
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Hold:
    """A jail, and what holds it on this machine."""

    jail: Jail
    standing: Standing
    state: Path

    async def run(self, spec: ProcessSpec, *, secrets: Mapping[str, str], report: Report) -> subprocess.ProcessResult:
        """Run a process confined; where what should have held it failed, it was not run, and that is raised."""
        with self.standing.backend.wrap(spec, self.jail) as confined:
            result = await subprocess.run(confined.spec, secrets=secrets, report=report, handover=confined.handover)
            try:
                confined.check(result)
            except IsolationUnavailable:
                _forget(self.state)
                raise
            return result

    def tell(self, outcome: Outcome) -> Outcome:
        """Return the outcome with how its process was held."""
        held = {
            "level": self.jail.level,
            "backend": self.standing.backend.name,
            "properties": list(in_order(self.standing.properties)),
            "policy": policy_digest(self.jail),
        }
        return replace(outcome, details={**outcome.details, "isolation": held})


async def hold(plan: Plan, folders: tuple[str, ...], space: Space) -> Hold | None:
    """Return what will hold the process of a plan, None where nothing needs to; refuse what nothing here can hold.

    `folders` are those with the files that run.
    """
    # A plan that does not say how its process is held gets the strictest jail.
    jail = plan.jail or Jail(strictest(()))
    if jail.level == "trusted":
        return None
    state = _state(space)
    try:
        standing = choose(jail.level, await _examined(state))
    except IsolationUnavailable:
        # What is missing may be installed while Kiwi runs.
        _found.pop(state, None)
        raise
    return Hold(replace(jail, readable=(*jail.readable, *folders, *_made_folders(plan))), standing, state)


def check_level(level: Level, space: Space) -> None:
    """Refuse a level that is known to be out of reach here; nothing is started to find out."""
    if level != "trusted" and (known := known_standings(space)) is not None:
        choose(level, known)


async def standings(space: Space) -> tuple[Standing, ...]:
    """Return what this machine can hold processes by; the first time, tests on it find out."""
    return await _examined(_state(space))


def known_standings(space: Space) -> tuple[Standing, ...] | None:
    """Return what this machine can hold processes by, as it was found before; None where it was not tested yet."""
    return recall(backends(), _state(space))


def _made_folders(plan: Plan) -> tuple[str, ...]:
    """Return the folders that are made for a plan: its dependencies, and what was compiled."""
    environment = Environment.from_json(as_object(plan.facts.get("environment")))
    build = Build.from_json(as_object(plan.facts.get("build")))
    return tuple(folder for folder in (environment.folder, build.folder) if folder)


async def _examined(state: Path) -> tuple[Standing, ...]:
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if state not in _found:
            _found[state] = await examine(backends(owner_map=_owner_map()), state, _run)
        return _found[state]


async def _run(confined: Confined) -> subprocess.ProcessResult:
    return await subprocess.run(confined.spec, handover=confined.handover)


@cache
def _owner_map() -> int | None:
    # Kept open for as long as this process lives: every sandbox that root starts needs it.
    return owner_map(NOBODY)


def _forget(state: Path) -> None:
    _found.pop(state, None)
    forget(state)


def _state(space: Space) -> Path:
    return space.cache
