"""The backend `rlimits` and its scratch folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import Handover, ResourceLimits, SandboxProfile
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.backend import Launch, SelfTest
from kiwi_mcp.sandbox.limits import limiting
from kiwi_mcp.sandbox.linux import start_restricted
from kiwi_mcp.sandbox.process_setup import open_grants

_OPEN_TO_ALL = ("/dev/full", "/dev/null", "/dev/ptmx", "/dev/pts", "/dev/shm", "/dev/tty", "/dev/zero")  # noqa: S108 - memory and terminals, which programs expect
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The first parameter is a file of the user's own, so that nothing but the restriction keeps it from being changed.
_SELF_TEST = """
fails() { ! (eval "$1") 2>/dev/null; }
grep -q '^NoNewPrivs:.1$' /proc/self/status && echo no_new_privs
[ "$(ulimit -n)" = 64 ] && [ "$(ulimit -c)" = 0 ] && [ "$(ulimit -t)" = 5 ] && echo rlimits
echo probe >"$TMPDIR/probe" && [ -w "$1" ] && cat "$1" >/dev/null && fails 'echo >>"$1"' && fails ': >"$1"' &&
    fails 'truncate -s 0 "$1"' && fails ': >"$1.new"' && fails 'mkdir "$1.new"' && fails 'mv "$1" "$1.new"' &&
    fails 'ln -s / "$1.new"' && fails 'mv "$TMPDIR/probe" "$1.new"' && [ ! -e "$1.new" ] && [ -e "$1" ] &&
    echo fs_write_limited
:
"""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder that only the user can access, and remove it after the block."""
    folder = Path(mkdtemp(prefix="kiwi-run-"))
    try:
        yield folder
    finally:
        with suppress(OSError):  # what cannot be removed is left to the system's cleanup of temporary folders
            _empty(folder)
            folder.rmdir()


def _empty(folder: Path) -> None:
    """Remove the content of a folder: inner folders are moved up one level at a time, and links are not followed."""
    top, names = os.open(folder, _FOLDER), (f"{token_hex(8)}-{number}" for number in count())
    try:
        for _ in range(100_000):
            if not (found := os.listdir(top)):  # noqa: PTH208 - by descriptor
                return
            for name in found:
                if not _is_unlinked(name, top):
                    _remove(name, top, names)
    finally:
        os.close(top)


def _remove(name: str, top: int, names: Iterator[str]) -> None:
    """Remove one folder, after the folders in it have been moved beside it."""
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inside in os.listdir(inner):  # noqa: PTH208 - by descriptor
            if not _is_unlinked(inside, inner):
                os.chmod(inside, 0o700, dir_fd=inner)  # a folder that cannot be written to cannot be moved
                os.rename(inside, next(names), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def _is_unlinked(name: str, folder: int) -> bool:
    """Remove what has a name, unless it is a folder; whether it was none."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


class Rlimits(Struct, frozen=True):
    """Puts `prlimit` before a command, which is None where the machine has no such program."""

    prlimit: str | None
    limits_writing: bool
    """Whether this kernel can keep a process from changing files."""
    name: str = "rlimits"
    limited_by: str = ""

    def obstacles(self) -> tuple[str, ...]:
        """Return an obstacle if the program is missing."""
        return () if self.prlimit else ("`prlimit` is not installed: install util-linux.",)

    def fingerprint(self) -> str:
        """Return where the program is, and what the kernel can."""
        return f"{self.prlimit} {self.limits_writing}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that looks at its own limits, and tries to change a file."""
        words = ("/bin/sh", "-c", _SELF_TEST, "self_test", secret)
        spec = ProcessSpec(words, cwd="/", env={"PATH": "/usr/bin:/bin"}, timeout=20.0)
        return SelfTest(spec, SandboxProfile("standard", limits=ResourceLimits(open_files=64, cpu_seconds=5)))

    @contextmanager
    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> Iterator[Launch]:
        """Yield the process with limits and, if the kernel supports it, a temporary folder of its own."""
        assert self.prlimit is not None  # noqa: S101 - a backend with obstacles is never chosen
        limited = replace(spec, argv=(*limiting(self.prlimit, profile.limits), *spec.argv))
        if not self.limits_writing:
            yield Launch(limited, Handover(start=partial(start_restricted, None)))
            return
        with ExitStack() as keep:
            own = str(keep.enter_context(scratch_folder()))
            granted = open_grants(SandboxProfile(profile.level, writable=(*profile.writable, own)), (), keep)
            allowed = [grant.descriptor for grant in granted]
            for path in _OPEN_TO_ALL:
                with suppress(OSError):  # not on this machine
                    allowed.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
                    keep.callback(os.close, allowed[-1])
            variables = {**spec.env, "TMPDIR": own}
            yield Launch(replace(limited, env=variables), Handover(start=partial(start_restricted, allowed)))
