from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.surfaces.start import named_project


@pytest.mark.parametrize(
    ("words", "project"),
    [
        ([], ""),
        (["--project", "/a"], "/a"),
        (["--project=/a b"], "/a b"),
        (["--project"], None),
        (["--project="], None),
        (["--project", "--help"], None),
        (["--help"], None),
        (["--project", "/a", "--odd"], None),
        (["extra"], None),
    ],
)
def test_serve_starts_directly_or_leaves_its_arguments_to_the_cli(words: list[str], project: str | None) -> None:
    assert named_project(words) == project


def run(program: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", program], input=stdin, env=env, capture_output=True, timeout=120, check=False
    )


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_a_stray_print_never_reaches_the_protocol_stream() -> None:
    done = run(
        "import os, subprocess, sys\n"
        "from kiwi_mcp.surfaces.mcp.handshake import claim\n"
        "wire = claim()\n"
        "print('from print', flush=True)\n"
        "os.write(1, b'from os.write\\n')\n"
        "subprocess.run(['echo', 'from a child'], check=True)\n"
        "subprocess.run(['cat'], check=True)\n"
        "wire.write(os.read(wire.inbound, 100))\n",
        stdin=b"a message\n",
    )
    assert done.stdout == b"a message\n"
    assert done.stderr.split(b"\n")[:3] == [b"from print", b"from os.write", b"from a child"]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_process_without_one_of_its_streams_does_not_crash(closed: int) -> None:
    done = run(
        f"import os; os.close({closed})\n"
        "from kiwi_mcp.surfaces.mcp.handshake import claim\n"
        "wire = claim()\n"
        "assert min(wire.inbound, wire.outbound) > 2\n"
        "os.write(1, b'stray')\n"
        "wire.write(b'message')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"message" if closed == 2 else b"")


@pytest.mark.usefixtures("processes")
def test_a_client_that_stopped_reading_ends_the_process_quietly() -> None:
    done = run(
        "import os\n"
        "from kiwi_mcp.surfaces.mcp.handshake import StdioPipe\n"
        "ours, theirs = os.pipe()\n"
        "os.close(ours)\n"
        "StdioPipe(0, theirs).write(b'message')\n"
    )
    assert (done.returncode, done.stderr) == (0, b"")
