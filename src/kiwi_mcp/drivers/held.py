"""Held processes: what a process is left with where it is confined, its run to the end, or its talk while it lives.

What this machine can hold processes by is found out once, when the first process asks for it. A process that cannot be
held as was asked is not run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from weakref import WeakKeyDictionary

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Gate, Jail, Level
from kiwi_mcp.domain.outcome import Outcome, Report
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives import peer, subprocess
from kiwi_mcp.primitives.addresses import HostRules
from kiwi_mcp.primitives.egress_record import Ledger
from kiwi_mcp.primitives.user_namespace import owner_map
from kiwi_mcp.sandbox.bubblewrap import NOBODY
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.levels import in_order, offers
from kiwi_mcp.sandbox.none import Unconfined
from kiwi_mcp.sandbox.port import Confined
from kiwi_mcp.sandbox.proxied import refuse_hosts, refuse_without_gate
from kiwi_mcp.sandbox.quota import quota
from kiwi_mcp.sandbox.standing import Standing, choose, examine, forget, policy_digest, recall

_MOST_TOLD = 3
_HOSTS = (
    "If the item is to reach it, name it in its manifest: `needs: {hosts: [name:port]}`; "
    "an address that is not public needs `hosts.allow` of the policy besides."
)
_found: dict[Path, tuple[Standing, ...]] = {}
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Hold:
    """A jail, and what holds it on this machine."""

    jail: Jail
    standing: Standing
    state: Path
    left: Ledger = field(default_factory=Ledger)
    """What its processes sent and received, as far as they reach the network through the proxy."""

    async def run(self, spec: ProcessSpec, *, secrets: Mapping[str, str], report: Report) -> subprocess.ProcessResult:
        """Run a process confined; where what should have held it failed, it was not run, and that is raised."""
        async with self._confined(spec) as confined:
            result = await subprocess.run(
                confined.spec,
                secrets=secrets,
                report=report,
                handover=confined.handover,
                watch=quota(self.jail.writable, self.jail.limits),
            )
            self._check(confined, result)
            return result

    @asynccontextmanager
    async def talking(
        self, spec: ProcessSpec, *, secrets: Mapping[str, str], longest_line: int
    ) -> AsyncIterator[peer.Peer]:
        """Start a process to talk to, confined, as `peer.talking` does; that it never began is raised at the end."""
        async with self._confined(spec) as confined:
            process: peer.Peer | None = None
            try:
                async with peer.talking(
                    confined.spec,
                    secrets=secrets,
                    longest_line=longest_line,
                    handover=confined.handover,
                    watch=quota(self.jail.writable, self.jail.limits),
                ) as process:
                    yield process
            finally:
                if process is not None:
                    self._check(confined, process.ended())

    def tell(self, outcome: Outcome, asked: Level) -> Outcome:
        """Return the outcome with how its process was held, and what its manifests had asked for."""
        held = {
            "asked": asked,
            "used": self.jail.level,
            "backend": self.standing.backend.name,
            "properties": list(in_order(self.standing.properties)),
            "policy": policy_digest(self.jail),
            "provenance": self.jail.provenance,
        }
        network = {"network": self.left.to_json()} if self.left.is_kept else {}
        details = {**outcome.details, "isolation": held, **network}
        return replace(outcome, details=details, suggestion=self._advice(outcome))

    def _advice(self, outcome: Outcome) -> str:
        """Return what to do about an outcome: where it failed and hosts were denied to it, that comes first."""
        denied = () if outcome.is_success else self.left.denials()
        if not denied:
            return outcome.suggestion
        told = f"The proxy denied {', '.join(denied[:_MOST_TOLD])}. {_HOSTS}"
        return f"{told} {outcome.suggestion}".strip()

    @asynccontextmanager
    async def _confined(self, spec: ProcessSpec) -> AsyncIterator[Confined]:
        """Give a process as it is started, confined: what lasts as long as the process does is opened here."""
        with self.standing.backend.wrap(spec, self.jail) as confined:
            refuse_without_gate(self.jail, confined.handover, self.standing.backend.name)
            if (gate := confined.handover.gate) is None:
                yield confined
                return
            rules = HostRules(self.jail.hosts, self.jail.denied_hosts, self.jail.private_hosts)
            # The proxy is loaded by the first process that has one.
            egress: Callable[[HostRules, Gate, Ledger], AbstractAsyncContextManager[None]]
            egress = import_module("kiwi_mcp.primitives.egress").egress
            async with egress(rules, gate, self.left):
                yield confined

    def _check(self, confined: Confined, ended: subprocess.ProcessResult | peer.Ended) -> None:
        try:
            confined.check(ended)
        except IsolationUnavailable:
            _forget(self.state)
            raise


async def held_by(jail: Jail, space: Space) -> Hold:
    """Return what will hold a process in a jail; refuse what nothing here can hold."""
    refuse_hosts(jail)
    state = _state(space)
    closed, trusted = _around(space)
    jail = replace(jail, closed=closed, trusted=trusted)
    if jail.level == "trusted":
        # Nothing has to be tested to leave a process as it is.
        return Hold(jail, _as_it_is(), state)
    try:
        standing = choose(jail.level, await _examined(state))
    except IsolationUnavailable:
        # What is missing may be installed while Kiwi runs.
        _found.pop(state, None)
        raise
    return Hold(jail, standing, state)


@lru_cache(maxsize=64)
def _around(space: Space) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders whose programs bring nothing of them, and those below them that Kiwi made or runs from."""
    closed = (os.path.realpath(space.project), os.path.realpath(space.user))
    return closed, tuple(os.path.realpath(own) for own in (space.cache, sys.prefix, sys.base_prefix))


@cache
def _as_it_is() -> Standing:
    backend = Unconfined()
    return Standing(backend, offers()[backend.name].provides)


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
