"""The level `standard`: a process gains no privileges and changes only granted files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.process import run as subprocess
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.sandbox import linux
from kiwi_mcp.sandbox.command_files import find_launcher
from kiwi_mcp.sandbox.rlimits import Rlimits

pytestmark = [
    pytest.mark.skipif(not linux.is_there(), reason="this kernel has no Landlock of version 3"),
    pytest.mark.usefixtures("processes"),
]


def run(script: str, *writable: Path, env: dict[str, str] | None = None) -> ProcessResult:
    """Run a shell script at `standard`, with folders that it may change."""
    spec = ProcessSpec(("/bin/sh", "-c", script), cwd="/", env={"PATH": "/usr/bin:/bin", **(env or {})}, timeout=20.0)
    backend = Rlimits(find_launcher("prlimit"), limits_writing=True)

    async def held() -> ProcessResult:
        with backend.wrap(spec, SandboxProfile("standard", writable=tuple(map(str, writable)))) as confined:
            return await subprocess.run(confined.spec, handover=confined.handover)

    return asyncio.run(held())


def test_a_file_without_a_grant_is_readable_and_stays_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "note"
    file.write_text("mine")
    tries = ("echo >>{0}", ": >{0}", "truncate -s 0 {0}", "rm -f {0}", "mv {0} {0}.new", "ln -sf / {0}")
    script = "\n".join(f"({tried.format(file)}) && echo changed" for tried in tries)
    assert run(f"cat {file}\n{script}").stdout == b"mine"
    assert file.read_text() == "mine"


@pytest.mark.smoke
def test_nothing_is_created_beside_a_granted_folder(tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.mkdir()
    ended = run(f"echo kept >{granted}/a; mkdir {granted}/b; mv {granted}/a {granted}/b/; : >{tmp_path}/c", granted)
    assert ended.exit_code != 0
    assert (granted / "b" / "a").read_text() == "kept\n"
    assert not (tmp_path / "c").exists()


def test_children_have_the_same_restrictions(tmp_path: Path) -> None:
    ended = run(f"setsid sh -c ': >{tmp_path}/a'; echo $?")
    assert ended.stdout.strip() != b"0"
    assert not (tmp_path / "a").exists()


def test_a_link_in_a_granted_folder_does_not_make_its_target_writable(tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.mkdir()
    (granted / "way").symlink_to(tmp_path)
    assert run(f": >{granted}/way/a", granted).exit_code != 0
    assert not (tmp_path / "a").exists()


def test_the_temporary_folder_is_private_and_removed_afterwards() -> None:
    ended = run(
        "echo kept >$TMPDIR/a && cat $TMPDIR/a && stat -c %a $TMPDIR && echo $TMPDIR", env={"TMPDIR": "/nowhere"}
    )
    kept, mode, folder = ended.stdout.decode().split()
    assert (kept, mode) == ("kept", "700")
    assert folder != "/nowhere"
    assert not Path(folder).exists()


def test_a_folder_1500_deep_and_unreadable_ones_are_removed_too() -> None:
    deep = (
        "cd $TMPDIR; echo $TMPDIR; for i in 1 2 3 4 5; do p=$(printf 'd/%.0s' $(seq 300)); mkdir -p $p; cd -P $p; done"
    )
    closed = "cd $TMPDIR; mkdir -p closed/inner; : >closed/inner/a; chmod 0 closed/inner; chmod 0 closed; ln -s / link"
    ended = run(f"({closed}) && {deep}")
    assert ended.exit_code == 0, ended.stderr
    assert not Path(ended.stdout.decode().strip()).exists()


def test_streams_the_result_and_usual_devices_work() -> None:
    ended = run(
        "echo out; echo err >&2; echo null >/dev/null; echo shared >/dev/shm/kiwi-test-$$ && rm /dev/shm/kiwi-test-$$"
        ' && printf result >"$KIWI_RESULT"'
    )
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.result) == (0, b"out\n", b"err\n", b"result")


def privileges() -> list[str]:
    """What the kernel says about the rights of this process, and about the filters it is under."""
    names = ("NoNewPrivs", "Seccomp", "Cap")
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(names)]


def test_a_restricted_process_cannot_gain_privileges_and_kiwi_itself_is_not_restricted(tmp_path: Path) -> None:
    before = privileges()
    ended = run("grep NoNewPrivs /proc/self/status")
    assert ended.stdout.split() == [b"NoNewPrivs:", b"1"]
    (tmp_path / "kiwi").write_text("still writes")
    # The tests may run inside a sandbox themselves, so that the bit may be set already.
    assert privileges() == before
