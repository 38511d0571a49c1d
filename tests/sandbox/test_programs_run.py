"""Ordinary programs work in a sandbox as they do outside."""

from __future__ import annotations

import pytest
from tests.sandbox.conftest import Cell, Warden

ASYNC = """
import asyncio, json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
async def main():
    with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2) as processes:
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(threads, abs, -1), await loop.run_in_executor(processes, abs, -2)]
print(json.dumps(asyncio.run(main())))
"""


def test_python_event_loops_threads_and_processes_work(warden: Warden) -> None:
    assert warden.python_says(ASYNC) == [1, 2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("sh", "-c", "echo hi | tr a-z A-Z"), "HI"),
        (("awk", "BEGIN { print 1 + 1 }"), "2"),
        (("perl", "-e", "print scalar getpwuid($<)"), "kiwi"),
        (("git", "-c", "init.defaultBranch=main", "init", "--quiet", "--bare", "."), ""),
        (("tar", "-cf", "/dev/null", "/etc/hosts"), ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ordinary_programs_work(argv: tuple[str, ...], said: str, keeper: Warden) -> None:
    ended = keeper.run(*argv)
    assert (ended.exit_code, ended.stdout.decode().strip()) == (0, said), ended.stderr


def test_standard_streams_can_be_opened_by_name_and_the_result_comes_through(keeper: Warden) -> None:
    script = "echo out >/dev/stdout; echo err >/dev/stderr; printf 42 >$KIWI_RESULT"
    ended = keeper.run("/bin/sh", "-c", script)
    assert (ended.stdout, ended.stderr, ended.result) == (b"out\n", b"err\n", b"42")


def test_a_process_starts_in_its_granted_folder_or_at_home(keeper: Warden) -> None:
    folder = keeper.folder("project")
    (folder / "inner").mkdir()
    granted = keeper.run("/bin/pwd", cell=Cell(readable=(folder,), cwd=folder / "inner"))
    assert granted.stdout.decode().strip() == str(folder / "inner")
    assert keeper.run("/bin/pwd", cell=Cell(cwd=folder)).stdout == b"/tmp/home\n"
