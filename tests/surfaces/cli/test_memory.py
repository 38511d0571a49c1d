"""`kiwi memory`: what a person sees of what their searches are remembered by."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.remembered import Remembered
from kiwi_mcp.surfaces import start


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, its data and its talk."""

    code: int
    out: str
    err: str


Kiwi = Callable[..., Ended]


@pytest.fixture
def kiwi(home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kiwi:
    """Run a command in the project, as its entry point would."""
    monkeypatch.chdir(project)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kiwi", *words])
        with pytest.raises(SystemExit) as ended:
            start.main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def known(home: Path) -> None:
    store = Store(home / ".ai")
    remembered = Remembered(store.registry().database, store.actor.name)
    day = 86_400_000
    remembered.note(store.actor.name, Trace("user/local/umbrella", "will it rain", is_run=True, at=day))
    remembered.note(store.actor.name, Trace("mcp/post/parcel", "where is my parcel", is_run=False, at=2 * day))
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
    assert json.loads(kiwi("memory", "forget", "--json").out)["forgotten"] == 1
    ended = kiwi("memory")
    assert ended.out == ""
    assert "No search is remembered" in ended.err
    assert kiwi("memory", "show", "umbrella").code != 0


def test_it_says_that_the_owner_switched_it_off(kiwi: Kiwi, known: None, home: Path) -> None:
    (home / ".ai" / "registry.yaml").write_text("remember: false\n")
    assert "`remember: false`" in kiwi("memory").err
    (home / ".ai" / "registry.yaml").write_text("remember: perhaps\n")
    assert "says neither yes nor no" in kiwi("memory").err
