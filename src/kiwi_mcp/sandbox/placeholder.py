"""Placeholders: what keeps names free while a process that must not create them is running.

A mount needs something to lie on, so a name that is absent gets a placeholder on the owner's disk: a socket that no
program listens on. git shows no sockets, neither inside the sandbox nor outside, and no program takes one for a file
or a folder. `.git` gets an empty folder, which git looks past. Placeholders have a time of change of zero, which tells
them apart from what is the owner's, and are removed when the last process that they are for has ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from stat import S_IFSOCK, S_ISDIR, S_ISREG, S_ISSOCK
from time import sleep

_TIME = 0
_WRITING = 0o222
_FOLDERS = frozenset({".git"})
_TRIES, _PAUSE = 100, 0.002
"""How often and how long, in seconds, the removal of placeholders by another process is waited for."""


def is_placeholder(path: str) -> bool:
    """Whether a path is a placeholder; earlier versions used empty files and folders."""
    try:
        state = os.lstat(path)
        if not _looks_so(state):
            return False
        return not S_ISDIR(state.st_mode) or not os.listdir(path)  # noqa: PTH208 - text, as all that is on the way of every call
    except OSError:
        return False


def _looks_so(state: os.stat_result) -> bool:
    """Whether something may be a placeholder, by its kind and times; a folder must be empty besides."""
    if state.st_mtime_ns != _TIME:
        return False
    is_empty_file = S_ISREG(state.st_mode) and state.st_size == 0 and not state.st_mode & _WRITING
    return S_ISDIR(state.st_mode) or S_ISSOCK(state.st_mode) or is_empty_file


def make_placeholders(folder: int, names: Sequence[str], keep: ExitStack) -> bool:
    """Put a placeholder wherever one of some names is free in an open folder, until `keep` ends.

    The folder is locked for as long, together with other processes that do the same. Returns False where another
    process has the lock for itself.
    """
    locked = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    if not _is_shared(locked):
        os.close(locked)
        return False
    keep.callback(_release, locked, names)
    there = frozenset(os.listdir(locked))  # noqa: PTH208 - by descriptor
    _make([name for name in names if name not in there], locked)
    return True


def _make(names: Sequence[str], folder: int) -> None:
    first = ""
    for name in names:
        # A folder that this user cannot write to keeps the process out by itself.
        with suppress(OSError):
            if name in _FOLDERS:
                os.mkdir(name, 0o755, dir_fd=folder)
            elif _is_linked(first, name, folder):
                continue
            else:
                first = _make_socket(name, folder)
            os.utime(name, (_TIME, _TIME), dir_fd=folder, follow_symlinks=False)


def _is_linked(first: str, name: str, folder: int) -> bool:
    """Link a socket to another name, and return whether that worked: creating a new one is many times slower."""
    with suppress(OSError):
        os.link(first, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    return False


def _make_socket(name: str, folder: int) -> str:
    """Make a socket, and return its name if it can have others; where there are no sockets, an empty file does."""
    try:
        os.mknod(name, S_IFSOCK | 0o444, dir_fd=folder)
    except PermissionError:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=folder))
        return ""
    return name


def _is_shared(locked: int) -> bool:
    for _ in range(_TRIES):
        try:
            flock(locked, LOCK_SH | LOCK_NB)
        except OSError:
            sleep(_PAUSE)
        else:
            return True
    return False


def _release(locked: int, names: Sequence[str]) -> None:
    """Remove the placeholders, unless another process needs them. A folder that is no longer empty is the owner's."""
    with suppress(OSError):
        flock(locked, LOCK_EX | LOCK_NB)
        for name in names:
            with suppress(OSError):
                state = os.lstat(name, dir_fd=locked)
                if _looks_so(state):
                    remove = os.rmdir if S_ISDIR(state.st_mode) else os.unlink
                    remove(name, dir_fd=locked)
    os.close(locked)
