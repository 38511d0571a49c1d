"""The backend `rlimits`: limits for each process, and no way to gain rights. What it sees and reaches stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kiwi_mcp.domain.isolation import Jail, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.limits import limiting
from kiwi_mcp.sandbox.port import Confined, SelfTest

_SELF_TEST = """
grep -q '^NoNewPrivs:.1$' /proc/self/status && echo no_new_privs
[ "$(ulimit -n)" = 64 ] && [ "$(ulimit -c)" = 0 ] && [ "$(ulimit -t)" = 5 ] && echo rlimits
:
"""


@dataclass(frozen=True, slots=True)
class Rlimits:
    """Puts `setpriv` and `prlimit` before a command; None where the machine has no such program."""

    setpriv: str | None
    prlimit: str | None
    name: str = "rlimits"

    def obstacles(self) -> tuple[str, ...]:
        """Return which of the two programs is missing."""
        found = {"setpriv": self.setpriv, "prlimit": self.prlimit}
        return tuple(f"`{name}` is not installed: install util-linux." for name, path in found.items() if path is None)

    def fingerprint(self) -> str:
        """Return where the two programs are."""
        return f"{self.setpriv} {self.prlimit}"

    def self_test(self, secret: str) -> SelfTest | None:  # noqa: ARG002 - the port gives every backend the same arguments
        """Return a shell that looks at its own limits."""
        spec = ProcessSpec(("/bin/sh", "-c", _SELF_TEST), cwd="/", env={"PATH": "/usr/bin:/bin"}, timeout=20.0)
        return SelfTest(spec, Jail("standard", limits=Limits(open_files=64, cpu_seconds=5)))

    @contextmanager
    def wrap(self, spec: ProcessSpec, jail: Jail) -> Iterator[Confined]:
        """Give the process with limits before it."""
        assert self.setpriv is not None  # noqa: S101 - a backend with obstacles is never chosen
        assert self.prlimit is not None  # noqa: S101 - likewise
        limits = limiting(self.prlimit, jail.limits)
        yield Confined(replace(spec, argv=(self.setpriv, "--no-new-privs", "--", *limits, *spec.argv)))
