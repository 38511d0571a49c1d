"""`kiwi memory`: what a person sees of what their searches are remembered by."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from tests.surfaces.cli.conftest import Kiwi

import kiwi_mcp
from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.remembered import Remembered

SAY = """\
tool_id: say
tool_type: script
version: 1.0.0
executor: bash_runtime
description: Speak a word aloud
parameters: {type: object, properties: {word: {type: string}}, required: [word], additionalProperties: false}
config: {entrypoint: main.sh, env: {WORD: "{word}"}}
"""


@pytest.fixture
def known(home: Path) -> None:
    store = Store(home / ".ai")
    remembered = Remembered(store.registry().database, store.actor.name)
    day = 86_400_000
    remembered.note("", Trace("user/local/umbrella", "will it rain", is_run=True, at=day))
    remembered.note("", Trace("mcp/post/parcel", "where is my parcel", is_run=False, at=2 * day))
    store.close()


def test_it_shows_what_is_remembered_the_latest_first(kiwi: Kiwi, known: None) -> None:
    told = kiwi("memory")
    assert told.out == (
        "mcp/post/parcel  load  1970-01-03  where is my parcel\nuser/local/umbrella  run  1970-01-02  will it rain\n"
    )
    assert "2 in all" in told.err
    assert kiwi("memory", "show", "umbrella").out == "user/local/umbrella  run  1970-01-02  will it rain\n"


def test_it_forgets_one_item_or_all(kiwi: Kiwi, known: None) -> None:
    assert kiwi("memory", "forget", "post/parcel").out == "1 remembered request forgotten\n"
    assert json.loads(kiwi("memory", "--json").out)["remembered"] == [
        {"request": "will it rain", "item": "user/local/umbrella", "used": "run", "at": "1970-01-02T00:00:00Z"}
    ]
    assert json.loads(kiwi("memory", "forget", "--yes", "--json").out)["forgotten"] == 1
    ended = kiwi("memory")
    assert ended.out == ""
    assert "No search is remembered" in ended.err
    assert kiwi("memory", "show", "umbrella").code != 0


@pytest.mark.parametrize("given", ["", "n\n", "y\n"])
def test_without_a_terminal_nothing_but_a_yes_forgets_all(kiwi: Kiwi, known: None, given: str) -> None:
    refused = kiwi("memory", "forget", given=given)
    assert (refused.code, refused.out) == (6, "")
    assert "Forget all" in refused.err
    assert "`--yes`" in refused.err
    assert json.loads(kiwi("memory", "forget", "--json", given=given).out)["code"] == "not_permitted"
    assert len(json.loads(kiwi("memory", "--json").out)["remembered"]) == 2
    assert kiwi("memory", "forget", "--yes", given=given).out == "2 remembered requests forgotten\n"


@pytest.mark.parametrize(("typed", "left"), [("y", 0), ("n", 2), ("", 2)])
def test_a_person_at_a_terminal_is_asked_before_all_is_forgotten(
    kiwi: Kiwi, known: None, project: Path, typed: str, left: int
) -> None:
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "memory", "forget"]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        seen = _until(own, b"[N]o: ")
        os.write(own, f"{typed}\n".encode())
        code = process.wait(30)
    os.close(own)
    assert b"Forget all" in seen
    assert code == (6 if left else 0)
    assert len(json.loads(kiwi("memory", "--json").out)["remembered"]) == left


@pytest.mark.parametrize(("word", "left"), [("--yes", 0), ("umbrella", 1)])
def test_a_yes_or_the_name_of_an_item_is_enough(kiwi: Kiwi, known: None, project: Path, word: str, left: int) -> None:
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "memory", "forget", word]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        code = process.wait(30)
    os.close(own)
    assert code == 0
    assert len(json.loads(kiwi("memory", "--json").out)["remembered"]) == left


def test_what_was_looked_at_to_run_or_explain_an_item_was_not_read(kiwi: Kiwi, home: Path, project: Path) -> None:
    folder = project / ".ai" / "tools" / "say"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(SAY)
    (folder / "main.sh").write_text('[ "$WORD" != no ]\n')

    def learnt() -> list[tuple[str, str]]:
        return [(one["item"], one["used"]) for one in json.loads(kiwi("memory", "--json").out)["remembered"]]

    assert "say" in kiwi("search", "speak a word aloud").out
    assert kiwi("run", "say", "word=no").code != 0
    assert kiwi("run", "say", "wrod=yes").code != 0
    assert kiwi("run", "say", "word=yes", "--dry-run").code == 0
    assert kiwi("why", "say", "word=yes").code == 0
    (home / ".ai" / "policy.yaml").write_text("items: {allow: ['*'], deny: ['*/say@*']}\n")
    assert kiwi("run", "say", "word=yes").code == 6
    (home / ".ai" / "policy.yaml").unlink()
    assert learnt() == []
    assert kiwi("load", "say").code == 0
    assert learnt() == [("project/local/say", "load")]
    assert kiwi("run", "say", "word=yes").code == 0
    assert learnt() == [("project/local/say", "run")]
    looked = [one["action"] for one in json.loads(kiwi("audit", "--json").out)["receipts"]]
    assert looked.count("load") == 1


def test_it_says_that_the_owner_switched_it_off(kiwi: Kiwi, known: None, home: Path) -> None:
    (home / ".ai" / "registry.yaml").write_text("remember: false\n")
    assert "`remember: false`" in kiwi("memory").err
    (home / ".ai" / "registry.yaml").write_text("remember: perhaps\n")
    assert "says neither yes nor no" in kiwi("memory").err


def _until(terminal: int, wanted: bytes) -> bytes:
    """Read from a terminal until something stands there."""
    seen, end = b"", time.monotonic() + 60
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65_536)
    assert wanted in seen, seen
    return seen
