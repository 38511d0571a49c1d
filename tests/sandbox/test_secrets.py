"""Variables of a sandboxed process reach it and are visible to no other process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from secrets import token_hex

import pytest
from tests.sandbox.conftest import Cell, Warden

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.sandbox.process_setup import split_environment

SECRET = f"secret-{token_hex(16)}"


@pytest.mark.case("SEC-08")
def test_a_secret_is_in_no_command_line(keeper: Warden) -> None:
    marker = keeper.folder("marker")
    script = f'printf %s "$TOKEN" | cksum; : >{marker}/begun; while [ ! -e {marker}/done ]; do sleep 0.02; done'
    cell = Cell(writable=(marker,), env={"TOKEN": "${TOKEN}"}, secrets={"TOKEN": SECRET})

    async def watched() -> tuple[bytes, list[bytes]]:
        run = asyncio.ensure_future(keeper.held("/bin/sh", "-c", script, cell=cell))
        while not run.done() and not (marker / "begun").exists():
            await asyncio.wait((run,), timeout=0.01)
        seen = _command_lines()
        (marker / "done").touch()
        return (await run).stdout, seen

    response, seen = keeper.do(lambda: asyncio.run(watched()))
    assert response.split()[1] == str(len(SECRET)).encode()
    assert any(b"bwrap" in line for line in seen)
    assert not any(SECRET.encode() in line for line in seen)


def _command_lines() -> list[bytes]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes())
        except OSError:
            continue
    return lines


@pytest.mark.case("INJ-11")
def test_a_preload_library_is_not_loaded_by_the_launcher(keeper: Warden) -> None:
    workspace = keeper.folder("evil", evil__so="not a library")
    cell = Cell(readable=(workspace,), env={"LD_PRELOAD": f"{workspace}/evil.so"})
    ended = keeper.run("/bin/sh", "-c", "echo $LD_PRELOAD; tr '\\0' '\\n' </proc/1/environ", cell=cell)
    assert ended.exit_code == 0
    assert ended.stdout.decode().splitlines()[0] == f"{workspace}/evil.so"
    assert b"\nLD_PRELOAD" not in ended.stdout
    # The loader complains once for each program that it starts with the variable: those inside.
    assert b"object" in ended.stderr
    assert b"bwrap" not in ended.stderr


def test_loader_variables_are_set_inside_and_not_passed_to_the_launcher() -> None:
    passed, inside = split_environment({"A": "1", "LD_PRELOAD": "x", "BASH_FUNC_ls%%": "() { :; }", "GCONV_PATH": "y"})
    assert passed == {"A": "1", "HOME": "/tmp/home", "TMPDIR": "/tmp"}
    assert inside == {"LD_PRELOAD": "x", "BASH_FUNC_ls%%": "() { :; }", "GCONV_PATH": "y"}


def test_a_secret_under_a_loader_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="LD_LIBRARY_PATH"):
        split_environment({"LD_LIBRARY_PATH": "/x:${TOKEN}"})


def test_home_and_the_temporary_folder_are_private(keeper: Warden) -> None:
    env = {"HOME": os.environ["HOME"], "TMPDIR": "/var/tmp"}
    ended = keeper.run("/bin/sh", "-c", "echo $HOME $TMPDIR; cd; pwd; id -un", cell=Cell(env=env))
    assert ended.stdout == b"/tmp/home /tmp\n/tmp/home\nkiwi\n"
