"""Sandboxed tools see their own files only, have no network, and still return results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]

PRYING = """import os, pathlib, socket, urllib.parse


def attempt(what):
    try:
        return what()
    except OSError as fault:
        return type(fault).__name__


def main(secret: str, address: str, project: str):
    host = urllib.parse.urlsplit(address)
    return {
        "secret": attempt(lambda: pathlib.Path(secret).read_text()),
        "project": attempt(lambda: os.listdir(project)),
        "service": attempt(lambda: str(socket.create_connection((host.hostname, host.port), 3))),
        "own": pathlib.Path(__file__).with_name("beside.txt").read_text(),
        "key": os.environ["KEY"] == "opensesame",
        "scratch": pathlib.Path(os.environ["HOME"], "note").write_text("kept nowhere"),
    }
"""
PRYING_SHELL = """cat "$KIWI_PARAM_secret" >/dev/null 2>&1 && echo "read the secret"
ls "$KIWI_PARAM_project" >/dev/null 2>&1 && echo "listed the project"
(exec 3<>"/dev/tcp/${KIWI_PARAM_address#http://}") 2>/dev/null && echo "reached the service"
host="${KIWI_PARAM_address#http://}"
(exec 3<>"/dev/tcp/${host%:*}/${host#*:}") 2>/dev/null && echo "reached the service"
echo "done in $HOME"
"""
LINGERING = """import os, subprocess, sys, time


def main(mark: str):
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)
    time.sleep(600)
"""


def create(ask: Ask, name: str, executor: str, files: dict[str, Json], **words: Json) -> Answer:
    config = {"entrypoint": next(iter(files)), **as_object(words.pop("config", {}))}
    item: JsonObject = {
        "tool_type": "script", "version": "1.0.0", "executor": executor, "description": "Look around",
        "isolation": "sandboxed", "config": config, "files": files, **words,
    }  # fmt: skip
    return ask("execute", action="create", item_id=name, parameters=item)


def texts(*names: str) -> list[Json]:
    return [{"name": name, "type": "string"} for name in names]


@pytest.fixture
def temptations(home: Path, project: Path, serve: Callable[..., tuple[str, list[JsonObject]]]) -> dict[str, str]:
    """What a curious tool would look for: a key of the user's, the project, and a service on this machine."""
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id_ed25519").write_text("private")
    address, _ = serve(lambda _: (200, {}, b"welcome"))
    return {"secret": str(home / ".ssh" / "id_ed25519"), "project": str(project), "address": address}


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("FS-01", "NET-01")
def test_a_sandboxed_python_tool_sees_its_files_its_key_and_nothing_else(
    ask: Ask, temptations: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "opensesame")
    files: dict[str, Json] = {"main.py": PRYING, "beside.txt": "mine"}
    parameters, config = texts("secret", "address", "project"), {"env": {"KEY": "${KEY}"}}
    created = create(ask, "pry", "python_runtime", files, parameters=parameters, config=config)
    assert not created.is_error, created.content

    response = ask("execute", action="run", item_id="pry", parameters=temptations).content

    result = as_object(response["result"])
    assert result["secret"] == "FileNotFoundError"
    assert result["project"] == "FileNotFoundError"
    assert result["service"] in {"OSError", "ConnectionRefusedError", "PermissionError"}
    assert result["own"] == "mine"
    assert result["key"] is True
    held = as_object(response["isolation"])
    assert (held["used"], held["provenance"], held["backend"]) == ("sandboxed", "owner_written", "bubblewrap")
    assert "net_none" in as_list(held["properties"])


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("FS-01", "NET-01")
def test_a_sandboxed_shell_tool_sees_nothing_else_either(ask: Ask, temptations: dict[str, str]) -> None:
    parameters = texts("secret", "address", "project")
    assert not create(ask, "pry", "bash_runtime", {"main.sh": PRYING_SHELL}, parameters=parameters).is_error

    response = ask("execute", action="run", item_id="pry", parameters=temptations).content

    assert str(response["result"]).strip() == "done in /tmp/home"


@pytest.mark.usefixtures("sandbox")
def test_a_sandboxed_tool_that_times_out_ends_with_all_its_children(ask: Ask, tmp_path: Path) -> None:
    made = create(
        ask, "linger", "python_runtime", {"main.py": LINGERING}, parameters=texts("mark"), config={"timeout": 2}
    )
    assert not made.is_error, made.content

    response = ask("execute", action="run", item_id="linger", parameters={"mark": str(tmp_path)}).content

    assert response["status"] == "timeout"
    assert not any(str(tmp_path).encode() in words for words in command_lines())


def command_lines() -> Iterator[bytes]:
    """Yield the words of every process on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            yield path.read_bytes()


@pytest.mark.usefixtures("sandbox")
def test_the_plan_and_why_contain_the_level(ask: Ask) -> None:
    assert not create(ask, "greet", "python_runtime", {"main.py": "def main(): return 'hi'\n"}).is_error
    planned = ask("execute", action="run", item_id="greet", parameters={}, dry_run=True).content
    assert as_object(as_object(planned["plan"])["jail"])["level"] == "sandboxed"
    response = ask("execute", action="why", item_id="greet").content
    assert (as_object(response["isolation"])["level"], response["would_run"]) == ("sandboxed", True)


def test_an_unknown_level_is_reported_with_the_nearest_one(ask: Ask) -> None:
    response = create(ask, "greet", "python_runtime", {"main.py": "def main(): pass\n"}, isolation="sandbox").content
    (issue,) = map(as_object, as_list(response["issues"]))
    assert issue["place"] == "isolation"
    assert "sandboxed" in str(issue["fix"])


def test_an_item_without_a_possible_sandbox_does_not_run(ask: Ask, project: Path) -> None:
    words = {"tool_type": "api", "version": "1.0.0", "executor": "http_client", "description": "x", "parameters": []}
    config = {"method": "GET", "url": "http://127.0.0.1:9/"}
    manifest = {"tool_id": "call", **words, "isolation": "restricted", "config": config}
    response = ask("execute", action="create", item_id="call", parameters=manifest).content
    assert [as_object(issue)["place"] for issue in as_list(response["issues"])] == ["isolation"]

    # A file without a check is refused when it is called.
    (project / ".ai" / "tools").mkdir(exist_ok=True)
    (project / ".ai" / "tools" / "call.yaml").write_text(json.dumps(manifest))
    response = ask("execute", action="run", item_id="call", parameters={}).content
    assert response["code"] == "invalid_manifest"
    assert "asks for a sandbox" in str(response["message"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("needs", [{"read": ["notes"]}, {"write": ["notes/a.md"]}, {"read": ["."]}])
def test_a_tool_with_a_project_grant_starts_in_the_project(ask: Ask, project: Path, needs: JsonObject) -> None:
    (project / "notes").mkdir()
    (project / "notes" / "a.md").write_text("1")
    created = create(ask, "look", "bash_runtime", {"main.sh": "pwd; ls notes\n"}, needs=needs)
    assert not created.is_error, created.content

    assert ask("execute", item_id="look").content["result"] == f"{project.resolve()}\na.md"


@pytest.mark.usefixtures("sandbox")
def test_a_tool_without_grants_starts_in_its_home_and_knows_the_project(ask: Ask, project: Path) -> None:
    create(ask, "look", "bash_runtime", {"main.sh": 'pwd; echo "$KIWI_PROJECT"\n'})

    assert ask("execute", item_id="look").content["result"] == f"/tmp/home\n{project.resolve()}"
