"""Resource limits of a waiting process: set from outside, permanent, and never loosened."""

from __future__ import annotations

import resource
from subprocess import DEVNULL, PIPE, Popen

import pytest

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.sandbox.limits import start_limited

LIMITS = ResourceLimits(memory_bytes=64 << 20, cpu_seconds=7, open_files=99, file_bytes=1_000)


def current_limits() -> dict[str, tuple[int, int]]:
    """The limits that a waiting shell has once it was started with `LIMITS`."""

    def spawn() -> Popen[bytes]:
        return Popen(("/bin/cat",), stdin=PIPE, stdout=DEVNULL, env={})

    with start_limited(LIMITS, spawn) as process:
        kinds = ("CORE", "DATA", "FSIZE", "NOFILE", "CPU")
        found = {kind: resource.prlimit(process.pid, getattr(resource, f"RLIMIT_{kind}")) for kind in kinds}
        assert process.stdin is not None
        process.stdin.close()
    return found


@pytest.mark.usefixtures("processes")
def test_a_waiting_process_has_its_limits_before_it_continues_and_cannot_raise_them() -> None:
    wanted = {"CORE": 0, "DATA": 64 << 20, "FSIZE": 1_000, "NOFILE": 99, "CPU": 7}
    assert current_limits() == {kind: (most, most) for kind, most in wanted.items()}


@pytest.mark.usefixtures("processes")
def test_a_stricter_existing_limit_stays() -> None:
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
