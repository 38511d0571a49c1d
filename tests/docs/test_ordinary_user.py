"""Every guide works for an ordinary user without control groups, also where the tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.docs.test_pages import PAGES, ROOT

USER = "1000"
BECOME = r"""
set -e
ordinary() { setpriv --reuid=$USER_ID --regid=$USER_ID --clear-groups --bounding-set=-all --no-new-privs "$@"; }
mount --make-rprivate /
mount -t tmpfs none /sys/fs/cgroup
if ! ordinary test -r "$PREFIX/bin"; then
  # The interpreter is in a home that others cannot enter: in this table of mounts they can.
  mkdir "$BASE/python"; mount --bind "$PREFIX" "$BASE/python"
  mount -t tmpfs -o mode=755 none "$(echo "$PREFIX" | cut -d/ -f1,2)"
  mkdir -p "$PREFIX"; mount --move "$BASE/python" "$PREFIX"
fi
chown $USER_ID:$USER_ID "$BASE"
ordinary "$@"
"""
"""Runs a command as an ordinary user, in a table of mounts without control groups."""


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("encoder_model", "sandbox", "processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user here, test_pages.py too")
def test_every_guide_works_for_an_ordinary_user_without_control_groups() -> None:
    # Not a folder of pytest's own: another session may close those to others at any time.
    with TemporaryDirectory() as base:
        done = run_as_ordinary_user(base, "tests/docs/test_pages.py", "-k", "following")
    assert f"{len(PAGES)} passed" in done.stdout, done.stdout[-20_000:]


def run_as_ordinary_user(base: str, *words: str, patience: int = 580) -> subprocess.CompletedProcess[str]:
    """Run tests as an ordinary user without control groups, who has a folder for everything."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "HOME": base,
        "BASE": base,
        "PREFIX": str(Path(sys.executable).resolve().parents[1]),
        "USER_ID": USER,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={base}/tests"]
    command = [sys.executable, *tests, *words]
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", BECOME, "bash", *command],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patience, check=False,
    )  # fmt: skip
