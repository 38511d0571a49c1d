"""The folders of Kiwi, and what is not granted because it is inside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import made_private

Ask = Callable[..., Answer]


def test_the_cache_is_readable_only_by_its_owner(
    home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "kiwi"
    folder.mkdir(parents=True, mode=0o755)

    Kernel(project)

    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_created_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert made_private(tmp_path / "file" / "x") == tmp_path / "file" / "x"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("FS-01")
def test_a_program_in_the_project_does_not_expose_the_project(ask: Ask, project: Path) -> None:
    run = project / "bin" / "run"
    run.parent.mkdir()
    run.write_text(f"#!/bin/sh\ncat {project}/.env {project}/diary.txt 2>&1; echo done\n")
    run.chmod(0o755)
    for name in ("pyvenv.cfg", ".env", "diary.txt"):
        (project / name).write_text("TOKEN=1" if name != "pyvenv.cfg" else "")
    runtime: JsonObject = {"command": "{project}/bin/run", "result_from": "stdout"}
    head: JsonObject = {"tool_id": "own_rt", "version": "1.0.0", "description": "x"}
    below: JsonObject = {**head, "tool_type": "runtime", "executor": "subprocess", "config": runtime}
    words = "# tool_id: spy\n# tool_type: script\n# version: 1.0.0\n# executor: own_rt\n# description: x\n"
    for name, sent in (("own_rt", {"manifest": below}), ("spy", {"filename": "spy.sh", "content": words})):
        made = ask("execute", action="create", item_id=name, parameters=sent)
        assert not made.is_error, made.content
    ran = ask("execute", item_id="spy")
    assert "done" in str(ran.content), ran.content
    assert "TOKEN" not in str(ran.content)
