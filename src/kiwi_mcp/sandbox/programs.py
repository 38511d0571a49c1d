"""Programs: the launchers that a sandbox is made with, and what a program needs of the file system to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG, S_IWGRP, S_IWOTH

FOLDERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin", "/run/current-system/sw/bin")
"""Where launchers are looked for: never on PATH, where anybody may have put one."""
_OTHERS_WRITE = S_IWGRP | S_IWOTH
_MOST_STEPS = 16
_LONGEST_LINE = 256


def find_launcher(name: str, folders: Sequence[str] = FOLDERS) -> str | None:
    """Return the path of a launcher that only the system's administrator can change; None where there is none."""
    for folder in folders:
        found = Path(os.path.realpath(Path(folder, name)))
        if _is_the_systems(found) and os.access(found, os.X_OK):
            return str(found)
    return None


def _is_the_systems(path: Path) -> bool:
    try:
        state = path.lstat()
        if not S_ISREG(state.st_mode):
            return False
        return all(one.st_uid == 0 and not one.st_mode & _OTHERS_WRITE for one in (state, *_parents(path)))
    except OSError:
        return False


def _parents(path: Path) -> Iterator[os.stat_result]:
    return (folder.lstat() for folder in path.parents)


@dataclass(frozen=True, slots=True)
class Program:
    """A program as it is started inside a sandbox, and the paths without which it does not run."""

    path: str
    roots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Around:
    """The folders that programs are found among: those whose files may not say of themselves what they are."""

    closed: tuple[str, ...] = ()
    """Folders that anybody's files may be in: what lies there is no installation, whatever it looks like."""
    trusted: tuple[str, ...] = ()
    """Those below them that Kiwi made."""
    given: tuple[str, ...] = ()
    """What is given already."""

    def is_closed(self, path: Path) -> bool:
        """Whether a folder is, or lies in, one that is closed."""
        return _is_in(path, self.closed) and not _is_in(path, self.trusted)


def known_program(found: str, is_there: Callable[[str], bool], around: Around = Around()) -> Program:  # noqa: B008 - frozen
    """Return the program at a path as it was found before, unless it has changed since."""
    own, target = Path(found).lstat(), Path(found).stat()
    state = (own.st_ino, own.st_ctime_ns, target.st_dev, target.st_ino, target.st_ctime_ns)
    return _program(found, state, is_there, around)


@lru_cache(maxsize=256)
def _program(found: str, _: tuple[int, ...], is_there: Callable[[str], bool], around: Around) -> Program:
    return program_at(found, is_there, around)


def program_at(found: str, is_there: Callable[[str], bool], around: Around = Around()) -> Program:  # noqa: B008 - frozen
    """Return the program at a path; `is_there` tells of a path whether every sandbox has it.

    An interpreter and the Rust compiler need the folder they were installed to, a virtual environment also the one it
    was made from, and a script its interpreter. Of any other program only the file itself is taken, under its real
    name: the folder around it may be a home.
    """
    places = [*_links(found)]
    path = next((place for place in places if _is_seen(place, is_there, around)), places[-1])
    roots: dict[str, None] = {}
    waiting = [found]
    for _ in range(_MOST_STEPS):
        if waiting:
            waiting += _gather(waiting.pop(), roots, around)
    return Program(str(path), tuple(root for root in roots if not is_there(root)))


def _is_seen(place: Path, is_there: Callable[[str], bool], around: Around) -> bool:
    """Whether a program is seen under this name inside, and need not be given under its real one."""
    return is_there(str(place)) or _is_in(place, around.given) or _is_opened(_prefix(place), around)


def _gather(program: str, roots: dict[str, None], around: Around) -> Iterator[str]:
    """Add what a program needs, and yield the programs it needs besides."""
    for place in _links(program):
        prefix = _prefix(place)
        # What cannot be executed is no program: a name in a manifest does not open the file it names.
        is_program = not place.is_symlink() and os.access(place, os.X_OK)
        if _is_opened(prefix, around):
            if str(prefix) not in roots:
                yield str(prefix / "bin" / "python")
            roots[str(prefix)] = None
        elif is_program:
            roots[str(place)] = None
        if is_program:
            yield from _interpreter(place)


def _links(program: str) -> Iterator[Path]:
    """Yield a program's path and that of everything it links to, with the folders on the way made real."""
    place = Path(program)
    for _ in range(_MOST_STEPS):
        place = Path(os.path.realpath(place.parent)) / place.name
        yield place
        if not place.is_symlink():
            return
        place = place.parent / place.readlink()


def _interpreter(place: Path) -> list[str]:
    """Return the interpreter that the first line of a script names."""
    try:
        with place.open("rb") as file:
            line = file.readline(_LONGEST_LINE)
    except OSError:
        return []
    words = line[2:].split() if line.startswith(b"#!") else []
    return [os.fsdecode(words[0])] if words and words[0].startswith(b"/") else []


def _prefix(place: Path) -> Path:
    return place.parent.parent


def _is_opened(prefix: Path, around: Around) -> bool:
    """Whether a folder is given as a whole, because a program was installed to it."""
    return not around.is_closed(prefix) and _is_installation(prefix)


def _is_in(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_installation(prefix: Path) -> bool:
    if (prefix / "pyvenv.cfg").is_file() or (prefix / "lib" / "rustlib").is_dir():
        return True
    return any((folder / "os.py").is_file() for folder in prefix.glob("lib/python3*"))
