"""`kiwi` alone and `kiwi list`: what is here, what waits, and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

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
