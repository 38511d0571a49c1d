"""The level `standard`: a process gains no rights, and changes only the files that it may."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives import subprocess
from kiwi_mcp.primitives.subprocess import ProcessResult
from kiwi_mcp.sandbox import landlock
from kiwi_mcp.sandbox.programs import find_launcher
from kiwi_mcp.sandbox.rlimits import Rlimits

pytestmark = pytest.mark.skipif(not landlock.is_there(), reason="this kernel has no Landlock of version 3")


def run(script: str, *writable: Path, env: dict[str, str] | None = None) -> ProcessResult:
    """Run a shell script at `standard`, with folders that it may change."""
    spec = ProcessSpec(("/bin/sh", "-c", script), cwd="/", env={"PATH": "/usr/bin:/bin", **(env or {})}, timeout=20.0)
    backend = Rlimits(find_launcher("prlimit"), limits_writing=True)

    async def held() -> ProcessResult:
        with backend.wrap(spec, Jail("standard", writable=tuple(map(str, writable)))) as confined:
            return await subprocess.run(confined.spec, handover=confined.handover)

    return asyncio.run(held())


def test_a_file_that_was_not_granted_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "note"
    file.write_text("mine")
    tries = ("echo >>{0}", ": >{0}", "truncate -s 0 {0}", "rm -f {0}", "mv {0} {0}.new", "ln -sf / {0}")
    script = "\n".join(f"({tried.format(file)}) && echo changed" for tried in tries)
    assert run(f"cat {file}\n{script}").stdout == b"mine"
    assert file.read_text() == "mine"


def test_nothing_is_made_beside_a_granted_folder(tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.mkdir()
    ended = run(f"echo kept >{granted}/a; mkdir {granted}/b; mv {granted}/a {granted}/b/; : >{tmp_path}/c", granted)
    assert ended.exit_code != 0
    assert (granted / "b" / "a").read_text() == "kept\n"
    assert not (tmp_path / "c").exists()


def test_what_it_starts_is_held_likewise(tmp_path: Path) -> None:
    ended = run(f"setsid sh -c ': >{tmp_path}/a'; echo $?")
    assert ended.stdout.strip() != b"0"
    assert not (tmp_path / "a").exists()


def test_a_link_in_a_granted_folder_leads_to_nothing_that_can_be_changed(tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.mkdir()
    (granted / "way").symlink_to(tmp_path)
    assert run(f": >{granted}/way/a", granted).exit_code != 0
    assert not (tmp_path / "a").exists()


def test_its_temporary_folder_is_its_own_and_gone_afterwards() -> None:
    ended = run(
        "echo kept >$TMPDIR/a && cat $TMPDIR/a && stat -c %a $TMPDIR && echo $TMPDIR", env={"TMPDIR": "/nowhere"}
    )
    kept, mode, folder = ended.stdout.decode().split()
    assert (kept, mode) == ("kept", "700")
    assert folder != "/nowhere"
    assert not Path(folder).exists()


def test_a_folder_1500_deep_and_closed_ones_are_removed_too() -> None:
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


def test_it_gains_no_rights_and_kiwi_itself_stays_free(tmp_path: Path) -> None:
    ended = run("grep NoNewPrivs /proc/self/status")
    assert ended.stdout.split() == [b"NoNewPrivs:", b"1"]
    (tmp_path / "kiwi").write_text("still writes")
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text() or os.environ.get("KIWI_RUN")
