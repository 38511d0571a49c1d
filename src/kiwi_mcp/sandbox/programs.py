"""Programs: the launchers that a sandbox is made with, and what a program needs of the file system to run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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


def roots_of(program: str) -> tuple[str, ...]:
    """Return the paths without which a program does not run: its own, those of its links, and its installation.

    An interpreter needs the folder it was installed to, a virtual environment also the one it was made from, and a
    script its interpreter. Of any other program only the file itself is taken: the folder around it may be a home.
    """
    roots: dict[str, None] = {}
    waiting = [program]
    for _ in range(_MOST_STEPS):
        if not waiting:
            break
        for place in _links(waiting.pop()):
            prefix = place.parent.parent
            if (root := str(prefix if _is_installation(prefix) else place)) in roots:
                continue
            roots[root] = None
            waiting += [str(prefix / "bin" / "python")] if _is_virtual(prefix) else []
            waiting += _interpreter(place)
    return tuple(roots)


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


def _is_virtual(prefix: Path) -> bool:
    return (prefix / "pyvenv.cfg").is_file()


def _is_installation(prefix: Path) -> bool:
    return _is_virtual(prefix) or any((folder / "os.py").is_file() for folder in prefix.glob("lib/python3*"))
