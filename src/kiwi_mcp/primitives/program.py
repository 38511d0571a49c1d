"""The program of a process: where it lies, and what its start may fail on, in words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

from kiwi_mcp.domain.errors import CommandMissing, InvalidRequest, KiwiError, TooLarge, Unavailable
from kiwi_mcp.domain.plan import ProcessSpec

_ARGUMENT_LIMIT = 131_072
"""The most one argument or variable may have, by the kernel, in bytes."""
_USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"


def search_path(first: str = "") -> str:
    """Return the PATH of a process: one folder first, then the caller's own.

    Relative folders are left out: they would mean the project's folder, where anybody may have put a program.
    """
    return _absolute(first, os.environ.get("PATH", _USUAL_PATH))


@lru_cache(maxsize=64)
def _absolute(first: str, path: str) -> str:
    return ":".join(dict.fromkeys(folder for folder in (first, *path.split(":")) if folder.startswith("/")))


def locate(spec: ProcessSpec, env: Mapping[str, str]) -> str:
    """Return the path of the program a spec starts: as written, or on the PATH of its own environment."""
    _check(spec, env)
    command = spec.argv[0]
    if "/" in command:
        path = os.path.join(spec.cwd, command)  # noqa: PTH118 - paths as objects cost too much on the way of every run
        if not os.path.isfile(path):  # noqa: PTH113 - as above
            raise CommandMissing(command, needed_by="the call")
        if not os.access(path, os.X_OK):
            raise _unusable(command, "it is not executable", "Give it the executable bit, or name its interpreter.")
        return path
    # A relative entry would be looked up in Kiwi's own folder.
    folders = [folder for folder in env.get("PATH", os.defpath).split(os.pathsep) if folder.startswith("/")]
    found = shutil.which(command, path=os.pathsep.join(folders)) if command and folders else None
    if found is None:
        raise CommandMissing(command, needed_by="the call")
    return found


def _check(spec: ProcessSpec, env: Mapping[str, str]) -> None:
    if not spec.argv:
        raise InvalidRequest("The process has no command.", suggestion="Name a program in `command`.")
    if any("\0" in text for text in (*spec.argv, spec.cwd, *env, *env.values())):
        raise InvalidRequest(
            "An argument or variable of the process holds a NUL character, which cannot be passed on.",
            suggestion="Send such data on standard input or in a file.",
        )
    if not os.path.isdir(spec.cwd):  # noqa: PTH112 - as above
        raise InvalidRequest(
            f"The process would start in {spec.cwd!r}, which is not a folder.",
            suggestion="Create the folder, or name one that exists.",
        )


@contextmanager
def spawning(spec: ProcessSpec) -> Iterator[None]:
    """Turn what the start of a process may raise into errors that say what to do."""
    try:
        yield
    except ValueError as fault:  # a variable's name with `=` in it, or text that is no text
        raise InvalidRequest(
            f"The process cannot be given its arguments and variables: {fault}.",
            suggestion="Use names of letters, digits and `_`, and text that is valid Unicode.",
        ) from fault
    except OSError as fault:
        raise _explained(spec, fault) from fault


def _explained(spec: ProcessSpec, fault: OSError) -> KiwiError:
    command = spec.argv[0]
    match fault.errno:
        case errno.ENOENT:
            return _unusable(command, "the interpreter in its first line is missing", "Install that interpreter.")
        case errno.ENOEXEC:
            return _unusable(
                command, "this machine cannot execute it", "Begin a script with a line such as `#!/usr/bin/env bash`."
            )
        case errno.EACCES | errno.EPERM:
            return _unusable(command, "this user may not execute it", "Check its permissions and those of its folder.")
        case errno.E2BIG:
            size = sum(len(os.fsencode(text)) for text in spec.argv)
            return TooLarge("The list of arguments and variables", size=size, limit=_ARGUMENT_LIMIT)
        case _:
            return _unusable(command, fault.strerror or "unknown fault", "Try again when the machine is less busy.")


def _unusable(command: str, reason: str, suggestion: str) -> Unavailable:
    return Unavailable(f"`{command}` cannot be started: {reason}.", suggestion=suggestion, command=command)
