"""Sandboxed processes: each runs in the sandbox that its profile asks for, to its end or in a conversation.

Which backends work on this machine is tested once, when the first process needs one. A process that cannot be isolated
as asked is not run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import CERTIFICATE_VARIABLES, Level, SandboxProfile
from kiwi_mcp.domain.outcome import Outcome, Report
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.manifest.templates import escape
from kiwi_mcp.primitives import egress_proxy
from kiwi_mcp.primitives.http.addresses import HostRules
from kiwi_mcp.primitives.http.certificates import certificate_file
from kiwi_mcp.primitives.http.traffic_log import TrafficLog
from kiwi_mcp.primitives.process import run as subprocess
from kiwi_mcp.primitives.process import stdio_process
from kiwi_mcp.primitives.process.namespaces import owner_map
from kiwi_mcp.primitives.process.spawn import completed
from kiwi_mcp.sandbox.backend import BackendReport, Launch, NoSandbox, choose, examine, forget, policy_digest, recall
from kiwi_mcp.sandbox.bubblewrap import UNPRIVILEGED_ID, backends
from kiwi_mcp.sandbox.levels import base_profile, offers
from kiwi_mcp.sandbox.limits import quota
from kiwi_mcp.sandbox.process_setup import refuse_hosts, refuse_without_gate
from kiwi_mcp.sandbox.quarantine import Findings, NameWatch

_log = logging.getLogger("kiwi")
_MOST_DENIED = 3
_HOSTS = (
    "If the item is to reach it, name it in its manifest: `needs: {hosts: [name:port]}`; "
    "an address that is not public needs `hosts.allow` of the policy besides."
)
_found: dict[Path, tuple[BackendReport, ...]] = {}
_chosen: dict[tuple[Path, Level], tuple[tuple[BackendReport, ...], BackendReport]] = {}
"""The backend for each level, and what was found on this machine when it was chosen."""
_NO_TRAFFIC = TrafficLog()
"""The log of processes that have no proxy."""
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class Sandbox(Struct, frozen=True):
    """A sandbox profile, and the backend that enforces it on this machine."""

    profile: SandboxProfile
    backend_report: BackendReport
    state: Path
    watch: NameWatch | None
    """Finds settings of other programs that appear in the folders that its process may write to, if there are any."""
    traffic: TrafficLog = field(default_factory=TrafficLog)
    """What its processes sent and received, as far as they reach the network through the proxy."""
    certificates: str = ""
    """The file of certificates that its processes trust; empty if they reach no host."""
    scratch_watch: Callable[[], str] | None = None
    """Watches the size of the scratch folder, if there is one."""

    async def run(
        self,
        spec: ProcessSpec,
        *,
        secrets: Mapping[str, str],
        report: Report,
        confirm: Callable[[], None] | None = None,
        lent: tuple[int, ...] = (),
    ) -> subprocess.ProcessResult:
        """Run a process in the sandbox; if the sandbox failed, the process was not run, and that is raised.

        `confirm` is called immediately before it starts, and raises if it may not start any more. `lent` are
        descriptors that it is given besides.
        """
        spec = self._certified(spec) if self.certificates else spec
        async with AsyncExitStack() as keep:
            if self.watch is not None:
                await keep.enter_async_context(self._watched(NameWatch.end))
            if self.profile.hosts:
                confined = await keep.enter_async_context(self._confined(spec))
            else:
                confined = keep.enter_context(self.backend_report.backend.wrap(spec, self.profile))
            watch = self._watch_of(confined) if self.profile.writable or confined.watch else None
            handover = confined.handover
            if lent:
                handover = replace(handover, descriptors=(*handover.descriptors, *lent))
            result = await subprocess.run(
                confined.spec, secrets=secrets, report=report, handover=handover, watch=watch, confirm=confirm
            )
            try:
                confined.check(result)
            except IsolationUnavailable:
                self._test_again()
                raise
            return result

    def _test_again(self) -> None:
        """Let the backends be tested again before the next process starts."""
        _found.pop(self.state, None)
        forget(self.state)

    def _watch_of(self, confined: Launch) -> Callable[[], str] | None:
        """Return what watches a process: the quota of the folders that it writes to, and its memory."""
        folders = (*self.profile.writable, *(copy for _, copy in self.profile.git_copies))
        files = quota([folder for folder in folders if folder != self.profile.scratch], self.profile.limits)
        watches = [watch for watch in (confined.watch, files, self.scratch_watch) if watch]
        return (lambda: next(filter(None, (watch() for watch in watches)), "")) if watches else None

    @asynccontextmanager
    async def talking(
        self, spec: ProcessSpec, *, secrets: Mapping[str, str], longest_line: int
    ) -> AsyncIterator[tuple[stdio_process.StdioProcess, Callable[[], bool]]]:
        """Start a process to talk to, confined; that it never began is raised at the end.

        The function beside it says whether its sandbox still protects what it did at the start.
        """
        spec = self._certified(spec)
        async with self._watched(NameWatch.leave), self._confined(spec) as confined:
            process: stdio_process.StdioProcess | None = None
            try:
                async with stdio_process.open_stdio(
                    confined.spec,
                    secrets=secrets,
                    longest_line=longest_line,
                    handover=confined.handover,
                    watch=self._watch_of(confined),
                ) as process:
                    yield process, confined.is_whole
            finally:
                if process is not None:
                    try:
                        confined.check(process.ended())
                    except IsolationUnavailable:
                        self._test_again()
                        raise

    def tell(self, outcome: Outcome, asked: Level) -> Outcome:
        """Return the outcome with how its process was isolated, and what its manifests had asked for."""
        isolation = {
            "asked": asked,
            "used": self.profile.level,
            "backend": self.backend_report.backend.name,
            "limited_by": self.backend_report.backend.limited_by,
            "properties": sorted(self.backend_report.properties),
            "policy": policy_digest(self.profile),
            "provenance": self.profile.provenance,
        }
        network = {"network": self.traffic.to_json()} if self.traffic.is_kept else {}
        details = {**outcome.details, "isolation": isolation, **network}
        warnings = outcome.warnings
        if self.watch is not None:
            found = self.watch.take_news()
            warnings = (*warnings, *found.warnings())
            details |= found.to_json()
        suggestion = outcome.suggestion
        if not outcome.is_success and (denied := self.traffic.denials()):
            suggestion = f"The proxy denied {', '.join(denied[:_MOST_DENIED])}. {_HOSTS} {suggestion}".strip()
        return replace(outcome, details=details, suggestion=suggestion, warnings=warnings)

    def _certified(self, spec: ProcessSpec) -> ProcessSpec:
        """Return a process with the variables that name its certificates; what an installer was given stays."""
        named = dict.fromkeys(CERTIFICATE_VARIABLES, escape(self.certificates)) if self.certificates else {}
        return replace(spec, env={**named, **spec.env})

    @asynccontextmanager
    async def _confined(self, spec: ProcessSpec) -> AsyncIterator[Launch]:
        """Yield a process as it starts in its sandbox; open the resources that it needs for its lifetime."""
        with self.backend_report.backend.wrap(spec, self.profile) as confined:
            refuse_without_gate(self.profile, confined.handover, self.backend_report.backend.name)
            if (gate := confined.handover.gate) is None:
                yield confined
                return
            rules = HostRules(self.profile.hosts, self.profile.denied_hosts, self.profile.private_hosts)
            async with egress_proxy.serve_proxy(rules, gate, self.traffic):
                yield confined

    @asynccontextmanager
    async def _watched(self, end: Callable[[NameWatch], Findings]) -> AsyncIterator[None]:
        """Look for settings of other programs that a process leaves behind, however it ends.

        `end` does so, and returns what no result is going to name; if there is no result, that is everything.
        """
        if (watch := self.watch) is None:
            yield
            return
        await asyncio.to_thread(watch.begin)
        has_result, found = False, Findings()

        async def search() -> None:
            nonlocal found
            found = await asyncio.to_thread(end, watch)

        try:
            yield
            has_result = True
        finally:
            await completed(search())
            for warning in (found if has_result else found + watch.take_news()).warnings():
                _log.warning("%s", warning)


async def open_sandbox(profile: SandboxProfile, space: Space, folders: tuple[str, ...] = ()) -> Sandbox:
    """Return the sandbox that enforces a profile, with more readable folders; refuse one that cannot be enforced."""
    backend = await backend_for(profile, space)
    profile = _extended(profile, space, folders)
    watch = _watch(profile, space) if profile.writable else None
    if not profile.hosts:
        return Sandbox(profile, backend, space.cache, watch, _NO_TRAFFIC)
    certificates = certificate_file(space.user, space.cache)
    if certificates and not base_profile().covers(certificates):
        profile = replace(profile, readable=(*profile.readable, certificates))
    return Sandbox(profile, backend, space.cache, watch, TrafficLog(), certificates)


async def backend_for(profile: SandboxProfile, space: Space) -> BackendReport:
    """Return the backend that can enforce a profile here; refuse a profile that none can enforce."""
    if profile.hosts:
        refuse_hosts(profile)
    if profile.level == "trusted":
        # Nothing has to be tested to leave a process as it is.
        return _as_it_is()
    known = _chosen.get((space.cache, profile.level))
    if known is not None and known[0] is _found.get(space.cache):
        return known[1]
    try:
        found = await backend_reports(space)
        backend = choose(profile.level, found)
    except IsolationUnavailable:
        # What is missing may be installed while Kiwi runs.
        _found.pop(space.cache, None)
        raise
    _chosen[space.cache, profile.level] = (found, backend)
    return backend


def _watch(profile: SandboxProfile, space: Space) -> NameWatch | None:
    """Return what looks for settings of other programs in the folders that a sandboxed process may write to.

    Kiwi's own folders are left out: what is installed there brings settings that no other program reads.
    """
    if profile.level not in {"sandboxed", "restricted"}:
        return None
    (_, user), (cache, *_) = _around(space)
    watched = [path for path in profile.writable if not any(map(Path(path).is_relative_to, (user, cache)))]
    if not watched:
        return None
    return NameWatch(watched, space.user / "state" / "quarantine", skipped=(user, cache), projects=profile.closed)


@lru_cache(maxsize=256)
def _extended(profile: SandboxProfile, space: Space, folders: tuple[str, ...]) -> SandboxProfile:
    """Return a profile with more readable folders, and the folders that decide about files beside a program."""
    closed, trusted = _around(space)
    return replace(profile, readable=(*profile.readable, *folders), closed=closed, trusted=trusted)


@lru_cache(maxsize=64)
def _around(space: Space) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders where a program brings no files but itself, and those in them that Kiwi made or runs from."""
    closed = (os.path.realpath(space.project), os.path.realpath(space.user))
    return closed, tuple(os.path.realpath(own) for own in (space.cache, sys.prefix, sys.base_prefix))


