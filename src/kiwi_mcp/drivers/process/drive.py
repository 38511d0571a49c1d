"""From one process to an outcome: prepare what it needs, run it, hear what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import IsolationUnavailable, Unavailable
from kiwi_mcp.domain.isolation import Jail, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Report
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.process.bind import KINDS, bind_process, frame_of
from kiwi_mcp.drivers.process.build import Build, make_build
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.process.environments.install import Installer, install_level
from kiwi_mcp.drivers.process.jail import hold
from kiwi_mcp.drivers.process.result import Hearing, with_needs
from kiwi_mcp.drivers.process.snapshot import have_snapshot
from kiwi_mcp.drivers.process.syntax import check_syntax
from kiwi_mcp.policy.floors import with_remedy


class Process:
    """Runs a tool's files by its runtime's words, as one process."""

    async def check(self, chain: Chain, space: Space) -> tuple[Issue, ...]:
        """Judge the entrypoint's syntax by the runtime's own words."""
        try:
            return await check_syntax(chain, space)
        except OSError as fault:
            raise _unwritable(space, fault) from fault

    async def aclose(self) -> None:
        """Let go of nothing: nothing is kept between calls."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan the process."""
        return bind_process(chain, inputs, space)

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller
    ) -> Outcome:
        """Have what holds the process, the files, the dependencies and the build the plan names; then run it."""
        assert isinstance(plan.spec, ProcessSpec)  # noqa: S101 - bind above makes no other
        facts = frame_of(chain, space).facts
        try:
            held = await hold(plan, (facts["tool.files"], facts["runtime.files"]), space)
        except IsolationUnavailable as refused:
            raise with_remedy(refused, plan.jail.provenance if plan.jail else "unknown", chain.tool) from None
        try:
            homes = await _prepare(plan, chain, space, caller.report)
        except OSError as fault:
            raise _unwritable(space, fault) from fault
        result = await held.run(plan.spec, secrets=secrets, report=caller.report)
        outcome = Hearing(chain.tool.id, as_text(plan.facts.get("result_from")), homes, plan.spec).outcome(result)
        return held.tell(with_needs(outcome, held.jail.level), chain.isolation)


async def _prepare(plan: Plan, chain: Chain, space: Space, report: Report) -> Mapping[str, str]:
    """Make what the plan needs, and return where each folder the process sees has its author's files."""
    environment = Environment.from_json(as_object(plan.facts.get("environment")))
    level = install_level(plan.jail.level if plan.jail else strictest(()))
    if environment.kind:
        await KINDS[environment.kind].make(environment, chain.tool, Installer(space, level, report))
    facts = frame_of(chain, space).facts
    tool_files, runtime_files = Path(facts["tool.files"]), Path(facts["runtime.files"])
    have_snapshot(chain.tool, tool_files, linked=environment.linked)
    have_snapshot(chain.executor, runtime_files)
    if build := as_object(plan.facts.get("build")):
        seen = (facts["tool.files"], facts["runtime.files"], *filter(None, [environment.folder]))
        await make_build(Build.from_json(build), Jail(level, readable=seen), space, report)
    return {str(tool_files): str(chain.tool.origin.root), str(runtime_files): str(chain.executor.origin.root)}


def _unwritable(space: Space, fault: OSError) -> Unavailable:
    return Unavailable(
        f"Kiwi cannot keep what the tool needs in {str(space.cache)!r}: {fault.strerror or fault}.",
        suggestion="Make the folder writable, free space on its disk, or choose another cache folder.",
    )
