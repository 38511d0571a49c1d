"""Find a program and start it with pipes and a marker; errors of starting."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from subprocess import DEVNULL, Popen

from msgspec import Struct

from kiwi_mcp.domain.errors import CommandMissing, InvalidRequest, KiwiError, TooLarge, Unavailable
from kiwi_mcp.domain.isolation import Handover
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process.process_tree import MARK, STAMPED, TreeMarker, stamping

RESULT = "KIWI_RESULT"
"""The variable with the path of the result channel."""
_ARGUMENT_LIMIT = 131_072
"""The most one argument or variable may have, by the kernel, in bytes."""


async def completed(work: Coroutine[object, object, object]) -> None:
    """Wait for work that must complete, even if this task is cancelled several times."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


def abandon(process: Popen[bytes]) -> None:
    """End a process that could not be taken charge of."""
    process.kill()
    process.wait()


class Started(Struct, frozen=True):
    """A process that was started, with Kiwi's ends of its pipes; the receiver closes them."""

    process: Popen[bytes]
    handle: int
    """The descriptor that becomes readable when the process ends."""
    stdin: int | None
    stdout: int
    stderr: int
    result: int | None


def start(
    spec: ProcessSpec,
    program: str,
    env: Mapping[str, str],
    handover: Handover,
    mark: TreeMarker,
    *,
    has_input: bool,
    has_result: bool,
) -> Started:
    """Start a process with pipes and a marker; where that fails, nothing of it is left."""
    theirs: list[int] = []
    ours: list[int] = []
    process: Popen[bytes] | None = None
    try:
        for _ in range(3 if has_result else 2):
            reading, writing = os.pipe()
            ours.append(reading)
            theirs.append(writing)
        if has_input:
            reading, writing = os.pipe()
            theirs.append(reading)
            ours.append(writing)
        if handover.owner is not None:  # the user that it will be could not open them by name otherwise
            for end in theirs:
                os.fchown(end, handover.owner, -1)
        passed = (theirs[2],) if has_result else ()
        own = {RESULT: f"/dev/fd/{theirs[2]}", MARK: mark.name} if has_result else {MARK: mark.name}
        with stamping(mark):
            process = handover.start(
                lambda: Popen(
                    spec.argv,
                    executable=program,
                    cwd=spec.cwd,
                    env={**env, **own},
                    stdin=theirs[-1] if has_input else DEVNULL,
                    stdout=theirs[0],
                    stderr=theirs[1],
                    pass_fds=(*passed, *handover.descriptors),
                    start_new_session=not handover.makes_session,
                    process_group=handover.group,
                )
            )
        handover.enter(process.pid)
        handle = os.pidfd_open(process.pid)
    except BaseException as fault:
        if process is not None:
            abandon(process)
        for end in ours:
            os.close(end)
        if isinstance(fault, (OSError, ValueError)):
            raise start_error(spec, fault) from fault
        raise
    finally:
        for end in theirs:
            os.close(end)
    with suppress(OSError, ValueError):  # it has ended already, or it is another user's by now
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # limits that it cannot raise again
        resource.prlimit(process.pid, STAMPED, (mark.stamp, mark.stamp))
    result = ours[2] if has_result else None
    return Started(process, handle, ours[-1] if has_input else None, ours[0], ours[1], result)


def search_path(first: str = "") -> str:
    """Return the PATH of a process: one folder first, then the caller's own.

    Relative folders are left out. They would refer to the project folder, where untrusted programs may be.
    """
    return _absolute(first, os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"))


@lru_cache(maxsize=64)
def _absolute(first: str, path: str) -> str:
    return ":".join(dict.fromkeys(folder for folder in (first, *path.split(":")) if folder.startswith("/")))


def find_program(command: str, path: str, *, needed_by: str, shell: str = "", install: str = "") -> str:
    """Return where a program is now: absolute as written, or in the first folder of `path`; else `shell` if there."""
    if command and ("/" not in command or command.startswith("/")):  # a relative path would be a file of the project
        for folder in ("",) if command.startswith("/") else path.split(":"):
            place = f"{folder}/{command}" if folder else command
            if os.access(place, os.X_OK) and not os.path.isdir(place):  # noqa: PTH112 - on the way of every call
                return place
    if shell and os.access(shell, os.X_OK):
        return shell
    raise CommandMissing(command, needed_by=needed_by, install=install)


def locate(spec: ProcessSpec, env: Mapping[str, str]) -> str:
    """Return the path of the program a spec starts: as written, or on the PATH of its own environment."""
    if not spec.argv:
        raise InvalidRequest("The process has no command.", suggestion="Name a program in `command`.")
    if "\0" in "".join((*spec.argv, spec.cwd, *env, *env.values())):
        raise InvalidRequest(
            "An argument or variable of the process holds a NUL character, which cannot be passed on.",
            suggestion="Send such data on standard input or in a file.",
        )
    if not os.path.isdir(spec.cwd):  # noqa: PTH112 - paths as objects cost too much on the way of every run
        raise InvalidRequest(
            f"The process would start in {spec.cwd!r}, which is not a folder.",
            suggestion="Create the folder, or name one that exists.",
        )
    command = spec.argv[0]
    if "/" in command:
        path = os.path.join(spec.cwd, command)  # noqa: PTH118 - as above
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


def start_error(spec: ProcessSpec, fault: OSError | ValueError) -> KiwiError:
    """Return the error for a process that could not be started, with what to do about it."""
    if isinstance(fault, ValueError):  # a variable's name with `=` in it, or text that is no text
        return InvalidRequest(
            f"The process cannot be given its arguments and variables: {fault}.",
            suggestion="Use names of letters, digits and `_`, and text that is valid Unicode.",
        )
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


def start_background(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Start a program in a session of its own, with the variables here and `env`, and return its process id."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
    )
    process.returncode = 0  # it is not waited for here, and that is no fault
    return process.pid
