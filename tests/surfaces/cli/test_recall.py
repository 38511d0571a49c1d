"""`kiwi recall`: the stored searches of a person."""

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
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.search_index.recall import RecallEntry, RecallStore

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
    remembered = RecallStore(store.registry().database, store.actor.name)
    day = 86_400_000
    remembered.add("", RecallEntry("user/local/umbrella", "will it rain", is_run=True, at=day))
    remembered.add("", RecallEntry("mcp/post/parcel", "where is my parcel", is_run=False, at=2 * day))
    store.close()


def test_the_list_shows_the_latest_entries_first(kiwi: Kiwi, known: None) -> None:
    response = kiwi("recall")
    assert response.out == (
        "mcp/post/parcel  load  1970-01-03  where is my parcel\nuser/local/umbrella  run  1970-01-02  will it rain\n"
    )
    assert "2 in all" in response.err
    assert kiwi("recall", "show", "umbrella").out == "user/local/umbrella  run  1970-01-02  will it rain\n"


def test_forget_removes_one_item_or_all(kiwi: Kiwi, known: None) -> None:
    assert kiwi("recall", "forget", "post/parcel").out == "1 remembered request forgotten\n"
    assert json.loads(kiwi("recall", "--json").out)["remembered"] == [
        {"request": "will it rain", "item": "user/local/umbrella", "used": "run", "at": "1970-01-02T00:00:00Z"}
    ]
    assert json.loads(kiwi("recall", "forget", "--yes", "--json").out)["forgotten"] == 1
    ended = kiwi("recall")
    assert ended.out == ""
    assert "No search is remembered" in ended.err
    assert kiwi("recall", "show", "umbrella").code != 0


@pytest.mark.parametrize("given", ["", "n\n", "y\n"])
def test_without_a_terminal_only_yes_forgets_all(kiwi: Kiwi, known: None, given: str) -> None:
    refused = kiwi("recall", "forget", given=given)
    assert (refused.code, refused.out) == (6, "")
    assert "Delete everything" in refused.err
    assert "`--yes`" in refused.err
    assert json.loads(kiwi("recall", "forget", "--json", given=given).out)["code"] == "not_permitted"
    assert len(json.loads(kiwi("recall", "--json").out)["remembered"]) == 2
    assert kiwi("recall", "forget", "--yes", given=given).out == "2 remembered requests forgotten\n"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("typed", "left"), [("y", 0), ("n", 2), ("", 2)])
def test_a_person_on_a_terminal_is_asked_before_everything_is_forgotten(
    kiwi: Kiwi, known: None, project: Path, typed: str, left: int
) -> None:
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "recall", "forget"]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        seen = _until(own, b"[N]o: ")
        os.write(own, f"{typed}\n".encode())
        code = process.wait(120)
    os.close(own)
    assert b"Delete everything" in seen
    assert code == (6 if left else 0)
    assert len(json.loads(kiwi("recall", "--json").out)["remembered"]) == left


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("word", "left"), [("--yes", 0), ("umbrella", 1)])
def test_yes_or_the_name_of_an_item_is_enough(kiwi: Kiwi, known: None, project: Path, word: str, left: int) -> None:
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "recall", "forget", word]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        code = process.wait(120)
    os.close(own)
    assert code == 0
    assert len(json.loads(kiwi("recall", "--json").out)["remembered"]) == left


@pytest.mark.usefixtures("sandbox")
def test_a_load_before_a_run_or_why_is_not_remembered(kiwi: Kiwi, home: Path, project: Path) -> None:
    folder = project / ".ai" / "tools" / "say"
    folder.mkdir(parents=True)
    (folder / "tool.yaml").write_text(SAY)
    (folder / "main.sh").write_text('[ "$WORD" != no ]\n')

    def learnt() -> list[tuple[str, str]]:
        return [(one["item"], one["used"]) for one in json.loads(kiwi("recall", "--json").out)["remembered"]]

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


def test_the_list_reports_that_the_owner_switched_it_off(kiwi: Kiwi, known: None, home: Path) -> None:
    (home / ".ai" / "registry.yaml").write_text("remember: false\n")
    assert "`remember: false`" in kiwi("recall").err
    (home / ".ai" / "registry.yaml").write_text("remember: perhaps\n")
    assert "says neither yes nor no" in kiwi("recall").err


def _until(terminal: int, wanted: bytes) -> bytes:
    """Read from a terminal until something stands there."""
    seen, end = b"", time.monotonic() + 120
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65_536)
    assert wanted in seen, seen
    return seen
