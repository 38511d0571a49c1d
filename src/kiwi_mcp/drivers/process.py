"""The process driver: one process from the files of a tool and the config of its runtime.

It also builds tools, checks their syntax, and gives the tools of one source a scratch folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from signal import Signals
from stat import S_ISREG
from time import time
from typing import Literal
from uuid import uuid4

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import (
    BuildFailed,
    InvalidArguments,
    InvalidManifest,
    IsolationUnavailable,
    PolicyDenied,
    TooLarge,
    Unavailable,
)
from kiwi_mcp.domain.isolation import Level, ResourceLimits, SandboxProfile, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, compact, text_of
from kiwi_mcp.domain.outcome import Logs, Outcome, Progress, Report, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers import Dispatch, Driver, SyntaxCheck, container, git_copy, tool_calls
from kiwi_mcp.drivers.environments import packages
from kiwi_mcp.drivers.environments.environment import Environment, base_env, make_once
from kiwi_mcp.drivers.output import NotJsonOutput, ParsedOutput, json_or_text, parse
from kiwi_mcp.drivers.sandboxed import backend_for, open_sandbox
from kiwi_mcp.manifest.runtime import RuntimeConfig, declared_env, runtime_config, seconds, texts
from kiwi_mcp.manifest.templates import ABSENT, Values, defaulted, escape, placeholders, plain, render, variables
from kiwi_mcp.policy.isolation import with_remedy
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.primitives.process.spawn import find_program, search_path
from kiwi_mcp.sandbox.limits import quota

_SPELLED_OUT_LIMIT = 100_000
"""The most that parameters may take as arguments or variables; the system's own limit is a little higher."""
_NOT_IN_NAMES = lazy_pattern(r"[\s=\0]")
_NOT_IN_VARIABLES = lazy_pattern(r"[^A-Za-z0-9_]")
_BUILD_TIMEOUT, _CHECK_TIMEOUT = 600.0, 60.0
_COMPLAINT = lazy_pattern(r"error", re.IGNORECASE)
_ENTRYPOINT = "{tool.files}/{tool.entrypoint}"


