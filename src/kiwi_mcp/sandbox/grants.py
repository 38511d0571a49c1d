"""Grants: paths that a confined process is given, opened once and without following links."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from stat import S_ISDIR, S_ISREG

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.sandbox.kernel_calls import open_beneath
from kiwi_mcp.sandbox.refusals import ungrantable

_ITS_OWN = ("/", "/dev", "/etc", "/proc", "/run", "/sys", "/tmp")  # noqa: S108 - names of places, nothing is written
"""Folders of which every private file system has its own."""
_NEVER = ("/dev/", "/proc/", "/sys/")
_NAME_IT = "Name a folder or a file of your own by its real path, without links on the way."


@dataclass(frozen=True, slots=True)
class Opened:
    """A granted path that is open: what it named then is what is given, whatever the path names later."""

    path: str
    descriptor: int
    is_writable: bool
    is_folder: bool
    owner: int


def open_grants(jail: Jail, needed: Iterable[str], keep: ExitStack) -> tuple[Opened, ...]:
    """Open all that a process is given, outer folders first, so that what is nested comes to lie on top.

    `needed` are readable paths that the process could not run without.
    """
    wanted = {**dict.fromkeys((*needed, *jail.readable), False), **dict.fromkeys(jail.writable, True)}
    ordered = sorted(wanted.items(), key=lambda grant: len(PurePosixPath(grant[0]).parts))
    return tuple(_open(path, keep, is_writable=is_writable) for path, is_writable in _outermost(ordered))


def _outermost(grants: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Leave out what lies in something that is given in the same way."""
    given: dict[str, bool] = {}
    for path, is_writable in grants:
        around = next((given[outer] for outer in map(str, PurePosixPath(path).parents) if outer in given), None)
        if around != is_writable:
            given[path] = is_writable
            yield path, is_writable


def _open(path: str, keep: ExitStack, *, is_writable: bool) -> Opened:
    _refuse_reserved(path)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = open_beneath(root, path[1:], os.O_PATH)
    except OSError as fault:
        raise ungrantable(path, _reason(fault), _NAME_IT) from fault
    finally:
        os.close(root)
    keep.callback(os.close, descriptor)
    state = os.fstat(descriptor)
    if not S_ISDIR(state.st_mode) and not S_ISREG(state.st_mode):
        raise ungrantable(path, "it is neither a folder nor a regular file", _NAME_IT)
    return Opened(path, descriptor, is_writable, S_ISDIR(state.st_mode), state.st_uid)


def _refuse_reserved(path: str) -> None:
    if not path.startswith("/") or os.path.normpath(path) != path or "\0" in path:
        raise ungrantable(path, "it is not an absolute path in its plain form", _NAME_IT)
    if path in _ITS_OWN or path.startswith(_NEVER):
        raise ungrantable(path, "a sandbox has its own there", "Name the folder below it that is meant.")


def _reason(fault: OSError) -> str:
    match fault.errno:
        case errno.ELOOP:
            return "there is a link on the way"
        case errno.ENOENT | errno.ENOTDIR:
            return "there is nothing of that name"
        case errno.EACCES:
            return "this user may not go there"
        case errno.ENOSYS:
            return "this kernel cannot open paths without following links; it must be Linux 5.6 or newer"
        case _:
            return fault.strerror or "it cannot be opened"
