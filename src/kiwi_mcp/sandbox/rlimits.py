"""The backend `rlimits`: limits for each process, no way to gain rights, and only some files that it may change.

What it sees and reaches stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from kiwi_mcp.domain.isolation import Handover, Jail, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.grants import open_grants
from kiwi_mcp.sandbox.landlock import open_common, start_restricted
from kiwi_mcp.sandbox.limits import limiting
from kiwi_mcp.sandbox.port import Confined, SelfTest
from kiwi_mcp.sandbox.scratch import scratch_folder

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


@dataclass(frozen=True, slots=True)
class Rlimits:
    """Puts `prlimit` before a command, which is None where the machine has no such program."""

    prlimit: str | None
    limits_writing: bool
    """Whether this kernel can keep a process from changing files."""
    name: str = "rlimits"

    def obstacles(self) -> tuple[str, ...]:
        """Return that the program is missing."""
        return () if self.prlimit else ("`prlimit` is not installed: install util-linux.",)

    def fingerprint(self) -> str:
        """Return where the program is, and what the kernel can."""
        return f"{self.prlimit} {self.limits_writing}"

    def self_test(self, secret: str) -> SelfTest | None:
        """Return a shell that looks at its own limits, and tries to change a file."""
        words = ("/bin/sh", "-c", _SELF_TEST, "self_test", secret)
        spec = ProcessSpec(words, cwd="/", env={"PATH": "/usr/bin:/bin"}, timeout=20.0)
        return SelfTest(spec, Jail("standard", limits=Limits(open_files=64, cpu_seconds=5)))

    @contextmanager
    def wrap(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:
        """Give the process with limits before it and, where the kernel can, a temporary folder of its own."""
        assert self.prlimit is not None  # noqa: S101 - a backend with obstacles is never chosen
        limited = replace(spec, argv=(*limiting(self.prlimit, jail.limits), *spec.argv))
        if not self.limits_writing:
            yield Confined(limited, Handover(start=partial(start_restricted, None)))
            return
        with ExitStack() as keep:
            own = str(keep.enter_context(scratch_folder()))
            granted = open_grants(Jail(jail.level, writable=(*jail.writable, own)), (), keep)
            allowed = (*(grant.descriptor for grant in granted), *open_common(keep))
            variables = {**spec.env, "TMPDIR": own}
            yield Confined(replace(limited, env=variables), Handover(start=partial(start_restricted, allowed)))
