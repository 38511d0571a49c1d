"""Attacks on the limits of an ordinary user without control groups: each is stopped, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from secrets import token_hex

import pytest
from tests.sandbox.conftest import Cell, Warden, processes_with

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.domain.json import Json

MEGABYTE = 1_048_576
LIMITS = ResourceLimits(memory_bytes=96 * MEGABYTE, tmp_bytes=16 * MEGABYTE, pids=64)

FAST_ALLOCATION = """
import mmap
pages = [mmap.mmap(-1, 1 << 25, flags=mmap.MAP_SHARED | 0x8000) for _ in range(64)]  # populated, and not RLIMIT_DATA
"""
MANY_PROCESSES = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        held = bytearray(b"x") * (16 << 20)
        time.sleep(15)
time.sleep(15)
"""
DOUBLE_FORK = """
import os, time
for _ in range(12):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            held = bytearray(b"x") * (16 << 20)
            time.sleep(15)
        os._exit(0)
    os.wait()
time.sleep(15)
"""
PAGE_TABLES = """
import mmap, os, time
for _ in range(40):
    if os.fork() == 0:
        sparse = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        for place in range(0, 5 << 30, 1 << 21):  # reading costs no memory but a page table each
            sparse[place]
        time.sleep(15)
time.sleep(15)
"""
UNDUMPABLE = """
import ctypes, mmap, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
shared = mmap.mmap(-1, 1 << 28)
for place in range(0, 1 << 28, 4096):
    shared[place] = 1
time.sleep(15)
"""
DROPPED_SHARED_MEMORY = """
import mmap, time
kept = []
for _ in range(24):
    pages = mmap.mmap(-1, 1 << 24, flags=mmap.MAP_SHARED)
    for place in range(0, 1 << 24, 4096):
        pages[place] = 1
    pages.madvise(mmap.MADV_DONTNEED)  # no longer resident, and still allocated
    kept.append(pages)
time.sleep(15)
"""


@pytest.mark.case("RES-02", "RES-03")
@pytest.mark.parametrize(
    "attack", [FAST_ALLOCATION, MANY_PROCESSES, DOUBLE_FORK, PAGE_TABLES, UNDUMPABLE, DROPPED_SHARED_MEMORY]
)
def test_memory_of_all_processes_together_is_limited(attack: str, watched: Warden) -> None:
    word = token_hex(8)
    ended = watched.run(watched.python, "-I", "-S", "-c", attack, word, cell=Cell(limits=LIMITS, timeout=100.0))
    assert ended.stopped == f"used more than {LIMITS.memory_bytes:,} bytes of memory, all its processes together"
    assert processes_with(word) == []


def test_memory_that_belongs_to_no_process_is_refused_or_has_a_size(watched: Warden) -> None:
    code = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    return "had" if getattr(libc, name)(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
def fill(folder):
    try:
        with open(folder + "/fill", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
    except OSError as fault:
        return errno.errorcode[fault.errno]
    return "had"
every = ctypes.create_string_buffer(b"\\xff" * 128)
print(json.dumps({
    "memfd": call("memfd_create", b"x", 0),
    "shm": call("shmget", 0, 1 << 20, 0o1600),
    "processors": call("sched_setaffinity", 0, 128, every),
    "count": len(os.sched_getaffinity(0)),
    "tmp": fill("/tmp"),
    "dev_shm": fill("/dev/shm"),
}))
"""
    response = watched.python_says(code, cell=Cell(limits=LIMITS))
    refused: Json = {"memfd": "EPERM", "shm": "EPERM", "processors": "EPERM", "count": 1}
    assert response == {**refused, "tmp": "ENOSPC", "dev_shm": "ENOSPC"}  # type: ignore[dict-item]


def test_shared_pages_count_once(watched: Warden) -> None:
    # Eight processes with the same 40 MB have 40 MB together; a sum of what each has resident would be 320.
    code = """
import json, os, time
held = bytearray(b"x") * (40 << 20)
children = []
for _ in range(8):
    if (child := os.fork()) == 0:
        time.sleep(0.6)
        os._exit(0)
    children.append(child)
print(json.dumps([os.waitpid(child, 0)[1] for child in children]))
"""
    assert watched.python_says(code, cell=Cell(limits=LIMITS)) == [0] * 8


def test_kiwi_returns_to_all_processors_after_a_start(watched: Warden) -> None:
    def counted() -> tuple[str, str]:
        before = _processors()
        asyncio.run(watched.held("/bin/true"))
        return before, _processors()

    before, after = watched.do(counted)
    assert before == after


def _processors() -> str:
    rows = Path("/proc/thread-self/status").read_text().splitlines()
    return json.dumps([row for row in rows if row.startswith("Cpus_allowed:")])
