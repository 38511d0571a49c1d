"""Chain and inputs to one process."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidArguments, InvalidManifest
from kiwi_mcp.domain.isolation import Level
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact, text_of
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.environments.environment import Environment, base_env, find_program
from kiwi_mcp.drivers.environments.package_manager import PackageManager
from kiwi_mcp.drivers.process.placeholders import ENTRYPOINT, check_words, facts_of, fill, names_entrypoint, values_of
from kiwi_mcp.drivers.process.toolchain import bind_build
from kiwi_mcp.manifest.runtime import RuntimeConfig, declared_env, runtime_config, seconds, texts
from kiwi_mcp.manifest.templates import Values, defaulted, escape, placeholders, render, variables
from kiwi_mcp.primitives.process.spawn import search_path

_SPELLED_OUT_LIMIT = 100_000
"""The most that parameters may take as arguments or variables; the system's own limit is a little higher."""
_NOT_IN_NAMES = re.compile(r"[\s=\0]")
_NOT_IN_VARIABLES = re.compile(r"[^A-Za-z0-9_]")


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
    is_compiled: bool
    asked: Level
    """The isolation level that the manifests of the chain ask for."""
    commands: tuple[str, ...]
    """The programs that the tool itself needs."""
    path: str
    """Where programs are looked for."""


_frames: OrderedDict[tuple[int, str], Frame] = OrderedDict()
_FRAMES_KEPT = 512


def frame_of(chain: Chain, space: Space) -> Frame:
    """Return the frame of a chain, made once for as long as the catalog gives the same chain."""
    key = (id(chain), search_path())
    known = _frames.get(key)
    if known is None or known.chain is not chain or known.space != space:
        known = _frames[key] = _make_frame(chain, space)
        if len(_frames) > _FRAMES_KEPT:
            _frames.popitem(last=False)
    return known


def _make_frame(chain: Chain, space: Space) -> Frame:
    words = runtime_config(chain.executor)
    environment = _environment_of(chain.tool, chain.executor, words, space)
    base = {name: escape(value) for name, value in base_env(chain.tool, space, environment).items()}
    declared = {**declared_env(chain.tool), **words.env}
    facts, command = facts_of(chain, space, environment), _template(chain, words)
    return Frame(
        chain,
        space,
        words,
        environment,
        facts,
        base,
        declared,
        command,
        fill(command, facts) if facts.keys() >= {*placeholders(list(command))} else None,
        tuple((link.identity, link.digest) for link in chain.links),
        variables(declared),
        defaulted(declared),
        seconds(chain.tool.manifest.config.get("timeout"), words.timeout),
        words.is_compiled,
        chain.isolation,
        texts(chain.tool.manifest.config.get("commands")),
        search_path(environment.bin),
    )


def bind_process(chain: Chain, inputs: JsonObject, space: Space) -> Plan:
    """Return the plan of a tool that uses a runtime: one process, built from the runtime's config and these inputs."""
    frame = frame_of(chain, space)
    tool, words, environment, declared = chain.tool, frame.words, frame.environment, frame.declared
    is_fixed = frame.fixed is not None and not declared and not frame.is_compiled
    values = {} if is_fixed else values_of(chain, inputs, frame.facts)
    for name in frame.commands:
        find_program(name, RuntimeConfig(tool.id, command=()), environment, frame.path)
    prepared: dict[str, Json] = {"result_from": words.result_from}
    if environment.packages:
        prepared["environment"] = environment.to_json()
    if frame.is_compiled:
        prepared["build"] = bind_build(words, frame.facts, environment, frame.base).to_json()
    spec = ProcessSpec(
        argv=(*_command(frame, values), *_flags(tool.id, words, inputs)),
        cwd=str(space.project),
        env={
            **(_rendered(declared, values) if declared else {}),
            **frame.base,
            **_parameter_variables(tool.id, words, inputs),
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


def _environment_of(tool: Tool, runtime: Tool, words: RuntimeConfig, space: Space) -> Environment:
    if words.manager is None:
        return Environment()
    return PackageManager(words.manager, runtime).plan(tool, words.packages, space.cache)


def _template(chain: Chain, words: RuntimeConfig) -> tuple[str, ...]:
    """Return the words of the command line, as templates that can be filled safely."""
    template = words.command
    if not template:
        fix = "Give it `command`, or `compile_command` and `run_command`."
        raise InvalidManifest(f"{words.runtime_id!r}", [Issue("config.command", "says no program to start", fix)])
    if chain.tool.entrypoint and not words.is_compiled and not names_entrypoint(template):
        template = (*template, ENTRYPOINT)
    check_words(chain, (*template, *words.compile))
    return template


def _command(frame: Frame, values: Values) -> tuple[str, ...]:
    program, *arguments = frame.fixed or fill(frame.command, values)
    if frame.is_compiled and program.startswith("./"):
        return (f"{values['build']}/{program[2:]}", *arguments)
    return (find_program(program, frame.words, frame.environment, frame.path), *arguments)


def _rendered(declared: Mapping[str, str], values: Values) -> dict[str, str]:
    # A variable that is a parameter and nothing else is left out where the parameter is absent.
    return {name: text_of(value) for name, value in as_object(render(declared, values)).items()}


def _flags(tool_id: str, words: RuntimeConfig, inputs: JsonObject) -> Sequence[str]:
    if words.params_as != "flags":
        return ()
    unusable = [name for name in inputs if _NOT_IN_NAMES.search(name)]
    if unusable:
        fix = "Use letters, digits, `_` and `-`."
        raise InvalidArguments(tool_id, [Issue(name, "cannot be the name of an argument", fix) for name in unusable])
    return [f"--{name}={value}" for name, value in _spelled_out(tool_id, inputs).items()]


def _parameter_variables(tool_id: str, words: RuntimeConfig, inputs: JsonObject) -> Mapping[str, str]:
    if words.params_as != "environment":
        return {}
    named = {name: f"KIWI_PARAM_{_NOT_IN_VARIABLES.sub('_', name)}" for name in inputs}
    if len(set(named.values())) < len(named):
        fix = "Rename one of them: as variables they would have the same name."
        raise InvalidArguments(tool_id, [Issue("", "two parameters differ in punctuation only", fix)])
    spelled = _spelled_out(tool_id, inputs)
    return {named[name]: escape(value) if "$" in value else value for name, value in spelled.items()}


def _spelled_out(tool_id: str, inputs: JsonObject) -> Mapping[str, str]:
    """Return parameters as texts that fit on a command line or in variables."""
    spelled = {name: text_of(value) for name, value in inputs.items()}
    issues = [
        Issue(name, "holds a NUL character", "Send it without.") for name, value in spelled.items() if "\0" in value
    ]
    size = sum(len(name) + len(value.encode()) for name, value in spelled.items())
    if size > _SPELLED_OUT_LIMIT:
        reason = f"the parameters take {size:,} bytes, and this runtime hands over at most {_SPELLED_OUT_LIMIT:,}"
        fix = "Send less, or let the runtime say `params_as: json_stdin` and read them from standard input."
        issues.append(Issue("", reason, fix))
    if issues:
        raise InvalidArguments(tool_id, issues)
    return spelled
