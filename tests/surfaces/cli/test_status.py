"""`kiwi` alone and `kiwi list`: what is here, what waits, and what to do next."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kiwi_mcp.surfaces.cli.screen import Screen, talk

from .conftest import Kiwi

SCRIPT = "tool_id: {0}\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\ndescription: Does {0}. More.\n"


@pytest.mark.usefixtures("sandbox")
def test_kiwi_alone_shows_first_steps_then_the_state_and_the_next_step(kiwi: Kiwi, home: Path, project: Path) -> None:
    first = kiwi()
    assert (first.code, "kiwi setup" in first.out) == (0, True)
    assert not (home / ".ai").exists()

    for folder, name in ((project / ".ai", "sweep"), (home / ".ai", "dust")):
        (folder / "tools" / name).mkdir(parents=True)
        (folder / "tools" / name / "tool.yaml").write_text(SCRIPT.format(name) + "config: {entrypoint: main.sh}\n")
        (folder / "tools" / name / "main.sh").write_text("echo\n")
    assert kiwi("mcp", "add", "ghost", "--", "bash", "-c", "exit 3").code == 0
    assert kiwi("list").out.splitlines() == [
        "sweep  project/script        Does sweep.",
        "dust   user/script           Does dust.",
    ]

    state = kiwi()
    assert state.out.splitlines() == [
        "! 1 MCP server, 1 down: ghost",
        "✓ 2 items of your own",
        "✓ 0 questions for you",
        "✓ 0 threads not ended",
    ]
    assert state.err == "hint: `kiwi mcp refresh ghost` starts it again and says what is wrong.\n"


@pytest.mark.usefixtures("sandbox")
def test_kiwi_alone_names_both_commands_if_calls_and_threads_wait(kiwi: Kiwi, project: Path) -> None:
    (project / ".ai" / "tools").mkdir(parents=True)
    (project / ".ai" / "tools" / "asks.yaml").write_text(
        "tool_id: asks\ntool_type: composite\nversion: 1.0.0\ndescription: Asks\n"
        "config:\n  steps:\n    - {id: sure, ask: Sure?}\n"
    )
    started = kiwi("run", "asks")
    assert (started.code, "Its program:" in started.err, " continue`." in started.err) == (9, False, True)
    assert kiwi("run", "memory_write", "path=AGENT.md", "content=hi").code == 6

    state = kiwi()
    assert "! 2 questions for you" in state.out
    assert all(f"`kiwi {words}`" in state.err for words in ("approvals", "thread list --status waiting"))


def test_help_and_your_own_tools_work_where_there_can_be_no_project(
    command: Kiwi, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ai" / "tools").mkdir(parents=True)
    (home / ".ai" / "tools" / "dust.yaml").write_text(
        SCRIPT.format("dust").replace("bash_runtime", "subprocess") + "config: {command: echo, args: [hi]}\n"
    )
    theirs = tmp_path / "theirs"
    (theirs / ".ai").mkdir(parents=True)
    owner, real = os.geteuid(), os.stat

    def elsewhere(path: str | Path, **words: bool) -> os.stat_result:
        state = real(path, **words)
        is_theirs = os.path.samestat(state, real(theirs))
        return os.stat_result((*state[:4], owner + 1, *state[5:])) if is_theirs else state

    monkeypatch.setattr(os, "stat", elsewhere)
    for folder in (Path("/"), theirs):
        monkeypatch.chdir(folder)
        assert command("help", "tool").code == 0
        listed = command("list")
        assert (listed.code, listed.out.split()[0]) == (0, "dust")
        assert ("belongs to another user, so its .ai folder is not used" in listed.err) == (folder == theirs)
    lost = command("why", "nosuch")
    assert (lost.code, "would run: no" in lost.out) == (3, True)


def test_marks_have_colour_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> tuple[str, str]:
        Screen().data("✓ fine\nnot ✓ here\n  ✗ broken \x1b[2J")
        talk("error: no\nhint: yes")
        return capsys.readouterr()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown() == ("✓ fine\nnot ✓ here\n  ✗ broken \x1b[2J\n", "error: no\nhint: yes\n")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert shown() == (
        "\x1b[32m✓\x1b[0m fine\nnot ✓ here\n  \x1b[31m✗\x1b[0m broken \\x1b[2J\n",
        "\x1b[31merror:\x1b[0m no\n\x1b[36mhint:\x1b[0m yes\n",
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(shown())
