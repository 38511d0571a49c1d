"""Builds: a compiled tool's program, made once for each chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import BuildFailed
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.held import held_by
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.process.facts import ENTRYPOINT, fill
from kiwi_mcp.drivers.process.once import make_once
from kiwi_mcp.drivers.process.surroundings import find_program
from kiwi_mcp.drivers.words import Words, texts
from kiwi_mcp.manifest.render import placeholders

_TIMEOUT = 600.0
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Build:
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


def bind_build(words: Words, facts: Mapping[str, str], environment: Environment, env: Mapping[str, str]) -> Build:
    """Return the run of the compiler; one that says nothing about files is told them as most compilers expect."""
    template = words.compile if placeholders(list(words.compile)) else (*words.compile, "-o", "{binary}", ENTRYPOINT)
    program, *arguments = fill(template, facts)
    argv = (find_program(program, words, environment), *arguments)
    return Build(facts["tool.id"], argv, facts["build"], env)


async def make_build(build: Build, jail: Jail, space: Space, report: Report) -> None:
    """Have the program, compiling it where nobody did: by a compiler that writes its folder and reaches nobody.

    `jail` is how strictly it is held, and what it sees besides.
    """
    await make_once(Path(build.folder), partial(_compile, build=build, jail=jail, space=space, report=report))


async def _compile(folder: Path, *, build: Build, jail: Jail, space: Space, report: Report) -> None:
    report(Progress(f"Compiling {build.tool_id}"))
    spec = ProcessSpec(argv=build.argv, cwd=str(folder), env=build.env, timeout=_TIMEOUT)
    held = await held_by(replace(jail, writable=(str(folder),)), space)
    result = await held.run(spec, secrets={}, report=report)
    if result.exit_code == 0 and not result.timed_out:
        return
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    ending = f"did not end within {_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    raise BuildFailed(
        f"Compiling {build.tool_id!r} {ending}: {chr(10).join(said.splitlines()[-_LAST_LINES:])}",
        suggestion="Mend the source as the compiler says, then run the tool again.",
        tool_id=build.tool_id,
        exit_code=result.exit_code,
    )
