from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

import pytest

from kiwi_mcp.domain.errors import CommandMissing, InvalidRequest, KiwiError, TooLarge, Unavailable, VariableMissing
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process import run as subprocess
from kiwi_mcp.primitives.process.process_tree import ProcessTree, TreeMarker, stamping
from kiwi_mcp.primitives.process.run import ProcessResult

pytestmark = pytest.mark.usefixtures("processes")

T = TypeVar("T")
PATH = "/usr/local/bin:/usr/bin:/bin"
# Tests may run in several processes at once, and each looks for its own survivors only.
OURS = {"KIWI_TEST": f"primitives-{os.getpid()}"}
LONG = f"1000{os.getpid()}"


def run(work: Coroutine[object, object, T]) -> T:
    return asyncio.run(work)


def a_spec(
    *argv: str,
    cwd: str = "/",
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    timeout: float = 20.0,
    output_limit: int = 1_000_000,
    result_limit: int = 1_000_000,
) -> ProcessSpec:
    return ProcessSpec(
        argv=argv,
        cwd=cwd,
        env={"PATH": PATH, **(env or {})},
        stdin=stdin,
        timeout=timeout,
        output_limit=output_limit,
        result_limit=result_limit,
    )


def bash(
    script: str, *, secrets: dict[str, str] | None = None, report: Report = silent, **words: object
) -> ProcessResult:
    return run(subprocess.run(a_spec("bash", "-c", script, **words), secrets=secrets or {}, report=report))  # type: ignore[arg-type]  # the words of a_spec


def living(word: str) -> list[int]:
    """Every process on this machine, dead ones that wait aside, that has the word on its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def marked() -> list[int]:
    """Every process on this machine that carries the mark of one of this test's runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"\0KIWI_TEST={OURS['KIWI_TEST']}\0".encode() in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before, had = descriptors(), children()
    yield
    assert descriptors() <= before
    assert children() <= had


@pytest.mark.req("K-PR-01")
def test_output_exit_code_and_result_come_back_as_bytes() -> None:
    done = bash(r"""printf '\xff\x00a'; echo err >&2; printf '{"a": 1}' > "$KIWI_RESULT"; exit 3""")
    assert (done.exit_code, done.signal) == (3, None)
    assert done.stdout == b"\xff\x00a"
    assert done.stderr == b"err\n"
    assert done.result == b'{"a": 1}'
    assert (done.is_truncated, done.is_result_truncated, done.timed_out) == (False, False, False)
    assert bash("true").result is None
    assert bash("kill -9 $$").signal == signal.SIGKILL


@pytest.mark.case("SEC-01")
def test_the_environment_is_that_of_the_spec_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIWI_CANARY", "canary-value")
    monkeypatch.setenv("BASH_ENV", "/dev/null")
    done = run(subprocess.run(a_spec("/bin/cat", "/proc/self/environ", env={"A": "1"})))
    names = {variable.partition(b"=")[0] for variable in done.stdout.split(b"\0") if variable}
    assert names == {b"PATH", b"A", b"KIWI_RESULT", b"KIWI_RUN"}


def test_only_the_standard_streams_and_the_result_channel_are_inherited() -> None:
    with Path("/dev/null").open() as file:
        os.set_inheritable(file.fileno(), True)
        done = run(subprocess.run(a_spec("/bin/ls", "/proc/self/fd")))
    assert len(done.stdout.split()) == 5  # 0, 1, 2, the channel, and the folder that is being listed


@pytest.mark.case("SEC-08", "SEC-05")
def test_a_secret_is_only_in_the_environment_and_redacted_in_output() -> None:
    script = """grep -c hunter /proc/$$/cmdline; echo "$KEY"; echo "$KEY" >&2; echo "\\"$KEY\\"" > "$KIWI_RESULT" """
    response: list[Progress] = []
    done = bash(script, env={"KEY": "Bearer ${TOKEN}"}, secrets={"TOKEN": "hunter22-value"}, report=response.append)
    assert done.stdout == b"1\nBearer [redacted:TOKEN]\n"  # the one `hunter` is the script's own search word
    assert done.stderr == b"Bearer [redacted:TOKEN]\n"
    assert done.result == b'"Bearer [redacted:TOKEN]"\n'
    assert not any("hunter22" in one.message for one in response)


