"""The commands for published versions: text and JSON output, and exit codes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.plugins.machines import Machine

from kiwi_mcp.surfaces import start


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, its data and its talk, without what differs from run to run."""

    code: int
    out: str
    err: str

    @property
    def output(self) -> tuple[int, list[str], list[str]]:
        """All of it, line by line, with long lines cut."""
        out, err = ([line[:100] for line in text.splitlines()] for text in (self.out, self.err))
        return self.code, out, err


Kiwi = Callable[..., Ended]
DIRECTIVE = """```xml
<directive name="guide" version="1.0.0">
  <metadata><description>Guide</description><model tier="fast" /><permissions /></metadata>
  <process><step name="go"><action>Go.</action></step></process>
</directive>
```
"""
KNOWLEDGE = "---\nid: guide\ntitle: Guide\nversion: 1.0.0\nentry_type: reference\n---\nGo.\n"
VARYING = (
    (r"sha256:[0-9a-f]{12,64}", "sha256:…"),
    (r"\d{4}-\d\d-\d\d(T[\d:.]+Z)?", "DATE"),
    (r"sqlite://\S+", "STORE"),
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine on which commands are run, with two versions of one tool and one of another."""
    machine = Machine(tmp_path / "ann", namespaces=["acme", "public"])
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(machine.project)
    return machine


@pytest.fixture
def kiwi(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kiwi:
    """Run a command in the machine's project, as its entry point would."""

    def plain(text: str) -> str:
        for pattern, word in VARYING:
            text = re.sub(pattern, word, text)
        return text.replace(str(machine.home), "HOME").replace(str(machine.home.parent), "TMP")

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kiwi", *words])
        with pytest.raises(SystemExit) as ended:
            start.main()
        printed = capsys.readouterr()
        out = printed.out if "--json" in words else plain(printed.out)
        return Ended(int(ended.value.code or 0), out, plain(printed.err))

    return run


@pytest.fixture
def filled(machine: Machine, sandbox: None) -> Machine:
    machine.publish("tick", "1.0.0", changelog="The first.\nOf many.")
    machine.publish("tick", "1.1.0", says="two")
    machine.publish("tock", visibility="private")
    return machine


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02")
def test_publish_shows_the_version_and_its_executors(kiwi: Kiwi, machine: Machine) -> None:
    machine.script("tick")
    assert kiwi("publish", "tick", "-m", "The first.", "--dry-run").output == snapshot(
        (
            0,
            ["acme/tick@1.0.0 would be published"],
            [
                "  ! it is not signed",
                "      fix: Run `kiwi sign tick` before publishing, so that others can tell that nothing changed sinc",
                "  digest: sha256:…",
                "hint: Others get it with `kiwi pull acme/tick`; `kiwi versions acme/tick` lists its history.",
            ],
        )
    )
    assert kiwi("publish", "tick", "-m", "The first.", "--to", "../share").output == snapshot(
        (
            0,
            ["acme/tick@1.0.0 published"],
            [
                "  ! it is not signed",
                "      fix: Run `kiwi sign tick` before publishing, so that others can tell that nothing changed sinc",
                "  digest: sha256:…",
                "  closure: sha256:…",
                "  to: oci:HOME/share",
                "hint: Others get it with `kiwi pull acme/tick`; `kiwi versions acme/tick` lists its history.",
            ],
        )
    )
    assert json.loads(kiwi("publish", "tick", "--json").out)["status"] == "unchanged"
    machine.script("tick", says="other")
    assert kiwi("publish", "tick").output == snapshot(
        (
            8,
            [],
            [
                "error: Published already, with other content or on another executor: acme/tick@1.0.0. A published ve",
                "hint: Give the changed item a new version (`version:` in its manifest), then publish that. The next ",
            ],
        )
    )


@pytest.mark.req("K-ME-02")
def test_pull_shows_the_chain(kiwi: Kiwi, filled: Machine) -> None:
    filled.do("deprecate", "tick@1.0.0", {"reason": "Old."})
    assert kiwi("pull", "tick@1.0.0").output == snapshot(
        (
            0,
            ["acme/tick@1.0.0 is here, whole and verified"],
            [
                "warning: registry/acme/tick@1.0.0 is deprecated: Old.",
                "  registry/acme/tick@1.0.0  sha256:…",
                "  └─ builtin/kiwi/bash_runtime@1.0.0  sha256:…",
                "     └─ builtin/kiwi/subprocess@1.0.0  sha256:…",
                "  closure: sha256:…",
                "hint: Run it with `kiwi run acme/tick@1.0.0`, or copy it here with `kiwi load acme/tick@1.0.0 --dest",
            ],
        )
    )
    kiwi("registry", "push", "../share")
    assert kiwi("pull", "acme/tick", "--from", "../share", "--dry-run").output == snapshot(
        (0, ["acme/tick@1.1.0 would be pulled"], ["  closure: sha256:…"])
    )
    pulled = kiwi("pull", "acme/tick", "--from", "../share", "--accept-unsigned", "--json")
    assert json.loads(pulled.out)["status"] == "pulled"
    assert kiwi("pull", "nothing").output == snapshot(
        (
            3,
            [],
            [
                "error: The registry has no 'nothing' in acme, public, kiwi.",
                "hint: Write `name`, `namespace/name`, `name@^1.2`, `name@1.2.3` or a digest `sha256:…`.",
            ],
        )
    )


@pytest.mark.req("K-ME-02")
@pytest.mark.parametrize(("place", "text"), [("directives/guide.md", DIRECTIVE), ("knowledge/guide.md", KNOWLEDGE)])
def test_directives_and_knowledge_are_published_and_pulled_too(
    kiwi: Kiwi, machine: Machine, place: str, text: str
) -> None:
    path = machine.put(place, text)
    assert kiwi("publish", "guide", "--to", "../share", "--dry-run").out == "acme/guide@1.0.0 would be published\n"
    assert kiwi("pull", "guide", "--from", "../share").code == 3
    assert kiwi("publish", "guide", "--to", "../share").out == "acme/guide@1.0.0 published\n"
    path.unlink()
    pulled = kiwi("pull", "guide", "--from", "../share", "--accept-unsigned")
    assert pulled.out == "acme/guide@1.0.0 is here, whole and verified\n"
    assert kiwi("load", "guide").out == text + "\n"


def test_versions_are_shown_as_a_table(kiwi: Kiwi, filled: Machine) -> None:
    filled.do("yank", "tick@1.1.0", {"reason": "It leaks."})
    assert kiwi("versions", "tick").output == snapshot(
        (
            0,
            [
                "1.1.0          DATE ann          sha256:…  yanked",
                "               yanked: It leaks.",
                "1.0.0          DATE ann          sha256:…  latest             The first.",
            ],
            [],
        )
    )
    assert [one["version"] for one in json.loads(kiwi("versions", "tick", "--json").out)["versions"]] == [
        "1.1.0",
        "1.0.0",
    ]
    assert kiwi("versions", "nothing").code == 3


def test_a_diff_goes_to_stdout_and_its_heading_to_stderr(kiwi: Kiwi, filled: Machine) -> None:
    assert kiwi("diff", "tick").output == snapshot(
        (
            0,
            [
                "--- a/main.sh",
                "+++ b/main.sh",
                "@@ -1 +1 @@",
                "-echo hi",
                "+echo two",
                "--- a/tool.yaml",
                "+++ b/tool.yaml",
                "@@ -1,6 +1,6 @@",
                " tool_id: tick",
                " tool_type: script",
                '-version: "1.0.0"',
                '+version: "1.1.0"',
                ' executor: "bash_runtime"',
                " description: Says a word called tick",
                " config:",
            ],
            ["registry/acme/tick@1.0.0 → registry/acme/tick@1.1.0"],
        )
    )
    assert kiwi("diff", "tick", "1.1.0", "1.1.0").output == snapshot(
        (0, [], ["registry/acme/tick@1.1.0 → registry/acme/tick@1.1.0", "Nothing differs."])
    )
    assert json.loads(kiwi("diff", "tick", "1.0.0", "1.1.0", "--json").out)["status"] == "different"
    assert kiwi("diff", "tick", "1.0.0", "9.0.0").code == 3


def test_status_changes_are_sentences(kiwi: Kiwi, filled: Machine) -> None:
    assert kiwi("deprecate", "tick@1.0.0", "-m", "Old.").output == snapshot(
        (0, ["acme/tick@1.0.0 is deprecated"], ["  latest: 1.1.0"])
    )
    assert kiwi("deprecate", "tick", "--undo").output == snapshot(
        (0, ["acme/tick@1.1.0, acme/tick@1.0.0 are no longer deprecated"], ["  latest: 1.1.0"])
    )
    assert kiwi("yank", "tick@1.1.0", "--dry-run").output == snapshot(
        (0, ["1.1.0          DATE ann          sha256:…  latest"], ["acme/tick@1.1.0 would be yanked"])
    )
    assert kiwi("rollback", "tick", "-m", "It leaks.").output == snapshot(
        (
            0,
            ["acme/tick@1.0.0 is the latest again"],
            ["hint: Take it back with `kiwi yank acme/tick@1.1.0 --undo`.", "  latest: 1.0.0"],
        )
    )
    assert kiwi("yank", "tick@1.1.0", "--undo").output == snapshot(
        (0, ["acme/tick@1.1.0 is taken up again"], ["  latest: 1.1.0"])
    )
    assert kiwi("yank", "tick").code == 4
    assert json.loads(kiwi("rollback", "tick", "--to", "1.0.0", "--json").out)["latest"] == "1.0.0"


def test_lists_and_verification_are_readable(kiwi: Kiwi, filled: Machine) -> None:
    assert kiwi("registry", "list", "--namespace", "acme").output == snapshot(
        (
            0,
            [
                "acme/tick  1.1.0      script       Says a word called tick",
                "acme/tock  1.0.0      script       Says a word called tock",
            ],
            ["2 items in HOME/.ai/state/registry.db"],
        )
    )
    assert kiwi("registry", "list", "--limit", "1").output == snapshot(
        (
            0,
            ["acme/tick  1.1.0      script       Says a word called tick"],
            [
                "1 item in HOME/.ai/state/registry.db",
                "hint: There are more than 1: raise `limit`, or search with `source: registry`.",
            ],
        )
    )
    assert len(json.loads(kiwi("registry", "list", "--type", "primitive", "--json").out)["items"]) == 2
    checked = json.loads(kiwi("verify", "--json").out)["checked"]
    message = f"Everything is as it was sealed: {checked} versions in HOME/.ai/state/registry.db"
    assert kiwi("verify").output == (0, [], [message])
    assert kiwi("verify", "tick").output == snapshot(
        (0, [], ["Everything is as it was sealed: 2 versions in HOME/.ai/state/registry.db"])
    )
    assert json.loads(kiwi("verify", "--json").out)["issues"] == []


def test_remotes_are_added_shown_and_used(kiwi: Kiwi, filled: Machine) -> None:
    assert kiwi("registry", "add", "share", "../share").output == snapshot(
        (
            0,
            ["share is HOME/share"],
            ["hint: `kiwi registry remote pull share` copies from it, `kiwi registry remote push share` to it."],
        )
    )
    assert kiwi("registry", "add", "team", "https://kiwi.example.com", "--token", "TEAM_TOKEN").code == 0
    code, shown, notes = kiwi("registry", "show").output
    assert (code, [re.sub(r"\(\d+ versions", "(N versions", line) for line in shown], notes) == snapshot(
        (
            0,
            [
                "store: HOME/.ai/state/registry.db (N versions)",
                "as: ann, in acme, public",
                "remote: share  HOME/share",
                "remote: team  https://kiwi.example.com",
            ],
            [],
        )
    )
    assert kiwi("registry", "push", "share", "--dry-run").output == snapshot(
        (
            0,
            ["oci:HOME/share: would be 2 new, 0 unchanged, 0 marked"],
            ["  + acme/tick@1.0.0", "  + acme/tick@1.1.0"],
        )
    )
    assert kiwi("registry", "push", "share", "--with-private").code == 0
    assert kiwi("registry", "remote", "pull", "share").output == snapshot(
        (0, ["oci:HOME/share: 0 new, 2 unchanged, 0 marked"], [])
    )
    assert json.loads(kiwi("registry", "show", "--json").out)["remotes"]["team"]["token"] == "${TEAM_TOKEN}"
    assert json.loads(kiwi("registry", "remote", "pull", "share", "--json").out)["status"] == "pulled"
    assert kiwi("registry", "push", "nowhere").code == 3


def test_search_and_load_reach_the_registry(kiwi: Kiwi, filled: Machine) -> None:
    found = kiwi("search", "tick", "--source", "registry")
    assert found.out.startswith("acme/tick  registry/script")
    assert kiwi("load", "tick", "--destination", "project").code == 0
    assert (filled.ai / "tools" / "tick" / "main.sh").read_text() == "echo two\n"


@pytest.mark.usefixtures("sandbox")
def test_a_store_that_is_down_is_an_error_with_a_hint(kiwi: Kiwi, machine: Machine) -> None:
    machine.settle(url="postgresql://127.0.0.1:1/kiwi")
    assert kiwi("versions", "tick").output == snapshot(
        (
            7,
            [],
            [
                "error: The store postgresql://127.0.0.1:1/kiwi is not available: no server listens there. Nothing wa",
                "hint: Check that the server runs and that the URL names its host and port.",
            ],
        )
    )
    assert kiwi("doctor").code == 1
