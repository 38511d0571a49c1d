"""Programs: trusted launchers, and the files that a program needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import Warden

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.sandbox.command_files import ProgramFiles, ProgramFolders, find_launcher, program_at


def test_a_launcher_comes_from_the_system() -> None:
    assert find_launcher("prlimit") == str(Path("/usr/bin/prlimit").resolve())
    assert find_launcher("no-such-launcher") is None


def test_a_launcher_in_a_writable_folder_is_not_used(tmp_path: Path) -> None:
    shutil.copy("/bin/true", tmp_path / "bwrap")
    assert find_launcher("bwrap", [str(tmp_path)]) is None  # below a temporary folder, which everybody may write to


@pytest.mark.usefixtures("processes")
def test_an_interpreter_exposes_its_installation_and_nothing_around_it(environment: Path) -> None:
    python = environment / "bin" / "python"
    base = Path(os.path.realpath(sys.executable)).parent.parent
    assert program_at(str(python), nowhere) == ProgramFiles(str(python), (str(environment), str(base)))


@pytest.mark.usefixtures("processes")
def test_a_script_of_an_environment_exposes_its_interpreter_too(environment: Path) -> None:
    script = environment / "bin" / "serve"
    script.write_text(f"#!{environment}/bin/python\n")
    script.chmod(0o755)
    assert {*program_at(str(script), nowhere).roots} == {*program_at(f"{environment}/bin/python", nowhere).roots}


@pytest.mark.case("FS-01")
def test_a_program_in_a_home_does_not_expose_the_home(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "bin" / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mine").chmod(0o755)
    (tmp_path / "bin" / "alias").symlink_to("mine")
    program = program_at(str(tmp_path / "bin" / "alias"), lambda path: path.startswith("/usr"))
    assert program == ProgramFiles(str(tmp_path / "bin" / "mine"), (str(tmp_path / "bin" / "mine"),))


@pytest.mark.case("FS-01")
def test_a_rust_compiler_exposes_its_installed_libraries(tmp_path: Path) -> None:
    compiler = tmp_path / "toolchain" / "bin" / "rustc"
    for folder in (compiler.parent, tmp_path / "toolchain" / "lib" / "rustlib"):
        folder.mkdir(parents=True)
    shutil.copy("/bin/true", compiler)
    assert program_at(str(compiler), lambda _: False) == ProgramFiles(str(compiler), (str(tmp_path / "toolchain"),))


def test_a_project_that_looks_like_an_installation_is_not_exposed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    run = tmp_path / "bin" / "run"
    run.write_text("#!/bin/sh\n")
    run.chmod(0o755)
    closed = ProgramFolders(closed=(str(tmp_path),))
    assert str(tmp_path) not in program_at(str(run), nowhere, closed).roots
    assert str(run) in program_at(str(run), nowhere, closed).roots
    made = ProgramFolders(closed=(str(tmp_path),), trusted=(str(tmp_path),))
    assert str(tmp_path) in program_at(str(run), nowhere, made).roots


@pytest.mark.usefixtures("processes")
def test_an_environment_of_the_project_is_used_if_granted(environment: Path) -> None:
    python, closed = environment / "bin" / "python", (str(environment.parent),)
    base = str(Path(os.path.realpath(sys.executable)).parent.parent)

    assert program_at(str(python), nowhere, ProgramFolders(closed, given=(str(environment),))) == ProgramFiles(
        str(python), (base,)
    )
    assert str(environment) not in program_at(str(python), nowhere, ProgramFolders(closed)).roots


@pytest.mark.case("FS-01")
def test_naming_a_key_as_a_program_does_not_expose_it(tmp_path: Path, keeper: Warden) -> None:
    home = keeper.folder("keys", id_ed25519="a key", script="")
    (home / "script").write_text(f"#!{home}/id_ed25519\n")
    (home / "script").chmod(0o755)
    (home / "link").symlink_to("id_ed25519")
    assert f"{home}/id_ed25519" not in program_at(f"{home}/script", nowhere).roots
    for name in ("id_ed25519", "link"):
        with pytest.raises(KiwiError, match="not on this machine"):
            keeper.run(f"{home}/{name}")


def test_a_symlink_cycle_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert program_at(str(tmp_path / "a"), nowhere).roots == ()


def nowhere(_: str) -> bool:
    return False


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    return tmp_path / "env"
