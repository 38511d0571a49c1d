"""Exhaustion: a sandboxed process that exceeds its limits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex

import pytest
from tests.sandbox.conftest import Cell, Warden, processes_with

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.domain.json import as_list, as_object

MEGABYTE = 1_048_576


@pytest.mark.case("RES-01")
def test_a_busy_loop_ends_at_its_timeout(warden: Warden) -> None:
    word = token_hex(8)
    ended = warden.run("/bin/sh", "-c", "while :; do :; done", word, cell=Cell(timeout=0.5))
    assert ended.timed_out
    assert ended.duration < 20
    assert processes_with(word) == []


@pytest.mark.case("RES-02")
def test_memory_beyond_the_limit_is_refused(warden: Warden) -> None:
    code = """
import json
try:
    held = [bytearray(1 << 22) for _ in range(1024)]
    print(json.dumps("had"))
except MemoryError:
    print(json.dumps("refused"))
"""
    cell = Cell(limits=ResourceLimits(memory_bytes=256 * MEGABYTE))
    ended = warden.run(warden.python, "-I", "-S", "-c", code, cell=cell)
    assert ended.signal is not None or ended.exit_code == 137 or ended.stdout == b'"refused"\n'


@pytest.mark.case("RES-02")
def test_restricted_limits_the_memory_of_all_processes_together(strict: Warden) -> None:
    code = """
import os, sys, time
children = []
for _ in range(6):
    child = os.fork()
    if child == 0:
        held = bytearray(b"x") * (32 << 20)
        time.sleep(1)
        os._exit(0)
    children.append(child)
