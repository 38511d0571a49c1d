"""What a chain runs that is in no item's digest is watched by its content: its script, its code, its own program."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.items import Manifest, Origin, Source, Tool
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel.watching import known_as, watched


def chain(project: Path, command: str, *args: Json, source: Source = "project", **config: Json) -> Chain:
    words: dict[str, Json] = {"command": command, "args": list(args), **config}
    manifest = Manifest("serve", "mcp_server", "1.0.0", config=words)
    folder = project / ".ai"
    return Chain((Tool(manifest, Origin(source, folder / "serve.yaml", folder), digest="d"),), "mcp", project=project)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text("print(1)\n")
    return path


def paths(one: Chain) -> list[str]:
    return [path for path, _ in watched(one)]


def test_a_script_is_watched_wherever_it_lies_and_however_it_is_named(script: Path, tmp_path: Path) -> None:
    for word in (str(script), "server.py", "./server.py", "{project}/server.py"):
        assert paths(chain(tmp_path, "/bin/sh", word)) == [str(script)], word
    inner = tmp_path / "inner"
    inner.mkdir()
    assert paths(chain(tmp_path, "/bin/sh", "../server.py", cwd="inner")) == [str(script)]
    assert paths(chain(tmp_path, "/bin/sh", "--require=server.py", "-c", "1")) == [str(script)]


def test_an_edit_is_seen_and_so_is_its_undoing(script: Path, tmp_path: Path) -> None:
    one = chain(tmp_path, "/bin/sh", "server.py")
    before, known = watched(one), known_as(one.tool, one)
    script.write_text("print(2)\n")
    assert watched(one) != before
    assert known_as(one.tool, one) != known
    script.write_text("print(1)\n")
    assert (watched(one), known_as(one.tool, one)) == (before, known)


def test_a_program_outside_the_system_folders_is_watched_and_one_of_the_system_is_not(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "run"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    link = tmp_path / "link"
    link.symlink_to(program)
    assert paths(chain(tmp_path, "{project}/bin/run")) == [str(program)]
    assert paths(chain(tmp_path, str(link))) == [str(program)]
    assert paths(chain(tmp_path, "/bin/sh", "-c", "exit")) == []


def test_a_folder_is_watched_by_what_an_interpreter_begins_with(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__main__.py", "other.py"):
        (package / name).write_text("")
    assert paths(chain(tmp_path, "/usr/bin/env", "package")) == [str(package / "__main__.py")]


def test_data_that_a_server_works_on_and_what_ships_with_kiwi_are_not_watched(script: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("")
    assert paths(chain(tmp_path, "/usr/bin/env", "--db=notes.db", "notes.db", "x" * 5_000, "a\0b", "{name}.py")) == []
    bare = chain(tmp_path, "/bin/sh", str(script), source="builtin")
    assert (paths(bare), known_as(bare.tool, bare)) == ([], "d")
