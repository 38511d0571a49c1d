"""A stdio process: its input, its output, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar

import pytest

from kiwi_mcp.domain.errors import TooLarge, Unavailable
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process.stdio_process import LineReader, StdioProcess, open_stdio

Result = TypeVar("Result")
ECHO = "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(line); sys.stdout.buffer.flush()"


def run(
    program: str,
    talk: Callable[[StdioProcess], Awaitable[Result]],
    folder: Path,
    *,
    env: dict[str, str] | None = None,
    secrets: dict[str, str] | None = None,
    longest_line: int = 1_000_000,
) -> Result:
    """Start a program of Python, talk to it, and return what came of it."""
    spec = ProcessSpec((sys.executable, "-c", program), str(folder), env or {})

    async def whole() -> Result:
        async with open_stdio(spec, secrets=secrets or {}, longest_line=longest_line) as peer:
            return await talk(peer)

    return asyncio.run(whole())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("processes")
def test_lines_are_sent_and_received_in_order(tmp_path: Path) -> None:
    async def talk(peer: StdioProcess) -> list[bytes | None]:
        peer.send(b"one\ntwo\n")
        peer.send(b"three\n")
        return [await peer.line() for _ in range(3)]

    assert run(ECHO, talk, tmp_path) == [b"one", b"two", b"three"]


@pytest.mark.usefixtures("processes")
def test_a_process_that_does_not_read_blocks_no_writer(tmp_path: Path) -> None:
    async def talk(peer: StdioProcess) -> int:
        for sent in range(100):
            try:
                peer.send(b"x" * 1_000_000)
            except BrokenPipeError:
                return sent
        return 100

    assert 60 <= run("import time; time.sleep(60)", talk, tmp_path) < 70


@pytest.mark.usefixtures("processes")
def test_a_large_message_arrives_whole(tmp_path: Path) -> None:
    async def talk(peer: StdioProcess) -> bytes | None:
        peer.send(b"x" * 500_000 + b"\n")
        return await peer.line()

    assert run(ECHO, talk, tmp_path) == b"x" * 500_000


@pytest.mark.usefixtures("processes")
def test_output_is_buffered_up_to_a_limit(tmp_path: Path) -> None:
    program = "import sys\nfor n in range(200000): print('y' * 100)\nprint('all', file=sys.stderr, flush=True)"

    async def talk(peer: StdioProcess) -> tuple[bool, int]:
        await peer.line()
        has_ended = await peer.ends_within(0.3)
        count = 1
        while await peer.line() is not None:
            count += 1
        return has_ended, count

    assert run(program, talk, tmp_path) == (False, 200_000)


async def test_empty_lines_are_buffered_up_to_a_limit_too() -> None:
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    lines, written = LineReader(theirs, 1_000), 0
    for _ in range(50):
        with suppress(BlockingIOError):
            written += os.write(ours, b"\n" * 65_536)
        await asyncio.sleep(0)
    os.close(ours)
    for _ in range(written):
        assert await lines.take() == b""
    assert await lines.take() is None
    assert written < 500_000


@pytest.mark.usefixtures("processes")
def test_output_before_the_end_is_not_lost_by_a_slow_reader(tmp_path: Path) -> None:
    program = "print('y' * 999999); print('\\n'.join(map(str, range(5000))))"

    async def talk(peer: StdioProcess) -> list[bytes]:
        await peer.ends_within(10)
        await asyncio.sleep(0.4)  # longer than output may still come
        found = []
        while (line := await peer.line()) is not None:
            found.append(line)
        return found

    assert run(program, talk, tmp_path)[1:] == [str(number).encode() for number in range(5000)]


@pytest.mark.usefixtures("processes")
def test_a_line_over_the_limit_is_refused_after_the_lines_before_it(tmp_path: Path) -> None:
    program = "print('short', flush=True); print('x' * 5_000_000, flush=True)"

    async def talk(peer: StdioProcess) -> bytes | None:
        first = await peer.line()
        with pytest.raises(TooLarge):
            await peer.line()
        return first

    assert run(program, talk, tmp_path) == b"short"


@pytest.mark.usefixtures("processes")
def test_a_last_line_without_a_line_end_is_a_line(tmp_path: Path) -> None:
    async def talk(peer: StdioProcess) -> list[bytes | None]:
        return [await peer.line(), await peer.line(), await peer.line()]

    assert run("print('a'); print('b', end='')", talk, tmp_path) == [b"a", b"b", None]


@pytest.mark.usefixtures("processes")
def test_the_end_of_stderr_is_stored_without_secrets(tmp_path: Path) -> None:
    program = "import os, sys; sys.stderr.write('x' * 300000 + ' key ' + os.environ['KEY']); sys.exit(4)"

    async def talk(peer: StdioProcess) -> tuple[str, str]:
        await peer.ends_within(10)
        await asyncio.sleep(0.05)
        return peer.complaints(), peer.ending()

    said, ending = run(program, talk, tmp_path, env={"KEY": "${KEY}"}, secrets={"KEY": "s3cr3t-value"})
    assert len(said) <= 65_536
    assert said.endswith("key [redacted:KEY]")
    assert ending == "it ended with exit code 4"


@pytest.mark.usefixtures("processes")
def test_a_process_sees_its_own_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "inherited")

    async def talk(peer: StdioProcess) -> bytes | None:
        return await peer.line()

    program = "import os; print(sorted(name for name in os.environ if not name.startswith(('LC_', '__'))))"
    assert run(program, talk, tmp_path, env={"A": "1"}) == b"['A', 'KIWI_RUN']"


@pytest.mark.usefixtures("processes")
@pytest.mark.case("MCP-10")
def test_a_process_that_ignores_termination_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )

    async def talk(peer: StdioProcess) -> int:
        return int(await peer.line() or b"0")

    started = monotonic()
    pid = run(program, talk, tmp_path)
    assert not is_alive(pid)
    assert monotonic() - started < 50


@pytest.mark.usefixtures("processes")
def test_children_in_another_session_are_ended_too(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleeper, start_new_session=True, env={})\n"
        "print(child.pid, flush=True)\nsys.stdin.read()"
    )

    async def talk(peer: StdioProcess) -> int:
        return int(await peer.line() or b"0")

    assert not is_alive(run(program, talk, tmp_path))


@pytest.mark.usefixtures("processes")
def test_the_end_of_the_main_process_counts_even_if_a_child_keeps_its_output_open(tmp_path: Path) -> None:
    program = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"

    async def talk(peer: StdioProcess) -> bytes | None:
        async with asyncio.timeout(120):
            return await peer.line()

    assert run(program, talk, tmp_path) is None


@pytest.mark.usefixtures("processes")
async def test_a_cancelled_process_leaves_nothing(tmp_path: Path) -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def talk() -> None:
        spec = ProcessSpec((sys.executable, "-c", ECHO), str(tmp_path))
        async with open_stdio(spec, secrets={}) as peer:
            started.set_result(peer.pid)
            await peer.line()

    task = asyncio.create_task(talk())
    pid = await started
    task.cancel()
    await asyncio.wait({task})
    assert not is_alive(pid)


async def test_a_missing_program_is_reported_before_anything_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_stdio(ProcessSpec(("/no/such/program",), str(tmp_path)), secrets={}):
            pass

    with pytest.raises(Unavailable):
        await scenario()


@pytest.mark.usefixtures("processes")
async def test_a_process_that_must_be_stopped_is_ended_and_the_reason_is_reported(tmp_path: Path) -> None:
    spec = ProcessSpec((sys.executable, "-c", ECHO), str(tmp_path), {})

    async def whole() -> tuple[bytes | None, str]:
        async with open_stdio(spec, secrets={}, watch=lambda: "wrote too much") as peer, asyncio.timeout(120):
            return await peer.line(), peer.ending()

    assert await whole() == (None, "it was stopped: it wrote too much")
