"""Which argument of a command is the script: its folder is visible, and files that inline code receives are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.command_files import script_in


def place_in(command: str, folder: Path) -> int | None:
    return script_in(ProcessSpec(tuple(command.split()), cwd=str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("python3 server", 1),
        ("python3.11 -E server", 2),
        ("python3 -u -I server", 3),
        ("/usr/bin/bash -e server", 2),
        ("sh -eu server", 2),
        ("node --enable-source-maps server", 2),
        ("perl -w server", 2),
    ],
)
def test_options_without_code_do_not_hide_the_script(folder: Path, command: str, place: int) -> None:
    assert place_in(command, folder) == place


@pytest.mark.parametrize(
    "command",
    [
        "python3 -c pass server",
        "python3 -Ic pass server",
        "python3 -m module server",
        "python3 -mmodule server",
        "bash -c true server",
        "sh -ec true server",
        "bash -ce true server",
        "node -e 1 server",
        "node -pe 1 server",
        "node --eval=1 server",
        "perl -E 1 server",
        "perl -ne 1 server",
        "ruby -e 1 server",
        "php -r 1 server",
        "cat server",
    ],
)
def test_a_file_argument_of_inline_code_is_not_the_script(folder: Path, command: str) -> None:
    assert place_in(command, folder) is None
