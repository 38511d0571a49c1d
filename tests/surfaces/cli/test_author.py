"""The loop of an author: `kiwi new`, `kiwi dev`, `kiwi sign A B` and `kiwi sign .`."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from tests.surfaces.cli.conftest import Kiwi

import kiwi_mcp

KINDS = ("python", "bash", "node", "api", "mcp", "directive", "knowledge", "thread")


@pytest.mark.usefixtures("sandbox")
def test_every_template_is_valid_and_runs_where_it_can(kiwi: Kiwi) -> None:
    for kind in KINDS:
        written = kiwi("new", f"my_{kind}", f"--{kind}")
        assert (written.code, Path(written.out.split()[-1]).exists()) == (0, True), written
        assert json.loads(kiwi("validate", f"my_{kind}", "--json").out)["issues"] == []
    greeting = {"my_python": {"greeting": "hello Ada"}, "my_bash": "hello Ada", "my_node": {"greeting": "hello Ada"}}
    for name, result in greeting.items():
        assert json.loads(kiwi("run", name, "name=Ada", "--json").out)["result"] == result
    assert "api.example.com/v1/search?query=a%20b" in kiwi("run", "my_api", "query=a b", "--dry-run").out
    assert (kiwi("mcp", "refresh", "my_mcp", "--yes").code, kiwi("mcp", "accept", "my_mcp").code) == (0, 0)
    assert kiwi("run", "my_mcp/echo", "text=hi").out == "hi\n"
    assert json.loads(kiwi("run", "my_directive", "text=hi", "--json").out)["status"] == "ready"
    assert "Text that search finds" in kiwi("run", "my_knowledge").out
    assert kiwi("new", "my_python", "--python").code == 8
    assert kiwi("new", "other").code == kiwi("new", "other", "--bash", "--node").code == 2


@pytest.mark.usefixtures("sandbox")
def test_several_items_are_signed_by_name_and_all_only_after_a_question(kiwi: Kiwi, project: Path) -> None:
    for name in ("one", "two", "three"):
        assert kiwi("new", name, "--bash").code == 0
    assert kiwi("sign", "one", "two").code == 0
    assert [_integrity(kiwi, name) for name in ("one", "two", "three")] == ["hashed", "hashed", "unsigned"]
    assert kiwi("sign", ".", given="").code == 2
    assert kiwi("sign", "--yes", ".", given="").code == 2
    with (project / ".ai" / "tools" / "two.sh").open("a") as file:
        file.write("echo more\n")
    with terminal(project, "sign", ".") as (own, process):
        asked = until(own, b"[N]o: ").decode()
        os.write(own, b"y\n")
        assert process.wait(120) == 0
    assert ["one.sh" in asked, "two.sh" in asked, "three.sh" in asked] == [False, True, True]
    assert [_integrity(kiwi, name) for name in ("one", "two", "three")] == ["hashed", "hashed", "hashed"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("words", [("sign", "."), ("run", "one", "--type", "tool")])
def test_a_file_that_changes_during_the_question_is_not_signed(
    kiwi: Kiwi, project: Path, words: tuple[str, ...]
) -> None:
    folder = project / ".ai" / "tools" / "one"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(
        "tool_id: one\ntool_type: script\nexecutor: bash_runtime\nversion: 1.0.0\ndescription: One\n"
        "config: {entrypoint: main.sh}\n"
    )
    (folder / "main.sh").write_text("echo one\n")
    with terminal(project, *words) as (own, process):
        assert b"tool.yaml with 1 more file" in until(own, b"[N]o: ")
        (folder / "main.sh").write_text("echo two\n")
        os.write(own, b"y\n")
        assert process.wait(120) == 8
    assert _integrity(kiwi, "one") == "unsigned"


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("sandbox")
def test_dev_validates_and_runs_at_every_save_and_signs_at_a_key(kiwi: Kiwi, project: Path) -> None:
    assert kiwi("new", "hail", "--bash").code == 0
    file = project / ".ai" / "tools" / "hail.sh"
    with terminal(project, "dev", "hail", "name=Ada", "--json") as (own, process):
        assert b'"hello Ada"' in until(own, b"waiting for a change")
        broken = file.read_text().replace("version: 1.0.0", "version: one")
        file.write_text(broken)
        assert b"not a semantic version" in until(own, b"waiting for a change")
        file.write_text(broken.replace("version: one", "version: 1.0.0").replace("echo", "echo oh"))
        seen = until(own, b"waiting for a change")
        assert b'"oh hello Ada"' in seen
        assert b'"used": "restricted"' in seen
        os.write(own, b"s")
        assert b'"integrity": "hashed"' in until(own, b"waiting for a change")
        file.write_text(file.read_text().replace("echo oh", "echo hey"))  # a stale signature does not stop the author
        seen = until(own, b"waiting for a change")
        assert b'"hey hello Ada"' in seen
        assert b'"integrity": "unsigned"' in seen
        os.write(own, b"q")
        assert process.wait(120) == 0
    assert kiwi("dev", "nothing").code == 3


def _integrity(kiwi: Kiwi, name: str) -> str:
    return str(json.loads(kiwi("why", name, "--json").out)["chain"][0]["integrity"])


@contextmanager
def terminal(project: Path, *words: str) -> Iterator[tuple[int, Popen[bytes]]]:
    """Run a command on a terminal."""
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", *words]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=theirs) as process:
        os.close(theirs)
        try:
            yield own, process
        finally:
            process.kill()
            os.close(own)


def until(own: int, wanted: bytes) -> bytes:
    """Read from a terminal until something is there."""
    seen, end = b"", time.monotonic() + 120
    while wanted not in seen and time.monotonic() < end:
        if select.select([own], [], [], 1)[0]:
            seen += os.read(own, 65_536)
    assert wanted in seen, seen
    return seen