class Process(Driver):
    """Runs a tool's files as one process, as its runtime's config says."""

    def check(self, chain: Chain, space: Space) -> SyntaxCheck | None:
        """Return the check of the entrypoint's syntax by the runtime's own command."""
        words = runtime_config(chain.executor)
        if not words.check or not chain.tool.entrypoint:
            return None
        _check_words(chain, words.check)
        # Dependencies play no part in syntax: the bare interpreter of the environment is enough.
        environment = Environment()
        if words.manager:
            environment = packages.PackageManager(words.manager, chain.executor).bare()
        facts = _facts_of(chain, space, environment)
        program, *arguments = _fill(words.check, facts)
        argv = (_program(program, words, environment, search_path(environment.bin)), *arguments)
        env = {**base_env(chain.tool, space, environment), "NO_COLOR": "1"}
        escaped = {name: escape(value) for name, value in env.items()}
        plan = Plan(
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
        return SyntaxCheck(plan, partial(_check_syntax, plan, chain, space))

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Return the plan: one process, built from the runtime's config and these inputs."""
        frame = _frame_of(chain, space)
        tool, words, environment, declared = chain.tool, frame.words, frame.environment, frame.declared
        if frame.fixed is not None and not declared and not words.compile:
            values: Values = {}
        else:
            properties = as_object(tool.manifest.parameters.get("properties"))
            values = {**dict.fromkeys(properties, ABSENT), **inputs, **frame.facts}
        for name in frame.commands:
            if name not in environment.programs:
                find_program(name, frame.path, needed_by=tool.id)
        prepared: dict[str, Json] = {"result_from": words.result_from}
        if environment.packages:
            prepared["environment"] = environment.to_json()
        if frame.items:
            prepared["items"] = list(frame.items)
        if "scratch" in tool.manifest.config:
            prepared["scratch"] = tool.manifest.config["scratch"]
        if words.compile:
            prepared["build"] = to_builtins(_bind_build(frame))
        program, *arguments = frame.fixed or _fill(frame.command, values)
        if words.compile and program.startswith("./"):
            program = f"{values['build']}/{program[2:]}"
        elif program in environment.programs:
            program = environment.programs[program]
        else:
            program = find_program(
                program, frame.path, needed_by=words.runtime_id, shell=words.shell, install=words.install
            )
        env: dict[str, str] = {}
        if declared:  # a variable that is a parameter and nothing else is left out where the parameter is absent
            env = {name: text_of(value) for name, value in as_object(render(declared, values)).items()}
        spec = ProcessSpec(
            argv=(program, *arguments, *(_flags(tool.id, inputs) if words.params_as == "flags" else ())),
            cwd=str(space.project),
            env={
                **env,
                **frame.base,
                **(_parameter_variables(tool.id, inputs) if words.params_as == "environment" else {}),
            },
            stdin=compact(dict(inputs)).encode(),
            timeout=frame.timeout,
        )
        return Plan(
            identity=tool.identity,
            tool_digest=tool.digest,
            driver="process",
            chain=frame.chain_names,
            spec=spec,
            inputs=inputs,
            variables=frame.variables,
            defaulted=frame.defaulted,
            facts=prepared,
            effect=tool.manifest.effect or "at_most_once",
        )

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Refuse a level of isolation that this machine does not have."""
        if _frame_of(chain, space).words.engines:
            container.check_container(plan, chain, space)
            return
        # A plan without a sandbox profile gets the strictest one.
        profile = plan.profile or SandboxProfile(strictest(()))
        if profile.provenance == "unknown" and "items" in plan.facts:
            raise PolicyDenied(
                f"{chain.tool.id!r} calls other items, and is not signed.",
                suggestion=f"Read it, then `kiwi sign {chain.tool.id}`.",
                tool_id=chain.tool.id,
            )
        if "scratch" in plan.facts:
            _refuse_unknown(chain, profile)
        try:
            await backend_for(profile, space)
        except IsolationUnavailable as refused:
            raise with_remedy(refused, profile.provenance, chain.tool) from None

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Run the process. One that needs git and may write to a repository has a copy of its git folder."""
        profile = plan.profile or SandboxProfile(strictest(()))
        run = partial(self._run, plan, chain, space, secrets=secrets, caller=caller, dispatch=dispatch)
        if "git" not in chain.needs.commands or not profile.writable:
            return await run(profile)
        async with git_copy.git_copies(profile, space.cache) as copies:
            outcome = await run(replace(profile, git_copies=tuple((one.git, str(one.folder)) for one in copies)))
            faults: list[str] = []
            for copy in copies:
                await copy.take_over(faults.append)
        if not faults:
            return outcome
        fix = "See that no other program works in the repository, then call again."
        return replace(outcome, status="error", result=None, message=" ".join(faults), suggestion=fix)

    async def _run(
        self,
        plan: Plan,
        chain: Chain,
        space: Space,
        profile: SandboxProfile,
        *,
        secrets: Mapping[str, str],
        caller: Caller,
        dispatch: Dispatch,
    ) -> Outcome:
        """Open the sandbox, make the files, the dependencies and the build that the plan names, then run it."""
        assert isinstance(plan.spec, ProcessSpec)  # noqa: S101 - bind above makes no other
        frame = _frame_of(chain, space)
        spec, facts, tool = plan.spec, frame.facts, chain.tool
        confirm = caller.journal.confirm if caller.journal else None
        if frame.words.engines:
            ending = partial(outcome_of, tool.id, frame.words.result_from, {}, spec)
            files = str(take_snapshot(tool, space.cache))
            return await container.run_container(plan, chain, space, files, caller.report, ending, confirm)
        environment = convert(plan.facts.get("environment", {}), Environment)
        build = convert(plan.facts["build"], Build) if "build" in plan.facts else None
        # The folders of what runs: the files of the tool and of its runtime, its dependencies, and what was compiled.
        tool_files, runtime_files = facts["tool.files"], facts["runtime.files"]
        own = [tool_files, runtime_files, environment.folder, tool_calls.CLIENT if frame.items else ""]
        own += [build.folder] if build else []
        profile, watch = _with_scratch(chain, profile, space) if "scratch" in plan.facts else (profile, None)
        try:
            sandbox = await open_sandbox(profile, space, tuple(filter(None, own)))
        except IsolationUnavailable as refused:
            raise with_remedy(refused, profile.provenance, tool) from None
        await _have_files(frame, profile, environment, build, caller.report)
        env = dict(spec.env)
        if profile.scratch:
            sandbox = replace(sandbox, scratch_watch=watch)
            env["KIWI_SCRATCH"] = escape(profile.scratch)
        if caller.journal is not None:  # a call of a thread: it has the same key whenever it is repeated
            env["KIWI_IDEMPOTENCY_KEY"] = caller.origin.key
        start = partial(sandbox.run, secrets=secrets, report=caller.report, confirm=confirm)
        if frame.items:
            async with tool_calls.serving_calls(tool, frame.items, caller, dispatch, space) as (lent, more):
                env = {**env, **more, "PATH": f"{more['PATH']}{spec.env.get('PATH', '')}"}
                result = await start(replace(spec, env=env), lent=(lent,))
        else:
            result = await start(replace(spec, env=env))
        homes = {tool_files: str(tool.origin.root), runtime_files: str(chain.executor.origin.root)}
        outcome = outcome_of(tool.id, frame.words.result_from, homes, spec, result)
        is_confined = outcome.status == "error" and sandbox.profile.level in {"sandboxed", "restricted"}
        if is_confined and _OUT_OF_REACH.search(f"{outcome.message}\n{outcome.logs.stderr}"):
            outcome = replace(outcome, suggestion=f"{_NEEDS} {outcome.suggestion}".strip())
        return sandbox.tell(outcome, frame.asked)


class Frame(Struct, frozen=True):
    """What every call of a chain has in common, whatever its inputs."""

    chain: Chain
    space: Space
    words: RuntimeConfig
    environment: Environment
    facts: Mapping[str, str]
    base: Mapping[str, str]
    declared: Mapping[str, str]
    command: tuple[str, ...]
    fixed: tuple[str, ...] | None
    """The command line, if it contains no parameter."""
    chain_names: tuple[tuple[str, str], ...]
    variables: tuple[str, ...]
    defaulted: tuple[str, ...]
    timeout: float
    asked: Level
    """The isolation level that the manifests of the chain ask for."""
    commands: tuple[str, ...]
    """The programs that the tool itself needs."""
    path: str
    """Where programs are looked for."""
    items: tuple[str, ...]
    """The items that the tool calls."""


_frames: OrderedDict[tuple[int, str | None], Frame] = OrderedDict()
_FRAMES_KEPT = 512


def _frame_of(chain: Chain, space: Space) -> Frame:
    """Return the frame of a chain, made once for as long as the catalog gives the same chain."""
    key = (id(chain), os.environ.get("PATH"))
    known = _frames.get(key)
    if known is not None and known.chain is chain and known.space == space:
        return known
    tool = chain.tool
    words = runtime_config(chain.executor)
    environment = Environment()
    if words.manager:
        manager = packages.PackageManager(words.manager, chain.executor)
        environment = manager.plan(tool, words.packages, space.cache)
    base = {name: escape(value) for name, value in base_env(tool, space, environment).items()}
    declared = {**declared_env(tool), **words.env}
    facts = _facts_of(chain, space, environment)
    command = words.command
    path = search_path(environment.bin)
    if not command:
        fix = "Give it `command`, or `compile_command` and `run_command`."
        raise InvalidManifest(f"{words.runtime_id!r}", [Issue("config.command", "says no program to start", fix)])
    if tool.entrypoint and not words.compile and not _names_entrypoint(command):
        command = (*command, _ENTRYPOINT)
    _check_words(chain, (*command, *words.compile))
    if words.engines:
        command = container.container_command(chain, words, space, path)
        base = {**base, **container.engine_env()}
    frame = _frames[key] = Frame(
        chain,
        space,
        words,
        environment,
        facts,
        base,
        declared,
        command,
        _fill(command, facts) if facts.keys() >= {*placeholders(list(command))} else None,
        tuple((link.identity, link.digest) for link in chain.links),
        variables(declared),
        defaulted(declared),
        seconds(tool.manifest.config.get("timeout"), words.timeout),
        chain.isolation,
        texts(tool.manifest.config.get("commands")),
        path,
        tool.manifest.needs.items,
    )
    if len(_frames) > _FRAMES_KEPT:
        _frames.popitem(last=False)
    return frame


async def _have_files(
    frame: Frame, profile: SandboxProfile, environment: Environment, build: Build | None, report: Report
) -> None:
    """Have the dependencies, the files and the build of a tool."""
    chain, space, manager = frame.chain, frame.space, frame.words.manager
    tool_files, runtime_files = frame.facts["tool.files"], frame.facts["runtime.files"]
    try:
        if environment.packages and manager is not None:
            installer = packages.Installer(space, packages.install_level(profile.level), report)
            if not manager.is_shipped:
                # Its commands are those of the runtime's author: they run at its level, with its provenance.
                installer = packages.Installer(space, profile.level, report, profile.provenance, is_shipped=False)
            await packages.PackageManager(manager, chain.executor).make(environment, chain.tool, installer)
        _have_snapshot(chain.tool, tool_files, linked=environment.linked)
        _have_snapshot(chain.executor, runtime_files)
        if build:
            seen = (tool_files, runtime_files, *filter(None, [environment.folder]))
            level = packages.install_level(profile.level)
            compiler = SandboxProfile(level, readable=seen, writable=(build.folder,))
            make = partial(_compile, build=build, profile=compiler, space=space, report=report)
            await make_once(Path(build.folder), make)
    except OSError as fault:
        raise _unwritable(space, fault) from fault


def _unwritable(space: Space, fault: OSError) -> Unavailable:
    return Unavailable(
        f"Kiwi cannot keep what the tool needs in {str(space.cache)!r}: {fault.strerror or fault}.",
        suggestion="Make the folder writable, free space on its disk, or choose another cache folder.",
    )


def _flags(tool_id: str, inputs: JsonObject) -> Sequence[str]:
    """Return parameters as arguments."""
    if unusable := [name for name in inputs if _NOT_IN_NAMES.search(name)]:
        fix = "Use letters, digits, `_` and `-`."
        raise InvalidArguments(tool_id, [Issue(name, "cannot be the name of an argument", fix) for name in unusable])
    return [f"--{name}={value}" for name, value in _spelled_out(tool_id, inputs).items()]


def _parameter_variables(tool_id: str, inputs: JsonObject) -> Mapping[str, str]:
    """Return parameters as variables."""
    found: dict[str, str] = {}
    for name, value in _spelled_out(tool_id, inputs).items():
        found[f"KIWI_PARAM_{_NOT_IN_VARIABLES.sub('_', name)}"] = escape(value) if "$" in value else value
    if len(found) < len(inputs):
        fix = "Rename one of them: as variables they would have the same name."
        raise InvalidArguments(tool_id, [Issue("", "two parameters differ in punctuation only", fix)])
    return found


def _spelled_out(tool_id: str, inputs: JsonObject) -> Mapping[str, str]:
    """Return parameters as texts that fit on a command line or in variables."""
    spelled: dict[str, str] = {}
    issues: list[Issue] = []
    size = 0
    for name, value in inputs.items():
        text = spelled[name] = value if isinstance(value, str) else text_of(value)
        size += len(name) + len(text.encode())
        if "\0" in text:
            issues.append(Issue(name, "holds a NUL character", "Send it without."))
    if size > _SPELLED_OUT_LIMIT:
        reason = f"the parameters take {size:,} bytes, and this runtime hands over at most {_SPELLED_OUT_LIMIT:,}"
        fix = "Send less, or let the runtime say `params_as: json_stdin` and read them from standard input."
        issues.append(Issue("", reason, fix))
    if issues:
        raise InvalidArguments(tool_id, issues)
    return spelled


_SUGGESTIONS = {
    "error": "The logs contain all its output. Fix the tool or the parameters, then run it again.",
    "timeout": "Give it less to do, or a longer `config.timeout`.",
}
_OUT_OF_REACH = lazy_pattern(
    r"no such file|file ?not ?found|enoent|read-only file system|erofs|permission denied|eacces|not permitted"
    r"|network is unreachable|enetunreach|connection refused|econnrefused|name resolution|not resolve|eai_again"
    r"|name or service not known|enotfound|address family not supported|eafnosupport",
    re.IGNORECASE,
)
_NEEDS = (
    "It runs in a sandbox, where it sees no file and reaches no host that it did not ask for: name them under `needs` "
    "of its manifest (`read`, `write`, `hosts`); `kiwi help isolation` shows how."
)


def outcome_of(
    tool_id: str, result_from: str, homes: Mapping[str, str], spec: ProcessSpec, process: ProcessResult
) -> Outcome:
    """Return what happened; `homes` are the real folders that the folder names in its output stand for."""
    what, result = "", ParsedOutput(None)
    try:
        if process.stopped:
            what = f"{process.stopped}, and was stopped"
        elif process.timed_out:
            what = f"did not end within {spec.timeout:g} seconds and was stopped"
        elif process.exit_code != 0:
            ending = f"was ended by {_signal(process.signal)}" if process.signal else ""
            what = ending or f"ended with exit code {process.exit_code}"
        elif process.is_result_truncated:
            what = f"gave a result of more than {spec.result_limit:,} bytes"
        elif process.result or result_from == "json_stdout":
            result = parse(process.result or process.stdout)
        elif result_from != "channel":
            result = json_or_text(process.stdout)
    except NotJsonOutput as fault:
        what = f"gave a result that is not JSON: {fault}"
    # Text that names the author's files, not the copies that ran; without what is the result already.
    is_stdout_shown = bool(what or process.result) or result_from == "channel"
    stdout = process.stdout.decode("utf-8", errors="replace") if is_stdout_shown else ""
    stderr = process.stderr.decode("utf-8", errors="replace")
    for folder, home in homes.items():
        stdout, stderr = stdout.replace(folder, home), stderr.replace(folder, home)
    logs = Logs(
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=process.stdout_bytes,
        stderr_bytes=process.stderr_bytes,
        is_truncated=process.is_truncated,
    )
    if not what:
        details = {"replaced_characters": True} if result.is_repaired else {}
        return Outcome("success", result.value, logs=logs, exit_code=0, details=details)
    status: Literal["error", "timeout"] = "timeout" if process.timed_out and not process.stopped else "error"
    last = next(reversed(logs.stderr.strip().splitlines()), "").strip()[:500]
    return Outcome(
        status,
        message=f"`{tool_id}` {what}{f': {last}' if last else '.'}",
        suggestion=_SUGGESTIONS[status],
        logs=logs,
        exit_code=process.exit_code,
        details={"signal": _signal(process.signal)} if process.signal else {},
    )


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


class Build(Struct, frozen=True):
    """One run of a compiler in the folder it builds in."""

    tool_id: str
    argv: tuple[str, ...]
    folder: str
    env: Mapping[str, str]


def _bind_build(frame: Frame) -> Build:
    """Return the compiler run; a command that names no files gets them the way most compilers expect."""
    words, facts = frame.words, frame.facts
    template = words.compile if placeholders(list(words.compile)) else (*words.compile, "-o", "{binary}", _ENTRYPOINT)
    program, *arguments = _fill(template, facts)
    argv = (_program(program, words, frame.environment, frame.path), *arguments)
    return Build(facts["tool.id"], argv, facts["build"], frame.base)


def _program(command: str, words: RuntimeConfig, environment: Environment, path: str) -> str:
    """Return where a program is now: in the environment, or on this machine."""
    return environment.programs.get(command) or find_program(
        command, path, needed_by=words.runtime_id, shell=words.shell, install=words.install
    )


async def _compile(folder: Path, *, build: Build, profile: SandboxProfile, space: Space, report: Report) -> None:
    """Build a program with a compiler that writes only its folder and has no network access."""
    report(Progress(f"Compiling {build.tool_id}"))
    spec = ProcessSpec(argv=build.argv, cwd=str(folder), env=build.env, timeout=_BUILD_TIMEOUT)
    sandbox = await open_sandbox(profile, space)
    result = await sandbox.run(spec, secrets={}, report=silent)
    if result.exit_code == 0 and not result.timed_out:
        return
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    ending = f"did not end within {_BUILD_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    raise BuildFailed(
        f"Compiling {build.tool_id!r} {ending}: {chr(10).join(said.splitlines()[-30:])}",
        suggestion="Fix the source as the compiler says, then run the tool again.",
        tool_id=build.tool_id,
        exit_code=result.exit_code,
    )


