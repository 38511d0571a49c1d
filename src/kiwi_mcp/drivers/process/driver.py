"""Prepare files, packages, build; run; outcome."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import IsolationUnavailable, Unavailable
from kiwi_mcp.domain.isolation import SandboxProfile, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Report
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.driver import Dispatch, SyntaxCheck
from kiwi_mcp.drivers.environments.environment import Environment
from kiwi_mcp.drivers.environments.installer import Installer, install_level
from kiwi_mcp.drivers.environments.package_manager import PackageManager
from kiwi_mcp.drivers.process.plan import Frame, bind_process, frame_of
from kiwi_mcp.drivers.process.result import Hearing, with_needs
from kiwi_mcp.drivers.process.snapshot import have_snapshot
from kiwi_mcp.drivers.process.toolchain import Build, check_syntax, make_build, plan_check
from kiwi_mcp.drivers.sandboxed import Sandbox, backend_for, open_sandbox
from kiwi_mcp.policy.isolation import with_remedy

_NO_PACKAGES = Environment()


async def hold(plan: Plan, folders: tuple[str, ...], space: Space) -> Sandbox:
    """Return what will hold the process of a plan; refuse what nothing here can hold.

    `folders` are those with the files that run.
    """
    # A plan without a sandbox profile gets the strictest one.
    profile = plan.profile or SandboxProfile(strictest(()))
    # The folders that are made for the plan: its dependencies, and what was compiled.
    if "environment" in plan.facts:
        folders = (*folders, Environment.from_json(as_object(plan.facts["environment"])).folder)
    if "build" in plan.facts:
        folders = (*folders, Build.from_json(as_object(plan.facts["build"])).folder)
    return await open_sandbox(profile, space, tuple(filter(None, folders)))


class Process:
    """Runs a tool's files by its runtime's words, as one process."""

    def check(self, chain: Chain, space: Space) -> SyntaxCheck | None:
        """Return the check of the entrypoint's syntax by the runtime's own command."""
        if (plan := plan_check(chain, space)) is None:
            return None

        async def run() -> tuple[Issue, ...]:
            try:
                return await check_syntax(plan, chain, space)
            except OSError as fault:
                raise _unwritable(space, fault) from fault

        return SyntaxCheck(plan, run)

    async def aclose(self) -> None:
        """Release nothing: nothing is kept between calls."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan the process."""
        return bind_process(chain, inputs, space)

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Refuse a level of isolation that this machine does not have."""
        profile = plan.profile or SandboxProfile(strictest(()))
        try:
            await backend_for(profile, space)
        except IsolationUnavailable as refused:
            raise with_remedy(refused, profile.provenance, chain.tool) from None

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Have what holds the process, the files, the dependencies and the build the plan names; then run it."""
        assert isinstance(plan.spec, ProcessSpec)  # noqa: S101 - bind above makes no other
        frame = frame_of(chain, space)
        held = await self._isolated(plan, frame)
        try:
            homes = await _prepare(plan, frame, caller.report)
        except OSError as fault:
            raise _unwritable(space, fault) from fault
        result = await held.run(plan.spec, secrets=secrets, report=caller.report)
        outcome = Hearing(chain.tool.id, as_text(plan.facts.get("result_from")), homes, plan.spec).outcome(result)
        return held.tell(with_needs(outcome, held.profile.level), frame.asked)

    async def _isolated(self, plan: Plan, frame: Frame) -> Sandbox:
        try:
            return await hold(plan, (frame.facts["tool.files"], frame.facts["runtime.files"]), frame.space)
        except IsolationUnavailable as refused:
            raise with_remedy(
                refused, plan.profile.provenance if plan.profile else "unknown", frame.chain.tool
            ) from None


async def _prepare(plan: Plan, frame: Frame, report: Report) -> Mapping[str, str]:
    """Make what the plan needs, and return where each folder the process sees has its author's files."""
    chain, space, facts = frame.chain, frame.space, frame.facts
    environment, held = _NO_PACKAGES, plan.profile.level if plan.profile else strictest(())
    manager = frame.words.manager
    if "environment" in plan.facts and manager:
        environment = Environment.from_json(as_object(plan.facts["environment"]))
        installer = Installer(space, install_level(held), report)
        if not manager.is_shipped:
            # Its commands are those of the runtime's author: they run at its level, with its provenance.
            assert plan.profile is not None  # noqa: S101 - the plan of a process has one
            installer = Installer(space, plan.profile.level, report, plan.profile.provenance, is_shipped=False)
        await PackageManager(manager, chain.executor).make(environment, chain.tool, installer)
    tool_files, runtime_files = facts["tool.files"], facts["runtime.files"]
    have_snapshot(chain.tool, tool_files, linked=environment.linked)
    have_snapshot(chain.executor, runtime_files)
    if "build" in plan.facts:
        build = as_object(plan.facts["build"])
        seen = (facts["tool.files"], facts["runtime.files"], *filter(None, [environment.folder]))
        profile = SandboxProfile(install_level(held), readable=seen)
        await make_build(Build.from_json(build), profile, space, report)
    return {tool_files: str(chain.tool.origin.root), runtime_files: str(chain.executor.origin.root)}


def _unwritable(space: Space, fault: OSError) -> Unavailable:
    return Unavailable(
        f"Kiwi cannot keep what the tool needs in {str(space.cache)!r}: {fault.strerror or fault}.",
        suggestion="Make the folder writable, free space on its disk, or choose another cache folder.",
    )