@pytest.mark.case("SEC-04")
def test_a_missing_variable_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(VariableMissing):
        bash(f"touch {tmp_path}/ran", env={"KEY": "${NOT_SET}"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.req("K-RT-06")
def test_arguments_are_passed_literally() -> None:
    done = run(
        subprocess.run(
            a_spec("bash", "-c", 'printf "%s|%s" "$1" "$P"', "x", "${HOME}; $(id)", env={"P": "$${HOME}"}),
            secrets={"HOME": "/secret"},
        )
    )
    assert done.stdout == b"${HOME}; $(id)|${HOME}"


@pytest.mark.case("RES-13")
def test_standard_input_is_closed_after_its_data(tmp_path: Path) -> None:
    assert bash("cat; echo end").stdout == b"end\n"
    assert bash("cat; echo end", stdin=b"in\n").stdout == b"in\nend\n"


def test_much_input_and_output_do_not_block_each_other() -> None:
    data = os.urandom(3_000_000)
    done = run(subprocess.run(a_spec("/bin/cat", stdin=data, output_limit=4_000_000)))
    assert done.stdout == data


def test_a_child_that_does_not_read_its_input_is_not_an_error() -> None:
    assert bash("exit 0", stdin=b"x" * 5_000_000).exit_code == 0


@pytest.mark.req("K-PR-01")
@pytest.mark.case("RES-08")
def test_a_flood_is_cut_counted_and_uses_no_memory() -> None:
    before = _resident()
    done = bash("printf start; head -c 1000000000 /dev/zero; printf end", timeout=150)
    assert done.stdout_bytes == 1_000_000_008
    assert done.is_truncated
    assert len(done.stdout) < 1_000_100
    assert done.stdout.startswith(b"start\0")
    assert done.stdout.endswith(b"\0end")
    assert b"[999000008 bytes left out]" in done.stdout
    assert _resident() - before < 64_000_000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.case("RES-09")
def test_a_flood_on_one_stream_does_not_block_the_other() -> None:
    done = bash("head -c 5000000 /dev/zero >&2; echo out")
    assert (done.stderr_bytes, done.stdout) == (5_000_000, b"out\n")


def test_a_result_over_its_limit_is_flagged() -> None:
    done = bash('head -c 3000000 /dev/zero > "$KIWI_RESULT"', result_limit=1000)
    assert done.is_result_truncated
    assert done.result == bytes(1000)


def test_a_secret_across_the_cut_of_the_output_is_redacted() -> None:
    for lead in range(90, 101):
        done = bash(
            f"printf '%{lead}s%s' '' $K; printf '%1000s' ''; printf '%s%{lead}s' $K ''",
            env={"K": "${K}"},
            secrets={"K": "abcdefghij"},
            output_limit=200,
        )
        assert b"abc" not in done.stdout
        assert b"hij" not in done.stdout


@pytest.mark.req("K-PR-01")
@pytest.mark.case("RES-01")
def test_a_busy_loop_ends_at_its_timeout() -> None:
    done = bash("while :; do :; done", timeout=0.5)
    assert done.timed_out
    assert 0.5 <= done.duration < 20
    assert done.exit_code is None


@pytest.mark.req("K-PR-01")
@pytest.mark.case("RES-10")
def test_a_process_that_ignores_termination_or_stops_itself_is_killed() -> None:
    done = bash("trap '' TERM; echo ready; while :; do sleep 0.05; done", timeout=0.3, env=OURS)
    assert done.timed_out
    assert done.signal == signal.SIGKILL
    assert done.stdout == b"ready\n"
    stopped = bash("trap '' TERM; kill -STOP $$; while :; do sleep 0.05; done", timeout=0.3, env=OURS)
    assert stopped.signal == signal.SIGKILL
    assert marked() == []


@pytest.mark.case("RES-11")
def test_a_child_that_closes_its_streams_is_waited_for() -> None:
    done = bash('rm -f /dev/null/x; exec >&- 2>&-; eval "exec ${KIWI_RESULT##*/}>&-"; sleep 0.4; exit 5')
    assert done.exit_code == 5
    assert done.duration >= 0.4
    late = bash("exec >&- 2>&-; sleep 30", timeout=0.3)
    assert late.timed_out
    assert 0.3 <= late.duration < 20


@pytest.mark.req("K-PR-01")
def test_processes_left_in_the_group_are_ended_and_cause_no_delay() -> None:
    done = bash("echo a; sleep 312 & exit 4", env=OURS)
    assert (done.exit_code, done.stdout) == (4, b"a\n")
    assert done.duration < 60
    assert marked() == []


def test_output_just_after_the_end_of_the_main_process_is_read() -> None:
    assert bash("(sleep 0.1; echo late) & exit 0").stdout == b"late\n"


DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for fd in range(0, 256):
    try: os.close(fd)
    except OSError: pass
os.chdir("/")
{then}
"""


@pytest.mark.req("K-PR-01")
@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(313)",
        f"os.execve('/bin/sleep', ['sleep', '{LONG}'], {{}})",
        f"[os.fork() or os.setsid() for _ in range(4)]; os.execve('/bin/sleep', ['sleep', '{LONG}'], {{}})",
    ],
    ids=["plain", "with its environment wiped", "a family of its own"],
)
@pytest.mark.parametrize("leader", ["exit 0", "sleep 20"])
def test_a_daemon_does_not_survive_its_run(then: str, leader: str) -> None:
    script = f'{sys.executable} -I -S -c "$PROGRAM"; {leader}'
    env = {"PROGRAM": DAEMON.format(then=then), **OURS}
    done = bash(script, env=env, timeout=120 if leader == "exit 0" else 0.5)
    assert done.timed_out == (leader != "exit 0")
    assert marked() == []
    assert living(LONG) == []


def test_a_daemon_started_immediately_does_not_survive() -> None:
    script = f'env -i setsid bash -c "exec >/dev/null 2>&1 <&-; (sleep {LONG} &); sleep {LONG}" & exit 0'

    async def many() -> None:
        await asyncio.gather(*(subprocess.run(a_spec("bash", "-c", script)) for _ in range(12)))

    run(many())
    assert living(LONG) == []


def test_a_run_in_another_thread_behaves_the_same() -> None:
    script = f'env -i setsid bash -c "exec >/dev/null 2>&1 <&-; sleep {LONG}" & sleep 0.1; echo done'
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(bash, script).result().stdout == b"done\n"
    assert living(LONG) == []


@pytest.mark.req("K-PR-01")
def test_a_bounded_fork_bomb_is_killed_in_full() -> None:
    script = 'bomb() { [ "$1" -gt 0 ] && { bomb $(($1 - 1)) & bomb $(($1 - 1)) & }; sleep 313315; }; bomb 6'
    done = bash(script, timeout=1.0, env=OURS)
    assert done.timed_out
    assert marked() == []


def test_cancelling_kills_all_children_and_is_raised() -> None:
    started: list[Progress] = []

    async def cancelled() -> None:
        spec = a_spec("bash", "-c", "trap '' TERM; (setsid sleep 316 &); echo go; sleep 316", env=OURS)
        going = asyncio.Event()

        def on_progress(progress: Progress) -> None:
            started.append(progress)
            going.set()

        task = asyncio.create_task(subprocess.run(spec, report=on_progress))
        await asyncio.wait_for(going.wait(), 120)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # however often
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
    assert started[0].message == "go"
    assert marked() == []


def test_ended_children_are_reaped_and_not_counted_as_left_behind() -> None:
    mark = TreeMarker.new()
    with stamping(mark):
        ended = Popen(["/bin/true"], start_new_session=True)
        living = Popen(["/bin/sleep", "317"], start_new_session=True)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert ProcessTree(0, mark).kill() == [living.pid]
        with pytest.raises(ChildProcessError):
            os.waitpid(ended.pid, os.WNOHANG)
    finally:
        living.kill()
        for process in (ended, living):
            process.wait()


@pytest.mark.case("RACE-06")
def test_only_marked_children_are_signalled() -> None:
    stranger = Popen(["/bin/sleep", "317"])
    leader = Popen(["/bin/true"], start_new_session=True)
    try:
        assert not ProcessTree(leader.pid, TreeMarker.new()).kill()
        assert stranger.poll() is None
        bash("sleep 317 & exit 0")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        leader.wait()


@pytest.mark.case("RES-07")
def test_a_child_that_opens_all_descriptors_does_not_affect_the_kernel() -> None:
    program = "f = []\ntry:\n    while True: f.append(open('/dev/null'))\nexcept OSError as e: print(e.errno)"
    done = run(subprocess.run(a_spec("bash", "-c", f'ulimit -n 200; exec {sys.executable} -I -S -c "$0"', program)))
    assert done.stdout == b"24\n"


@pytest.mark.case("RES-12")
def test_a_thousand_calls_wait_for_their_turn() -> None:
    most = 0

    async def one() -> int | None:
        nonlocal most
        done = await subprocess.run(a_spec("/bin/true"))
        most = max(most, descriptors())
        return done.exit_code

    async def many() -> list[int | None]:
        return await asyncio.gather(*(one() for _ in range(1000)))

    assert set(run(many())) == {0}
    assert most < 64 * 6 + 64


@pytest.mark.smoke
def test_lines_are_reported_while_the_process_runs() -> None:
    response: list[Progress] = []
    bash(
        "echo one; sleep 0.2; echo '::progress 3/10 third of ten' >&2; sleep 0.2; echo '::progress 4' >&2",
        report=response.append,
    )
    assert response == [Progress("one"), Progress("third of ten", 3, 10), Progress("", 4)]


def test_lines_that_come_too_fast_are_throttled_and_the_last_is_reported() -> None:
    response: list[Progress] = []
    done = bash("for i in $(seq 20000); do echo $i; done", report=response.append)
    assert len(response) <= done.duration * 10 + 2
    assert response[-1].message == "20000"


def test_no_core_is_dumped() -> None:
    assert bash("ulimit -Sc; sleep 0.1; ulimit -Hc").stdout == b"0\n0\n"


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (a_spec("no-such-program-here"), CommandMissing, "no-such-program-here"),
        (a_spec("./none"), CommandMissing, "./none"),
        (a_spec("/etc/passwd"), Unavailable, "not executable"),
        (a_spec("/bin/true", cwd="/no/such/folder"), InvalidRequest, "not a folder"),
        (a_spec("/bin/true", "a\0b"), InvalidRequest, "NUL"),
        (a_spec("/bin/true", env={"A=B": "x"}), InvalidRequest, "variables"),
        (a_spec("/bin/true", "\ud800"), InvalidRequest, "variables"),
        (a_spec("/bin/true", "x" * 200_000), TooLarge, "arguments"),
        (ProcessSpec(argv=(), cwd="/"), InvalidRequest, "no command"),
        (ProcessSpec(argv=("true",), cwd="/", env={"PATH": "bin:."}), CommandMissing, "true"),
    ],
)
def test_a_program_that_cannot_start_is_an_error(spec: ProcessSpec, error: type[KiwiError], words: str) -> None:
    with pytest.raises(error) as caught:
        run(subprocess.run(spec))
    assert words in caught.value.message


def test_a_script_without_an_interpreter_is_an_error(tmp_path: Path) -> None:
    for name, text in (("none", "echo hi\n"), ("missing", "#!/no/such/interpreter\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        with pytest.raises(Unavailable) as caught:
            run(subprocess.run(a_spec(f"./{name}", cwd=str(tmp_path))))
        assert f"./{name}" in caught.value.message


def test_a_program_in_the_working_folder_is_started_by_its_relative_path(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho $0 $1\n")
    (tmp_path / "tool").chmod(0o755)
    assert run(subprocess.run(a_spec("./tool", "x", cwd=str(tmp_path)))).stdout.endswith(b"/tool x\n")


def test_unusual_json_passes_the_channel_unchanged() -> None:
    text = '{"a": NaN, "b": 1e999, "c": "\\ud800", "d": ' + "9" * 5000 + "}"
    done = run(subprocess.run(a_spec("bash", "-c", 'cat > "$KIWI_RESULT"', stdin=text.encode())))
    assert done.result == text.encode()
