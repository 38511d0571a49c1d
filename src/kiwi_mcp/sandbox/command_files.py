"""The files that a command needs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG, S_IWGRP, S_IWOTH

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.levels import base_profile

FOLDERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin", "/run/current-system/sw/bin")
"""Where launchers are looked for. Never on PATH, where an untrusted program may be."""
_OTHERS_WRITE = S_IWGRP | S_IWOTH
_MOST_STEPS = 16
_LONGEST_LINE = 256
_MODULES = "node_modules"
_INTERPRETER = lazy_pattern(
    r"(?:python|pypy)[\d.]*|node|nodejs|deno|bun|tsx|ts-node|ruby|perl|php|java|dotnet|lua|Rscript|uv|(?:ba|da|k|z)?sh"
)
_CODE = (
    (lazy_pattern(r"(?:ba|da|k|z)?sh"), lazy_pattern(r"-[A-Za-z]*c[A-Za-z]*")),
    (lazy_pattern(r"(?:python|pypy)[\d.]*|uv"), lazy_pattern(r"-[bBdEiIOPqsSuvx]*[cm].*", re.DOTALL)),
    (lazy_pattern(r"php"), lazy_pattern(r"-[rBRE].*", re.DOTALL)),
    (lazy_pattern(r".+"), lazy_pattern(r"-[A-Za-z]{0,3}[ceEmp]|-[ceEm].+|--(?:eval|print)(?:=.*)?", re.DOTALL)),
)
"""By program, the options that are followed by code or a module name: no argument is the script file then."""


def find_launcher(name: str, folders: Sequence[str] = FOLDERS) -> str | None:
    """Return the path of a launcher that only the system's administrator can change; None where there is none."""
    for folder in folders:
        found = Path(os.path.realpath(Path(folder, name)))
        with suppress(OSError):
            state = found.lstat()
            states = (state, *(around.lstat() for around in found.parents))
            is_the_systems = all(one.st_uid == 0 and not one.st_mode & _OTHERS_WRITE for one in states)
            if S_ISREG(state.st_mode) and is_the_systems and os.access(found, os.X_OK):
                return str(found)
    return None


class ProgramFiles(Struct, frozen=True):
    """A program as it is started inside a sandbox, and the paths without which it does not run."""

    path: str
    roots: tuple[str, ...]


class ProgramFolders(Struct, frozen=True):
    """The folders that decide how files next to a program are treated."""

    closed: tuple[str, ...] = ()
    """Folders with untrusted files. A program in them is never treated as part of an installation."""
    trusted: tuple[str, ...] = ()
    """Those below them that Kiwi made."""
    given: tuple[str, ...] = ()
    """Paths that the process can already read."""

    def is_closed(self, path: Path) -> bool:
        """Whether a folder is closed, or is in a closed folder."""
        return is_in_any(path, self.closed) and not is_in_any(path, self.trusted)


_NO_FOLDERS = ProgramFolders()


@lru_cache(maxsize=256)
def known_program(
    found: str, _: tuple[int, ...], is_there: Callable[[str], bool], around: ProgramFolders
) -> ProgramFiles:
    """Return the program at a path as it was found in this state before."""
    return program_at(found, is_there, around)


def program_at(found: str, is_there: Callable[[str], bool], around: ProgramFolders = _NO_FOLDERS) -> ProgramFiles:
    """Return the program at a path; `is_there` says whether every sandbox has a path.

    An interpreter and the Rust compiler need the folder they were installed to, a virtual environment also the one it
    was made from, and a script its interpreter. Of any other program only the file itself is taken, under its real
    name: the folder around it may be a home.
    """
    places = [*_links(found)]
    # A name under which it is seen inside is used, so that it need not be given under its real one.
    seen = (
        place
        for place in places
        if is_there(str(place)) or is_in_any(place, around.given) or _is_opened(place.parent.parent, around)
    )
    path = next(seen, places[-1])
    roots: dict[str, None] = {}
    waiting = [found]
    for _ in range(_MOST_STEPS):
        if waiting:
            waiting += _gather(waiting.pop(), roots, around)
    return ProgramFiles(str(path), tuple(root for root in roots if not is_there(root)))


def _gather(program: str, roots: dict[str, None], around: ProgramFolders) -> Iterator[str]:
    """Add what a program needs, and yield the programs it needs besides."""
    for place in _links(program):
        prefix = place.parent.parent
        # What cannot be executed is no program: a name in a manifest does not open the file it names.
        is_program = not place.is_symlink() and os.access(place, os.X_OK)
        if _is_opened(prefix, around):
            if str(prefix) not in roots:
                yield str(prefix / "bin" / "python")
            roots[str(prefix)] = None
        elif is_program:
            roots[str(place)] = None
        if is_program:
            with suppress(OSError), place.open("rb") as file:
                line = file.readline(_LONGEST_LINE)
                words = line[2:].split() if line.startswith(b"#!") else []
                if words and words[0].startswith(b"/"):
                    yield os.fsdecode(words[0])


def _links(program: str) -> Iterator[Path]:
    """Yield a program's path and that of everything it links to, with the folders on the way made real."""
    place = Path(program)
    for _ in range(_MOST_STEPS):
        place = Path(os.path.realpath(place.parent)) / place.name
        yield place
        if not place.is_symlink():
            return
        place = place.parent / place.readlink()


def _is_opened(prefix: Path, around: ProgramFolders) -> bool:
    """Whether a folder is given as a whole, because a program was installed to it."""
    return not around.is_closed(prefix) and (
        (prefix / "pyvenv.cfg").is_file()
        or (prefix / "lib" / "rustlib").is_dir()
        or any((folder / "os.py").is_file() for folder in prefix.glob("lib/python3*"))
    )


def is_in_any(path: Path, folders: Iterable[str]) -> bool:
    """Whether a path is one of some folders, or is in one."""
    return any(path.is_relative_to(folder) for folder in folders)


class CommandFiles(Struct, frozen=True):
    """A process as it is started confined, with the paths that it needs."""

    spec: ProcessSpec
    programs: tuple[str, ...]
    """What its program needs besides itself, where that is one of this machine's by its name."""
    named: Mapping[str, tuple[str, ...]]
    """The paths that its command names, each with the files around it."""

    @property
    def readable(self) -> tuple[str, ...]:
        """All paths that it may read."""
        return tuple(dict.fromkeys((*self.programs, *(path for around in self.named.values() for path in around))))


def files_of_command(spec: ProcessSpec, *, has_folder: bool, is_placed: bool = False) -> CommandFiles:
    """Return the files that a server may read because of its command.

    `has_folder` says whether its manifest names its working directory, and `is_placed` whether it gives the path of its
    program.
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
    return CommandFiles(
        replace(spec, argv=tuple(argv), cwd=folder),
        tuple(path for path in besides if not covered(path)),
        {path: around for path, around in named.items() if around and not all(map(covered, around))},
    )


def needed_by(program: str, path: str) -> tuple[str, ...]:
    """Return what a program needs besides itself: the modules around it, and the interpreter in its `env` line."""
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
    """Whether a path without links is in a folder."""
    return Path(path).is_relative_to(Path(folder).resolve())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a word too long for a name, or with a character that none has
        return False


def _around(path: Path) -> tuple[str, ...]:
    """Return the folder that a file is part of; empty for a standalone program, or if that folder is too wide."""
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
    """Yield the files of the interpreter in a script's `env` line."""
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
