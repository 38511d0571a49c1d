"""Files that a chain runs outside any digest are watched by their content: script, code and program."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.items import Chain, Location, Manifest, Source, Tool, TypeTraits
from kiwi_mcp.domain.json import Json
from kiwi_mcp.policy.isolation import external_code, known_as


def chain(project: Path, command: str, *args: Json, source: Source = "project", **config: Json) -> Chain:
    words: dict[str, Json] = {"command": command, "args": list(args), **config}
    manifest = Manifest("serve", "mcp_server", "1.0.0", config=words)
    folder = project / ".ai"
    return Chain(
        (Tool(manifest, Location(source, folder / "serve.yaml", folder), digest="d"),),
        (TypeTraits("mcp", "server", "server"),),
        project=project,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text("print(1)\n")
    return path


def paths(one: Chain) -> list[str]:
    return [path for path, _ in external_code(one)]


def test_a_script_is_watched_in_any_place_and_under_any_name(script: Path, tmp_path: Path) -> None:
    for word in (str(script), "server.py", "./server.py", "{project}/server.py"):
        assert paths(chain(tmp_path, "/bin/sh", word)) == [str(script)], word
    inner = tmp_path / "inner"
    inner.mkdir()
    assert paths(chain(tmp_path, "/bin/sh", "../server.py", cwd="inner")) == [str(script)]
    assert paths(chain(tmp_path, "/bin/sh", "--require=server.py", "-c", "1")) == [str(script)]


def test_an_edit_and_its_reversal_are_seen(script: Path, tmp_path: Path) -> None:
    one = chain(tmp_path, "/bin/sh", "server.py")
    before, known = external_code(one), known_as(one.tool, one)
    script.write_text("print(2)\n")
    assert external_code(one) != before
    assert known_as(one.tool, one) != known
    script.write_text("print(1)\n")
    assert (external_code(one), known_as(one.tool, one)) == (before, known)


def test_a_program_outside_the_system_folders_is_watched(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "run"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    link = tmp_path / "link"
    link.symlink_to(program)
    assert paths(chain(tmp_path, "{project}/bin/run")) == [str(program)]
    assert paths(chain(tmp_path, str(link))) == [str(program)]
    assert paths(chain(tmp_path, "/bin/sh", "-c", "exit")) == []


def test_a_folder_is_watched_by_the_entry_files_of_an_interpreter(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__main__.py", "other.py"):
        (package / name).write_text("")
    assert paths(chain(tmp_path, "/usr/bin/env", "package")) == [str(package / "__main__.py")]


def test_data_of_a_server_and_built_in_files_are_not_watched(script: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("")
    assert paths(chain(tmp_path, "/usr/bin/env", "--db=notes.db", "notes.db", "x" * 5_000, "a\0b", "{name}.py")) == []
    bare = chain(tmp_path, "/bin/sh", str(script), source="builtin")
    assert (paths(bare), known_as(bare.tool, bare)) == ([], "d")