@cache
def _as_it_is() -> BackendReport:
    backend = NoSandbox()
    return BackendReport(backend, offers()[backend.name].provides)


def check_level(level: Level, space: Space) -> str:
    """Refuse a level that is known to be out of reach here; return what limits its processes together, if it is known.

    Nothing is started to find out.
    """
    if level == "trusted" or (known := known_backend_reports(space)) is None:
        return ""
    return choose(level, known).backend.limited_by


async def backend_reports(space: Space) -> tuple[BackendReport, ...]:
    """Return the backends of this machine; the first time, tests find out what they can do."""
    state = space.cache
    if (found := _found.get(state)) is not None:
        return found
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if state not in _found:
            _found[state] = await examine(backends(owner_map=_owner_map()), state, _run)
        return _found[state]


def known_backend_reports(space: Space) -> tuple[BackendReport, ...] | None:
    """Return the backends of this machine, as they were tested before; None where they were not."""
    return _found.get(space.cache) or recall(backends(), space.cache)


async def _run(confined: Launch) -> subprocess.ProcessResult:
    return await subprocess.run(confined.spec, handover=confined.handover, watch=confined.watch)


@cache
def _owner_map() -> int | None:
    # Kept open for as long as this process lives: every sandbox that root starts needs it.
    return owner_map(UNPRIVILEGED_ID)
