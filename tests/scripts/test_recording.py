"""The recording of `kiwi setup` in the README shows what the command prints."""

from __future__ import annotations

import re
import runpy
from html import unescape
from pathlib import Path

import pytest

from kiwi_mcp.kernel.verbs.mcp.connect import SetupServer, server_table

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "setup.svg"
ROW = re.compile(r"✓ (\S+) +reaches (.+?)  +changes (.+?)  +(\d+) tools")


def shown() -> list[str]:
    """The lines of the recording after the command, as plain text."""
    texts = re.findall(r"<text [^>]*>(.*)</text>", PICTURE.read_text(encoding="utf-8"))
    command, *lines = [unescape(re.sub(r"<[^>]+>", "", text)) for text in texts]
    assert command == "$ kiwi setup --yes"
    return lines


def test_the_recording_has_the_form_that_setup_prints_and_is_in_the_readme() -> None:
    lines = shown()
    rows = [found.groups() for line in lines if (found := ROW.fullmatch(line))]
    servers = [SetupServer(server=row[0], may_reach=row[1], may_change=row[2], tools=int(row[3])) for row in rows]
    assert len(servers) == 5
    assert [*server_table(servers)] == lines[:5]
    assert "](docs/pictures/setup.svg)" in (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install")[0]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("sandbox", "processes")
def test_setup_prints_what_the_recording_shows(tmp_path: Path) -> None:
    recording = runpy.run_path(str(ROOT / "scripts" / "recording.py"))
    printed = [recording["SGR"].sub("", line) for line in recording["record"](tmp_path)]
    assert [re.sub(r"[\d,]+", "0", line) for line in printed] == [re.sub(r"[\d,]+", "0", line) for line in shown()], (
        "run: make recording"
    )
