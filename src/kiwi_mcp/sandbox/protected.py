"""Protected names: what stays as it is in a folder that a confined process may write to.

Other programs run or obey what stands under these names: hooks of a repository, settings of an editor, Kiwi's own
items. What is there is given read-only. What is not there is kept from appearing by an empty file in its place, which
is removed when the last process that is kept from it has ended. A file is taken by nobody for what a folder of its name
is; where programs expect a file of that name to say something, the place is held by an empty folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from stat import S_ISDIR, S_ISREG

from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.profile import Profile
from kiwi_mcp.sandbox.refusals import ungrantable

_MARK = 0
"""The time of change that what holds a place has, so that it is told from what is the owner's."""
_TRIES = 5
_FOLDERS = frozenset({".git"})
"""Held by a folder: git looks past an empty one, and stops at a file that does not say where the repository is."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def shielded(grants: Sequence[Opened], profile: Profile, keep: ExitStack) -> Iterator[Opened]:
    """Yield what lies protected in the writable ones of some grants, open, to be given read-only."""
    for grant in grants:
        if grant.is_writable and grant.is_folder:
            for name in profile.protected:
                if name in profile.kept_absent:
                    _hold_place(grant, name, keep)
                if (opened := _open(grant, name, keep)) is not None:
                    yield opened


def _open(grant: Opened, name: str, keep: ExitStack) -> Opened | None:
    path = f"{grant.path}/{name}"
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=grant.descriptor)
    except OSError:
        return None
    keep.callback(os.close, descriptor)
    state = os.fstat(descriptor)
    if not S_ISDIR(state.st_mode) and not S_ISREG(state.st_mode):
        raise ungrantable(path, "it must stay as it is, and a link cannot be held", "Grant folders below it instead.")
    return Opened(path, descriptor, is_writable=False, is_folder=S_ISDIR(state.st_mode), owner=state.st_uid)


def _hold_place(grant: Opened, name: str, keep: ExitStack) -> None:
    """Put something empty where nothing is, and share in it where another run did so."""
    for _ in range(_TRIES):
        try:
            _make(grant.descriptor, name)
        except FileExistsError:
            pass
        except OSError:  # a folder that this user cannot write to keeps the process out by itself
            return
        if not _is_ours(grant.descriptor, name):
            return
        if (held := _held(grant.descriptor, name)) is not None:
            keep.callback(_release, os.dup(grant.descriptor), name, held)
            return
    raise ungrantable(f"{grant.path}/{name}", "another process holds its place", "Try again when that has ended.")


def _make(folder: int, name: str) -> None:
    if name in _FOLDERS:
        os.mkdir(name, 0o755, dir_fd=folder)
    else:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=folder))
    os.utime(name, (_MARK, _MARK), dir_fd=folder, follow_symlinks=False)


def _is_ours(folder: int, name: str) -> bool:
    try:
        held = os.open(name, _OPEN, dir_fd=folder)
    except OSError:
        return False
    try:
        state = os.fstat(held)
        is_empty = not os.listdir(held) if S_ISDIR(state.st_mode) else state.st_size == 0  # noqa: PTH208 - by descriptor
        return state.st_mtime_ns == _MARK and is_empty
    finally:
        os.close(held)


def _held(folder: int, name: str) -> int | None:
    """Return what holds a place, open and locked so that nobody removes it; None where somebody is about to."""
    try:
        held = os.open(name, _OPEN, dir_fd=folder)
    except OSError:
        return None
    with suppress(OSError):
        flock(held, LOCK_SH | LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(name, dir_fd=folder, follow_symlinks=False)):
            return held
    os.close(held)
    return None


def _release(folder: int, name: str, held: int) -> None:
    # Whoever else holds it removes it later; what is not empty any more is nobody's to remove.
    with suppress(OSError):
        flock(held, LOCK_EX | LOCK_NB)
        if _is_ours(folder, name):
            remove = os.rmdir if S_ISDIR(os.fstat(held).st_mode) else os.unlink
            remove(name, dir_fd=folder)
    os.close(held)
    os.close(folder)
