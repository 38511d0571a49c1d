"""What a process sees of this machine because of its command: its program, its script, and the packages of both.

A command that names a script means what lies around it too: the modules it imports, the package it is part of. What
would be a home folder, or hold one, is never meant: then it is the file alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.profile import base_profile
from kiwi_mcp.sandbox.programs import program_at

_MODULES = "node_modules"
_MOST_STEPS = 16
_LONGEST_LINE = 256
_INTERPRETER = re.compile(
    r"(?:python|pypy)[\d.]*|node|nodejs|deno|bun|tsx|ts-node|ruby|perl|php|java|dotnet|lua|Rscript|uv|(?:ba|da|k|z)?sh"
)
_CODE = (
    (re.compile(r"(?:ba|da|k|z)?sh"), re.compile(r"-[A-Za-z]*c[A-Za-z]*")),
    (re.compile(r"(?:python|pypy)[\d.]*|uv"), re.compile(r"-[bBdEiIOPqsSuvx]*[cm].*", re.DOTALL)),
    (re.compile(r"php"), re.compile(r"-[rBRE].*", re.DOTALL)),
    (re.compile(r".+"), re.compile(r"-[A-Za-z]{0,3}[ceEmp]|-[ceEm].+|--(?:eval|print)(?:=.*)?", re.DOTALL)),
)
"""By program, what is followed by code or by the name of a module: then no word is the file that runs."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it is started confined, with the paths that it needs."""

    spec: ProcessSpec
    programs: tuple[str, ...]
    """What its program needs besides itself, where that is one of this machine's by its name."""
    named: Mapping[str, tuple[str, ...]]
    """The paths that its command names, each with what lies around it."""

    @property
    def readable(self) -> tuple[str, ...]:
        """All that it is to see."""
        return tuple(dict.fromkeys((*self.programs, *(path for around in self.named.values() for path in around))))


def seen_by(spec: ProcessSpec, *, has_folder: bool, is_placed: bool = False) -> Seen:
    """Return what a server sees by its command.

    `has_folder` says whether its manifest names where it starts, and `is_placed` whether it says where its program is.
    """
    program, argv, folder = spec.argv[0], list(spec.argv), str(Path(spec.cwd).resolve())
    named = {str(Path(program).resolve()): _around(Path(program))} if is_placed else {}
    if (place := script_in(spec)) is not None:
        script = Path(spec.cwd, argv[place]).resolve()
        # By its whole name, since the folder it was relative to may not be there.
        argv[place] = str(script)
        named[str(script)] = _around(script) or (str(script),)
    if has_folder and not is_too_wide(Path(folder)) and Path(folder).is_dir():
        named[folder] = (folder,)
    besides = (
        _interpreters(program, spec.env.get("PATH", "")) if is_placed else needed_by(program, spec.env.get("PATH", ""))
    )
    covered = base_profile().covers
    return Seen(
        replace(spec, argv=tuple(argv), cwd=folder),
        tuple(path for path in besides if not covered(path)),
        {path: around for path, around in named.items() if around and not all(map(covered, around))},
    )


def needed_by(program: str, path: str) -> tuple[str, ...]:
    """Return what a program needs besides itself: the modules it lies among, and the interpreter it asks `env` for."""
    return (*_around(Path(program)), *_interpreters(program, path))


def script_in(spec: ProcessSpec) -> int | None:
    """Return which word of an interpreter's command is the file that it runs: the first that names one, before code."""
    program = Path(spec.argv[0]).name
    if not _INTERPRETER.fullmatch(program):
        return None
    code = next(words for programs, words in _CODE if programs.fullmatch(program))
    for place, word in enumerate(spec.argv[1:], 1):
        if code.fullmatch(word):
            return None
        if not word.startswith("-") and "${" not in word and _is_file(Path(spec.cwd, word)):
            return place
    return None


def is_in(path: str, folder: str) -> bool:
    """Whether a path without links lies in a folder."""
    return Path(path).is_relative_to(Path(folder).resolve())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a word too long for a name, or with a character that none has
        return False


def _around(path: Path) -> tuple[str, ...]:
    """Return the folder that a file is part of; none where it is a program of its own, or lies in a home."""
    real = path.resolve()
    if not _is_file(real):
        return ()
    if _MODULES in real.parts:
        # A package finds what it depends on beside itself, in the outermost folder of modules.
        return (str(Path(*real.parts[: real.parts.index(_MODULES) + 1])),)
    if os.access(real, os.X_OK) and (not real.suffix or _INTERPRETER.fullmatch(real.name)):
        return ()
    folder = _package(real.parent)
    return () if is_too_wide(folder) else (str(folder),)


def _package(folder: Path) -> Path:
    """Return the folder of the package that a folder is in, or the folder itself where it is in none."""
    top = folder
    while (top / "__init__.py").is_file() and not is_too_wide(top.parent):
        top = top.parent
    for outer in (folder, *folder.parents)[:_MOST_STEPS]:
        if is_too_wide(outer):
            break
        if (outer / "package.json").is_file():
            return outer
    return top


def is_too_wide(folder: Path) -> bool:
    """Whether a folder is a home, holds homes, or is the root of everything."""
    home = Path.home().resolve()
    return folder == home or folder in home.parents or folder.parent == folder or str(folder.parent) in {"/", "/home"}


def _interpreters(program: str, path: str) -> Iterator[str]:
    """Yield what the interpreter needs that a script asks `env` for."""
    try:
        with Path(program).open("rb") as file:
            words = file.readline(_LONGEST_LINE).split()
    except OSError:
        return
    if not words or not words[0].startswith(b"#!") or not words[0].endswith(b"/env"):
        return
    name = next((os.fsdecode(word) for word in words[1:] if not word.startswith(b"-")), "")
    if name and (found := shutil.which(name, path=path)):
        yield from program_at(found, base_profile().covers).roots
