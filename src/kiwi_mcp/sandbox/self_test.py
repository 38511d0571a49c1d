"""The self-test: a shell script that, inside a sandbox, tries what must not work and tells which properties hold."""

from __future__ import annotations

from pathlib import Path

from kiwi_mcp.domain.isolation import Jail, Limits
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.levels import FOLDER
from kiwi_mcp.sandbox.port import SelfTest

_NAMESPACES = ("ipc", "mnt", "net", "pid", "user")
_MEGABYTE = 1_048_576
_PATH = "/usr/bin:/bin"


def self_test(secret: str, *, is_grouped: bool) -> SelfTest:
    """Return the script as a process, with limits that are small enough to be run into quickly.

    A variable that steers the start of programs is among what it is given, because the launcher must not have it.
    """
    memory = 24 * _MEGABYTE if is_grouped else 1_024 * _MEGABYTE
    limits = Limits(memory, cpus=0.5, pids=40, open_files=64, cpu_seconds=30, tmp_bytes=4 * _MEGABYTE)
    script = (FOLDER / "self_test.sh").read_text(encoding="utf-8")
    outside = [f"{name}={Path('/proc/self/ns', name).readlink()}" for name in _NAMESPACES]
    words = (secret, str(limits.tmp_bytes), str(limits.pids), "yes" if is_grouped else "no", *outside)
    spec = ProcessSpec(
        ("/bin/sh", "-c", script, "self_test", *words),
        cwd="/",
        env={"PATH": _PATH, "PROBE": "given", "LD_BIND_NOW": "1"},
        timeout=60.0,
    )
    return SelfTest(spec, Jail("restricted" if is_grouped else "sandboxed", limits=limits))
