"""Limits of a process that waits: set from outside, for good, and never loosened."""

from __future__ import annotations

import resource
from subprocess import DEVNULL, PIPE, Popen

from kiwi_mcp.domain.isolation import Limits
from kiwi_mcp.sandbox.limits import start_limited

LIMITS = Limits(memory_bytes=64 << 20, cpu_seconds=7, open_files=99, file_bytes=1_000)


def told() -> dict[str, tuple[int, int]]:
    """The limits that a waiting shell has once it was started with `LIMITS`."""

    def spawn() -> Popen[bytes]:
        return Popen(("/bin/cat",), stdin=PIPE, stdout=DEVNULL, env={})

    with start_limited(LIMITS, spawn) as process:
        kinds = ("CORE", "DATA", "FSIZE", "NOFILE", "CPU")
        found = {kind: resource.prlimit(process.pid, getattr(resource, f"RLIMIT_{kind}")) for kind in kinds}
        assert process.stdin is not None
        process.stdin.close()
    return found


def test_what_waits_has_its_limits_before_it_goes_on_and_cannot_raise_them() -> None:
    wanted = {"CORE": 0, "DATA": 64 << 20, "FSIZE": 1_000, "NOFILE": 99, "CPU": 7}
    assert told() == {kind: (most, most) for kind, most in wanted.items()}


def test_a_limit_that_is_stricter_already_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def spawn() -> Popen[bytes]:
        process = Popen(("/bin/cat",), stdin=PIPE, stdout=DEVNULL, env={})
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (50, 50))
        return process

    with start_limited(LIMITS, spawn) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (50, 50)
        assert process.stdin is not None
        process.stdin.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