async def _check_syntax(plan: Plan, chain: Chain, space: Space) -> tuple[Issue, ...]:
    """Return what is wrong with the entrypoint, by the program of the plan."""
    assert isinstance(plan.spec, ProcessSpec) and plan.profile  # noqa: S101, PT018 - `check` makes no other
    try:
        for link in (chain.tool, chain.executor):
            take_snapshot(link, space.cache)
        sandbox = await open_sandbox(plan.profile, space)
        result = await sandbox.run(plan.spec, secrets={}, report=silent)
    except OSError as fault:
        raise _unwritable(space, fault) from fault
    entrypoint, folder = chain.tool.entrypoint, plan.spec.cwd
    if result.timed_out:
        fix = "Make the file smaller, or look what the check waits for."
        return (Issue(entrypoint, f"the syntax check did not end within {_CHECK_TIMEOUT:.0f} seconds", fix),)
    if result.exit_code == 0:
        return ()
    said = (result.stderr + b"\n" + result.stdout).decode("utf-8", errors="replace")
    # A complaint names the line as `file:3`, `file: line 3` or `file", line 3`.
    found = re.search(rf'{re.escape(f"{folder}/{entrypoint}")}(?:"?[,:] line |:)(\d+)', said)
    line = int(found[1]) if found else None
    lines = list(filter(None, map(str.strip, said.splitlines())))
    complaint = next(filter(_COMPLAINT.search, lines), lines[-1] if lines else "is not valid")
    place = f"{entrypoint}:{line}" if line else entrypoint
    reason = complaint.replace(f"{folder}/", "")[:500]
    return (Issue(place, reason, "Fix the line, then validate again.", line=line),)


