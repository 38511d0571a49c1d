"""Read back: what the kernel says of a process that waits in a container, held against what was asked for.

An engine may leave out what it cannot do and say so in a warning, or follow a path that was exchanged meanwhile. So the
process waits until this was looked at, and what is not as it should be is a reason not to let it begin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kiwi_mcp.domain.isolation import Limits
from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.kernel_calls import open_beneath

_OWN = ("/dev", "/proc", "/sys", "/tmp")  # noqa: S108 - inside
"""Folders that a container has of its own, so that writing to them changes nothing outside."""
_SLACK = 4_096
"""What the kernel may add to a limit of memory: it counts in pages."""


def shortcomings(process: int, owner: int, grants: Sequence[Opened], limits: Limits, groups: Path) -> Iterator[str]:
    """Yield in what a container is not what was asked for, by its first process; `groups` is where they are mounted."""
    yield from _rights(process, owner)
    yield from _mounts(process, grants)
    yield from _given(process, grants)
    yield from _limits(process, limits, groups)


def _rights(process: int, owner: int) -> Iterator[str]:
    rows = Path(f"/proc/{process}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (row.partition(":") for row in rows)}
    if status["Uid"] != [str(owner)] * 4:
        yield f"it is the user {status['Uid'][1]} and not {owner}"
    if any(int(status[kind][0], 16) for kind in ("CapPrm", "CapEff", "CapBnd", "CapAmb")):
        yield "it has rights of the administrator's"
    if status["NoNewPrivs"] != ["1"] or status["Seccomp"] != ["2"]:
        yield "it could gain rights, or its system calls are not filtered"


def _mounts(process: int, grants: Sequence[Opened]) -> Iterator[str]:
    """Yield what can be written to and was not given to be."""
    writable = (*_OWN, *(grant.path for grant in grants if grant.is_writable))
    for row in Path(f"/proc/{process}/mountinfo").read_bytes().splitlines():
        point, options = row.split()[4:6]
        path = Path(os.fsdecode(point.decode("unicode_escape").encode("latin-1")))
        if b"rw" in options.split(b",") and not any(path.is_relative_to(place) for place in writable):
            yield f"{path} can be written to"


def _given(process: int, grants: Sequence[Opened]) -> Iterator[str]:
    """Yield which paths show something else than what was opened for the process."""
    root = os.open(f"/proc/{process}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for grant in grants:
            inside = open_beneath(root, grant.path[1:], os.O_PATH)
            try:
                if not os.path.samestat(os.fstat(inside), os.fstat(grant.descriptor)):
                    yield f"{grant.path} was exchanged"
            finally:
                os.close(inside)
    finally:
        os.close(root)


def _limits(process: int, limits: Limits, groups: Path) -> Iterator[str]:
    rows = [row.split(":", 2) for row in Path(f"/proc/{process}/cgroup").read_text().splitlines()]
    places = {name: place.lstrip("/") for _, names, place in rows for name in names.split(",")}
    if (groups / "cgroup.controllers").exists():
        own = groups / places[""]
        memory, pids, cpu = own / "memory.max", own / "pids.max", _ratio((own / "cpu.max").read_text())
    else:
        memory = groups / "memory" / places["memory"] / "memory.limit_in_bytes"
        pids, share = groups / "pids" / places["pids"] / "pids.max", groups / "cpu" / places["cpu"]
        cpu = _ratio(" ".join((share / f"cpu.cfs_{word}_us").read_text() for word in ("quota", "period")))
    if _number(memory.read_text()) > limits.memory_bytes + _SLACK:
        yield "its memory is not bounded"
    if _number(pids.read_text()) > limits.pids:
        yield "its processes are not counted"
    if cpu > limits.cpus * 1.01:  # the engine rounds
        yield "its share of the processors is not bounded"


def _ratio(text: str) -> float:
    quota, period = text.split()
    return _number(quota) / _number(period)


def _number(text: str) -> float:
    """Return a limit; `max` and -1 mean that there is none."""
    word = text.strip()
    return float("inf") if word in {"max", "-1"} else float(word)
