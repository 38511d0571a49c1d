"""`kiwi search`: hits, reasons, and suggestions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec import convert
from tests.plugins.machines import Machine
from tests.surfaces.cli.conftest import Kiwi

from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.verbs import load_verb
from kiwi_mcp.kernel.verbs import search as search_verb
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.tokens import forms_in
from kiwi_mcp.surfaces.cli import session
from kiwi_mcp.surfaces.cli.screen import Screen, strong


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "ann")
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(machine.project)
    for name in ("tick", "tock"):
        machine.script(name)
    return machine


@pytest.fixture
def kiwi(machine: Machine, command: Kiwi) -> Kiwi:
    """Run a command in the machine's project."""
    assert machine.project == Path.cwd()
    return command


def test_each_hit_is_a_row_with_its_score_and_the_matching_words(kiwi: Kiwi) -> None:
    code, out, talk = kiwi("search", "say the word tick")

    first, why, *_ = out.splitlines()
    assert (code, first.split()[:2]) == (0, ["tick", "project/script"])
    assert 0 < float(first.split()[2]) <= 1
    assert why.startswith("    by ")
    assert {"say", "word", "tick"} == {*why.removeprefix("    by ").split(", ")}
    assert "2 of 2 found" in talk


def test_a_hit_that_is_not_permitted_gives_the_reason(kiwi: Kiwi, machine: Machine) -> None:
    (machine.user / "policy.yaml").write_text("items: {allow: ['*'], deny: ['*/tock@*']}\n")
    _, out, _ = kiwi("search", "tock")
    assert "✗ not permitted: " in out
    assert "'*/tock@*'" in out


def test_filters_may_be_repeated_and_the_order_chosen(kiwi: Kiwi, machine: Machine) -> None:
    machine.put("tools/clock/chime.sh", "# tool_id: chime\n# tool_type: script\n# executor: bash_runtime\n"
                "# version: 1.0.0\n# description: Says a word\necho 1\n")  # fmt: skip
    found = json.loads(kiwi("search", "says a word", "--sort", "name", "--json")[1])
    assert [one["name"] for one in found["results"]] == ["chime", "tick", "tock"]
    for words, names in (
        (("--category", "clock", "--category", "other"), ["chime"]),
        (("--type", "script", "--limit", "1", "--sort-by", "name"), ["chime"]),
        (("--type", "api"), []),
        (("--server", "github"), []),
        (("--type", "knowledge"), []),
        (("--source", "user"), []),
    ):
        response = json.loads(kiwi("search", "says a word", *words, "--json")[1])
        assert [one["name"] for one in response["results"]] == names, words


def test_a_search_without_hits_shows_similar_items_and_how_to_search(kiwi: Kiwi) -> None:
    code, out, talk = kiwi("search", "tickettts")
    assert (code, out.splitlines()) == (0, ["close: project/local/tick  Says a word called tick"])
    assert talk.startswith("Nothing found. ")
    assert "one need per search" in talk
    assert "`--source all`" in talk
    assert "there are `script`" in kiwi("search", "tick", "--type", "api")[2]


def test_without_a_query_all_items_that_pass_the_filters_are_listed(kiwi: Kiwi) -> None:
    code, out, talk = kiwi("search", "--type", "script")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["tick", "tock"])
    assert "2 of 2 found" in talk


def test_parts_meaning_memory_weakness_and_progress_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    card = {
        "name": "post", "identity": "mcp/outbox/post@1.0.0", "source": "mcp", "tool_type": "mcp_tool", "score": 0.21,
        "description": "Post a letter. And more.", "why": [], "meaning": 0.4, "part": 2, "remembered": True, "path": "",
    }  # fmt: skip
    content = {
        "results": [card], "total": 1, "query": "", "source": "all", "parts": ["write it", "send it"],
        "note": "Weak match.", "indexing": {"cards": 9, "words": 7, "meaning": 2},
    }  # fmt: skip
    verb = load_verb("search", "")
    assert verb.view is not None
    Screen().show(verb.view(convert(content, verb.response)))
    out, talk = capsys.readouterr()
    assert out.splitlines() == [
        "mcp/outbox/post  mcp/mcp_tool       0.21    Post a letter.",
        "    near in meaning (0.4); used before for a need like this; for “send it”",
    ]
    assert "note: Weak match." in talk
    assert "of 9 items 7 are found by words, 2 by meaning so far" in talk


def test_matching_words_are_highlighted_on_a_terminal_in_any_form() -> None:
    text = "Sends send_mail to a tree"
    assert strong(text, forms_in(text, ["send", "mails"])) == (
        "\x1b[1mSends\x1b[0m \x1b[1msend\x1b[0m_\x1b[1mmail\x1b[0m to a tree"
    )
    assert strong("Sends mail", []) == "Sends mail"


class Unhurried:
    """An encoder for which everything is about rain, and which takes its time over it."""

    name, dimension = "unhurried", 384

    def encode(self, texts: Sequence[str]) -> Floats:
        time.sleep(0.015 * len(texts))
        rows = np.zeros((len(texts), self.dimension), np.float32)
        rows[:, 0] = 1
        return rows


@pytest.fixture
def many(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tools than a command can take in by the way."""
    for number in range(160):
        machine.put(f"tools/paint_{number}.sh", f"# tool_id: paint_{number}\n# tool_type: script\n# version: 1.0.0\n"
                    f"# executor: bash_runtime\n# description: Paints wall {number}\necho 1\n")  # fmt: skip
    monkeypatch.setenv("KIWI_SEARCH", "meaning")
    monkeypatch.setattr(search_verb, "load_encoder", Unhurried)


def is_complete(kiwi: Kiwi) -> bool:
    return "indexing" not in json.loads(kiwi("search", "paint", "--json")[1])


@pytest.mark.slow
@pytest.mark.usefixtures("many")
def test_unfinished_indexing_is_reported_with_the_command_to_finish_it(kiwi: Kiwi) -> None:
    code, out, talk = kiwi("search", "paint a wall")
    assert (code, bool(out)) == (0, True)
    assert "note: still indexing: " in talk
    assert "`kiwi search … --wait`" in talk
    assert not is_complete(kiwi)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
def test_with_wait_the_answer_comes_after_indexing(kiwi: Kiwi) -> None:
    code, out, talk = kiwi("search", "paint a wall", "--wait")
    assert (code, bool(out)) == (0, True)
    assert "still indexing" not in talk
    assert is_complete(kiwi)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
def test_indexing_continues_after_the_answer_on_a_terminal(kiwi: Kiwi, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    @contextmanager
    def heard(_: str, *, is_quiet: bool) -> Iterator[Report]:
        yield lambda step: None if is_quiet else steps.append(step.message)

    monkeypatch.setattr(session, "reporting", heard)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: stream is sys.stderr, raising=False)
    code, out, talk = kiwi("search", "paint a wall")
    assert (code, bool(out)) == (0, True)
    assert all(one.endswith(" of 162; Ctrl-C stops, what is done is kept") for one in steps)
    assert len(steps) > 1
    assert "--wait" not in talk
    assert is_complete(kiwi)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
def test_stopping_the_rest_after_an_answer_is_not_a_failure(kiwi: Kiwi, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: stream is sys.stderr, raising=False)
    monkeypatch.setattr(Kernel, "index", interrupted)
    assert kiwi("search", "paint a wall")[0] == 0
    assert kiwi("search", "paint a wall", "--wait")[0] == 130
