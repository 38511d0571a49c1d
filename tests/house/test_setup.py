"""Set-up: locked, quiet, and reproducible on an empty machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

COPIED = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "requirements", "scripts", "src")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(path: Path) -> dict[str, int]:
    """The packages of a locked set, each with the number of its hashes."""
    entries = re.split(r"^(?=\S)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [(re.match(r"([\w.-]+)==", entry), entry.count("--hash=sha256:")) for entry in entries]
    return {normal(name.group(1)): hashes for name, hashes in found if name is not None}


@pytest.mark.parametrize("name", ["dev", "node", "uv"])
def test_every_locked_package_has_its_hashes_and_no_index_is_named(name: str, root: Path) -> None:
    path = root / "requirements" / f"{name}.txt"
    assert all(hashes > 0 for hashes in locked(path).values())
    assert "://" not in path.read_text(encoding="utf-8")


def test_every_dependency_of_the_project_is_locked(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted = {normal(re.split(r"[^\w.-]", line)[0]) for line in asked}
    assert sorted(wanted - set(locked(root / "requirements" / "dev.txt"))) == [], "run `make lock`"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/lock.sh", ".ci/run"])
def test_the_shell_scripts_are_executable(script: str, root: Path) -> None:
    subprocess.run(["bash", "-n", root / script], check=True, timeout=120)
    assert (root / script).stat().st_mode & 0o111


def test_the_integration_run_is_make_test_and_nothing_else(root: Path) -> None:
    lines = (root / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec make test"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("processes")
def test_a_fresh_copy_sets_itself_up_with_an_empty_home_and_again_quickly(root: Path, tmp_path: Path) -> None:
    copy, home = tmp_path / "kiwi", tmp_path / "fresh-home"
    home.mkdir()
    copy.mkdir()
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    clean = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}

    first = subprocess.run(
        ["make", "setup"], cwd=copy, env=clean, capture_output=True, text=True, timeout=500, check=False
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    kiwi = [str(copy / ".venv/bin/kiwi"), "--version"]
    version = subprocess.run(kiwi, cwd=home, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert version.returncode == 0, version.stderr
    assert re.search(r"\d+\.\d+\.\d+", version.stdout)
    assert list((copy / "src/kiwi_mcp").rglob("*.pyc")), (
        "Kiwi is compiled even where the machine forbids to write bytecode"
    )

    again = subprocess.run(
        ["make", "setup"], cwd=copy, env=clean, capture_output=True, text=True, timeout=120, check=True
    )
    assert (again.stdout, again.stderr) == ("", "")
