"""The test tiers: fixtures choose the tier, and a test requests what it uses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import socket
import subprocess

import pytest

pytest_plugins = ["tests.plugins.tiers"]

@pytest.fixture(scope="module")
def shared():
    subprocess.run(["/bin/true"], check=True)

@pytest.fixture(scope="module")
def honest(processes):
    subprocess.run(["/bin/true"], check=True)

def test_nothing():
    pass

def test_process():
    subprocess.run(["/bin/true"], check=True)

def test_socket(encoder_model):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

def test_unix_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))

@pytest.mark.usefixtures("processes")
def test_shared(shared):
    pass

def test_honest(honest):
    pass

@pytest.mark.usefixtures("processes")
def test_requested():
    subprocess.run(["/bin/true"], check=True)

@pytest.mark.usefixtures("loopback", "processes")
@pytest.mark.smoke
def test_smoke():
    subprocess.run(["/bin/true"], check=True)

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_store(kind):
    pass
"""
FAST = {"test_nothing", "test_process", "test_unix_socket", "test_smoke", "test_store[sqlite]"}
FULL = {"test_socket", "test_shared", "test_honest", "test_requested", "test_slow", "test_store[postgres]"}


def run(folder: Path, root: Path, tier: str) -> str:
    """Run the tests above that belong to a tier, and return what pytest prints."""
    (folder / "conftest.py").write_text("", encoding="utf-8")
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    own = [f"--basetemp={folder / 'temporary'}", "-c", str(root / "pyproject.toml"), "--rootdir", str(folder)]
    words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", *own]
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, *words, "-m", tier, "test_some.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=50, check=False)
    return done.stdout + done.stderr


@pytest.mark.usefixtures("processes")
def test_fixtures_and_marks_choose_the_tier_of_a_test(tmp_path: Path, root: Path) -> None:
    for tier, names in (("not full", FAST), ("full", FULL)):
        printed = run(tmp_path, root, tier)
        assert {*re.findall(r"^test_some.py::(\S+) ", printed, re.MULTILINE)} == names, printed


@pytest.mark.usefixtures("processes")
def test_a_test_that_uses_more_than_it_requests_fails_with_the_fixture_to_request(tmp_path: Path, root: Path) -> None:
    printed = run(tmp_path, root, "full or not full")
    failed = {*re.findall(r"^(?:FAILED|ERROR) test_some.py::(\S+)", printed, re.MULTILINE)}
    assert failed == {"test_process", "test_socket", "test_shared"}, printed
    assert "This test must request the fixture `processes`" in printed
    assert "This test must request the fixture `loopback`" in printed
    assert "The fixture `shared` must request the fixture `processes`" in printed