def _facts_of(chain: Chain, space: Space, environment: Environment) -> Mapping[str, str]:
    """Return every fact of a chain by its name."""
    tool, runtime = chain.tool, chain.executor
    build = sha256("\n".join(link.digest for link in chain.links).encode()).hexdigest()
    return {
        "tool.files": str(_snapshot_folder(tool, space.cache, linked=environment.linked)),
        "tool.entrypoint": tool.entrypoint,
        "tool.id": tool.id,
        "tool.version": tool.manifest.version,
        "runtime.files": str(_snapshot_folder(runtime, space.cache)),
        "environment": environment.folder,
        "project": str(space.project),
        "build": str(space.cache / "builds" / build),
        "binary": tool.id,
    }


def _fill(template: Sequence[str], values: Values) -> tuple[str, ...]:
    """Return the words of a command line; a list fills several words, an absent parameter none."""
    filled: list[str] = []
    for value in as_list(render(list(template), values)):
        several = value if isinstance(value, list) else [value]
        filled.extend(plain(text_of(word)) for word in several)
    return tuple(filled)


def _check_words(chain: Chain, template: Sequence[str]) -> None:
    """Refuse words that cannot be filled safely: a variable among them, or a file the tool does not have."""
    issues = []
    if variables(list(template)):
        fix = "Move it to `config.env`, and read it there."
        issues.append(Issue("config.args", "a variable in a command line is visible to every user", fix))
    entrypoint = chain.tool.entrypoint
    if entrypoint and entrypoint not in {file.path for file in chain.tool.files}:
        fix = "Create it, or set `config.entrypoint` to one of the tool's files."
        issues.append(Issue("config.entrypoint", f"{entrypoint!r} is not a file of the tool", fix))
    if not entrypoint and _names_entrypoint(template):
        fix = f"Set `config.entrypoint`, which {chain.executor.id!r} runs."
        issues.append(Issue("config.entrypoint", "the tool does not say which file to run", fix))
    if issues:
        raise InvalidManifest(f"{chain.tool.id!r} on {chain.executor.id!r}", issues)


