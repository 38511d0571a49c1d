"""The `.env` of a project is a file of the project: a symlink does not load the variables of another file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.primitives.secrets.reveal import Variables

PLACES = (".env.local", ".env", ".ai/.env")


def found(project: Path, home: Path) -> dict[str, str]:
    values = Variables().resolve([], optional=["TOKEN"], project=project, user=home / ".ai", environ={})
    return {name: one.value.reveal() for name, one in values.items()}


@pytest.mark.parametrize("place", PLACES)
def test_a_symlink_out_of_the_project_is_not_read(place: str, project: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("TOKEN=stolen\n")
    (project / place).symlink_to(tmp_path / "credentials")

    assert found(project, home) == {}


@pytest.mark.parametrize("place", PLACES)
def test_a_symlink_within_the_project_is_read(place: str, project: Path, home: Path) -> None:
    (project / "shared.env").write_text("TOKEN=own\n")
    (project / place).symlink_to(project / "shared.env")

    assert found(project, home) == {"TOKEN": "own"}


def test_a_symlink_to_a_sibling_with_the_same_prefix_is_not_read(project: Path, home: Path) -> None:
    beside = project.with_name(f"{project.name}-secrets")
    beside.mkdir()
    (beside / "env").write_text("TOKEN=stolen\n")
    (project / ".env").symlink_to(f"../{beside.name}/env")

    assert found(project, home) == {}


def test_the_user_file_may_be_a_symlink(project: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "dotfiles").write_text("TOKEN=mine\n")
    (home / ".ai").mkdir()
    (home / ".ai" / ".env").symlink_to(tmp_path / "dotfiles")

    assert found(project, home) == {"TOKEN": "mine"}


@pytest.mark.parametrize("line", ["export TOKEN=x", "export  TOKEN = x", '  export TOKEN="x" # mine'])
def test_an_exported_variable_is_read(line: str, project: Path, home: Path) -> None:
    (project / ".env").write_text(f"{line}\n")

    assert found(project, home) == {"TOKEN": "x"}
