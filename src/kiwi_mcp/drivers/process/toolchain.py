"""Compile, and check syntax, by the runtime's own commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import BuildFailed
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.environments.build_cache import make_once
from kiwi_mcp.drivers.environments.environment import Environment, base_env
from kiwi_mcp.drivers.environments.package_manager import PackageManager
from kiwi_mcp.drivers.process.placeholders import ENTRYPOINT, check_words, facts_of, fill
from kiwi_mcp.drivers.process.snapshot import take_snapshot
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.manifest.runtime import RuntimeConfig, runtime_config, texts
from kiwi_mcp.manifest.templates import escape, placeholders
from kiwi_mcp.primitives.process import run
from kiwi_mcp.primitives.process.spawn import find_program, search_path

_BUILD_TIMEOUT = 600.0
_LAST_LINES = 30


class Build(Struct, frozen=True):
    """One run of a compiler in the folder it builds in."""

    tool_id: str
    argv: tuple[str, ...]
    folder: str
    env: Mapping[str, str]

    def to_json(self) -> JsonObject:
        """Return what a plan says about it."""
        return {"tool_id": self.tool_id, "argv": list(self.argv), "folder": self.folder, "env": self.env}

    @classmethod
    def from_json(cls, fact: JsonObject) -> Build:
        """Return the build that a plan names."""
        env = {name: as_text(value) for name, value in as_object(fact.get("env")).items()}
        return cls(as_text(fact.get("tool_id")), texts(fact.get("argv")), as_text(fact.get("folder")), env)


def bind_build(
    words: RuntimeConfig, facts: Mapping[str, str], environment: Environment, env: Mapping[str, str]
) -> Build:
    """Return the compiler run; a command that names no files gets them the way most compilers expect."""
    template = words.compile if placeholders(list(words.compile)) else (*words.compile, "-o", "{binary}", ENTRYPOINT)
    program, *arguments = fill(template, facts)
    argv = (_program(program, words, environment), *arguments)
    return Build(facts["tool.id"], argv, facts["build"], env)


def _program(command: str, words: RuntimeConfig, environment: Environment) -> str:
    """Return where a program is now: in the environment, or on this machine."""
    return environment.programs.get(command) or find_program(
        command, search_path(environment.bin), needed_by=words.runtime_id, shell=words.shell, install=words.install
    )


async def make_build(build: Build, profile: SandboxProfile, space: Space, report: Report) -> None:
    """Build the program unless it exists, with a compiler that writes only its folder and has no network access.

    The profile says how strictly the compiler is isolated, and what else it can see.
    """
    await make_once(Path(build.folder), partial(_compile, build=build, profile=profile, space=space, report=report))


async def _compile(folder: Path, *, build: Build, profile: SandboxProfile, space: Space, report: Report) -> None:
    report(Progress(f"Compiling {build.tool_id}"))
    spec = ProcessSpec(argv=build.argv, cwd=str(folder), env=build.env, timeout=_BUILD_TIMEOUT)
    held = await open_sandbox(replace(profile, writable=(str(folder),)), space)
    result = await held.run(spec, secrets={}, report=silent)
    if result.exit_code == 0 and not result.timed_out:
        return
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    ending = f"did not end within {_BUILD_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    raise BuildFailed(
        f"Compiling {build.tool_id!r} {ending}: {chr(10).join(said.splitlines()[-_LAST_LINES:])}",
        suggestion="Fix the source as the compiler says, then run the tool again.",
        tool_id=build.tool_id,
        exit_code=result.exit_code,
    )


_CHECK_TIMEOUT = 60.0
_COMPLAINT = lazy_pattern(r"error", re.IGNORECASE)
_FIX = "Fix the line, then validate again."


def plan_check(chain: Chain, space: Space) -> Plan | None:
    """Return the plan of the program that checks the entrypoint; None where the runtime names no such program."""
    words = runtime_config(chain.executor)
    if not words.check or not chain.tool.entrypoint:
        return None
    check_words(chain, words.check)
    # Dependencies play no part in syntax: the bare interpreter of the environment is enough.
    environment = PackageManager(words.manager, chain.executor).bare() if words.manager else Environment()
    facts = facts_of(chain, space, environment)
    program, *arguments = fill(words.check, facts)
    argv = (_program(program, words, environment), *arguments)
    env = {**base_env(chain.tool, space, environment), "NO_COLOR": "1"}
    escaped = {name: escape(value) for name, value in env.items()}
    return Plan(
        identity=chain.tool.identity,
        tool_digest=chain.tool.digest,
        driver="process",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=ProcessSpec(argv=argv, cwd=facts["tool.files"], env=escaped, timeout=_CHECK_TIMEOUT),
        inputs={},
        # A runtime's config may come from anyone, and so may the files that it inspects.
        profile=SandboxProfile("sandboxed", readable=(facts["tool.files"], facts["runtime.files"])),
        effect="pure",
    )


async def check_syntax(plan: Plan, chain: Chain, space: Space) -> tuple[Issue, ...]:
    """Return what is wrong with the entrypoint, by the program of the plan."""
    assert isinstance(plan.spec, ProcessSpec) and plan.profile  # noqa: S101, PT018 - `plan_check` makes no other
    for link in (chain.tool, chain.executor):
        take_snapshot(link, space.cache)
    held = await open_sandbox(plan.profile, space)
    result = await held.run(plan.spec, secrets={}, report=silent)
    return _issues(chain.tool.entrypoint, plan.spec.cwd, result)


def _issues(entrypoint: str, folder: str, result: run.ProcessResult) -> tuple[Issue, ...]:
    if result.timed_out:
        fix = "Make the file smaller, or look what the check waits for."
        return (Issue(entrypoint, f"the syntax check did not end within {_CHECK_TIMEOUT:.0f} seconds", fix),)
    if result.exit_code == 0:
        return ()
    said = (result.stderr + b"\n" + result.stdout).decode("utf-8", errors="replace")
    line = _line(said, f"{folder}/{entrypoint}")
    place = f"{entrypoint}:{line}" if line else entrypoint
    return (Issue(place, _reason(said, folder), _FIX, line=line),)


def _line(said: str, path: str) -> int | None:
    """Return the line that a complaint names: `file:3`, `file: line 3` or `file", line 3`."""
    found = re.search(rf'{re.escape(path)}(?:"?[,:] line |:)(\d+)', said)
    return int(found[1]) if found else None


def _reason(said: str, folder: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    complaint = next((line for line in lines if _COMPLAINT.search(line)), lines[-1] if lines else "is not valid")
    return complaint.replace(f"{folder}/", "")[:500]
