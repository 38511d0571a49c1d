"""The systemd units in `deploy/` are correct, and start commands that exist."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kiwi_mcp.surfaces.cli.help import table

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy").glob("*.service"))


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of the package systemd")
def test_systemd_accepts_the_units(home: Path) -> None:
    program = home / ".local" / "bin" / "kiwi"
    program.parent.mkdir(parents=True)
    program.symlink_to(shutil.which("true") or "")
    done = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", *UNITS],
        env={**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_start_commands_that_exist() -> None:
    started = [line.split()[1] for unit in UNITS for line in unit.read_text().splitlines() if "ExecStart=" in line]
    assert sorted(started) == ["up", "worker"]
    assert {*started} <= {row["path"].split()[0] for row in table()["commands"]}
