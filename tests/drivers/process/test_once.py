"""A folder that several kernels need at the same time is built once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from kiwi_mcp.drivers.environments.environment import is_made, make_once

KERNEL = """
import asyncio, sys
from pathlib import Path
from kiwi_mcp.drivers.environments.environment import make_once

async def make(folder):
    with open(sys.argv[2], "a") as notes:
        notes.write("made\\n")
    (folder / "first").touch()
    await asyncio.sleep(0.05)
    (folder / "second").touch()
    if len(sys.argv) > 3:
        print("half-way", flush=True)
        await asyncio.sleep(60)

asyncio.run(make_once(Path(sys.argv[1]), make))
"""


def kernel(*arguments: str) -> Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Popen([sys.executable, "-c", KERNEL, *arguments], env=env, stdout=PIPE)


@pytest.mark.usefixtures("processes")
@pytest.mark.case("RACE-03")
def test_concurrent_kernels_build_a_folder_once(tmp_path: Path) -> None:
    folder, notes = tmp_path / "envs" / "a", tmp_path / "notes"
    kernels = [kernel(str(folder), str(notes)) for _ in range(4)]
    assert [each.wait(120) for each in kernels] == [0, 0, 0, 0]
    assert notes.read_text() == "made\n"
    assert is_made(folder, "second")
    for each in kernels:
        assert each.stdout is not None
        each.stdout.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.case("RACE-03")
async def test_a_folder_of_a_killed_kernel_is_rebuilt(tmp_path: Path) -> None:
    folder, notes = tmp_path / "a", tmp_path / "notes"
    killed = kernel(str(folder), str(notes), "stay")
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"half-way\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait(120)
    killed.stdout.close()
    assert (folder / "second").exists()
    assert not is_made(folder)

    async def make(fresh: Path) -> None:
        assert not (fresh / "second").exists()
        (fresh / "mine").touch()

    await make_once(folder, make)
    assert is_made(folder, "mine")


async def test_a_finished_folder_is_reused_and_one_without_its_marker_is_rebuilt(tmp_path: Path) -> None:
    times: list[int] = []

    async def make(folder: Path) -> None:
        times.append(1)
        (folder / "proof").touch()

    for _ in range(3):
        await make_once(tmp_path / "a", make, proof="proof")
    assert len(times) == 1
    (tmp_path / "a" / "proof").unlink()
    await make_once(tmp_path / "a", make, proof="proof")
    assert len(times) == 2


async def test_a_failed_or_cancelled_build_leaves_no_folder(tmp_path: Path) -> None:
    async def fail(_: Path) -> None:
        raise RuntimeError

    async def cancelled() -> None:
        started = asyncio.Event()

        async def wait(_: Path) -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(make_once(tmp_path / "b", wait))
        await started.wait()
        task.cancel()
        await task

    with pytest.raises(RuntimeError):
        await make_once(tmp_path / "a", fail)
    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
