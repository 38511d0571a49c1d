"""Prepared: a process before its launcher is told of it: its program, what it is given, and where it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.errors import CommandMissing
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.grants import Opened, open_grants
from kiwi_mcp.sandbox.profile import HOME, base_profile
from kiwi_mcp.sandbox.programs import Around, known_program
from kiwi_mcp.sandbox.protected import shielded
from kiwi_mcp.sandbox.proxied import proxy_variables, refuse_hosts
from kiwi_mcp.sandbox.variables import divided


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a launcher is to make of a process; what is open in it is closed by the block that prepared it."""

    argv: tuple[str, ...]
    granted: tuple[Opened, ...]
    """What was asked for, and what the program itself needs."""
    shields: tuple[Opened, ...]
    """What lies in it and stays as it is."""
    hidden: tuple[str, ...]
    """What lies in it and is not seen."""
    folder: str
    """Where it starts."""
    passed: Mapping[str, str]
    """Variables that the launcher may have too."""
    inside: Mapping[str, str]
    """Variables that only the process may have."""

    @property
    def grants(self) -> tuple[Opened, ...]:
        """All that is laid into the sandbox, in the order in which it comes to lie on top of each other."""
        return (*self.granted, *self.shields)


def prepare(spec: ProcessSpec, jail: Jail, keep: ExitStack) -> Prepared:
    """Find the program of a process and open what it is given."""
    refuse_hosts(jail)
    passed, inside = divided({**spec.env, **proxy_variables(jail)})
    around = Around(jail.closed, jail.trusted, (*jail.readable, *jail.writable))
    program = known_program(_found(spec), _is_everywhere, around)
    granted = open_grants(jail, program.roots, keep)
    return Prepared(
        argv=(program.path, *spec.argv[1:]),
        granted=granted,
        shields=tuple(shielded(granted, base_profile(), keep)),
        hidden=(*jail.hidden, *_secrets(program.roots)),
        folder=_folder(spec, granted, jail),
        passed=passed,
        inside=inside,
    )


def _is_everywhere(path: str) -> bool:
    """Whether every sandbox has a path."""
    return base_profile().covers(path)


def _found(spec: ProcessSpec) -> str:
    """Return where the program of a process lies."""
    command = spec.argv[0]
    folders = [folder for folder in spec.env.get("PATH", os.defpath).split(":") if folder.startswith("/")]
    found = str(Path(spec.cwd, command)) if "/" in command else shutil.which(command, path=":".join(folders))
    if found is None or not Path(found).is_file() or not os.access(found, os.X_OK):
        raise CommandMissing(command, needed_by="the call")
    return found


def _secrets(roots: Sequence[str]) -> Iterator[str]:
    """Yield the files with variables that lie in what a program was installed to: it may be a project of its own."""
    for root in filter(os.path.isdir, roots):
        yield from (f"{root}/{name}" for name in os.listdir(root) if name == ".env" or name.startswith(".env."))  # noqa: PTH208 - names, at every start


def _folder(spec: ProcessSpec, grants: Sequence[Opened], jail: Jail) -> str:
    """Return where the process starts: where it was to, if that or something in it was granted, else in its home."""
    around = {spec.cwd, *map(str, Path(spec.cwd).parents)}
    # What is given of a folder lies in it under its own name, so that paths that begin in the folder lead there.
    is_around = any(grant.path in around for grant in grants if grant.is_folder)
    is_there = is_around or any(Path(path).is_relative_to(spec.cwd) for path in (*jail.readable, *jail.writable))
    return spec.cwd if is_there else HOME
