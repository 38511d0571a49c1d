"""`kiwi up` as a process: where it listens, when it refuses to start, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kiwi_mcp.surfaces.gateway.tokens import Tokens

PROGRAM = """
import sys
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.surfaces.cli.gateway import up
try:
    up()
except KiwiError as error:
    print(error.message, error.suggestion, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@contextmanager
def kiwi_up(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    return process.stderr.readline()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_answers_and_ends_when_asked(home: Path, ending: signal.Signals) -> None:
    Tokens(home / ".ai").add("eve", ["acme"], can_write=True)
    with kiwi_up("--port", "0", "--json") as process:
        line = first_line(process)
        assert process.stdout
        told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        assert told["url"] in line
        assert told["url"] == f"http://127.0.0.1:{told['port']}"
        connection = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=10)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
        connection.close()

        process.send_signal(ending)
        assert process.wait(20) == 0
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")


@pytest.mark.case("GW-08")
@pytest.mark.parametrize("words", [[], ["--host", "0.0.0.0"], ["--host", "0.0.0.0", "--read-only"]])
def test_without_tokens_it_does_not_start_where_anybody_else_could_use_it(words: list[str]) -> None:
    with kiwi_up("--port", "0", *words) as process:
        assert process.wait(20) == 4
        assert "kiwi up token add" in first_line(process)


def test_without_tokens_it_lets_this_machine_read() -> None:
    with kiwi_up("--port", "0", "--read-only") as process:
        assert "(read-only)" in first_line(process)


def test_a_port_that_is_taken_is_told(home: Path) -> None:
    Tokens(home / ".ai").add("eve", ["acme"], can_write=True)
    with kiwi_up("--port", "0") as first:
        port = first_line(first).rsplit(":", 1)[1].strip()
        with kiwi_up("--port", port) as second:
            assert second.wait(20) == 7
            assert "--port 0" in first_line(second)


def test_tokens_are_made_listed_and_removed_by_commands(home: Path) -> None:
    def kiwi(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"

    secret = kiwi("token", "add", "eve", "--namespaces", "acme, public", "--write").strip()
    assert Tokens(home / ".ai").find(secret)
    listed = json.loads(kiwi("token", "list", "--json"))["tokens"]
    assert [(row["name"], row["right"], row["namespaces"]) for row in listed] == [("eve", "write", ["acme", "public"])]
    assert secret not in kiwi("token", "list")
    assert "eve" in kiwi("token", "remove", "eve")
    assert kiwi("token", "remove", "eve").startswith("3:")


def test_the_kernel_and_the_commands_load_no_server(home: Path) -> None:
    program = (
        "import sys, kiwi_mcp.kernel, kiwi_mcp.surfaces.cli.gateway, kiwi_mcp.kernel.registry.remotes\n"
        "print([name for name in ('starlette', 'uvicorn', 'psycopg') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