print(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""
    cell = Cell(limits=ResourceLimits(memory_bytes=96 * MEGABYTE))
    ended = strict.run(strict.python, "-I", "-S", "-c", code, cell=cell)
    assert ended.exit_code == 137 or int(ended.stdout) > 0


@pytest.mark.case("RES-03")
def test_a_fork_bomb_is_limited_and_other_processes_continue(warden: Warden) -> None:
    word = token_hex(8)
    bomb = """
import os, sys, time
end = time.monotonic() + 0.8
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
    cell = Cell(limits=ResourceLimits(pids=64), timeout=60.0)

    async def watched() -> tuple[int, float]:
        most, slowest = 0, 0.0
        run = asyncio.ensure_future(warden.held(warden.python, "-I", "-S", "-c", bomb, word, cell=cell))
        while not run.done():
            started = time.monotonic()
            await asyncio.to_thread(subprocess.run, ["/bin/true"], check=True)
            slowest = max(slowest, time.monotonic() - started)
            most = max(most, len(processes_with(word)))
            await asyncio.wait((run,), timeout=0.05)
        await run
        return most, slowest

    most, slowest = warden.do(lambda: asyncio.run(watched()))
    assert 10 < most <= 64 + 4  # the launchers have the word among their arguments too
    assert slowest < 20
    assert processes_with(word) == []


@pytest.mark.case("RES-04")
def test_a_thread_bomb_is_limited(warden: Warden) -> None:
    code = """
import json, threading
stop, started = threading.Event(), 0
try:
    for _ in range(10_000):
        threading.Thread(target=stop.wait, daemon=True).start()
        started += 1
except RuntimeError as fault:
    print(json.dumps({"started": started, "said": str(fault)}))
stop.set()
"""
    response = as_object(warden.python_says(code, cell=Cell(limits=ResourceLimits(pids=64))))
    assert isinstance(response["started"], int)
    assert response["started"] < 64
    assert "thread" in str(response["said"])


@pytest.mark.case("RES-05")
def test_every_writable_place_has_a_quota(warden: Warden) -> None:
    code = """
import errno, json, os, sys
def fill(folder, size):
    try:
        file = os.open(folder + "/fill", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(file, 0, size)
    except OSError as fault:
        return errno.errorcode[fault.errno]
    finally:
        if os.path.exists(folder + "/fill"):
            os.unlink(folder + "/fill")
    return "had"
size = int(sys.argv[1])
places = ["/tmp", os.environ["HOME"], "/dev/shm"]
print(json.dumps({
    "within": [fill(place, size // 4) for place in places],
    "beyond": [fill(place, size + 1) for place in places],
    "elsewhere": [fill(place, 1) for place in ["/", "/dev", "/etc", "/usr"]],
}))
"""
    response = as_object(warden.python_says(code, str(ResourceLimits().tmp_bytes)))
    assert response["within"] == ["had"] * 3
    assert response["beyond"] == ["ENOSPC"] * 3
    assert {*as_list(response["elsewhere"])} == {"EROFS"}


@pytest.mark.case("RES-07")
def test_open_files_are_limited_and_kiwi_keeps_none(keeper: Warden) -> None:
    code = """
import errno, json, os
held = 0
try:
    for _ in range(100_000):
        os.open("/dev/null", os.O_RDONLY)
        held += 1
except OSError as fault:
    print(json.dumps([held, errno.errorcode[fault.errno]]))
"""

    def counted() -> tuple[int, int, str]:
        asyncio.run(keeper.held("/bin/true"))  # files that stay open are open now
        before = len([*Path("/proc/self/fd").iterdir()])
        ended = asyncio.run(keeper.held(keeper.python, "-I", "-S", "-c", code))
        return before, len([*Path("/proc/self/fd").iterdir()]), ended.stdout.decode()

    before, after, response = keeper.do(counted)
    assert before == after
    assert response == '[1020, "EMFILE"]\n'


@pytest.mark.case("RES-10")
def test_a_process_that_ignores_signals_is_killed(warden: Warden) -> None:
    word = token_hex(8)
    code = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", "{word}"])
os.kill(os.getpid(), signal.SIGSTOP)
"""
    ended = warden.run(warden.python, "-I", "-S", "-c", code, word, cell=Cell(timeout=0.5))
    assert ended.timed_out
    assert processes_with(word) == []


def test_nothing_continues_when_kiwi_is_killed(keeper: Warden) -> None:
    word = token_hex(8)
    marker = keeper.folder("marker")
    child = os.fork()
    if child == 0:
        argv = ("/bin/sh", "-c", f": >{marker}/begun; sleep 60", word)
        try:
            keeper.run(*argv, cell=Cell(writable=(marker,)))
        finally:
            os._exit(0)
    end = time.monotonic() + 120
    while not (marker / "begun").exists() and time.monotonic() < end:
        time.sleep(0.01)
    living = processes_with(word)
    for pid in _kiwis(child):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(child, 0)
    while processes_with(word) and time.monotonic() < end:
        time.sleep(0.01)
    assert living
    assert processes_with(word) == []


def _kiwis(child: int) -> list[int]:
    """Return a copy of this process and the copies it made of itself as another user."""
    own = Path("/proc/self/cmdline").read_bytes()
    listed = Path(f"/proc/{child}/task/{child}/children").read_text().split()
    return [*(int(pid) for pid in listed if Path(f"/proc/{pid}/cmdline").read_bytes() == own), child]


def test_a_script_that_kills_its_own_group_kills_nothing_else(keeper: Warden) -> None:
    ended = keeper.run("/bin/sh", "-c", "trap 'echo heard' TERM; kill 0; echo on")
    assert (ended.exit_code, ended.stdout) == (0, b"heard\non\n")


@pytest.mark.case("SEC-12")
def test_a_crash_leaves_no_core_file(keeper: Warden) -> None:
    workspace = keeper.folder("crash")
    cell = Cell(writable=(workspace,), cwd=workspace)
    ended = keeper.run(keeper.python, "-I", "-S", "-c", "import os; os.abort()", cell=cell)
    assert ended.exit_code == 128 + signal.SIGABRT
    assert [*workspace.iterdir()] == []


def test_an_interpreter_in_a_private_home_runs_when_kiwi_is_root(rooted: Warden) -> None:
    assert rooted.run(sys.executable, "-c", "import yaml").exit_code == 0