def _names_entrypoint(template: Sequence[str]) -> bool:
    """Whether any word is about the file to run."""
    return "tool.entrypoint" in placeholders(list(template))


_LINK = "node_modules"
_REMEMBERED = 10_000
_verified: OrderedDict[tuple[str, int, int, int, int], str] = OrderedDict()
"""The hash of each snapshot file read so far, for as long as its inode, size and times stay as they were."""


def _snapshot_folder(tool: Tool, cache: Path, *, linked: str = "") -> Path:
    """Return where a link's snapshot is, or will be: a folder named by its whole content."""
    # Not by the tool's digest alone: that one does not change when a file is signed, and the file does.
    listed = "\n".join(f"{file.sha256} {file.is_executable} {file.path}" for file in tool.files)
    return cache / "tools" / sha256(f"{linked}\n{listed}".encode()).hexdigest()


def take_snapshot(tool: Tool, cache: Path) -> Path:
    """Have a link's files as they were verified, and return their folder."""
    folder = _snapshot_folder(tool, cache)
    _have_snapshot(tool, str(folder))
    return folder


def _have_snapshot(tool: Tool, path: str, *, linked: str = "") -> None:
    """Have a link's files, as they were verified, in the folder that is named by them."""
    if _is_exact(tool, path):
        return
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        fresh.mkdir()
        for file in tool.files:
            target = fresh / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(load_bytes(tool, file))
            target.chmod(0o555 if file.is_executable else 0o444)
        if linked and not (fresh / _LINK).exists():
            (fresh / _LINK).symlink_to(linked)
        try:
            fresh.rename(folder)
        except OSError:
            # Another kernel was faster, which is fine; or the existing folder was tampered with.
            if not _is_exact(tool, path):
                spoiled = fresh.with_name(f"{fresh.name}.spoiled")
                folder.rename(spoiled)
                fresh.rename(folder)
                shutil.rmtree(spoiled, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _is_exact(tool: Tool, folder: str) -> bool:
    try:
        for file in tool.files:
            path = f"{folder}/{file.path}"
            state = os.lstat(path)
            key = (path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            if key not in _verified and S_ISREG(state.st_mode):
                _verified[key] = sha256(Path(path).read_bytes()).hexdigest()
                if len(_verified) > _REMEMBERED:
                    _verified.popitem(last=False)
            if _verified.get(key) != file.sha256:
                return False
    except OSError:
        return False
    return bool(tool.files) or os.path.isdir(folder)  # noqa: PTH112 - on the way of every run


_MOST_BYTES, _MOST_FILES = 268_435_456, 10_000
_SCRATCH_UNUSED = 86_400.0
"""How long a folder stays when no tool of its group is called, in seconds: as long as a call may take."""


def _refuse_unknown(chain: Chain, profile: SandboxProfile) -> None:
    """Refuse an item of unknown origin: it belongs to no group."""
    if profile.provenance == "unknown":
        raise PolicyDenied(
            f"{chain.tool.id!r} shares a scratch folder with other tools of its source, and is not signed.",
            suggestion=f"Read it, then `kiwi sign {chain.tool.id}`.",
            tool_id=chain.tool.id,
        )


def _with_scratch(
    chain: Chain, profile: SandboxProfile, space: Space
) -> tuple[SandboxProfile, Callable[[], str] | None]:
    """Return a profile with the scratch folder of a tool's group, and what watches its size.

    The group of a tool is where it was found, and who is proved to have written it: no manifest can name another group.
    """
    _refuse_unknown(chain, profile)
    origin = chain.tool.origin
    project = str(space.project) if origin.is_in_project else ""
    group = "\0".join((origin.source, origin.namespace, project, profile.provenance, chain.tool.signer))
    folder = space.cache / "scratch" / sha256(group.encode()).hexdigest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if time() - folder.stat().st_mtime > _SCRATCH_UNUSED:
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        os.utime(folder)
        size, count = _used(folder)
    except OSError as fault:
        raise Unavailable(
            f"The scratch folder {str(folder)!r} cannot be used: {fault.strerror or fault}.",
            suggestion="Make it writable, or delete it: tools keep nothing of value there.",
        ) from fault
    if size >= _MOST_BYTES or count >= _MOST_FILES:
        raise TooLarge(f"The scratch folder {str(folder)!r} of {chain.tool.id!r}", size=size, limit=_MOST_BYTES)
    rest = replace(ResourceLimits(), workspace_bytes=_MOST_BYTES - size, workspace_files=_MOST_FILES - count)
    shared = replace(profile, writable=(*profile.writable, str(folder)), scratch=str(folder))
    return shared, quota((str(folder),), rest)


def _used(folder: Path) -> tuple[int, int]:
    """Return the bytes and the number of files in a folder; no links are followed, and it ends at the limits."""
    size, count, waiting = 0, 0, [str(folder)]
    while waiting and size < _MOST_BYTES and count < _MOST_FILES:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                with suppress(FileNotFoundError):  # another tool of the group deleted it meanwhile
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                if count >= _MOST_FILES:
                    break
    return size, count


create_driver = Process
