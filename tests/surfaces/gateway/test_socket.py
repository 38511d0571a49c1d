"""`kiwi up --socket`: a gateway for processes of the same user, with any socket permissions."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kiwi_mcp.policy.tokens import TokenStore

PROGRAM = """
import sys
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.surfaces.cli import gateway
from kiwi_mcp.surfaces.cli.help import find
from kiwi_mcp.surfaces.cli.inputs import read
from kiwi_mcp.surfaces.cli.inputs import parse
try:
    row, rest = find(["up", *sys.argv[1:]])
    getattr(gateway, row["run"].removeprefix("gateway."))(row, read(row, parse(row, rest)))
except KiwiError as error:
    print(error.message, error.suggestion, file=sys.stderr)
    sys.exit(error.exit_code)
"""
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
STRANGER = 23_457
KNOCK = f"""
import os, socket, sys
os.setgroups([]); os.setresgid({STRANGER}, {STRANGER}, {STRANGER}); os.setresuid({STRANGER}, {STRANGER}, {STRANGER})
knock = socket.socket(socket.AF_UNIX)
knock.settimeout(10)
try:
    knock.connect(sys.argv[1])
    knock.sendall({ASK!r})
    print(repr(knock.recv(1000)))
except OSError as fault:
    print(type(fault).__name__)
"""


@pytest.fixture
def grounds(processes: None) -> Iterator[Path]:
    """A folder that every user may enter, with a short name."""
    with TemporaryDirectory(prefix="kiwi-socket-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def kiwi_up(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready_message(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout
    said: dict[str, object] = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
    return said


def ask(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(ASK)
        return b"".join(iter(lambda: connection.recv(4_096), b""))


@pytest.mark.case("GW-11")
def test_the_owner_is_answered_and_another_user_is_refused_by_permission_and_by_peer(grounds: Path, home: Path) -> None:
    TokenStore(home / ".ai").add("eve", ["acme"], can_write=True)
    path = grounds / "kiwi.sock"
    with kiwi_up("--socket", str(path), "--json") as process:
        assert ready_message(process)["socket"] == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path).endswith(b'{"status":"ok"}')
        if os.geteuid() == 0:
            assert knock(path) == "PermissionError"
            path.chmod(0o666)  # permissions set by mistake
            assert knock(path) in {"b''", "ConnectionResetError", "BrokenPipeError"}
            assert ask(path).endswith(b'{"status":"ok"}')
        process.terminate()
        assert process.wait(120) == 0
    assert not path.exists()


def knock(path: Path) -> str:
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", KNOCK, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_a_stale_socket_is_replaced_and_other_files_stay(grounds: Path, home: Path) -> None:
    TokenStore(home / ".ai").add("eve", ["acme"], can_write=True)
    path = grounds / "kiwi.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with kiwi_up("--socket", str(path), "--json") as process:
        ready_message(process)
        assert ask(path).endswith(b'{"status":"ok"}')
        with kiwi_up("--socket", str(path)) as second:
            assert second.wait(120) == 7
            assert "in use" in (second.stderr.read() if second.stderr else "")
    other = grounds / "file"
    other.write_text("mine")
    with kiwi_up("--socket", str(other)) as third:
        assert third.wait(120) == 7
    assert other.read_text() == "mine"


def test_an_invalid_socket_path_is_refused(grounds: Path, home: Path) -> None:
    TokenStore(home / ".ai").add("eve", ["acme"], can_write=True)
    with kiwi_up("--socket", str(grounds / ("x" * 120))) as process:
        assert process.wait(120) == 4
