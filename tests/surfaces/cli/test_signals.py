"""`kiwi run` in a shell: signals end the tool too, and flags take only their own values."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.cli.inputs import from_words

PATIENCE = 120.0
NAPPER = "sleep 600 &\n(setsid sleep 600 &)\nset -m\nsleep 600 &\nwait\n"
SCHEMA: JsonObject = {
    "properties": {"flag": {"type": "boolean"}, "name": {"type": "string"}, "text": {"type": "string"}}
}


@pytest.fixture
def mark(project: Path) -> str:
    """A word that is in the environment of a tool's processes, and of no others."""
    word = f"nap-{token_hex(16)}"
    folder = project / ".ai" / "tools" / "napper"
    folder.mkdir(parents=True)
    manifest = {"tool_id": "napper", "tool_type": "script", "version": "1.0.0", "executor": "bash_runtime"}
    config: Json = {"entrypoint": "main.sh", "env": {"MARK": word}}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, "config": config}))
    (folder / "main.sh").write_text(NAPPER)
    return word


def marked(word: str) -> list[int]:
    """The processes that have the word in their environment; one that has ended has none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has gone, or is not ours to see
            continue
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something becomes true in time; the other side has no way to tell us."""
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@contextmanager
def running(project: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kiwi_mcp", "run", "napper"]
    # A shell starts what runs in the background with SIGINT ignored, which children inherit; a terminal does not.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, heard)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-PR-01")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)], ids=["term", "hup", "int"]
)
def test_a_terminated_command_ends_every_process_of_its_tool(
    number: signal.Signals, code: int, mark: str, project: Path
) -> None:
    with running(project) as process:
        assert eventually(lambda: len(marked(mark)) >= 4)

        process.send_signal(number)

        try:
            _, talk = process.communicate(timeout=PATIENCE)
            assert process.returncode == code
            assert marked(mark) == []
            assert talk == (b"Interrupted.\n" if number == signal.SIGINT else b"")
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--flag", "name=x"], {"flag": True, "name": "x"}),
        (["--flag", "--name", "x"], {"flag": True, "name": "x"}),
        (["--flag", "false", "name=x"], {"flag": False, "name": "x"}),
        (["name=x", "--flag"], {"name": "x", "flag": True}),
    ],
)
def test_a_flag_does_not_consume_the_argument_after_it(words: list[str], given: dict[str, Json]) -> None:
    assert from_words(words, SCHEMA) == given


def test_an_option_without_its_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--text needs a value"):
        from_words(["name=x", "--text"], SCHEMA)
